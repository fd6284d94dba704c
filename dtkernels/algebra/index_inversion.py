"""Invert index arithmetic: solve an index for one of its labels.

Before: ``s + k - 3 == t``  After: ``s == t - k + 3``; a factor divides: ``2 * s + k == t`` is ``s == (t - k) / 2`` where ``(t - k) % 2 == 0``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..lang import expr as ex
from ..lang.extents.linear_form import LinearForm, linear_form
from .smart_constructors import ZERO, add, negate


@dataclass(frozen=True)
class Inverse:
    """The ``value`` of a label where the conditions ``when`` hold; the labels ``new`` vary freely in it."""

    value: ex.Expr
    new: tuple[str, ...] = ()
    when: tuple[ex.Expr, ...] = ()


def unknown(index: ex.Expr, over: list[str]) -> str | None:
    """Return the first label of ``over`` that ``index`` can be solved for: a result's labels come before those of sums."""
    match index:
        case ex.Label(name):
            return name if name in over else None
        case ex.Binary("/", inner, ex.Const(size)):
            return unknown(inner, over) if type(size) is int and size > 0 else None
    if not _is_sum(index):
        return None
    form = linear_form(index)
    if list(form) == [index]:  # a product whose factor is not a constant
        return None
    return next((name for name in over if (atom := _single_addend(form, name)) is not None and unknown(atom, [name])), None)


def solve(index: ex.Expr, target: ex.Expr, name: str, rest_label: Callable[[ex.Binary, str], str]) -> Inverse:
    """Solve ``index == target`` for the label ``name`` that ``unknown`` chose; ``rest_label`` names the remainder of a division."""
    match index:
        case ex.Label():
            return Inverse(target)
        case ex.Binary("/", inner, size):
            rest = rest_label(index, name)
            found = solve(inner, ex.Binary("+", ex.Binary("*", size, target), ex.Label(rest)), name, rest_label)
            return replace(found, new=(*found.new, rest))
    form = linear_form(index)
    atom = _single_addend(form, name)
    assert atom is not None
    times = form.pop(atom)
    others = [a for a in form if form[a]]
    place = target if times > 0 else ZERO
    for a in others:
        place = add(place, multiple(a, -form[a] if times > 0 else form[a]))
    place = place if times > 0 else add(place, negate(target))
    if place == target and abs(times) == 1:  # a bare label would give the dimension its extent
        place = ex.Binary("-", target, ZERO)
    if abs(times) == 1:
        return solve(atom, place, name, rest_label)
    found = solve(atom, ex.Binary("/", place, ex.Const(abs(times))), name, rest_label)
    divides = ex.Binary("==", ex.Binary("%", ex.as_value(place), ex.Const(abs(times))), ZERO)
    return replace(found, when=(*found.when, divides))


def _is_sum(index: ex.Expr) -> bool:
    return isinstance(index, ex.Unary) and index.op == "-" or isinstance(index, ex.Binary) and index.op in "+-*"


def _single_addend(form: LinearForm, name: str) -> ex.Expr | None:
    """Return the one addend that contains the label ``name``."""
    having = [a for a, times in form.items() if times and a is not None and name in ex.free_labels(a)]
    return having[0] if len(having) == 1 else None


def multiple(atom: ex.Expr | None, times: int) -> ex.Expr:
    """Return an addend of a linear form with its factor."""
    size: ex.Expr = ex.Const(abs(times))
    e = size if atom is None else atom if abs(times) == 1 else ex.Binary("*", size, atom)
    return negate(e) if times < 0 else e
