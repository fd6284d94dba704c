"""Give reductions over different labels of one definition Funcs of their own."""

from __future__ import annotations

from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from .canonicalize import fresh_name


def separate_reductions(algorithm: Algorithm) -> Algorithm:
    """Give each reduction its own Func, where a definition has several whose labels differ: one tile would be as large as all of their extents together.

    Before: ``f[t] = rsum(exp(C[t] - C[j]) * B[j], j) - rsum(exp(D[i] - C[t]) * D[i], i) * B[t];``
    After:  ``f_sum[t] = rsum(exp(C[t] - C[j]) * B[j], j);  f_sum2[t] = rsum(exp(D[i] - C[t]) * D[i], i);  f[t] = f_sum[t] - f_sum2[t] * B[t];``

    Those over a few elements, as of windows, stay, and those of terms that are read one by one: they take as long as their reads.
    """
    taken = set(algorithm.names)
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        found = list(dict.fromkeys(ex.reductions(d.expr)))
        if not _apart(algorithm, d, found):
            definitions.append(d)
            continue
        names = {node: fresh_name(f"{d.name}_{node.kind}", taken) for node in found if isinstance(node, ex.Reduce)}
        definitions += [Definition(name, d.labels, node, d.pos) for node, name in names.items()]
        reads = {node: ex.Access(name, tuple(map(ex.Label, d.labels))) for node, name in names.items()}
        definitions.append(replace(d, expr=d.expr.transform(lambda n: reads.get(n, n))))  # type: ignore[call-overload]  # noqa: B023
    return algorithm.with_definitions(tuple(definitions)) if len(definitions) > len(algorithm.definitions) else algorithm


def _apart(algorithm: Algorithm, d: Definition, found: list[ex.Reduce | ex.Dot]) -> bool:
    """Return whether a definition has several reductions, each over elements of its own that are many, of terms that vary with the whole result."""
    if len(found) < 2 or any(isinstance(n, ex.Scan) for n in d.expr.walk()):
        return False
    labels = [x for node in found for x in node.labels]
    plain = all(isinstance(n, ex.Reduce) and n.kind not in ex.PLACES and n.rank is None and {*d.labels} <= ex.free_labels(n) for n in found)
    if any({*d.labels, *node.labels} <= ex.free_labels(a) for node in found for a in ex.accesses(node)):
        return False
    return plain and len({*labels}) == len(labels) and not {*labels} & {*d.labels} and not any(algorithm.constant_extent(x) for x in labels)
