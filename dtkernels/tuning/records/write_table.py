"""Write a table from measurements: its rows, the matrix of all times, and the regret at held-out sizes."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ...codegen.target import TARGETS
from ...lang.errors import DTError
from ...runtime.select.schedule_selection import gpu_of
from ...runtime.signature.spec_hash import spec_hash
from ...runtime.tables.table import Gpu, Row, write_gpu, write_rows
from ..search.candidates import ScheduleCandidate, split_by_kernel
from ..search.portfolio import Regret, choose, dispatched, kinds, summary
from ..search.search_state import SearchState
from ..search.warm_start import rows_in
from .journal import Time
from .measurement_store import MeasurementMatrix, write_joined, write_matrices
from .problems import CallKind, TuningProblem, operator_of, row_of, variants_of


@dataclass
class Outcome:
    """Rows, and regrets by op at sizes used for the choice and at held-out sizes."""

    rows: list[Row] = field(default_factory=list)
    chosen: dict[str, list[float]] = field(default_factory=dict)
    held_out: dict[str, list[float]] = field(default_factory=dict)
    against_default: dict[str, list[float]] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    worst: list[tuple[float, str]] = field(default_factory=list)

    def text(self) -> str:
        """Format the regrets, one line for each op, and the sizes where the dispatched schedule loses most."""
        lines = []
        for op in sorted(self.chosen | self.held_out):
            lines.append(f"{op}: {sum(r.op == op for r in self.rows)} rows, {self.kernels.get(op, 0)} kernels")
            lines.append(f"  regret where chosen for: {summary(self.chosen.get(op, []))}")
            lines.append(f"  regret where held out:   {summary(self.held_out.get(op, []))}")
            lines.append(f"  default against best:    {summary(self.against_default.get(op, []))}")
        lines.append(f"all ops, held out: {self.regret()}")
        lines += [f"  {r:.3f}  {title}" for r, title in sorted(self.worst, reverse=True)[:8] if r > 1.1]
        return "\n".join(lines)

    def regret(self) -> Regret:
        """Return the regret at all held-out sizes."""
        return summary([r for found in self.held_out.values() for r in found])


def entrants(known: SearchState, runs: dict[TuningProblem, ScheduleCandidate | None]) -> dict[TuningProblem, list[ScheduleCandidate]]:
    """Return what races at each problem of ``runs``: the dispatched schedule, the best kernel by kernel, the old table's, and the default."""
    found: dict[TuningProblem, list[ScheduleCandidate]] = {}
    for w, own in runs.items():
        best = known.composed(w)
        if best is not None:
            cuts = (own, best, *known.earlier.get(w, ())[:1], known.default.get(w))
            found[w] = list(dict.fromkeys(c for c in cuts if c is not None))
    return found


Choice = dict[CallKind, dict[TuningProblem, ScheduleCandidate]]  #: the schedule of each problem that is not held out


def corrected_by_races(known: SearchState, times: dict[tuple[str, str], Time], chosen: Choice, tolerated: float) -> Choice:
    """Correct ``chosen`` by the races: whole schedules timed side by side are more reliable than sums of kernel times.

    Among schedules within ``tolerated`` of the best at a size, the one that serves most sizes is taken. Sizes are left out if the
    default schedule, or the current row, could not be timed there: nothing shows then that a new row is better.
    """
    found: Choice = {}
    for group, of_works in chosen.items():
        cuts: dict[str, ScheduleCandidate] = {}
        raced: dict[str, dict[str, float]] = {}
        for w, made in of_works.items():
            if not _default_untimed(known, times, w) and not _row_untimed(known, times, w):
                here = _raced(known, times, w)
                cuts |= {c.text(): c for c in (made, *here)}
                raced[w.text()] = {c.text(): t.score for c, t in here.items()} or {made.text(): known.total(w, made.fused)}
        picked = choose(raced, tolerated, len(cuts))
        found[group] = {w: cuts[picked[w.text()]] for w in of_works if w.text() in picked}
    return found


def pruned(rows: dict[TuningProblem, Row]) -> list[Row]:
    """Leave out rows at whose sizes a call is given a row of the same schedule and alignment anyway; rows of one group."""
    kept = dict(rows)
    for work, row in rows.items():
        rest = {w: r for w, r in kept.items() if w != work}
        if _stands_for(dispatched(list(rest.values()), work), row):
            kept = rest
    for work, row in rows.items():  # those that went later may have been the evidence for one that went before
        if work not in kept and not _stands_for(dispatched(list(kept.values()), work), row):
            kept[work] = row
    return list(kept.values())


