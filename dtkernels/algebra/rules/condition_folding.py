"""Fold conditions on indices that hold for every element, or for none.

Before: ``d_A[d] = where(d - 4 < len(d), where(d >= 0, d_y[d - 4], 0), 0);``  After: ``d_A[d] = d_y[d - 4];``

A comparison is decided where both sides are linear in labels and extents with rational coefficients. A label is at least 0 and less than
its extent, which is then at least 1; other extents may be 0.
"""

from __future__ import annotations

import math
from fractions import Fraction

from ...lang import expr as ex
from ...lang.extents.linear_form import addends, sum_of_forms
from ..smart_constructors import where
from .constant_folding import fold_logic

_Form = dict[ex.Expr | None, Fraction]  #: atom -> its factor; None is the constant addend


def fold_condition(e: ex.Expr) -> ex.Expr:
    """Drop the choices and conditions in ``e`` that are decided."""

    def change(node: ex.Expr) -> ex.Expr:
        match node:
            case ex.Binary("<" | "<=" | ">" | ">=", left, right) if (known := _holds(node.op, left, right)) is not None:
                return ex.Const(known)
            case ex.Binary("and" | "or" as op, left, right):
                return fold_logic(op, left, right, node)
            case ex.Call("where", (condition, a, b)):
                return where(condition, a, b)
        return node

    return e.transform(change)


def _holds(op: str, left: ex.Expr, right: ex.Expr) -> bool | None:
    """Return whether the comparison always (True) or never (False) holds; None if it depends on the element."""
    if op in (">", ">="):
        return _holds(op.replace(">", "<"), right, left)
    terms = (*addends(left, Fraction(1), _divided), *addends(right, Fraction(-1), _divided))
    if not all(_is_bounded(atom) for atom, _ in terms):
        return None
    form = sum_of_forms(*({atom: times} for atom, times in terms))
    if not any(isinstance(atom, (ex.Label, ex.Call)) for atom in form):
        return None  # only extents: decided at the call
    most, least = _largest(form), _largest({atom: -times for atom, times in form.items()})
    if most is not None and (most < 0 or most == 0 and op == "<="):
        return True
    return False if least is not None and (least < 0 or least == 0 and op == "<") else None


def _divided(times: Fraction, size: int) -> Fraction | None:
    return times / size if size else None


def _is_bounded(atom: ex.Expr | None) -> bool:
    """Return whether an addend of a linear form has known bounds: a constant, a label, an extent or the whole quotient of one."""
    match atom:
        case None | ex.Label() | ex.Len():
            return True
        case ex.Call("floor", (ex.Binary("/", ex.Len(), ex.Const(size)),)):
            return type(size) is int and size > 0
    return False


def _largest(form: _Form) -> Fraction | None:
    """Return an upper bound of a form; None where there is none."""
    extents: dict[str, Fraction] = {}
    constant, own = Fraction(0), {atom.name.rstrip("'") for atom in form if isinstance(atom, ex.Label)}
    for atom, times in form.items():
        match atom:
            case None:
                constant += times
            case ex.Len(label):
                extents[label] = extents.get(label, Fraction(0)) + times
            case ex.Label(name) if times > 0:
                label = name.rstrip("'")
                extents[label] = extents.get(label, Fraction(0)) + times
                constant -= times
            case ex.Call(_, (ex.Binary(_, ex.Len(label), ex.Const(value)),)):
                size = Fraction(value)
                extents[label] = extents.get(label, Fraction(0)) + times / size
                constant -= min(times, Fraction(0)) * (size - 1) / size
    if any(times > 0 for times in extents.values()):
        return None
    bound = constant + sum(extents[label] for label in own & set(extents))
    return Fraction(math.floor(bound)) if all(times.denominator == 1 for times in form.values()) else bound  # an integer, since every addend is
