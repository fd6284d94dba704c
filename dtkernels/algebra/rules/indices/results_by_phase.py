"""Compute what is made of phases phase by phase too, and put the results in order last.

A kernel that makes the phases of a transposed convolution can then apply what follows, reduce channels, and store the result where it belongs
(``f.fuse_at(f_phases, x_step)``), where the phases themselves would be written and read in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ...quotients import divided, steps_of
from ...rearrangement import Interleaving, interleavings, rearrangement
from ..canonicalize import fresh_name
from ..condition_folding import fold_condition


def compute_results_by_phase(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Give what is made of a Func's phases a Func with the phases as labels: outputs and reductions that read all of it at one place of ``x``, what is between,
    and what others read in order.

    Before: ``g[x_phase, o, x_step] = A[x_phase, o, x_step]; y[o, x] = g[x % 2, o, x / 2] + b[o]; f[x] = rmax(y[o, x], o);``
    After:  ``g[x_phase, o, x_step] = A[x_phase, o, x_step]; y_phases[x_phase, o, x_step] = g[x_phase, o, x_step] + b[o];
    f_phases[x_phase, x_step] = rmax(y_phases[x_phase, o, x_step], o); f[x] = f_phases[x % 2, x / 2];``
    """
    refused: set[str] = set()
    ordered: list[str] = []
    while True:
        found, in_order = _by_phase(algorithm, outputs, refused, ordered)
        if in_order and in_order not in ordered:
            ordered.append(in_order)
            continue
        made = {*found.funcs} - {*algorithm.funcs}
        apart = {d.name: {a.tensor for a in ex.accesses(d.expr) if a.tensor in algorithm.funcs} for d in found.definitions}
        both = set().union(*(apart[f] for f in made)) & set().union(*(read for f, read in apart.items() if f not in made)) - made
        phases = {f for f in both if any(a.tensor == f and interleavings(a) for d in found.definitions for a in ex.accesses(d.expr))}
        if not phases - refused:
            return _with_products_inside(found, made)
        refused |= phases


def _by_phase(algorithm: Algorithm, outputs: tuple[str, ...], refused: set[str], ordered: list[str]) -> tuple[Algorithm, str]:
    """Return the algorithm with Funcs by phase, of no phases in ``refused``: those are read in another way too, and have to be stored.

    Nor is what reads those in ``ordered`` computed by phase. With it comes the first Func of phases that something else reads in order, "" if there is none.
    """
    found = algorithm
    for name in [d.name for d in algorithm.definitions]:
        looked_through = _through_rearranged(found, _summed_by_phase(found, found[name]))
        reads = {a.tensor for a in ex.accesses(looked_through.expr)}
        direct = {a.tensor for a in ex.accesses(algorithm[name].expr)}
        if not (reads & refused or direct & {*ordered}) and (by := _phases(found, looked_through)) and rearrangement(found[name], found) is None:
            found = _separated(found, looked_through, by)
        elif looked_through is not found[name] and not (reads & refused or direct & {*ordered}) and not any(_pairs(found, looked_through.expr)) and _summed(looked_through.expr):
            found = found.with_definitions(tuple(looked_through if d.name == name else d for d in found.definitions))
    if found is algorithm:
        return algorithm, ""
    read = {a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr)}
    kept = {*outputs} - read | {d.name for d in algorithm.definitions if _summed(d.expr)}
    kept |= {*ordered}
    plain = found.with_definitions(tuple(algorithm[d.name] if d.name in algorithm and d.name not in kept else d for d in found.definitions)).limited_to(outputs)
    return plain, next((d.name for d in plain.definitions if d.name not in kept and d is not found[d.name]), "")


