"""Invert index arithmetic: solve an index for one of its labels.

Before: ``s + k - 3 == t``  After: ``s == t - k + 3``; a factor divides: ``2 * s + k == t`` is ``s == (t - k) / 2`` where ``(t - k) % 2 == 0``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.extents.linear_form import LinearForm, linear_form
from .smart_constructors import ZERO, add, moved_by, negate


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


def digits(index: ex.Expr, target: ex.Label, over: list[str], extent: Callable[[str], int | None]) -> tuple[tuple[str, Inverse], ...]:
    """Solve ``size * step + digit + p == target`` for both labels, where ``digit`` has ``size`` values; nothing for any other index.

    Before: ``8 * i + u == t``, ``u`` below 8  After: ``u == t % 8`` and ``i == t / 8``, which leave no label to sum over
    """
    form = {atom: times for atom, times in linear_form(index).items() if times}
    offset = form.pop(None, 0)
    if len(form) != 2 or not all(isinstance(atom, ex.Label) and atom.name in over for atom in form):
        return ()
    (digit, one), (step, size) = sorted(((a.name, n) for a, n in form.items() if isinstance(a, ex.Label)), key=lambda a: a[1])
    if one != 1 or size <= 1 or extent(digit) != size:
        return ()
    moved = moved_by(target.name, -offset)
    return (digit, Inverse(ex.Binary("%", moved, ex.Const(size)))), (step, Inverse(ex.Binary("/", moved, ex.Const(size))))


def places_in_order(index: ex.Expr, round_: str, algorithm: Algorithm, own: dict[str, str]) -> tuple[str, ...]:
    """Return the labels that together count the places up to the extent of ``round_``, each once: ``u`` and ``i`` in ``7 * u + i + 3``, of a seventh of it and of 7.

    The one that the index is solved for comes first; none where no labels do. ``own``: temporary name of a label -> its own.
    """
    whole = linear_form(index)
    form = {atom.name: times for atom, times in whole.items() if times and isinstance(atom, ex.Label) and atom.name in own and _single_addend(whole, atom.name)}
    for sign in (1, -1):
        found: list[str] = []
        size: int | None = 1
        while size and (having := [x for x, times in form.items() if times == sign * size and x not in found]):
            if last := next((x for x in having if _fills(algorithm, own[x], size, round_)), None):
                return (last, *found)
            found.append(having[0])
            extent = algorithm.constant_extent(own[having[0]])
            size = extent and size * extent
    return ()


def _fills(algorithm: Algorithm, label: str, size: int, round_: str) -> bool:
    """Return whether ``size`` times the extent of a label is that of ``round_``, or less by what a division leaves."""
    if size == 1 and label in algorithm.tied_labels(round_):
        return True
    whole, parts = ([*algorithm.extent_formulas(x), *filter(None, [algorithm.plain_extent(x)])] for x in (round_, label))
    for part in parts:
        divided = isinstance(part, ex.Binary) and part.op == "/" and part.right == ex.Const(size)
        filled = part.left if divided else ex.Binary("*", ex.Const(size), part)  # type: ignore[attr-defined]
        if any(linear_form(filled) == linear_form(e) for e in whole):
            return True
    return False


def around(index: ex.Expr, target: ex.Expr, places: tuple[str, ...], round_: str, rest_label: Callable[[ex.Binary, str], str]) -> Inverse:
    """Solve ``index % len(round_) == target`` where ``places`` count up to the extent: ``7 * u + i == (target - 3) % len(round_)``."""
    form = {atom: times for atom, times in linear_form(index).items() if times}
    sign = 1 if form[ex.Label(places[0])] > 0 else -1
    place, inner = (target if sign > 0 else negate(target)), ex.as_value(ZERO)
    for atom, times in form.items():
        if isinstance(atom, ex.Label) and atom.name in places:
            inner = add(inner, multiple(atom, sign * times))
        else:
            place = add(place, multiple(atom, -sign * times))
    return solve(inner, ex.Binary("%", place, ex.Len(round_)), places[0], rest_label)


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
