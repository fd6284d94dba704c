"""Recognize Funcs that hold others one after another along a label.

``f[b, g] = p[b, g - 0] + q[b, g - len(j)];`` of ``Extent g = 2 * len(j)`` holds ``p[b, j]`` and then ``q[b, j]``: outside its extent each reads 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..lang import expr as ex
from ..lang.algorithm import Algorithm, Definition
from ..lang.extents.linear_form import linear_form


@dataclass(frozen=True)
class JoinedSlices:
    """The Funcs that a Func holds, in order, along which of its labels; ``own`` counts the elements of each there."""

    sources: tuple[str, ...]
    label: str
    own: str

    def place(self, source: str) -> ex.Expr:
        """Return where the Func holds the element of a source at ``own``, along its label."""
        n, at, extent = self.sources.index(source), ex.Label(self.own), ex.Len(self.own)
        return ex.Binary("+", at, extent if n == 1 else ex.Binary("*", ex.Const(n), extent)) if n else at


def joined_slices(d: Definition, algorithm: Algorithm) -> JoinedSlices | None:
    """Return which Funcs ``d`` holds one after another, each of whose elements once; None if it is anything else, or has more elements than they."""
    terms = ex.operands_of(d.expr, "+")
    if len(terms) < 2 or not all(isinstance(t, ex.Access) and t.tensor in algorithm for t in terms):
        return None
    for dim, label in enumerate(d.labels):
        found = {}
        for t in terms:
            own = algorithm[t.tensor].labels  # type: ignore[attr-defined]
            alike = len(own) == len(d.labels) and all(isinstance(i, ex.Label) and i.name == x for n, (i, x) in enumerate(zip(t.index, d.labels)) if n != dim)  # type: ignore[attr-defined]
            same = alike and own[:dim] + own[dim + 1 :] == d.labels[:dim] + d.labels[dim + 1 :]
            if same and (offset := slice_before(t.index[dim], label, own[dim])) is not None:  # type: ignore[attr-defined]
                found[offset] = t.tensor  # type: ignore[attr-defined]
        owns = {algorithm[t].labels[dim] for t in found.values()}
        if len({*found.values()}) == len(terms) and {*found} == {*range(len(terms))} and len(owns) == 1:
            (own_label,) = owns
            return JoinedSlices(tuple(found[n] for n in range(len(terms))), label, own_label) if slices_of(algorithm, label, own_label) == len(terms) else None
    return None


def slice_before(index: ex.Expr, label: str, own: str) -> int | None:
    """Return how many extents of ``own`` an index is before ``label``: 2 of ``g - 2 * len(j)``; None for any other index."""
    form = {atom: times for atom, times in linear_form(index).items() if times}
    if isinstance(index, ex.Label) or form.pop(ex.Label(label), 0) != 1:
        return None
    offset = -form.pop(ex.Len(own), 0)
    return offset if not form and offset >= 0 else None


def slices_of(algorithm: Algorithm, label: str, own: str) -> int | None:
    """Return how many extents of ``own`` that of ``label`` is, where its formula says so."""
    one = linear_form(algorithm.in_sizes(ex.Len(own)))
    for formula in algorithm.extent_formulas(label):
        form = {atom: times for atom, times in linear_form(formula).items() if times}
        if len(one) == len(form) == 1 and one.keys() == form.keys() and None not in form:
            each, every = next(iter(one.values())), next(iter(form.values()))
            return every // each if each > 0 and every % each == 0 else None
    return None