def _with_products_inside(algorithm: Algorithm, made: set[str]) -> Algorithm:
    """Make a product and the one Func of ``made`` that reads it one Func again, as it was written, under the name of the product."""
    for name in [f for f in algorithm.funcs if f in made]:
        d = algorithm[name]
        for access in ex.accesses(d.expr):
            source = algorithm[access.tensor] if access.tensor in algorithm else None
            once = source and [a for u in algorithm.definitions for a in ex.accesses(u.expr) if a.tensor == source.name] == [access]
            if source and once and isinstance(source.expr, ex.Dot) and access.index == tuple(map(ex.Label, d.labels)) and not _summed(d.expr):
                algorithm = _joined(algorithm, d, source, access)
                break
    return algorithm


def _joined(algorithm: Algorithm, d: Definition, source: Definition, access: ex.Access) -> Algorithm:
    """Return the algorithm with ``d`` under the name of ``source``, which it reads by ``access``."""

    def renamed(n: ex.Expr) -> ex.Expr:
        return replace(n, tensor=source.name) if isinstance(n, ex.Access) and n.tensor == d.name else n

    one = replace(source, expr=d.expr.transform(lambda n: source.expr if n == access else n))
    rest = (one if u is d else replace(u, expr=u.expr.transform(renamed)) for u in algorithm.definitions if u is not source)
    return algorithm.with_definitions(tuple(rest))


def _through_rearranged(algorithm: Algorithm, d: Definition) -> Definition:
    """Return ``d`` with what it reads of Funcs in another order read where that order comes from: every other element at its step, ``g[1, x]`` for ``f[2 * x + 1]``."""

    def read(node: ex.Expr) -> ex.Expr:
        if isinstance(node, ex.Access) and node.tensor in algorithm and (moved := rearrangement(algorithm[node.tensor], algorithm)) and moved.interleaves:
            of = algorithm[node.tensor]
            return ex.substitute(of.expr, dict(zip(of.labels, node.index)), index=True)
        return node

    expr = d.expr.transform(read)
    return d if expr == d.expr else replace(d, expr=divided(expr, algorithm))


def _summed_by_phase(algorithm: Algorithm, d: Definition) -> Definition:
    """Return ``d`` with its sums over all of a rearranged dimension over phases and steps instead, which are as many.

    Before: ``f[o, x] = g[x % 2, o, x / 2];  s[o] = rsum(f[o, x], x);``  After: ``s[o] = rsum(f[o, 2 * x_step + x_phase], x_phase, x_step);``
    """

    def change(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, (ex.Reduce, ex.Dot)) or isinstance(node, ex.Reduce) and (node.kind in ex.PLACES or node.rank is not None):
            return node
        for access in ex.accesses(node):
            for pair, phase, step in _pairs_behind(algorithm, access):
                own = {phase, step}
                if pair.label in node.labels and not own & {*node.labels, *ex.free_labels(node), *d.labels} and not any(isinstance(n, ex.Scan) for n in node.walk()):
                    inner = node.rebuild(lambda e: ex.substitute(e, {pair.label: pair.place(phase, step)}))  # noqa: B023
                    return change(replace(inner, labels=tuple(new for x in node.labels for new in ((phase, step) if x == pair.label else (x,)))))  # type: ignore[call-arg]
        return node

    return replace(d, expr=d.expr.transform(change))


def _pairs_behind(algorithm: Algorithm, access: ex.Access) -> Iterator[tuple[Interleaving, str, str]]:
    """Yield the interleavings of a rearranged Func in the labels by which an access reads it, each with the labels of phase and step; only of those that count every element once."""
    if access.tensor not in algorithm or not (moved := rearrangement(algorithm[access.tensor], algorithm)) or not moved.interleaves:
        return
    of, source = algorithm[access.tensor], algorithm[moved.source].labels
    assert isinstance(of.expr, ex.Access)
    for pair in interleavings(of.expr):
        read = access.index[of.labels.index(pair.label)]
        if isinstance(read, ex.Label) and steps_of(algorithm, pair.label, pair.offset, pair.size)[1]:
            yield replace(pair, label=read.name), source[pair.phase], source[pair.step]


