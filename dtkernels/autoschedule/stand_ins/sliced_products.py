"""Make slices of a product in the kernels that take them, where that is predicted to be faster than a kernel of the whole product.

The algebra makes one product of slices that definitions take (algebra/rules/products/sliced_products.py). One kernel of it reads its operands once and fills the
GPU; the kernel that takes the slices then reads them from memory. With few rows a launch costs more than that::

    P[b, g] = rdot(X[b, i], W[g, i], i);    f[b, j] = sigmoid(P[b, j + 0]) * tanh(P[b, j + len(j)]) + P[b, j + 2 * len(j)];

``P.fuse_at(f, j)`` makes each slice where it is taken. Its schedule is that of the algorithm with the slices in place of ``P``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ...algebra.autodiff.rematerialization import is_within_set_limit
from ...algebra.rules.constant_folding import drop_unused
from ...algebra.rules.products.sliced_products import slice_offset
from ...codegen.analysis.product_types import InputTypes, typed
from ...codegen.target import Target
from ...lang import expr as ex
from ...lang.algorithm import Algorithm, with_operands
from ...lang.schedule import FuseAt, Program, Schedule, host
from ..cost.outline import Known
from ..cost.predicted_time import predicted_time
from ..fit_resources import can_be_lowered

FASTER = 0.9  #: the part of the time with slices apart below which the whole product has a kernel


def products_in_slices(algorithm: Algorithm, outputs: tuple[str, ...]) -> dict[str, str]:
    """Map the products of which every access takes a slice to the label that counts the elements of one. None that a reduction reads: what is reduced there has its own Func."""
    found: dict[str, str] = {}
    reduced = {a.tensor for d in algorithm.definitions for n in ex.reductions(d.expr) for a in ex.accesses(n)}
    for d in algorithm.definitions:
        read = [a for e in algorithm.definitions for a in ex.accesses(e.expr) if a.tensor == d.name]
        if d.name in outputs or d.name in reduced or not read or not any(isinstance(n, ex.Dot) for n in ex.operands_of(d.expr, "+")):
            continue
        places = [[(i, own) for i, own in zip(a.index, d.labels) if not isinstance(i, ex.Label)] for a in read]
        if all(len(p) == 1 for p in places):
            taken = {(own, x) for ((i, own),) in places for x in ex.free_labels(i) if slice_offset(i, x) is not None}
            if len(taken) == 1 and all(len(ex.free_labels(i)) == 1 for ((i, _),) in places):
                found[d.name] = next(iter(taken))[1]
    return found


def with_slices_in_place(algorithm: Algorithm, names: dict[str, str]) -> Algorithm:
    """Return the algorithm without these products: what takes a slice computes it."""

    def change(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, ex.Access) or node.tensor not in names:
            return node
        made = algorithm[node.tensor]
        return ex.substitute(made.expr, dict(zip(made.labels, node.index)))

    changed = tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions if d.name not in names)
    return drop_unused(algorithm.with_definitions(changed), algorithm.labels)


def time_of_schedule(
    algorithm: Algorithm, schedule: Schedule, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target
) -> float:
    """Return the predicted microseconds of a schedule, which may name operands."""
    changed, width = typed(with_operands(algorithm, schedule.subjects()), sizes, itemsize)
    return predicted_time(str(schedule), Known.of(changed, outputs), sizes, width, target)


def made_where_taken(
    algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target,
    whole: Schedule, default: Callable[[Algorithm], Schedule],
) -> Schedule:  # fmt: skip
    """Return the schedule that makes slices where they are taken, or ``whole`` where that is predicted to be well faster and keeps no more than a limit that the user set.

    ``default`` returns an algorithm's schedule.
    """
    names = products_in_slices(algorithm, outputs) if 0 not in sizes.values() else {}
    if not names:
        return whole
    apart = with_slices_in_place(algorithm, names)
    found = default(apart)

    def time(of: Algorithm, schedule: Schedule) -> float:
        return time_of_schedule(of, schedule, outputs, sizes, itemsize, target)

    kept = sum(4 * math.prod(sizes[label] for label in algorithm[name].labels) for name in names)
    if is_within_set_limit(kept) and time(algorithm, whole) < FASTER * time(apart, found):
        return whole
    places = []
    for name, label in names.items():
        reader = next(d.name for d in algorithm.definitions if any(a.tensor == name for a in ex.accesses(d.expr)))
        places.append(FuseAt(name, "fuse_at", (host(reader, found.fused()), label)))
    fused = Schedule((*places, *found.primitives))
    return fused if can_be_lowered(Program(algorithm, fused)) else whole
