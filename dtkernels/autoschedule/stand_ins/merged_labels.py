"""Schedule an algorithm whose labels always lie beside one another as if each run of them were one label.

Rows of most programs are counted by several labels, ``X[b, y, x, f]``. Blocks of rows of a single ``y`` may be small, and sums over ``b, y, x`` are cut into
parts along one of them. Merged, they are one long dimension::

    d[b, y, x, j] = g[b, y, x, j] * sigmoid(X[b, y, x, j]);     d_c[j] = rsum(d[b, y, x, j], b, y, x);

is scheduled as this algorithm, and each kernel of its schedule gets ``merge(b_y_x, b, y, x)``::

    d[b_y_x, j] = g[b_y_x, j] * sigmoid(X[b_y_x, j]);           d_c[j] = rsum(d[b_y_x, j], b_y_x);

Labels of products stay apart: their rules merge labels themselves (rules/candidates/window_products.py), and kernels chosen for one label were slower than
predicted with several: a layer of 8 x 32 x 32 rows took 106 us on an H200, its gradients 4777 for 350, as a product and a sum of its rows in one kernel spilled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ...codegen.analysis.product_types import InputTypes
from ...codegen.pipeline import lower
from ...codegen.target import Target
from ...lang import expr as ex
from ...lang.algorithm import Algorithm, with_operands
from ...lang.errors import DTError
from ...lang.extents.formulas import inputs_of
from ...lang.reserved_names import clashes
from ...lang.schedule import FuseAt, Merge, Primitive, Program, Schedule
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import read_schedule
from ..fit_resources import fit_resources
from .sliced_products import time_of_schedule

FASTER = 0.95  #: the part of the time without merged labels below which they are merged

Run = tuple[str, ...]


@dataclass(frozen=True)
class MergedLabels:
    """An algorithm with one label in place of each run of them."""

    algorithm: Algorithm
    sizes: dict[str, int]
    runs: dict[str, Run]  #: the label of each run

    @staticmethod
    def of(algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int]) -> MergedLabels | None:
        """Return the algorithm with merged labels; None if there are none, or if merging them changes nothing for any kernel."""
        if 0 in sizes.values() or not (runs := _runs(algorithm, sizes)):
            return None
        names: dict[str, Run] = {}
        for run in runs:
            wish = "_".join(run)
            names[next(n for n in (wish, *(f"{wish}{i}" for i in range(99))) if not clashes(n, algorithm.names | names.keys()))] = run
        parts = {x for run in runs for x in run}
        kept = {label: n for label, n in sizes.items() if label not in parts}
        return MergedLabels(_merged(algorithm, names, sizes), kept | {name: math.prod(sizes[x] for x in run) for name, run in names.items()}, names)

    def restored(self, algorithm: Algorithm, schedule: Schedule) -> Schedule:
        """Return the same schedule for ``algorithm``, whose labels are not merged."""
        whole = with_operands(algorithm, schedule.subjects())
        merges = tuple(p for kernel in read_schedule(str(schedule)).kernels for p in self._merges(whole, kernel.func, (f for f, _ in kernel.members)))
        placed = tuple(self._placed(p) for p in schedule.primitives if isinstance(p, FuseAt))
        return Schedule((*placed, *merges, *(self._expanded(p) for p in schedule.primitives if not isinstance(p, FuseAt))))

    def _merges(self, algorithm: Algorithm, root: str, members: Iterable[str]) -> Iterator[Merge]:
        """Yield the statements that merge the labels of a kernel."""
        labels = {x for f in (root, *members) if f in algorithm for x in (*algorithm[f].labels, *reduction_labels(algorithm, f))}
        yield from (Merge(root, "merge", (name, *run)) for name, run in self.runs.items() if labels >= {*run})

    def _placed(self, p: FuseAt) -> FuseAt:
        """Return where a Func is fused, by a label that the consumer has."""
        return replace(p, args=tuple(self.runs[a][-1] if i and a in self.runs else a for i, a in enumerate(p.args))) if p.label in self.runs else p

    def _expanded(self, p: Primitive) -> Primitive:
        """Return a statement that merges further labels, with all of those that a merged one stands for."""
        if not isinstance(p, Merge):
            return p
        return replace(p, args=(p.label, *(x for part in p.parts for x in self.runs.get(part, (part,)))))


def with_merged_labels(
    algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target,
    found: Schedule, default: Callable[[Algorithm, dict[str, int]], Schedule],
) -> Schedule:  # fmt: skip
    """Return the schedule that merges labels, or ``found`` unless it is predicted to be slower. ``default`` returns an algorithm's schedule at given sizes."""
    merged = MergedLabels.of(algorithm, outputs, sizes)
    if merged is None:
        return found

    def time(schedule: Schedule) -> float:
        return time_of_schedule(algorithm, schedule, outputs, sizes, itemsize, target)

    try:
        program = Program(algorithm, merged.restored(algorithm, default(merged.algorithm, merged.sizes)))
        lower(program)
        fitting = fit_resources(program, sizes, itemsize, target).schedule
    except DTError:  # a statement about single labels
        return found
    return fitting if time(fitting) < FASTER * time(found) else found


