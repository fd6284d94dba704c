"""Prove that an index stays inside a dimension, from what formulas say of the extents of its labels.

``x + r`` with ``Extent x = A[0] - W[0] + 1`` and ``r`` of ``W[0]`` elements is at most ``A[0] - 1``.
"""

from __future__ import annotations

from .. import expr as ex
from ..algorithm import Algorithm
from .linear_form import LinearForm, addends, linear_form, sum_of_forms


def stays_inside(algorithm: Algorithm, index: ex.Expr, size: ex.Expr) -> bool:
    """Return whether a sum of labels is at least 0 and less than ``size`` wherever its labels are inside their extents."""
    form = linear_form(index)
    if not all(atom is None or isinstance(atom, (ex.Label, ex.Len)) for atom in form):
        return False
    return any(_is_inside(algorithm, form, size, rounded) for rounded in (False, True))


def _is_inside(algorithm: Algorithm, form: LinearForm, size: ex.Expr, rounded: bool) -> bool:
    """Return whether a form is at least 0 and less than ``size``; ``rounded``: bound quotients of sizes by what they are rounded down from."""
    least = _largest(algorithm, {atom: -times for atom, times in form.items()}, rounded)
    most = _largest(algorithm, form, rounded)
    return _never_positive(least) and most is not None and _never_positive(sum_of_forms(most, _form(size, -1, rounded), {None: 1}))


def size_of_dimension(algorithm: Algorithm, tensor: str, dim: int) -> ex.Expr | None:
    """Return the size of a dimension of an input or a Func; None where it is not known."""
    if tensor in algorithm.inputs:
        return ex.Access(tensor, (ex.Const(dim),))
    return _extent(algorithm, algorithm[tensor].labels[dim])


def _extent(algorithm: Algorithm, label: str) -> ex.Expr | None:
    return algorithm.plain_extent(label) or next(iter(algorithm.extent_formulas(label)), None)


def _largest(algorithm: Algorithm, form: LinearForm, rounded: bool) -> LinearForm | None:
    """Return an upper bound of a sum of labels and extents, in terms of sizes; None where an extent is not known."""
    total: LinearForm = {}
    for atom, times in form.items():
        if atom is None:
            total = sum_of_forms(total, {None: times})
        elif times > 0 or isinstance(atom, ex.Len):
            extent = _extent(algorithm, atom.label if isinstance(atom, ex.Len) else atom.name)  # type: ignore[attr-defined]
            if extent is None:
                return None
            total = sum_of_forms(total, _form(extent, times, rounded), {None: 0 if isinstance(atom, ex.Len) else -times})
    return total


def _form(e: ex.Expr, times: int, rounded: bool) -> LinearForm:
    """Return a number of times an extent, or more than that if ``rounded``."""
    return sum_of_forms(*({atom: n} for atom, n in addends(e, times, _dividend_factor if rounded else None)))


def _dividend_factor(times: int, size: int) -> int | None:
    """Return how many times ``a`` bounds a number of times ``a / size``, which is rounded down; None if that is no integer."""
    return times // size if size > 0 and times > 0 and times % size == 0 else None


def _never_positive(form: LinearForm | None) -> bool:
    """Return whether a form is at most 0: sizes are at least 0."""
    return form is not None and all(times <= 0 if atom is None or isinstance(atom, ex.Access) else times == 0 for atom, times in form.items())
