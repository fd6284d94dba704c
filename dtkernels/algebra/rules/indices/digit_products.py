"""Compute products that pick one operand by ``x % s`` and the other by ``x / s`` with a label for each of the two.

A tile over ``x`` then needs every element of one operand ``s`` times, and no product of matrices takes one operand by row and the other by remainder. With labels of
their own, the remainders are columns of one product, and the quotients rows: a sub-pixel convolution is a product and a rearrangement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ....lang.extents.linear_form import linear_form
from ...quotients import as_index, with_steps
from ...rearrangement import interleavings
from ...smart_constructors import moved_by
from ..canonicalize import fresh_name


@dataclass(frozen=True)
class _Digits:
    """The indices ``(x + offset) % size`` and ``(x + offset) / size`` of a product's operands."""

    x: str
    offset: int
    size: int

    @property
    def indices(self) -> tuple[ex.Expr, ex.Expr]:
        moved = moved_by(self.x, self.offset)
        return ex.Binary("%", moved, ex.Const(self.size)), ex.Binary("/", moved, ex.Const(self.size))


def separate_digits(algorithm: Algorithm) -> Algorithm:
    """Give each product whose operands have the remainder and the quotient of a label a Func with these as labels.

    Before: ``f[c, x] = rdot(A[k, x / 2], W[c, x % 2, k], k);``
    After:  ``f_phases[x_phase, c, x_step] = rdot(A[k, x_step + 0], W[c, x_phase + 0, k], k);  f[c, x] = f_phases[x % 2, c, x / 2];``

    Nothing changes where both operands have the same ones of them, or one operand alone has both.
    """
    for d in algorithm.definitions:
        dots = [n for n in d.expr.walk() if isinstance(n, ex.Dot)]
        if len(dots) == 1 and (found := [pair for x in d.labels if (pair := _digits(dots[0], x, algorithm))]):
            algorithm = _separated(algorithm, d, dots[0], found)
    return algorithm


def _digits(dot: ex.Dot, x: str, algorithm: Algorithm) -> _Digits | None:
    """Return the digits of ``x`` that the operands of a product have, each another one of them; None where ``x`` occurs in another way."""
    if x in dot.labels:
        return None
    read = [set(_places(side, x, False)) for side in (dot.left, dot.right)]
    in_order = (a for a in ex.accesses(dot) if a.tensor in algorithm and interleavings(a))  # these have labels for both: compute_results_by_phase
    if not all(read) or read[0] == read[1] or None in read[0] | read[1] or any(in_order):
        return None
    digits = {place[1:] for place in read[0] | read[1] if place}
    both = {place[0] for place in read[0] | read[1] if place}
    if len(digits) != 1 or both != {"%", "/"}:
        return None
    ((offset, size),) = digits
    return _Digits(x, offset, size)


def _places(e: ex.Expr, x: str, index: bool) -> Iterator[tuple[str, int, int] | None]:
    """Yield the digits of ``x`` that ``e`` has, each with offset and size; None for another occurrence of ``x``."""
    match e:
        case ex.Label(name) if name == x:
            yield None
        case ex.Binary("%" | "/" as op, moved, ex.Const(size)) if (op == "%" or index) and type(size) is int and size > 1 and x in ex.free_labels(moved):
            form = {atom: times for atom, times in linear_form(moved).items() if times}
            offset = form.pop(None, 0)
            plain = form == {ex.Label(x): 1} and 0 <= offset < size and moved == moved_by(x, offset)
            yield (op, offset, size) if plain else None
        case _:
            for child in e.children():
                yield from _places(child, x, index or isinstance(e, ex.Access))


def _separated(algorithm: Algorithm, d: Definition, dot: ex.Dot, digits: list[_Digits]) -> Algorithm:
    """Return the algorithm with a Func of the product by phase."""
    taken = set(algorithm.names)
    product: ex.Expr = dot
    steps, phases = {}, []
    for pair in digits:
        phase, step = fresh_name(f"{pair.x}_phase", taken), fresh_name(f"{pair.x}_step", taken)
        algorithm = with_steps(algorithm, step, pair.x, pair.offset, pair.size)
        algorithm = replace(algorithm, vars=(*algorithm.vars, phase, step), extents=(*algorithm.extents, (phase, "", pair.size)))
        by = dict(zip(pair.indices, (phase, step)))
        product = product.transform(lambda n: _by_digit(n, by, algorithm))  # noqa: B023
        phases.append(phase)
        steps[pair.x] = step
    func = fresh_name(f"{d.name}_phases", taken)
    made = Definition(func, (*phases, *(steps.get(x, x) for x in d.labels)), product, d.pos)
    quotients = {pair.x: pair.indices[1] for pair in digits}
    read = ex.Access(func, (*(pair.indices[0] for pair in digits), *(quotients.get(x, ex.Label(x)) for x in d.labels)))
    result = replace(d, expr=d.expr.transform(lambda n: read if n == dot else n))
    return algorithm.with_definitions(tuple(new for old in algorithm.definitions for new in ((made, result) if old is d else (old,))))


def _by_digit(n: ex.Expr, by: dict[ex.Expr, str], algorithm: Algorithm) -> ex.Expr:
    """Replace the digits in an index, and remainders elsewhere, by labels."""
    if isinstance(n, ex.Access):
        digits = set(map(ex.Label, by.values()))
        return replace(n, index=tuple(as_index(i, n.tensor, dim, algorithm) if i in digits else i for dim, i in enumerate(n.index)))
    return ex.Label(by[n]) if n in by else n