def _phases(algorithm: Algorithm, d: Definition) -> dict[str, tuple[Interleaving, str, str]]:
    """Return the labels of ``d`` of which it reads remainders and quotients, with the labels of phase and step to compute it by; nothing where that is impossible.

    Inputs may have such a label as an index: they are read at the place of the phase and step. Remainders and quotients may stand by themselves too.
    """
    if isinstance(d.expr, (ex.Scan, ex.Write, ex.Cast)):
        return {}
    found: dict[str, tuple[Interleaving, str, str]] = {}
    for access, pair in _pairs(algorithm, d.expr):
        own = algorithm[access.tensor].labels
        known = found.setdefault(pair.label, (pair, own[pair.phase], own[pair.step]))[0]
        if pair.label not in d.labels or known.indices != pair.indices or not _reads_everything(access):
            return {}
    indices = {index for pair, *_ in found.values() for index in pair.indices}
    places = sum(n in indices for n in d.expr.walk())
    places += sum(isinstance(i, ex.Label) and i.name in found for a in ex.accesses(d.expr) if a.tensor in algorithm.inputs for i in a.index)
    read = sum(isinstance(n, ex.Label) and n.name in found for n in d.expr.walk())
    taken = {label for _, *new in found.values() for label in new}
    return found if read == places and not taken & {*d.labels, *_summed(d.expr)} else {}


def _pairs(algorithm: Algorithm, e: ex.Expr) -> Iterator[tuple[ex.Access, Interleaving]]:
    return ((a, pair) for a in ex.accesses(e) if a.tensor in algorithm for pair in interleavings(a))


def _reads_everything(access: ex.Access) -> bool:
    """Return whether each index is a label, or one of a pair."""
    paired = {dim for pair in interleavings(access) for dim in (pair.phase, pair.step)}
    return all(dim in paired or isinstance(i, ex.Label) for dim, i in enumerate(access.index))


def _summed(e: ex.Expr) -> set[str]:
    return {label for n in ex.reductions(e) for label in n.labels}


def _separated(algorithm: Algorithm, d: Definition, by: dict[str, tuple[Interleaving, str, str]]) -> Algorithm:
    """Return the algorithm with ``d`` computed by phase."""
    at = {index: ex.Label(new) for pair, *labels in by.values() for index, new in zip(pair.indices, labels)}
    places = {x: pair.place(phase, step) for x, (pair, phase, step) in by.items()}

    def by_phase(n: ex.Expr) -> ex.Expr:
        if isinstance(n, ex.Access) and n.tensor in algorithm.inputs:
            return replace(n, index=tuple(places.get(i.name, i) if isinstance(i, ex.Label) else i for i in n.index))
        return whole[0] if (whole := [label for label in at.values() if n == ex.Call("floor", (label,))]) else at.get(n, n)

    steps = {x: step for x, (_, _, step) in by.items()}
    name = fresh_name(f"{d.name}_phases", set(algorithm.names))
    labels = (*(phase for _, phase, _ in by.values()), *(steps.get(x, x) for x in d.labels))
    made = Definition(name, labels, fold_condition(d.expr.transform(by_phase)), d.pos)
    phases = tuple(pair.indices[0] for pair, *_ in by.values())
    read = ex.Access(name, (*phases, *(by[x][0].indices[1] if x in by else ex.Label(x) for x in d.labels)))
    told = ((i.name, a.tensor, dim) for a in ex.accesses(d.expr) if a.tensor in algorithm.inputs for dim, i in enumerate(a.index) if isinstance(i, ex.Label) and i.name in by)
    algorithm = replace(algorithm, extents=tuple(dict.fromkeys((*algorithm.extents, *told))))  # no index tells it any more
    return algorithm.with_definitions(tuple(new for old in algorithm.definitions for new in ((made, replace(d, expr=read)) if old.name == d.name else (old,))))
