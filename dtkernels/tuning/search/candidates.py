"""Represent candidates kernel by kernel: a KernelCandidate schedules one kernel, given which Funcs are fused.

The cost of a schedule is the sum over its kernels. Each kernel is therefore searched by itself, and the best candidates are
combined again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...codegen.ir.nest import Kernel
from ...codegen.pipeline import lower, lower_one, prelower
from ...lang.algorithm import Algorithm, operand_names, sides_of
from ...lang.parser import parse_schedule
from ...lang.schedule import PRIMITIVES, Bare, FuseAt, Primitive, Program, Schedule
from ...lang.schedule_checks import check_schedule
from ..records.journal import HALF
from ..records.problems import TuningProblem, variants_of

ROW_BYTES = 16  #: of which the rows that a descriptor reads are multiples


@dataclass(frozen=True)
class KernelCandidate:
    """The statements on the kernel of ``root``, given the fusion statements ``fused``."""

    fused: str
    root: str
    tiles: str

    def text(self) -> str:
        """Return the key of the journal."""
        return f"{self.fused}{HALF}{self.root}\n{self.tiles}"

    @staticmethod
    def read(text: str) -> KernelCandidate:
        """Parse the result of ``text()``."""
        fused, _, rest = text.partition(HALF)
        root, _, tiles = rest.partition("\n")
        return KernelCandidate(fused, root, tiles)


@dataclass(frozen=True)
class ScheduleCandidate:
    """A whole schedule: its kernels' candidates in execution order."""

    plans: tuple[KernelCandidate, ...]

    @property
    def fused(self) -> str:
        return self.plans[0].fused

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(p.root for p in self.plans)

    def with_plan(self, plan: KernelCandidate) -> ScheduleCandidate:
        """Return the same schedule with one kernel replaced."""
        return ScheduleCandidate(tuple(plan if p.root == plan.root else p for p in self.plans))

    def schedule(self, outputs: tuple[str, ...]) -> str:
        """Return the DT text."""
        lines = [self.fused, *(p.tiles for p in self.plans), *(f"{o}.compile();" for o in outputs)]
        return "\n".join(line for line in lines if line)

    def text(self) -> str:
        """Return the key of the journal."""
        return f"{self.fused}{HALF}*\n" + "\n".join(p.tiles for p in self.plans)


def with_aligned_rows(whole: ScheduleCandidate, work: TuningProblem) -> ScheduleCandidate:
    """Align the rows of Funcs between kernels that a kernel reads by descriptors, where ``work`` has rows of no whole 16 bytes.

    A descriptor of other rows falls back to pointers, so that a kernel would be timed that its schedule does not mean.
    """
    variant = variants_of(work.group)[1]
    algorithm = variant.algorithm
    for func in dict.fromkeys(str(t) for p in whole.plans for s in parse_schedule(p.tiles).primitives if s.name == "descriptor" for t in s.args):
        plan = next((p for p in whole.plans if p.root == func and func not in variant.outputs), None)
        row = work.extents[algorithm[func].labels[-1]] * work.group.itemsize if plan is not None and algorithm[func].labels else 0
        if plan is not None and row % ROW_BYTES and f"{func}.align();" not in plan.tiles.splitlines():
            aligned = _sorted([*parse_schedule(plan.tiles).primitives, Bare(func, "align")])
            whole = whole.with_plan(KernelCandidate(plan.fused, func, aligned))
    return whole


def split_by_kernel(algorithm: Algorithm, outputs: tuple[str, ...], text: str) -> ScheduleCandidate:
    """Split the schedule ``text`` into kernels; Funcs that it does not compile are compiled. Raises DTError if it is not legal."""
    schedule = _uncompiled(text) + compiled(outputs)
    check_schedule(schedule, algorithm)
    hosts = _hosts(schedule)
    found_in = (k.func for k in lower(Program(algorithm, schedule)))
    roots = tuple(dict.fromkeys(f for f in found_in if f in algorithm and f not in hosts))  # the reader of a copy computes it, and the parts' kernel a sum
    found = plans_of(text, algorithm)
    joins = _joins(schedule)
    return ScheduleCandidate(tuple(found.get(root, KernelCandidate(joins, root, "")) for root in roots))


