"""Choose few schedules for many sizes by regret: how much slower a size runs than with its best schedule."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...codegen.powers_of_two import next_power_of_two
from ...runtime.select.row_ranking import candidates, whole_labels
from ...runtime.tables.table import Row
from ..records.problems import CallKind, TuningProblem, row_of, time_model
from .candidates import KernelCandidate, ScheduleCandidate, with_aligned_rows
from .search_state import Cell, SearchState

TOLERATED = 1.02  #: regret that justifies no further schedule
MOST = 8  #: schedules of one kernel of one group
UNKNOWN = 7.0  #: log regret if nothing was measured


def choose(times: dict[str, dict[str, float]], tolerated: float = TOLERATED, most: int = MOST) -> dict[str, str]:
    """Choose for each size one of few schedules that keep regrets under ``tolerated``; ``times``: size -> schedule -> time.

    Greedy: each step adds the schedule that lowers the sum of log regrets most. Sizes without any time are left out.
    """
    sizes = {w: t for w, t in times.items() if t}
    plans = list(dict.fromkeys(p for t in sizes.values() for p in t))
    if not plans:
        return {}
    places = {p: j for j, p in enumerate(plans)}
    regrets = np.full((len(sizes), len(plans)), UNKNOWN)
    for i, t in enumerate(sizes.values()):
        best = min(t.values())
        for p, time in t.items():
            regrets[i, places[p]] = math.log(time / best)
    chosen: list[int] = []
    now = np.full(len(sizes), UNKNOWN)
    while (now > math.log(tolerated)).any() and len(chosen) < min(most, len(plans)):
        totals = np.minimum(now[:, None], regrets).sum(axis=0)
        totals[chosen] = np.inf
        chosen.append(int(totals.argmin()))
        now = np.minimum(now, regrets[:, chosen[-1]])
    found = {}
    for i, (w, t) in enumerate(sizes.items()):
        usable = [plans[j] for j in chosen if regrets[i, j] < UNKNOWN] or list(t)
        found[w] = min(usable, key=t.__getitem__)
    return found


def plan_times(cells: list[Cell]) -> dict[str, dict[str, float]]:
    """Return the matrix of one kernel, for ``choose``."""
    return {s.work.text(): {p.text(): t.score for p, t in s.times.items() if not t.failure} for s in cells}


def choose_group(known: SearchState, group: CallKind, tolerated: float = TOLERATED) -> dict[TuningProblem, ScheduleCandidate]:
    """Choose the schedule of every problem that is not held out: the way to fuse that is best there, with few candidates for each kernel."""
    works = [w for w in known.of_group[group] if not w.held_out and known.composed(w) is not None]
    way = {w: known.composed(w).fused for w in works}  # type: ignore[union-attr]
    chosen: dict[tuple[TuningProblem, str], KernelCandidate] = {}
    for fused, cut in known.cuts.get(group, {}).items():
        here = [w for w in works if way[w] == fused]
        for root in cut.roots if here else ():
            picked = choose(plan_times([known.cells[w, fused, root] for w in here]), tolerated)
            for w in here:
                chosen[w, root] = KernelCandidate.read(picked[w.text()])
    found = {}
    for w in works:
        cut = known.cuts[group][way[w]]
        for root in cut.roots:
            cut = cut.with_plan(chosen[w, root])
        found[w] = with_aligned_rows(cut, w)
    return found


def dispatched(rows: list[Row], work: TuningProblem) -> Row | None:
    """Return the row that the dispatcher takes for these sizes, unless the default schedule is better than a far one; None if no row is usable."""
    wanted = row_of(work, "")
    return next((c.row for c in candidates(rows, wanted.key, work.extents, wanted.spec, time_model(work.group)) if not c.refused), None)


def kinds(cuts: Iterable[tuple[TuningProblem, ScheduleCandidate]]) -> int:
    """Count different kernels among schedules: whole extents count once for each power of two."""
    seen = set()
    for work, cut in cuts:
        for plan in cut.plans:
            powers = tuple(next_power_of_two(work.extents.get(label, 1)) for label in whole_labels(plan.tiles))
            seen.add((work.group, plan, powers))
    return len(seen)


@dataclass(frozen=True)
class Regret:
    """Regret over many sizes."""

    count: int
    median: float
    most_of: float  #: the 95th percentile
    worst: float

    def __str__(self) -> str:
        return f"{self.count} sizes: median {self.median:.3f}, 95% {self.most_of:.3f}, worst {self.worst:.3f}" if self.count else "no sizes"


def summary(regrets: list[float]) -> Regret:
    """Return median, 95th percentile and maximum."""
    if not regrets:
        return Regret(0, math.nan, math.nan, math.nan)
    ordered = sorted(regrets)
    return Regret(len(ordered), statistics.median(ordered), ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)], ordered[-1])
