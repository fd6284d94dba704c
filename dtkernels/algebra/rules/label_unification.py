"""Unify labels that index one dimension, so that later rules see that computations run over the same one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from .canonicalize import rename_bound
from .constant_folding import keep_extents


def unify_labels(algorithm: Algorithm) -> Algorithm:
    """Rename the label of a reduction to the label of its user, where both index the same dimension.

    Before: ``s[x] = rsum(exp(A[x, z]), z);  f[x, y] = exp(A[x, y]) / s[x];``
    After:  ``s[x] = rsum(exp(A[x, y]), y);  f[x, y] = exp(A[x, y]) / s[x];``

    Both labels have the extent of that dimension, so nothing else changes. A label that a schedule or sizes name keeps its name.
    """
    later: list[Definition] = []
    given: dict[str, set[tuple[str, int]]] = {}  #: extents that are declared, not derived from what the label indexes
    for label, tensor, dim in algorithm.extents:
        given.setdefault(label, set()).add((tensor, dim))
    for label, _ in algorithm.formulas:
        given.setdefault(label, set()).add(("", -1))  # equal to no dimension: such a label keeps its name
    renamed: dict[str, str] = {}
    for d in reversed(algorithm.definitions):
        bound = dict.fromkeys(label for n in _reductions(d.expr) for label in n.labels if label not in algorithm.named)
        for label in bound:
            shared = next((name for name, at in _unifiable_labels(d, label, later) if name not in given and given.get(label, {at}) <= _places(at, algorithm)), None)
            if shared is not None:
                d = replace(d, expr=rename_bound(d.expr, {label: shared}))
                renamed = {**{old: new if new != label else shared for old, new in renamed.items()}, label: shared}
        later.append(d)
    shared_ones = algorithm.with_definitions(tuple(replace(d, expr=_rename_lengths(d.expr, renamed)) for d in reversed(later)))
    return _declare_lost_extents(shared_ones, algorithm) if renamed else shared_ones


def _places(at: tuple[str, int], algorithm: Algorithm) -> set[tuple[str, int]]:
    """Return a dimension, and that of the input whose extent it has where it is one of a Func."""
    tensor, dim = at
    source = algorithm.extent_source(algorithm[tensor].labels[dim]) if tensor in algorithm else None
    return {at, source} if source else {at}


def _declare_lost_extents(after: Algorithm, before: Algorithm) -> Algorithm:
    """Declare an ``Extent`` for each label that is still reduced or a result's, and whose extent only a renamed access defined."""
    used = {label for d in after.definitions for n in _reductions(d.expr) for label in n.labels} | {label for d in after.definitions for label in d.labels}
    told = keep_extents(after, before)
    return replace(told, extents=tuple(e for e in told.extents if e in after.extents or e[0] in used))


def _rename_lengths(e: ex.Expr, renamed: dict[str, str]) -> ex.Expr:
    """Rename labels in ``len(...)``, since nothing may index the old ones any more."""

    def change(node: ex.Expr) -> ex.Expr:
        return ex.Len(renamed[node.label]) if isinstance(node, ex.Len) and node.label in renamed else node

    return e.transform(change) if renamed else e


def _unifiable_labels(d: Definition, label: str, later: list[Definition]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Find labels whose name ``label``, which ``d`` binds, may take.

    Each comes with the dimension of a tensor that both index, either in ``d`` itself or in a Func of ``later`` that reads it unshifted.
    """
    inside = [n for n in _reductions(d.expr) if label in n.labels]
    within = [a for n in inside for a in ex.accesses(n)]
    bound = {x for n in inside for x in n.labels}
    known = set().union(*(ex.free_labels(n) | {x for r in _reductions(n) for x in r.labels} for n in inside))
    element = ex.Access(d.name, tuple(map(ex.Label, d.labels)))
    users = [u for u in later if element in ex.accesses(u.expr)]
    apart = [n for n in _reductions(d.expr) if not any(x in inside for x in _reductions(n))]  # neither one of these nor around one
    for user in (d, *users):
        outside = [a for a in ex.accesses(user.expr) if user is not d or a not in within]
        names = (*user.labels, *(x for n in (apart if user is d else _reductions(user.expr)) for x in n.labels))
        for name in names:
            if name in known or user is not d and name in d.labels:
                continue
            for a in within:
                if ex.Label(label) in a.index and any(_reads_alike(ex.substitute(a, {label: ex.Label(name)}), b, bound) for b in outside):
                    yield name, (a.tensor, a.index.index(ex.Label(label)))


def _reads_alike(a: ex.Expr, b: ex.Access, bound: set[str]) -> bool:
    """Return whether two accesses are one, apart from labels ``bound`` by a reduction, which may take the names of others as well: rows of two labels, ``V[o, j, l]`` and ``V[o, i, k]``."""
    if not isinstance(a, ex.Access) or a.tensor != b.tensor or len(a.index) != len(b.index):
        return False
    return all(i == j or isinstance(i, ex.Label) and i.name in bound and isinstance(j, ex.Label) for i, j in zip(a.index, b.index))


def _reductions(e: ex.Expr) -> list[ex.Reduce | ex.Dot]:
    return [n for n in e.walk() if isinstance(n, (ex.Reduce, ex.Dot))]
