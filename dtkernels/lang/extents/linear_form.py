"""Take an index apart as a linear form: addends with factors.

``2 * (x - r) + 3`` is ``{x: 2, r: -2, None: 3}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import TypeVar

from .. import expr as ex

N = TypeVar("N", int, Fraction)
LinearForm = dict[ex.Expr | None, int]  #: addend -> its factor, in the order of the text; None is the constant addend


def linear_form(index: ex.Expr) -> LinearForm:
    """Return the addends of an index with their integer factors. A quotient is one addend."""
    return sum_of_forms(*({atom: times} for atom, times in addends(index, 1)))


def is_at_label(index: ex.Expr) -> bool:
    """Return whether an index is the value of one label: ``x``, or ``x + 0`` of another extent."""
    return isinstance(index, ex.Label) or [(isinstance(atom, ex.Label), times) for atom, times in linear_form(index).items() if times] == [(True, 1)]


def addends(e: ex.Expr, times: N, divided: Callable[[N, int], N | None] | None = None) -> Iterator[tuple[ex.Expr | None, N]]:
    """Yield the addends of ``times * e``, each with its factor.

    ``divided``: the factor of ``a`` in a number of times ``a / size``, or None to leave the quotient whole.
    """
    match e:
        case ex.Const(value) if type(value) is int:
            yield None, times * value
        case ex.Unary("-", a):
            yield from addends(a, -times, divided)
        case ex.Binary("+" | "-" as op, a, b):
            yield from addends(a, times, divided)
            yield from addends(b, times if op == "+" else -times, divided)
        case ex.Binary("*", ex.Const(value), a) | ex.Binary("*", a, ex.Const(value)) if type(value) is int:
            yield from addends(a, times * value, divided)
        case ex.Binary("/", a, ex.Const(size)) if divided and type(size) is int and (factor := divided(times, size)) is not None:
            yield from addends(a, factor, divided)
        case _:
            yield e, times


def sum_of_forms(*forms: Mapping[ex.Expr | None, N]) -> dict[ex.Expr | None, N]:
    """Return the sum of linear forms."""
    total: dict[ex.Expr | None, N] = {}
    for form in forms:
        for atom, times in form.items():
            total[atom] = total[atom] + times if atom in total else times
    return total
