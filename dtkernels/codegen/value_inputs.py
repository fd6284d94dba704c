"""Which inputs give the results their dtype."""

from __future__ import annotations

from collections.abc import Iterable

from ..lang import expr as ex
from ..lang.algorithm import Algorithm


def value_inputs(algorithm: Algorithm, inputs: Iterable[str]) -> list[str]:
    """Inputs whose dtype enters the results'.

    Not masks, which are only asked whether they are true, nor integers, nor what is cast wherever it is read.
    """
    masks = {
        t
        for t in inputs
        if t in algorithm.integer_inputs()
        or all(_is_condition(d.expr, t) for d in algorithm.definitions if any(a.tensor == t for a in ex.accesses(d.expr)))
    }
    return [t for t in inputs if t not in masks]


def _is_condition(expr: ex.Expr, tensor: str, inside: bool = False) -> bool:
    """Whether every access to ``tensor`` in ``expr`` stands where a truth value is wanted, or under a cast."""
    match expr:
        case ex.Access(name, _) if name == tensor:
            return inside
        case ex.Cast(ex.Access(name, _), _) if name == tensor:
            return True
        case ex.Call("where", (condition, a, b)):
            return _is_condition(condition, tensor, True) and _is_condition(a, tensor, inside) and _is_condition(b, tensor, inside)
        case ex.Binary("and" | "or", left, right):
            return _is_condition(left, tensor, True) and _is_condition(right, tensor, True)
        case ex.Unary("not", arg):
            return _is_condition(arg, tensor, True)
    return all(_is_condition(c, tensor) for c in expr.children())
