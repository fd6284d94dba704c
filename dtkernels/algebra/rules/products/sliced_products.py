"""Multiply once where definitions take slices of one product: the gates of a recurrent cell, or queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ....lang.extents.linear_form import linear_form
from ..canonicalize import fresh_name

LEAST = 3  #: slices that are taken out: two products side by side share an operand in one kernel, of three or more the accumulators fill its registers


class Slice(NamedTuple):
    """An addend in which an index is ``offset`` times the extent of ``label`` on: ``rdot(X[b, i], W[j + 2 * len(j), i], i)``."""

    addend: ex.Expr
    whole: ex.Expr  #: the addend with ``WHOLE + 0`` in place of that index: where the tensor ends says nothing of the slices
    label: str
    offset: int
    site: tuple[str, int]  #: the definition, and which sum of it
    labels: tuple[str, ...]  #: of the definition


WHOLE = "whole"  #: stands for the label of the product, which has a name of its own in each algorithm


def multiply_slices_at_once(algorithm: Algorithm) -> Algorithm:
    """Make a Func of a product, and of what is added to it, of which definitions take three or more slices next to each other.

    Before: ``r[b, j] = rdot(X[b, i], W[j + 0, i], i) + c[j + 0];  u[b, j] = rdot(X[b, i], W[j + len(j), i], i) + c[j + len(j)];
        n[b, j] = rdot(X[b, i], W[j + 2 * len(j), i], i) + c[j + 2 * len(j)];``
    After:  ``r_slices[b, j_slices] = rdot(X[b, i], W[j_slices + 0, i], i) + c[j_slices + 0];  r[b, j] = r_slices[b, j + 0];
        u[b, j] = r_slices[b, j + len(j)];  n[b, j] = r_slices[b, j + 2 * len(j)];``, with ``Extent j_slices = 3 * len(j);``

    The extent is that of the slices together: ``W`` and ``c`` may each have more elements, of which nothing is read, or fewer, behind which 0 is read.
    The gradients of ``X`` and of ``W`` are one product each, then.
    """
    for group in _groups(algorithm):
        algorithm = _with_product(algorithm, group)
    return algorithm


def _groups(algorithm: Algorithm) -> list[list[list[Slice]]]:
    """Return the slices of each product: for each of its addends the slices, the same sums having one of each."""
    found: dict[tuple[ex.Expr, str], list[Slice]] = {}
    for d in algorithm.definitions:
        for i, addends in enumerate(_sums(d.expr)):
            for addend in addends:
                for s in _slices(addend, d, i):
                    found.setdefault((s.whole, s.label), []).append(s)
    together: dict[frozenset, list[list[Slice]]] = {}
    for slices in found.values():
        offsets = {s.offset for s in slices}
        if len(offsets) >= LEAST and offsets == {*range(len(offsets))} and len({s.labels for s in slices}) == 1:
            together.setdefault(frozenset((s.site, s.offset) for s in slices), []).append(slices)
    groups = [group for group in together.values() if any(isinstance(slices[0].addend, ex.Dot) for slices in group)]
    operands = {a.tensor for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot) for a in ex.accesses(n)}
    return [group for group in groups if not any(s.site[0] in operands and algorithm[s.site[0]].expr in _chains(group, s) for s in group[0])]


def _chains(group: list[list[Slice]], one: Slice) -> list[ex.Expr]:
    """Return the sum that a definition is made of if it is a slice and nothing more: products that read it take it as it is, or with the tensor before it."""
    addends = [s.addend for slices in group for s in slices if s.site == one.site and s.offset == one.offset]
    return [ex.joined("+", addends), ex.joined("+", addends[::-1])]


def _sums(e: ex.Expr) -> Iterator[list[ex.Expr]]:
    """Yield the addends of each sum in ``e``; a product that nothing is added to by itself."""
    terms = ex.operands_of(e, "+")
    if len(terms) > 1 or isinstance(e, ex.Dot):
        yield terms
    for child in (child for term in terms if not isinstance(term, ex.Dot) for child in term.children()):
        yield from _sums(child)


def _slices(addend: ex.Expr, d: Definition, sum_: int) -> Iterator[Slice]:
    """Yield the addend for each label that it has in such an index alone."""
    if not isinstance(addend, (ex.Dot, ex.Access)) or not ex.free_labels(addend) <= {*d.labels}:
        return
    for label in d.labels:
        indices = [i for a in ex.accesses(addend) for i in a.index if label in ex.free_labels(i)]
        offsets = {slice_offset(i, label) for i in indices}
        count = sum(isinstance(n, ex.Label) and n.name == label for n in addend.walk())
        if len(offsets) == 1 and (offset := offsets.pop()) is not None and count == len(indices):
            at = ex.Binary("+", ex.Label(WHOLE), ex.Const(0))
            whole = addend.transform(lambda n, indices=indices, at=at: at if n in indices else n)  # type: ignore[misc]
            yield Slice(addend, whole, label, offset, (d.name, sum_), d.labels)


def slice_offset(index: ex.Expr, label: str) -> int | None:
    """Return how many extents of ``label`` an index is on; None for another index, and for the plain label, which sets its extent."""
    form = {atom: times for atom, times in linear_form(index).items() if times}
    if isinstance(index, ex.Label) or form.pop(ex.Label(label), 0) != 1:
        return None
    offset = form.pop(ex.Len(label), 0)
    return offset if not form and offset >= 0 else None


def _with_product(algorithm: Algorithm, group: list[list[Slice]]) -> Algorithm:
    """Return the algorithm with the product before the first definition that takes a slice of it."""
    group = sorted(group, key=lambda slices: not isinstance(slices[0].addend, ex.Dot))
    first = group[0][0]
    name, label = fresh_name(f"{first.site[0]}_slices", {*algorithm.names}), fresh_name(f"{first.label}_slices", {*algorithm.names, *algorithm.labels})
    parts = [slices[0].whole.transform(lambda n: ex.Label(label) if n == ex.Label(WHOLE) else n) for slices in group]
    own = [x for x in first.labels if x == first.label or any(x in ex.free_labels(s[0].addend) for s in group)]
    made = Definition(name, tuple(label if x == first.label else x for x in own), ex.joined("+", parts))
    by_offset = {s.offset: [next(t.addend for t in slices if t.offset == s.offset) for slices in group] for s in group[0]}

    def change(node: ex.Expr) -> ex.Expr:
        terms = ex.operands_of(node, "+")
        for offset, addends in by_offset.items():
            if all(a in terms for a in addends):
                on = ex.Const(0) if not offset else ex.Len(first.label) if offset == 1 else ex.Binary("*", ex.Const(offset), ex.Len(first.label))
                places = tuple(ex.Binary("+", ex.Label(x), on) if x == first.label else ex.Label(x) for x in own)
                terms = [ex.Access(name, places), *(t for t in terms if t not in addends)]
                node = ex.joined("+", terms)
        return node

    changed = [replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions]
    before = next(i for i, (d, old) in enumerate(zip(changed, algorithm.definitions)) if d.expr != old.expr)
    extent = (label, ex.Binary("*", ex.Const(len(by_offset)), ex.Len(first.label)))
    return replace(algorithm.with_definitions((*changed[:before], made, *changed[before:])), vars=(*algorithm.vars, label), formulas=(*algorithm.formulas, extent))
