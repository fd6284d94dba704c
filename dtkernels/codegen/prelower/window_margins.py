"""Give copies of inputs room for what windows read beyond the ends of a dimension.

Before, with ``r`` of three elements, masks for all elements of a tile, other ones in each step of the loop over ``r``::

    A_rows[A_1, c] = A[c, A_1];      f[o, x] = rdot(A_rows[x - r, c], W[o, c, r], c, r);

After, no masks but those of ``x``: what lies beyond the ends of ``A`` is 0 in the copy::

    A_rows[A_1, c] = A[c, A_1 - 2];  f[o, x] = rdot(A_rows[x - r + 2, c], W[o, c, r], c, r);
"""

from __future__ import annotations

from dataclasses import dataclass

from ...algebra.index_inversion import multiple
from ...algebra.smart_constructors import ZERO, add, negate
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ...lang.extents.index_bounds import size_of_dimension, stays_inside
from ...lang.extents.linear_form import linear_form
from ...lang.schedule import Program, Stage
from .kernel_partition import funcs_in_kernel


@dataclass(frozen=True)
class Margin:
    """What a dimension of a copy begins with, as the index of the input's dimension; ``label`` is that of the copy, of ``extent``."""

    label: str
    first: ex.Expr
    extent: ex.Expr

    def read(self, label: str) -> ex.Expr:
        """Return the place in the input of an element of the copy."""
        place = _sum(ex.Label(label), self.first)
        return ex.Binary("+", place, ZERO) if isinstance(place, ex.Label) else place  # a bare label would have the extent of the input

    def moved(self, index: ex.Expr) -> ex.Expr:
        """Return the place in the copy of what is at ``index`` in the input."""
        return _sum(index, negate(self.first))


def copied_windows(program: Program, tensor: str, along: str) -> dict[int, Margin]:
    """Return the margins that a copy has, by dimension: those of one window, if the copy then holds what all of its readers need."""
    algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
    asked = [p for p in program.schedule.primitives if isinstance(p, Stage) and (tensor, along) in p.copies]
    members = set().union(*(funcs_in_kernel(program, p.func) for p in asked))
    read = [a for m in sorted(members) for a in ex.accesses(algorithm[m].expr) if a.tensor == tensor]
    found: dict[int, Margin] = {}
    for d in range(len(read[0].index) if read else 0):
        windows = list(dict.fromkeys(a.index[d] for a in read))
        size = size_of_dimension(algorithm, tensor, d)
        beyond = [i for i in windows if not isinstance(i, ex.Label) and size is not None and not stays_inside(algorithm, i, size)]
        margin = _margin(algorithm, f"{tensor}_{d}", beyond[0]) if len(beyond) == 1 else None
        if margin is not None and all(_holds(algorithm, margin, i) for i in windows if i != beyond[0]):
            found[d] = margin
    return found


def _margin(algorithm: Algorithm, label: str, window: ex.Expr) -> Margin | None:
    """Return the margin for a sum of labels."""
    first: ex.Expr = ZERO
    extent: ex.Expr = ex.Const(1)
    for atom, times in linear_form(window).items():
        if atom is None:
            first = _sum(first, ex.Const(times))
        elif not isinstance(atom, ex.Label) or not (algorithm.plain_extent(atom.name) or algorithm.extent_formulas(atom.name)):
            return None
        elif times:
            steps = ex.Binary("-", ex.Len(atom.name), ex.Const(1))
            reach: ex.Expr = steps if abs(times) == 1 else ex.Binary("*", ex.Const(abs(times)), steps)
            extent = ex.Binary("+", extent, reach)
            first = _sum(first, negate(reach)) if times < 0 else first
    return Margin(label, first, extent)


def _holds(algorithm: Algorithm, margin: Margin, index: ex.Expr) -> bool:
    """Return whether the copy holds what another reader finds at ``index``."""
    extent = margin.extent.transform(lambda n: (algorithm.plain_extent(n.label) or algorithm.extent_formulas(n.label)[0]) if isinstance(n, ex.Len) else n)
    return stays_inside(algorithm, margin.moved(index), extent)


def _sum(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    """Return a sum with each addend once."""
    form = linear_form(ex.Binary("+", a, b))
    total: ex.Expr = ZERO
    for atom, times in form.items():
        if times and atom is not None:
            total = add(total, multiple(atom, times))
    constant = form.get(None, 0)
    return add(total, multiple(None, constant)) if constant else total
