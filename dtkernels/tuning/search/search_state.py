"""Store the results of each kernel at each size, and suggest what to try next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...lang.errors import DTError
from ..records.journal import Journal, Time
from ..records.problems import CallKind, TuningProblem, size_distance
from ..workers.compile_worker import Seeds
from .candidates import KernelCandidate, ScheduleCandidate, adapted, split_by_kernel, with_aligned_rows

NEAR = 3.0  #: problems further apart than this, in log2 of sizes, do not learn from one another
BELIEF, FADING = 0.03, 0.7  #: promised gains that the model is believed without having kept any; how earlier ones count at each proposal
LAGGING = 1.35  #: ways to fuse that take this many times as long as the best are given up


@dataclass
class Cell:
    """One kernel of one way to fuse, at one problem."""

    work: TuningProblem
    fused: str
    root: str
    times: dict[KernelCandidate, Time] = field(default_factory=dict)
    waiting: set[KernelCandidate] = field(default_factory=set)
    level: int = 0
    seeds: list[KernelCandidate] = field(default_factory=list)  #: candidates of the rules and the families, best predictions first
    proposing: bool = False
    gain: float = float("inf")  #: that is expected of the best candidate that was not measured, as a part of the time
    promised: float = 0.0  #: gains that the model expected of the proposals so far, and those that came of them
    kept: float = 0.0
    before: float = float("inf")  #: the best time before the last proposal
    quiet: int = 0  #: proposals in a row that promised no gain above the noise
    over: bool = False

    def best(self, count: int = 1) -> list[KernelCandidate]:
        """Return the fastest candidates, fastest first."""
        good = sorted((t.score, i, p) for i, (p, t) in enumerate(self.times.items()) if not t.failure)
        return [p for _, _, p in good[:count]]

    def expects(self, gain: float) -> float:
        """Return the expected gain of a new proposal: the model's, scaled by how well its last expectations were met."""
        now = self.fastest()
        if now < self.before < float("inf"):
            self.kept += min(math.log(self.before / now), self.gain)
        self.gain = gain * min(1.0, (self.kept + BELIEF) / (self.promised + BELIEF))
        if now < float("inf"):
            self.promised, self.kept, self.before = FADING * (self.promised + gain), FADING * self.kept, now
        return self.gain

    def fastest(self) -> float:
        """Return the best time so far."""
        return min((t.score for t in self.times.values()), default=float("inf"))


