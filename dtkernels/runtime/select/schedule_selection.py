"""Choose the schedule of a call from its sizes: the row predicted to be fastest, else the default schedule; say why."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ...autoschedule.cost.kernel_config import copied_inputs, halved_labels, kernels_of, tiled_labels, tiles_of
from ...autoschedule.cost.outline import Known
from ...autoschedule.cost.predicted_time import predicted_time
from ...codegen.powers_of_two import two_tiles_are_shorter
from ...codegen.target import TARGETS, Target
from ..tables.table import Gpu, RowKey
from .evidence import ITEMSIZE, TimeModel, weight
from .row_ranking import FAR, Candidate, bucket_of, distance, rank_rows
from .table_loader import OpTable, op_table

if TYPE_CHECKING:
    from ...codegen.analysis.product_types import InputTypes
    from ...lang.algorithm import Algorithm
    from ...lang.schedule import Program


@dataclass(frozen=True)
class Call:
    """A kind of call, in the terms of table rows."""

    op: str
    spec: str
    direction: str = "forward"
    params: tuple[tuple[str, int | bool], ...] = ()
    wanted: tuple[str, ...] = ()
    saved: bool = False
    batched: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def key(self, dtype: str, labels: frozenset[str]) -> RowKey:
        """Return the key of its rows, see ``Row.key``."""
        return RowKey(self.op, self.direction, self.params, self.wanted, self.kept or self.saved, self.batched, dtype, labels)


COMPILED = 1.05  #: how many times faster the default schedule must be than a far row: it is compiled, and no time of it was measured
SAVED = 0.5  #: microseconds a call that it must save: to compile takes a second
SIMILAR = 1.05  #: prebuilt kernels of rows that are predicted to take longer than the fastest by more than this are left alone


@dataclass(frozen=True)
class Choice:
    """The candidate rows of a call, fastest first, with the refused ones. If none is usable, the default schedule runs.

    ``default``: the predicted time of the default schedule where that is better than any row.
    """

    table: OpTable
    considered: tuple[Candidate, ...]
    sizes: dict[str, int]
    default: float | None = None

    @property
    def usable(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.considered if not c.refused)

    @property
    def preferred(self) -> tuple[Candidate, ...]:
        """Return the usable rows, none where the default schedule is better."""
        return self.usable if self.default is None else ()

    def similar(self) -> tuple[Candidate, ...]:
        """Return the preferred rows that take about as long as the fastest."""
        rows = self.preferred
        return tuple(c for c in rows if c.predicted <= SIMILAR * rows[0].predicted)

    def why_no_row(self) -> str:
        """Say in a few words why no row is taken."""
        if self.table.gpu is None:
            return "there is no table for this GPU or a similar one"
        if not self.considered:
            return f"table {self.table.gpu} has no row for this kind of call"
        c = self.considered[0]
        if self.default is not None:
            return f"it is predicted to take {self.default:.4g} us, the best row of {self.table.gpu} ({c.row.title()}, distance {c.distance:.2f}) {c.predicted:.4g} us"
        return f"the nearest row of {self.table.gpu} ({c.row.title()}) does not fit: {c.refused}"


@lru_cache(maxsize=32)
def gpu_of(target: Target) -> Gpu:
    """Return a target as the ``Gpu`` that tables describe."""
    known = target.name in TARGETS
    return Gpu(f"NVIDIA {target.name.upper()}" if known and target.backend == "cuda" else target.name, target.arch, target.multiprocessors, target.bandwidth)


def target_for(gpu: Gpu) -> Target | None:
    """Return the target to compile for a table's GPU: by name, else by compute capability."""
    alike = [t for t in TARGETS.values() if str(t.arch) == str(gpu.arch)]
    return next((t for t in alike if gpu.folder.startswith(gpu_of(t).folder)), alike[0] if alike else None)


def choose(subject: Call, dtype: str, sizes: dict[str, int], target: Target, known: Known | None = None) -> Choice:
    """Rank the rows of the GPU's table for one call. ``known``: the algorithm's outline."""
    table, key = op_table(subject.op, gpu_of(target)), subject.key(dtype, frozenset(sizes))
    model = None if known is None else TimeModel(known, target, _measured_on(table.gpu_of(key), target))
    return Choice(table, tuple(rank_rows(table.rows_of_kind(key), sizes, subject.spec, model)), sizes)


