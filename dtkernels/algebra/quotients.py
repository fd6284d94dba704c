"""Divide index arithmetic by a number of which it is a multiple, plus something smaller.

``(4 * x + p) / 4`` is ``x``, and ``(4 * x + p) % 4`` is ``p``, where ``p`` is below 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.extents.linear_form import LinearForm, linear_form
from .index_inversion import multiple
from .rearrangement import number_of_steps
from .smart_constructors import ONE, ZERO, add, conjuncts_of


def divided(e: ex.Expr, algorithm: Algorithm, below: Mapping[str, int] | None = None, index: bool = False) -> ex.Expr:
    """Return ``e`` without divisions of a multiple of the divisor, plus what is known to be smaller.

    ``below``: bounds of labels that conditions around ``e`` tell.
    """
    known = below or {}
    match e:
        case ex.Call("where", (condition, a, b)):
            inside = {**known, **_bounds(condition)}
            return replace(e, args=(divided(condition, algorithm, known, index), divided(a, algorithm, inside, index), divided(b, algorithm, known, index)))
        case ex.Access():
            places = [(i, divided(i, algorithm, known, True)) for i in e.index]
            return replace(e, index=tuple(i if i == new else as_index(new, e.tensor, dim, algorithm) for dim, (i, new) in enumerate(places)))
    e = e.rebuild(lambda child: divided(child, algorithm, known, index))
    match e:
        case ex.Binary("/" | "%" as op, inner, ex.Const(size)) if (index or op == "%") and type(size) is int and size > 0:
            return found if (found := _digit(op, inner, size, algorithm, known)) is not None else e
        case ex.Call("floor", (ex.Binary("/", inner, ex.Const(size)),)) if type(size) is int and size > 0:
            return found if (found := _digit("/", inner, size, algorithm, known)) is not None else e
    return e


def steps_of(algorithm: Algorithm, label: str, offset: int, size: int) -> tuple[ex.Expr, bool]:
    """Return how many values ``(label + offset) / size`` has, and whether each is that of ``size`` values of the label, ``offset`` being from 0 to ``size - 1``."""
    for extent in (*algorithm.extent_formulas(label), algorithm.in_sizes(ex.Len(label))):
        whole = linear_form(extent)
        if whole and not offset and not any(times % size for times in whole.values()):
            return _sum({atom: times // size for atom, times in whole.items()}), True
    return number_of_steps(label, offset, size), False


def with_steps(algorithm: Algorithm, step: str, label: str, offset: int, size: int) -> Algorithm:
    """Declare the extent of ``step``, which counts the values of ``(label + offset) / size``."""
    source = algorithm.extent_source(label)
    if source and not any(own == label for own, *_ in (*algorithm.extents, *algorithm.formulas)):
        algorithm = replace(algorithm, extents=(*algorithm.extents, (label, *source)))  # the access that tells it may change
    match steps_of(algorithm, label, offset, size)[0]:
        case ex.Access(tensor, (ex.Const(dim),)):
            return replace(algorithm, extents=(*algorithm.extents, (step, tensor, int(dim))))
        case formula:
            return replace(algorithm, formulas=(*algorithm.formulas, (step, formula)))


def as_index(i: ex.Expr, tensor: str, dim: int, algorithm: Algorithm) -> ex.Expr:
    """Return a label as an index of a dimension: ``x + 0`` unless it has the extent of that dimension, which a plain one would fix."""
    if not isinstance(i, ex.Label):
        return i
    extent = algorithm.in_sizes(ex.Len(algorithm[tensor].labels[dim])) if tensor in algorithm else ex.Access(tensor, (ex.Const(dim),))
    return i if linear_form(algorithm.in_sizes(ex.Len(i.name))) == linear_form(extent) else ex.Binary("+", i, ZERO)


def _digit(op: str, inner: ex.Expr, size: int, algorithm: Algorithm, below: Mapping[str, int]) -> ex.Expr | None:
    """Return the quotient, or the remainder, of a multiple of ``size`` plus something smaller; None of anything else."""
    whole, rest = _divided(inner, size)
    return (_sum(whole) if op == "/" else _sum(rest)) if _is_below(rest, size, algorithm, below) else None


def _divided(e: ex.Expr, size: int) -> tuple[LinearForm, LinearForm]:
    """Return the quotient of the addends that are multiples of ``size``, and the others."""
    form = {atom: times for atom, times in linear_form(e).items() if times}
    constant = form.pop(None, 0)
    whole: LinearForm = {atom: times // size for atom, times in form.items() if times % size == 0}
    rest: LinearForm = {atom: times for atom, times in form.items() if times % size}
    if constant // size and whole:
        whole[None] = constant // size
        constant %= size
    return whole, rest | ({None: constant} if constant else {})


def _is_below(form: LinearForm, size: int, algorithm: Algorithm, below: Mapping[str, int]) -> bool:
    """Return whether the value of a form is from 0 to ``size - 1``."""
    most = 0
    for atom, times in form.items():
        bound = 2 if atom is None else _bound(atom, algorithm, below)
        if bound is None or times < 0:
            return False
        most += times * (bound - 1)
    return most < size


def _bound(atom: ex.Expr, algorithm: Algorithm, below: Mapping[str, int]) -> int | None:
    """Return a number that a whole number of at least 0 is below."""
    match atom:
        case ex.Label(name):
            bounds = [n for n in (algorithm.constant_extent(name), below.get(name)) if n is not None]
            return min(bounds) if bounds else None
        case ex.Binary("%", _, ex.Const(size)) if type(size) is int and size > 0:
            return size
    return None


def _bounds(condition: ex.Expr) -> dict[str, int]:
    """Return the bounds of labels that a condition tells."""
    found = {}
    for c in conjuncts_of(condition):
        match c:
            case ex.Binary("<", ex.Label(name), ex.Const(size)) if type(size) is int:
                found[name] = size
    return found


def _sum(form: LinearForm) -> ex.Expr:
    found: ex.Expr = ZERO
    for atom, times in form.items():
        found = add(found, ONE if atom is None and times == 1 else multiple(atom, times))
    return found