class SearchState:
    """All cells of all groups."""

    def __init__(self, works: list[TuningProblem], journal: Journal):
        self.works, self.journal = works, journal
        self.of_group: dict[CallKind, list[TuningProblem]] = {}
        for w in works:
            self.of_group.setdefault(w.group, []).append(w)
        self.cuts: dict[CallKind, dict[str, ScheduleCandidate]] = {}
        self.default: dict[TuningProblem, ScheduleCandidate] = {}
        self.earlier: dict[TuningProblem, list[ScheduleCandidate]] = {}  #: schedules of a table's rows; the current one of a call first
        self.raced: dict[TuningProblem, list[ScheduleCandidate]] = {}  #: whole schedules that compete in races
        self.cells: dict[tuple[TuningProblem, str, str], Cell] = {}
        self._past: dict[str, list[tuple[str, Time]]] = {}
        for (work, plan), t in journal.times.items():
            self._past.setdefault(work, []).append((plan, t))
        self._related: dict[CallKind, list[CallKind]] = {g: _related(g, self.of_group) for g in self.of_group}
        self._near: dict[TuningProblem, list[TuningProblem]] = {}

    def seeded(self, work: TuningProblem, seeds: Seeds) -> list[Cell]:
        """Add the schedules to start from; return their cells."""
        cuts = self.cuts.setdefault(work.group, {})
        ways = {**self._measured_before(work, seeds.cuts), **seeds.cuts}
        for fused, made in ways.items():
            cuts.setdefault(fused, made)
        self.default[work], self.earlier[work] = seeds.default, seeds.earlier
        return [self._cell(work, fused, root) for fused in ways for root in cuts[fused].roots]

    def _measured_before(self, work: TuningProblem, known: dict[str, ScheduleCandidate]) -> dict[str, ScheduleCandidate]:
        """Return ways to fuse, besides ``known``, for which the journal has a candidate of every kernel."""
        from ..records.problems import variants_of

        found: dict[str, dict[str, KernelCandidate]] = {}
        for text, _ in self._past.get(work.text(), ()):
            plan = KernelCandidate.read(text)
            if plan.root != "*" and plan.fused not in known:
                found.setdefault(plan.fused, {}).setdefault(plan.root, plan)
        _, variant = variants_of(work.group)
        ways = {}
        for fused, plans in found.items():
            made = self.cuts[work.group].get(fused)
            try:
                made = made or split_by_kernel(variant.algorithm, variant.outputs, "\n".join((fused, *(p.tiles for p in plans.values()))))
            except DTError:
                continue
            if {*made.roots} == {*plans}:
                ways[fused] = made
        return ways

    def _cell(self, work: TuningProblem, fused: str, root: str) -> Cell:
        key = (work, fused, root)
        if key not in self.cells:
            cell = self.cells[key] = Cell(work, fused, root)
            for text, t in self._past.get(work.text(), ()):
                plan = KernelCandidate.read(text)
                if plan.fused == fused and plan.root == root:
                    cell.times[plan] = t
        return self.cells[key]

    def funcs(self, group: CallKind) -> tuple[str, ...]:
        """Return Funcs that kernels of the group write under any way to fuse, without those that none has written so far."""
        from ..records.problems import variants_of

        _, variant = variants_of(group)
        stored = (line.split(".")[0] for c in self.cuts[group].values() for line in c.fused.splitlines() if line.endswith(".store();"))
        found = dict.fromkeys((*variant.outputs, *(r for c in self.cuts[group].values() for r in c.roots), *stored))
        return tuple(d.name for d in variant.algorithm.definitions if d.name in found)

    def outputs(self, group: CallKind) -> tuple[str, ...]:
        """Return the outputs of the variant that a group tunes."""
        from ..records.problems import variants_of

        return variants_of(group)[1].outputs

    def near(self, work: TuningProblem) -> list[TuningProblem]:
        """Return the other problems of the group, nearest first."""
        if work not in self._near:
            others = sorted((size_distance(work, w), i, w) for i, w in enumerate(self.of_group[work.group]) if w != work)
            self._near[work] = [w for d, _, w in others if d <= NEAR]
        return self._near[work]

    def follows(self, group: CallKind) -> bool:
        """Return whether a similar group's best candidates replace a search here."""
        return any((o.dtype, group.dtype) == ("bf16", "fp16") or o.saved < group.saved for o in self._related[group])

    def lagging(self, cell: Cell) -> bool:
        """Return whether a cell's way to fuse takes far longer than another."""
        ways = {f: self.total(cell.work, f) for f in self.cuts[cell.work.group]}
        return ways[cell.fused] > LAGGING * min(ways.values())

    def total(self, work: TuningProblem, fused: str) -> float:
        """Return the total time of the best candidates; infinite while a kernel has none."""
        cut = self.cuts[work.group][fused]
        times = [s.fastest() if (s := self.cells.get((work, fused, r))) else float("inf") for r in cut.roots]
        return sum(times) + 1.0 * (len(times) - 1)  # each further kernel is a further launch

    def composed(self, work: TuningProblem) -> ScheduleCandidate | None:
        """Return the fastest known schedule, kernel by kernel; None if some kernel has no good candidate."""
        best: tuple[float, ScheduleCandidate] | None = None
        for fused, whole in self.cuts.get(work.group, {}).items():
            total = self.total(work, fused)
            if total < float("inf") and (best is None or total < best[0]):
                for root in whole.roots:
                    whole = whole.with_plan(self.cells[work, fused, root].best()[0])
                best = total, whole
        return with_aligned_rows(best[1], work) if best else None

    def suggestions(self, cell: Cell, most: int) -> list[KernelCandidate]:
        """Return candidates that are good nearby and in related groups, and not tried here."""
        found: list[KernelCandidate] = []
        here = self.cuts[cell.work.group][cell.fused]
        for group in self._related[cell.work.group]:
            twin = TuningProblem(group, cell.work.sizes, cell.work.held_out)
            for fused in self.cuts.get(group, {}):
                other = self.cells.get((twin, fused, cell.root))
                for plan in other.best(2) if other else ():
                    if (own := adapted(plan, here)) is not None:
                        found.append(own)
        for work in self.near(cell.work)[:4]:
            other = self.cells.get((work, cell.fused, cell.root))
            found += other.best(1 if len(found) > most else 2) if other else []
        return [p for p in dict.fromkeys(found) if p not in cell.times and p not in cell.waiting][:most]


def _related(group: CallKind, groups: dict[CallKind, list[TuningProblem]]) -> list[CallKind]:
    """Return groups of the same op and direction that differ in one thing: dtype, parameters, or whether results are saved."""
    found = []
    for other in groups:
        if other != group and (other.op, other.direction) == (group.op, group.direction):
            differing = (other.dtype != group.dtype) + (other.params != group.params) + (other.saved != group.saved)
            same_width = other.itemsize == group.itemsize
            if differing == 1 and same_width:
                found.append(other)
    return found