def _stands_for(taken: Row | None, row: Row) -> bool:
    """Return whether a call at the sizes of ``row`` gets the same kernels by ``taken``."""
    return taken is not None and taken.schedule == row.schedule and all(math.gcd(n, 16) == math.gcd(taken.sizes[x], 16) for x, n in row.sizes.items())


def rows_of(known: SearchState, times: dict[tuple[str, str], Time], choice: dict[TuningProblem, ScheduleCandidate], by: dict, measured: bool) -> list[Row]:
    """Return the rows of one group, without those that no call needs."""
    rows = {}
    for w, made in choice.items():
        found = times.get((w.text(), made.text()))
        time = found.cold if found is not None and not found.failure else known.total(w, made.fused)
        micro = round(time, 2) if measured and 0 < time < float("inf") else None
        rows[w] = replace(_row(w, made), microseconds=micro, measured=measured, by=by)
    return pruned(rows)


def _row(work: TuningProblem, made: ScheduleCandidate) -> Row:
    return row_of(work, made.schedule(variants_of(work.group)[1].outputs))


def run_at(known: SearchState, group: CallKind, choice: dict[TuningProblem, ScheduleCandidate], rows: list[Row]) -> dict[TuningProblem, ScheduleCandidate | None]:
    """Return the dispatched schedule at each held-out size: that of the row chosen from ``rows``, those of the new table, else the
    default schedule.
    """
    mine = {_row(w, c).schedule: c for w, c in choice.items()}
    found: dict[TuningProblem, ScheduleCandidate | None] = {}
    for w in (w for w in known.of_group[group] if w.held_out):
        row = dispatched(rows, w)
        if row is not None and row.schedule not in mine:
            mine[row.schedule] = made = _cut_of(row, w)  # type: ignore[assignment]
            if made is not None:
                known.cuts[group].setdefault(made.fused, made)  # else the kernels' outputs would be unknown
        found[w] = mine[row.schedule] if row is not None else known.default.get(w)
    return found


def _cut_of(row: Row, work: TuningProblem) -> ScheduleCandidate | None:
    _, variant = variants_of(work.group)
    try:
        return split_by_kernel(variant.algorithm, variant.outputs, row.schedule)
    except DTError:
        return None


def conclude(known: SearchState, times: dict[tuple[str, str], Time], choice: Choice, runs: dict[TuningProblem, ScheduleCandidate | None], by: dict, measured: bool) -> Outcome:
    """Return rows, and the regrets of the schedules that calls would run: ``choice`` at sizes used for the choice, ``runs`` at held-out sizes."""
    outcome = Outcome()
    for group, works in known.of_group.items():
        op = operator_of(group.op).spec.op
        chosen = choice.get(group, {})
        outcome.rows += rows_of(known, times, chosen, by, measured)
        outcome.kernels[op] = outcome.kernels.get(op, 0) + kinds(chosen.items())
        for w in works:
            _judge(outcome, op, w, known.default.get(w), runs.get(w) if w.held_out else chosen.get(w), _raced(known, times, w))
    return outcome


def _raced(known: SearchState, times: dict[tuple[str, str], Time], work: TuningProblem) -> dict[ScheduleCandidate, Time]:
    """Return the whole schedules that were timed at ``work``."""
    text, found = work.text(), {}
    for made in _known_cuts(known, work):
        t = times.get((text, made.text()))
        if t is not None and not t.failure:
            found[made] = t
    return found


def _default_untimed(known: SearchState, times: dict[tuple[str, str], Time], work: TuningProblem) -> bool:
    """Return whether the default schedule could not be timed at ``work``, neither as a whole nor kernel by kernel."""
    default = known.default[work]
    whole = times.get((work.text(), default.text()))
    kernels = [times.get((work.text(), p.text())) for p in default.plans]
    return any(t is None or t.failure for t in kernels) and (whole is None or bool(whole.failure))


def _row_untimed(known: SearchState, times: dict[tuple[str, str], Time], work: TuningProblem) -> bool:
    """Return whether the current row of a call was not timed at ``work``, neither as a whole nor kernel by kernel."""
    for made in known.earlier.get(work, ())[:1]:
        return (work.text(), made.text()) not in times and any((work.text(), p.text()) not in times for p in made.plans)
    return False


def _known_cuts(known: SearchState, work: TuningProblem) -> list[ScheduleCandidate]:
    return [c for c in dict.fromkeys((*known.raced.get(work, ()), known.composed(work), known.default.get(work))) if c is not None]


