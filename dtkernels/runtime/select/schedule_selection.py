"""From a call's sizes to its schedule: the nearest row that fits, else the formula; and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ...codegen.target import TARGETS, Target
from ..tables.table import Gpu, RowKey
from .row_ranking import Candidate, rank_rows
from .table_loader import OpTable, op_table

if TYPE_CHECKING:
    from ...codegen.analysis.product_types import InputTypes
    from ...lang.algorithm import Algorithm
    from ...lang.schedule import Program


@dataclass(frozen=True)
class Call:
    """What is called, as rows name it."""

    op: str
    spec: str
    direction: str = "forward"
    params: tuple[tuple[str, int | bool], ...] = ()
    wanted: tuple[str, ...] = ()
    saved: bool = False
    batched: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def key(self, dtype: str, labels: frozenset[str]) -> RowKey:
        """The key of the rows that are for it, see ``Row.key``."""
        return RowKey(self.op, self.direction, self.params, self.wanted, self.kept or self.saved, self.batched, dtype, labels)


@dataclass(frozen=True)
class Choice:
    """The rows that may be taken, nearest first, and those that were refused; where none is left the formula decides."""

    table: OpTable
    considered: tuple[Candidate, ...]
    sizes: dict[str, int]

    @property
    def usable(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.considered if not c.refused)

    def why_none(self) -> str:
        """Why no row is taken, in a few words."""
        if self.table.gpu is None:
            return "there is no table for this GPU or one like it"
        if not self.considered:
            return f"table {self.table.gpu} has no row for this kind of call"
        c = self.considered[0]
        return f"the nearest row of {self.table.gpu} ({c.row.title()}) is not taken: {c.refused}"


@lru_cache(maxsize=32)
def gpu_of(target: Target) -> Gpu:
    """A target as tables name GPUs."""
    known = target.name in TARGETS
    return Gpu(f"NVIDIA {target.name.upper()}" if known and target.backend == "cuda" else target.name, target.arch, target.multiprocessors, target.bandwidth if known else 0.0)


def target_for(gpu: Gpu) -> Target | None:
    """What to compile for a table's GPU: the target of its name, else one of its compute capability."""
    alike = [t for t in TARGETS.values() if str(t.arch) == str(gpu.arch)]
    return next((t for t in alike if gpu.folder.startswith(gpu_of(t).folder)), alike[0] if alike else None)


def choose(subject: Call, dtype: str, sizes: dict[str, int], target: Target, pitches: frozenset[str] = frozenset()) -> Choice:
    """The rows of the GPU's table for one call; ``pitches`` see ``choice.distance``."""
    table, key = op_table(subject.op, gpu_of(target)), subject.key(dtype, frozenset(sizes))
    return Choice(table, tuple(rank_rows(table.agreeing(key), sizes, subject.spec, pitches=pitches)), sizes)


def nearest(subject: Call, dtype: str, sizes: dict[str, int], target: Target, pitches: frozenset[str] = frozenset()) -> Candidate | None:
    """The first of ``choose`` that is for these very parameters and may be taken."""
    table, key = op_table(subject.op, gpu_of(target)), subject.key(dtype, frozenset(sizes))
    return table.nearest(key, sizes, subject.spec, pitches)


def scheduled(algorithm: Algorithm, text: str) -> Program:
    """The algorithm with a row's schedule. Raises DTError where the two do not fit."""
    from ...codegen.pipeline import lower
    from ...lang.parser import parse_schedule
    from ...lang.schedule import Program
    from ...lang.schedule_checks import check_schedule

    schedule = parse_schedule(text)
    check_schedule(schedule, algorithm)
    program = Program(algorithm, schedule)
    lower(program)
    return program


def room_for(program: Program, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target) -> None:
    """Raise DTError where the GPU does not have what the kernels of a program take."""
    from ...autoschedule.fit_resources import element_bytes
    from ...codegen.analysis.resources import check_resources
    from ...codegen.pipeline import lower

    itemsizes = element_bytes(program.algorithm, outputs, itemsize)
    for kernel in lower(program):
        check_resources(kernel, sizes, itemsizes, target)


def by_default_schedule(algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target) -> Program:
    """The algorithm with the formula's schedule for just these sizes."""
    from ...autoschedule.default_schedule import default_schedule
    from ...lang.schedule import Program

    return Program(algorithm, default_schedule(algorithm, outputs, sizes, itemsize, target))