def plans_of(text: str, algorithm: Algorithm) -> dict[str, KernelCandidate]:
    """Return the candidate of each kernel that the schedule ``text`` mentions, unchecked.

    The kernel that computes an operand of a product belongs to the first one that reads it, as one that copies an input does.
    """
    schedule = _uncompiled(text)
    hosts = readers(algorithm, text) | _hosts(schedule)

    def root_of(func: str) -> str:
        seen = {func}
        while func in hosts and hosts[func] not in seen:
            func = hosts[func]
            seen.add(func)
        return func

    joins = _joins(schedule)
    by_root: dict[str, list[Primitive]] = {}
    for p in schedule.primitives:
        if p.name not in _FUSING:
            by_root.setdefault(root_of(p.func), []).append(p)
    return {root: KernelCandidate(joins, root, _sorted(found)) for root, found in by_root.items()}


def readers(algorithm: Algorithm, text: str) -> dict[str, str]:
    """Return each operand that the schedule ``text`` gives a kernel of its own -> the first Func that reads it."""
    stated = {f for f in parse_schedule(text).subjects() if f not in algorithm}
    named = {name: e for name, e in (operand_names(algorithm).items() if stated else ()) if name in stated}
    taking = [(d.name, sides) for d in algorithm.definitions for n in d.expr.walk() if (sides := sides_of(n))]
    return {name: next(f for f, sides in taking if e in sides) for name, e in named.items()}


def _uncompiled(text: str) -> Schedule:
    return Schedule(tuple(p for p in parse_schedule(text).primitives if p.name not in ("compile", "compile_to_kernel")))


def _hosts(schedule: Schedule) -> dict[str, str]:
    """Return each Func that another one's kernel computes, completely or in parts -> that other Func."""
    return {p.func: p.consumer for p in schedule.primitives if isinstance(p, FuseAt)}


def _joins(schedule: Schedule) -> str:
    return "\n".join(str(p) for p in schedule.primitives if p.name in _FUSING)


_FUSING = ("fuse_at", "store", "parts_at", "accumulate_at")  #: the primitives that decide which kernels there are
_LAST = ("num_warps", "num_stages")


def _sorted(primitives: list[Primitive]) -> str:
    """Sort into one order, so that equal candidates have equal texts."""
    return "\n".join(map(str, sorted(primitives, key=lambda p: (p.name in _LAST, list(PRIMITIVES).index(p.name)))))


def compiled(outputs: tuple[str, ...]) -> Schedule:
    """Return the statements that compile ``outputs``."""
    return Schedule(tuple(Bare(o, "compile") for o in outputs))


def kernels_of(algorithm: Algorithm, outputs: tuple[str, ...], whole: ScheduleCandidate, root: str | None) -> tuple[Kernel, ...]:
    """Return the kernels of one candidate of a schedule, or of all. Raises DTError if they cannot be lowered."""
    schedule = parse_schedule(whole.schedule(outputs))
    check_schedule(schedule, algorithm)
    program = Program(algorithm, schedule)
    return lower(program) if root is None else lower_one(program, root)


def part_counts(algorithm: Algorithm, outputs: tuple[str, ...], whole: ScheduleCandidate, sizes: dict[str, int]) -> dict[str, int]:
    """Return the extents of labels that number the blocks of partial sums."""
    if ".parts_at(" not in whole.fused and ", ordered)" not in whole.fused:
        return {}
    counted = prelower(Program(algorithm, parse_schedule(whole.schedule(outputs)))).counted
    return {label: -(-sizes[other] // size) for label, other, size in counted}


def adapted(plan: KernelCandidate, into: ScheduleCandidate) -> KernelCandidate | None:
    """Transfer a candidate of another group to the same kernel of ``into``; None if there is none or it is fused otherwise."""
    theirs = set(plan.fused.splitlines())
    ours = set(into.fused.splitlines())
    if plan.root not in into.roots or not (theirs <= ours or ours <= theirs):
        return None
    return KernelCandidate(into.fused, plan.root, plan.tiles)