def _judge(outcome: Outcome, op: str, work: TuningProblem, default: ScheduleCandidate | None, runs: ScheduleCandidate | None, raced: dict[ScheduleCandidate, Time]) -> None:
    """Record the regret of the dispatched and of the default schedule at ``work``, relative to what was raced there."""
    if not raced:
        return
    best = min(t.score for t in raced.values())
    if default in raced:
        outcome.against_default.setdefault(op, []).append(raced[default].score / best)
    if runs in raced:
        regret = raced[runs].score / best
        (outcome.held_out if work.held_out else outcome.chosen).setdefault(op, []).append(regret)
        outcome.worst += [(regret, work.title())] if work.held_out else []


# -- files --------------------------------------------------------------------------------------------------------------


def gpu_named(about: dict) -> Gpu:
    """Return the GPU of a table from a worker's description."""
    bandwidth = next((t.bandwidth for t in TARGETS.values() if t.backend == "cuda" and about["name"].startswith(gpu_of(t).name)), 0.0)
    return Gpu(about["name"], about["arch"], about["multiprocessors"], bandwidth)


def remaining_rows(folder: Path, known: SearchState, rows: list[Row], whole: bool) -> dict[str, list[Row]]:
    """Return, by op, the rows of the table in ``folder`` that stay besides ``rows``: rows of the current spec at other sizes.

    A complete run (``whole``) removes those at held-out sizes, which would judge themselves.
    """
    places = {place_of(r) for r in rows}
    if whole:
        places |= {place_of(row_of(w, "")) for w in known.works if w.held_out}
    found = {}
    for op in dict.fromkeys(g.op for g in known.of_group):
        spec = operator_of(op).spec
        found[spec.op] = [r for r in rows_in(folder / f"{spec.op}.yaml") if r.spec == spec_hash(spec.algorithm) and place_of(r) not in places]
    return found


def place_of(row: Row) -> tuple:
    """Return the call that a row is for: its kind and its sizes."""
    return row.key, tuple(sorted(row.sizes.items()))


def measured_op(folder: Path) -> str | None:
    """Return an op of which a table has measured rows; None if it has none."""
    for path in sorted(folder.glob("*.yaml")):
        if path.name != "gpu.yaml" and any(r.measured for r in rows_in(path)):
            return path.stem
    return None


def write_tables(folder: Path, gpu: Gpu, rows: list[Row], kept: dict[str, list[Row]]) -> list[Path]:
    """Write a file for each op of ``kept``: ``rows`` and the rows that stay."""
    write_gpu(folder, gpu)
    for op, stay in kept.items():
        write_rows(folder / f"{op}.yaml", [r for r in rows if r.op == op] + stay)
    return [folder / f"{op}.yaml" for op in kept]


def write_measurements(path: Path, known: SearchState, times: dict[tuple[str, str], Time], by: dict) -> None:
    """Write every time of this run, and those of earlier runs for kinds of calls and sizes that this run did not tune."""
    works = {w.text(): (g, j) for g, of_group in known.of_group.items() for j, w in enumerate(of_group)}
    found: dict[CallKind, dict[tuple[int, str], Time]] = {g: {} for g in known.of_group}
    for (w, p), t in times.items():
        if w in works:
            group, j = works[w]
            found[group][j, p] = t
    mine = [_matrix(g, known.of_group[g], timed, by) for g, timed in found.items()]
    try:
        write_joined(path, by, mine)
    except ValueError as error:
        print(f"tune: {error}; it is now {set_aside(path)}", file=sys.stderr)
        write_matrices(path, by, mine)


def set_aside(path: Path) -> Path:
    """Rename a file to an unused name; return that name."""
    to = next(p for n in itertools.count(1) if not (p := path.with_suffix(f".{n}.old")).exists())
    os.replace(path, to)
    return to


def matrix_of_times(group: CallKind, times: Mapping[TuningProblem, Mapping[str, Time]], by: dict) -> MeasurementMatrix:
    """Return the times of one kind of call, given by problem and candidate."""
    works = list(times)
    return _matrix(group, works, {(j, p): t for j, w in enumerate(works) for p, t in times[w].items()}, by)


def _matrix(group: CallKind, works: list[TuningProblem], times: dict[tuple[int, str], Time], by: dict) -> MeasurementMatrix:
    plans = {p: i for i, p in enumerate(dict.fromkeys(p for _, p in times))}
    cold, warm = (np.full((len(works), len(plans)), np.nan, np.float32) for _ in range(2))
    for (j, p), t in times.items():
        if not t.failure:
            cold[j, plans[p]], warm[j, plans[p]] = t.cold, t.warm
    about = {"op": group.op, "direction": group.direction, "dtype": group.dtype, "params": dict(group.params), "wanted": group.wanted, "saved": group.saved}
    about |= {"kept": group.kept} if group.kept else {}
    return MeasurementMatrix({**about, "by": by, "works": [{**w.extents, "held_out": w.held_out} for w in works], "schedules": list(plans)}, cold, warm)