def nearest(subject: Call, dtype: str, sizes: dict[str, int], target: Target, known: Known | None = None) -> Candidate | None:
    """Return the first usable row of ``choose`` with exactly the call's parameters; decided once for sizes of one bucket."""
    table, key = op_table(subject.op, gpu_of(target)), subject.key(dtype, frozenset(sizes))
    found = table.nearest(key, sizes, subject.spec, known, lambda: None if known is None else TimeModel(known, target, _measured_on(table.gpu_of(key), target)))
    return found and found._replace(distance=distance(found.row, sizes, known.pitches if known else {}))


@lru_cache(maxsize=64)
def _table_target(folder: str) -> Target | None:
    return next((t for t in TARGETS.values() if gpu_of(t).folder == folder), None)


def _measured_on(gpu: str | None, target: Target) -> Target:
    """Return the GPU whose times the rows hold."""
    return (_table_target(gpu) if gpu is not None else None) or target


def settled(choice: Choice, text: str, dtype: str, known: Known, target: Target, own: Known | None = None) -> Choice:
    """Let the default schedule ``text`` compete with the best row. ``own``: the outline with the Funcs that it names of operands and terms, if it does.

    A measured row of the same tiles tells of it too, where the default schedule is that row's on copies with aligned rows; and one of the same
    kernels, where products wait for each other or two tiles hold what the row holds by one: the model errs on both alike.
    """
    first, there = choice.usable[0], predicted_time(text, own or known, dict(bucket_of(choice.sizes, known)), ITEMSIZE[dtype], target)
    waiting = sum(len(f.products) for f in known.outline.funcs) > 1
    same = tiles_of if copied_inputs(text) else kernels_of if waiting or halved_labels(text) else None
    told = [c for c in choice.usable if c.exact and c.row.measured and c.row.microseconds and not copied_inputs(c.row.schedule)] if same else []
    alike = [c for c in told if same and same(c.row.schedule) == same(text)]
    if alike:
        nearest = min(alike, key=lambda c: c.distance)
        model = TimeModel(known, target, _measured_on(choice.table.gpu, target))
        there *= math.exp(weight(nearest.distance) * model.ratio(nearest.row.schedule, nearest.row))
    return replace(choice, default=there) if COMPILED * there < first.predicted and first.predicted - there > SAVED else choice


def default_may_be_faster(choice: Choice, known: Known) -> bool:
    """Return whether the default schedule may be faster than every row: all are far from the call, or the best pads an extent that two tiles would hold."""
    if not choice.usable:
        return False
    first = choice.usable[0]
    near = min(c.distance for c in choice.usable if c.exact == first.exact)
    return near > FAR or not first.exact or first.distance > 0 and _pads(first.row.schedule, choice.sizes, known)


def _pads(schedule: str, sizes: dict[str, int], known: Known) -> bool:
    """Return whether one tile of a schedule holds a whole extent of a product that two shorter ones would."""
    sides = {label for f in known.outline.funcs for p in f.products for label in (*p.labels, *p.rows, *p.columns)}
    whole = {*tiled_labels(schedule)[1]} - {*halved_labels(schedule)}
    return any(two_tiles_are_shorter(sizes[label]) for label in whole & sides & sizes.keys())


def scheduled(algorithm: Algorithm, text: str) -> Program:
    """Combine an algorithm with a row's schedule. Raises DTError where the two do not fit."""
    from ...codegen.pipeline import lower
    from ...lang.parser import parse_schedule
    from ...lang.schedule import Program
    from ...lang.schedule_checks import check_schedule

    schedule = parse_schedule(text)
    check_schedule(schedule, algorithm)
    program = Program(algorithm, schedule)
    lower(program)
    return program


def check_resources_of(program: Program, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target) -> None:
    """Raise DTError where the kernels of a program exceed the GPU's resources."""
    from ...autoschedule.fit_resources import element_bytes
    from ...codegen.analysis.resources import check_resources
    from ...codegen.pipeline import lower
    from ...lang.algorithm import with_operands

    itemsizes = element_bytes(with_operands(program.algorithm, program.schedule.subjects()), outputs, itemsize)
    for kernel in lower(program):
        check_resources(kernel, sizes, itemsizes, target)


def by_default_schedule(
    algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target, in_order: bool = False
) -> Program:
    """Combine an algorithm with the default schedule for exactly these sizes. ``in_order``: sums have a fixed order."""
    from ...autoschedule.default_schedule import default_schedule
    from ...lang.schedule import Program

    return Program(algorithm, default_schedule(algorithm, outputs, sizes, itemsize, target, in_order))
