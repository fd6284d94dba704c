"""Prove that an index stays inside a dimension, from what formulas say of the extents of its labels.

``x + r`` with ``Extent x = A[0] - W[0] + 1`` and ``r`` of ``W[0]`` elements is at most ``A[0] - 1``.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import expr as ex
from ..algorithm import Algorithm

Form = dict[ex.Expr | None, int]  #: a size, or a quotient of sizes -> its factor; None is the constant addend


def stays_inside(algorithm: Algorithm, index: ex.Expr, size: ex.Expr) -> bool:
    """Return whether a sum of labels is at least 0 and less than ``size`` wherever its labels are inside their extents."""
    form = _sum(*({atom: times} for atom, times in _addends(index, 1, False)))
    if not all(atom is None or isinstance(atom, (ex.Label, ex.Len)) for atom in form):
        return False
    return any(_is_inside(algorithm, form, size, rounded) for rounded in (False, True))


def _is_inside(algorithm: Algorithm, form: Form, size: ex.Expr, rounded: bool) -> bool:
    """``rounded``: quotients of sizes count as the numbers that they are rounded down from, where that is more."""
    least = _largest(algorithm, {atom: -times for atom, times in form.items()}, rounded)
    most = _largest(algorithm, form, rounded)
    return _never_positive(least) and most is not None and _never_positive(_sum(most, _form(size, -1, rounded), {None: 1}))


def size_of_dimension(algorithm: Algorithm, tensor: str, dim: int) -> ex.Expr | None:
    """Return the size of a dimension of an input or a Func; None where it is not known."""
    if tensor in algorithm.inputs:
        return ex.Access(tensor, (ex.Const(dim),))
    return _extent(algorithm, algorithm[tensor].labels[dim])


def _extent(algorithm: Algorithm, label: str) -> ex.Expr | None:
    return algorithm.plain_extent(label) or next(iter(algorithm.extent_formulas(label)), None)


def _largest(algorithm: Algorithm, form: Form, rounded: bool) -> Form | None:
    """Return an upper bound of a sum of labels and extents, in terms of sizes; None where an extent is not known."""
    total: Form = {}
    for atom, times in form.items():
        if atom is None:
            total = _sum(total, {None: times})
        elif times > 0 or isinstance(atom, ex.Len):
            extent = _extent(algorithm, atom.label if isinstance(atom, ex.Len) else atom.name)  # type: ignore[attr-defined]
            if extent is None:
                return None
            total = _sum(total, _form(extent, times, rounded), {None: 0 if isinstance(atom, ex.Len) else -times})
    return total


def _form(e: ex.Expr, times: int, rounded: bool) -> Form:
    """Return a number of times an extent, or more than that if ``rounded``."""
    return _sum(*({atom: n} for atom, n in _addends(e, times, rounded)))


def _addends(e: ex.Expr, times: int, rounded: bool) -> Iterator[tuple[ex.Expr | None, int]]:
    match e:
        case ex.Const(value) if type(value) is int:
            yield None, times * value
        case ex.Unary("-", a):
            yield from _addends(a, -times, rounded)
        case ex.Binary("+" | "-" as op, a, b):
            yield from _addends(a, times, rounded)
            yield from _addends(b, times if op == "+" else -times, rounded)
        case ex.Binary("*", ex.Const(value), a) | ex.Binary("*", a, ex.Const(value)) if type(value) is int:
            yield from _addends(a, times * value, rounded)
        case ex.Binary("/", a, ex.Const(value)) if rounded and type(value) is int and value > 0 and times > 0 and times % value == 0:
            yield from _addends(a, times // value, rounded)
        case _:
            yield e, times


def _sum(*forms: Form) -> Form:
    total: Form = {}
    for form in forms:
        for atom, times in form.items():
            total[atom] = total.get(atom, 0) + times
    return total


def _never_positive(form: Form | None) -> bool:
    """Return whether a form is at most 0: sizes are at least 0."""
    return form is not None and all(times <= 0 if atom is None or isinstance(atom, ex.Access) else times == 0 for atom, times in form.items())