def _runs(algorithm: Algorithm, sizes: dict[str, int]) -> list[Run]:
    """Return the runs of labels that all tensors and sums have whole, one beside the other, or not at all, and whose merging may matter."""
    loose = _loose_labels(algorithm, sizes)
    while True:
        runs = _adjacent(algorithm, [x for x in algorithm.labels if x not in loose])
        uneven = {x for run in runs for x in run if not _is_merged_everywhere(algorithm, runs, run)}
        if not uneven:
            return [run for run in runs if sum(sizes[x] > 1 for x in run) > 1 and _matters(algorithm, run)]
        loose |= uneven


def _loose_labels(algorithm: Algorithm, sizes: dict[str, int]) -> set[str]:
    """Return the labels that stay: those of products, and those that count more than elements one after another, as values or in parts of other indices."""
    found = {x for x in algorithm.labels if x not in sizes or algorithm.constant_extent(x) is not None}
    sized = {t for _, formula in algorithm.formulas for t, _ in inputs_of(formula)}
    for d in algorithm.definitions:
        plain = Counter(i.name for a in ex.accesses(d.expr) for i in a.index if isinstance(i, ex.Label))
        found |= (Counter(n.name for n in d.expr.walk() if isinstance(n, ex.Label)) - plain).keys()
        for n in d.expr.walk():
            if isinstance(n, ex.Scan):
                found.add(n.label)
            elif isinstance(n, ex.Reduce) and (n.kind in ex.PLACES or n.rank is not None):
                found |= {*n.labels}
            elif isinstance(n, ex.Write):
                found |= {*d.labels}
            elif isinstance(n, ex.Dot):
                found |= {*n.labels, *ex.free_labels(n)}
            elif isinstance(n, ex.Access) and n.tensor in sized:
                found |= ex.free_labels(n)
    return found


def _places(algorithm: Algorithm) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """Yield each tensor with its labels, where it is defined and wherever it is read; None for a computed place."""
    for d in algorithm.definitions:
        yield d.name, d.labels
        for a in ex.accesses(d.expr):
            yield a.tensor, tuple(i.name if isinstance(i, ex.Label) else None for i in a.index)


def _adjacent(algorithm: Algorithm, labels: list[str]) -> list[Run]:
    """Return the longest runs of ``labels`` that follow each other wherever one of them is."""
    placed = [p for _, p in _places(algorithm)]
    summed = [n.labels for d in algorithm.definitions for n in ex.reductions(d.expr)]
    after: dict[str, str] = {}
    for x in labels:
        ends = {p[p.index(x) + 1] if x != p[-1] else None for p in placed if x in p}
        follower = next(iter(ends)) if len(ends) == 1 else None
        if follower in labels and all((x in p) == (follower in p) and p.count(x) < 2 for p in (*placed, *summed)):
            after[x] = follower  # type: ignore[assignment]
    runs = []
    for first in (x for x in after if x not in after.values()):
        run = [first]
        while run[-1] in after:
            run.append(after[run[-1]])
        runs.append(tuple(run))
    return runs


def _is_merged_everywhere(algorithm: Algorithm, runs: list[Run], run: Run) -> bool:
    """Return whether the dimensions that a run counts are those of some run in every access to the same tensors."""
    firsts = {r[0]: len(r) for r in runs}
    found = [(tensor, [(i, firsts[x]) for i, x in enumerate(placed) if x in firsts]) for tensor, placed in _places(algorithm)]
    touched = {tensor for tensor, placed in _places(algorithm) if run[0] in placed}
    return all(len({tuple(at) for t, at in found if t == tensor}) == 1 for tensor in touched)


def _matters(algorithm: Algorithm, run: Run) -> bool:
    """Return whether a run ends the dimensions of a tensor, or is summed over. Others only number what kernels repeat."""
    ends = any(placed[-len(run) :] == run for _, placed in _places(algorithm))
    return ends or any(run[0] in n.labels for d in algorithm.definitions for n in ex.reductions(d.expr))


def _merged(algorithm: Algorithm, names: dict[str, Run], sizes: dict[str, int]) -> Algorithm:
    """Return ``algorithm`` with one label for each run."""
    first, parts = {run[0]: name for name, run in names.items()}, {x for run in names.values() for x in run}

    def labels(own: Iterable[str]) -> tuple[str, ...]:
        return tuple(first.get(x, x) for x in own if x in first or x not in parts)

    def change(n: ex.Expr) -> ex.Expr:
        if isinstance(n, ex.Access):
            at = (i for i in n.index if not isinstance(i, ex.Label) or i.name in first or i.name not in parts)
            return replace(n, index=tuple(ex.Label(first.get(i.name, i.name)) if isinstance(i, ex.Label) else i for i in at))
        if isinstance(n, (ex.Reduce, ex.Dot)):
            return replace(n, labels=labels(n.labels))
        return ex.Const(sizes[n.label]) if isinstance(n, ex.Len) and n.label in parts else n

    before = {tensor: placed for tensor, placed in _places(algorithm)}
    extents = []
    for label, tensor, dim in algorithm.extents:
        own = before.get(tensor, ())
        if label not in parts and (dim >= len(own) or own[dim] not in parts):
            extents.append((label, tensor, sum(x not in parts or x in first for x in own[:dim]) if own else dim))
    definitions = tuple(replace(d, labels=labels(d.labels), expr=d.expr.transform(change)) for d in algorithm.definitions)
    changed = replace(algorithm, vars=labels(algorithm.vars), rvars=labels(algorithm.rvars), extents=tuple(extents))
    return changed.with_definitions(definitions)
