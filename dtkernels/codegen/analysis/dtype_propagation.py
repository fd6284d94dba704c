"""Which inputs give the results their dtype, and what is kept in theirs between kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...lang import expr as ex
from ...lang.algorithm import Algorithm


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


def product_inputs(algorithm: Algorithm) -> frozenset[str]:
    """Value inputs that products take, as they are or computed with first: they are brought to the dtype of the results.

    Others are widened to float32 where they are read, so that a whole number which is compared or added keeps its value.
    """
    uses: dict[str, list[tuple[str, ex.Expr, bool, bool]]] = {}
    for d in algorithm.definitions:
        for access, within, compared in _uses(d.expr, False, False):
            uses.setdefault(access.tensor, []).append((d.name, access, within, compared))
    feeding: set[str] = set()
    for d in reversed(algorithm.definitions):
        found = uses.get(d.name, [])
        if found and all((within or user in feeding) and not compared for user, _, within, compared in found):
            feeding.add(d.name)
    sides = {id(side) for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot) for side in (n.left, n.right)}
    return frozenset(
        t
        for t in value_inputs(algorithm, algorithm.inputs)
        if any(id(access) in sides for _, access, _, _ in uses.get(t, ()))
        or all((within or user in feeding) and not compared for user, _, within, compared in uses.get(t, ()))
    )


def _uses(expr: ex.Expr, within: bool, compared: bool) -> Iterator[tuple[ex.Access, bool, bool]]:
    """Each access in ``expr``, whether it stands in a side of a product, and whether it is asked for more than its value."""
    if isinstance(expr, ex.Access):
        yield expr, within, compared
    for i, child in enumerate(expr.children()):
        asked = isinstance(expr, ex.Binary) and expr.op in ex.COMPARISONS or isinstance(expr, ex.Call) and expr.fn == "where" and i == 0
        yield from _uses(child, within or isinstance(expr, ex.Dot), compared or asked)


def operands_only(algorithm: Algorithm) -> frozenset[str]:
    """Funcs that matrix products alone consume: between kernels they are kept as products take them, in the inputs' dtype."""
    plain: set[str] = set()
    sides = [side for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot) for side in (n.left, n.right)]
    operands = {id(side) for side in sides if isinstance(side, ex.Access)}
    for d in algorithm.definitions:
        plain |= {a.tensor for a in ex.accesses(d.expr) if id(a) not in operands} | ({d.name} if isinstance(d.expr, ex.Cast) else set())
    return frozenset(side.tensor for side in sides if isinstance(side, ex.Access) and side.tensor in algorithm) - plain


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
