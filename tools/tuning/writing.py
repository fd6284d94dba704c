"""From what was measured to a table: rows, the matrix of all times, and how good the choice is where it was not made."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from dtkernels.codegen.target import TARGETS
from dtkernels.lang.errors import DTError
from dtkernels.runtime.decide import gpu_of
from dtkernels.runtime.table import Gpu, Row, TableError, read_rows, spec_hash, write_gpu, write_rows, write_whole

from .choosing import Regret, choose_group, dispatched, kinds, summary
from .journal import Time
from .plans import Cut, cut
from .spots import Knowledge
from .works import Group, Work, operator_of, row_of, variants_of

WORTH = 1.03  #: a row whose schedule loses by more to another that was raced takes that one


@dataclass
class Outcome:
    """Rows, and regrets by op on sizes that were chosen for and on those that were not."""

    rows: list[Row] = field(default_factory=list)
    chosen: dict[str, list[float]] = field(default_factory=dict)
    held_out: dict[str, list[float]] = field(default_factory=dict)
    against_formula: dict[str, list[float]] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    worst: list[tuple[float, str]] = field(default_factory=list)

    def text(self) -> str:
        """The regrets, a line an op, and the sizes where the dispatched schedule loses most."""
        lines = []
        for op in sorted(self.chosen | self.held_out):
            lines.append(f"{op}: {sum(r.op == op for r in self.rows)} rows, {self.kernels.get(op, 0)} kernels")
            lines.append(f"  regret where chosen for: {summary(self.chosen.get(op, []))}")
            lines.append(f"  regret where held out:   {summary(self.held_out.get(op, []))}")
            lines.append(f"  formula against best:    {summary(self.against_formula.get(op, []))}")
        lines.append(f"all ops, held out: {self.regret()}")
        lines += [f"  {r:.3f}  {title}" for r, title in sorted(self.worst, reverse=True)[:8] if r > 1.1]
        return "\n".join(lines)

    def regret(self) -> Regret:
        """On all sizes held out."""
        return summary([r for found in self.held_out.values() for r in found])


def entrants(known: Knowledge, chosen: dict[Group, dict[Work, Cut]]) -> dict[Work, list[Cut]]:
    """What races at each work: what a call would run, the best kernel by kernel, the formula's."""
    found: dict[Work, list[Cut]] = {}
    for group, works in known.of_group.items():
        rows = [_row(w, c) for w, c in chosen.get(group, {}).items()]
        for w in works:
            best, formula = known.composed(w), known.formula.get(w)
            runs = _dispatched_cut(rows, w) if w.held_out else chosen.get(group, {}).get(w)
            cuts = [c for c in (runs, best, formula) if c is not None]
            if best is not None:
                found[w] = list(dict.fromkeys(cuts))
    return found


def _row(work: Work, made: Cut) -> Row:
    return row_of(work, made.schedule(variants_of(work.group)[1].outputs))


def _dispatched_cut(rows: list[Row], work: Work) -> Cut | None:
    row = dispatched(rows, work)
    _, variant = variants_of(work.group)
    try:
        return cut(variant.algorithm, variant.outputs, row.schedule) if row is not None else None
    except DTError:
        return None


def conclude(known: Knowledge, times: dict[tuple[str, str], Time], tolerated: float, by: dict, measured: bool) -> Outcome:
    """Rows by regret, corrected by the races, and the regrets of what a call would run."""
    outcome = Outcome()
    for group, works in known.of_group.items():
        op = operator_of(group.op).spec.op
        chosen = choose_group(known, group, tolerated)
        rows = []
        for w, made in list(chosen.items()):
            raced = _raced(known, times, w)
            if _formula_unknown(known, times, w):
                del chosen[w]  # nothing says that a row would be better than what runs without one
                continue
            made = _corrected(made, raced)
            chosen[w] = made
            if made in raced:
                outcome.chosen.setdefault(op, []).append(raced[made].score / min(t.score for t in raced.values()))
            time = raced[made].cold if made in raced else known.total(w, made.fused)
            micro = round(time, 2) if 0 < time < float("inf") else None
            rows.append(_with(_row(w, made), micro if measured else None, measured, by))
        outcome.rows += rows
        outcome.kernels[op] = outcome.kernels.get(op, 0) + kinds(chosen.items())
        for w in works:
            _judge(outcome, op, known, times, rows, w)
    return outcome


def _with(row: Row, micro: float | None, measured: bool, by: dict) -> Row:
    return replace(row, microseconds=micro, measured=measured, by=by)


def _raced(known: Knowledge, times: dict[tuple[str, str], Time], work: Work) -> dict[Cut, Time]:
    """Whole schedules that were timed at ``work``."""
    text, found = work.text(), {}
    for made in _known_cuts(known, work):
        t = times.get((text, made.text()))
        if t is not None and not t.failure:
            found[made] = t
    return found


def _formula_unknown(known: Knowledge, times: dict[tuple[str, str], Time], work: Work) -> bool:
    """Whether the formula's schedule could not be timed at ``work``, as a whole or kernel by kernel."""
    formula = known.formula[work]
    whole = times.get((work.text(), formula.text()))
    kernels = [times.get((work.text(), p.text())) for p in formula.plans]
    return any(t is None or t.failure for t in kernels) and (whole is None or bool(whole.failure))


def _known_cuts(known: Knowledge, work: Work) -> list[Cut]:
    return [c for c in dict.fromkeys((*known.raced.get(work, ()), known.composed(work), known.formula.get(work))) if c is not None]


def _corrected(made: Cut, raced: dict[Cut, Time]) -> Cut:
    if not raced:
        return made
    best = min(raced, key=lambda c: raced[c].score)
    return best if made in raced and raced[made].score > WORTH * raced[best].score else made


def _judge(outcome: Outcome, op: str, known: Knowledge, times: dict, rows: list[Row], work: Work) -> None:
    """The regret of what a call of these sizes runs, and of the formula."""
    raced = _raced(known, times, work)
    if len(raced) == 0:
        return
    best = min(t.score for t in raced.values())
    formula = known.formula.get(work)
    if formula in raced:
        outcome.against_formula.setdefault(op, []).append(raced[formula].score / best)
    if work.held_out:
        runs = _dispatched_cut(rows, work) or formula
        if runs in raced:
            regret = raced[runs].score / best
            outcome.held_out.setdefault(op, []).append(regret)
            outcome.worst.append((regret, work.title()))


# -- files --------------------------------------------------------------------------------------------------------------


def gpu_named(about: dict) -> Gpu:
    """The GPU of a table from what a worker says of it."""
    bandwidth = next((t.bandwidth for t in TARGETS.values() if t.backend == "cuda" and about["name"].startswith(gpu_of(t).name)), 0.0)
    return Gpu(about["name"], about["arch"], about["multiprocessors"], bandwidth)


def write_tables(folder: Path, gpu: Gpu, outcome: Outcome, groups: list[Group], whole: bool) -> list[Path]:
    """A file an op; rows of kinds of calls that were not tuned now stay if they are of the current spec.

    Where the run was cut short (not ``whole``) so do rows at sizes that nothing is known of now."""
    write_gpu(folder, gpu)
    written = []
    for op in dict.fromkeys(g.op for g in groups):
        operator = operator_of(op)
        path = folder / f"{operator.spec.op}.yaml"
        mine = {(g.direction, g.dtype, g.params, g.wanted, g.saved, g.kept) for g in groups if g.op == op}
        new = [r for r in outcome.rows if r.op == operator.spec.op]
        places = {(r.key, tuple(r.sizes.items())) for r in new}
        current = [r for r in _existing(path) if r.spec == spec_hash(operator.spec.algorithm) and (r.key, tuple(r.sizes.items())) not in places]
        kept = [r for r in current if not whole or (r.direction, r.dtype, tuple(sorted(r.params.items())), r.wanted, r.saved, r.kept) not in mine]
        write_rows(path, new + kept)
        written.append(path)
    return written


def _existing(path: Path) -> tuple[Row, ...]:
    try:
        return read_rows(path.read_text(), str(path))
    except (OSError, TableError, UnicodeDecodeError):
        return ()


def write_measurements(path: Path, known: Knowledge, times: dict[tuple[str, str], Time], by: dict) -> None:
    """Every time as ``cold/<n>`` and ``warm/<n>`` of shape (works, schedules), NaN where none; ``group/<n>`` in the header names them."""
    tensors, header = {}, {"by": json.dumps(by)}
    for i, (group, works) in enumerate(known.of_group.items()):
        texts = {w.text(): j for j, w in enumerate(works)}
        found = {(w, p): t for (w, p), t in times.items() if w in texts}
        plans = list(dict.fromkeys(p for _, p in found))
        cold, warm = (np.full((len(works), len(plans)), np.nan, np.float32) for _ in range(2))
        places = {p: j for j, p in enumerate(plans)}
        for (w, p), t in found.items():
            if not t.failure:
                cold[texts[w], places[p]], warm[texts[w], places[p]] = t.cold, t.warm
        tensors |= {f"cold/{i}": cold, f"warm/{i}": warm}
        kind = {"op": group.op, "direction": group.direction, "dtype": group.dtype, "params": dict(group.params), "wanted": group.wanted, "saved": group.saved}
        kind |= {"kept": group.kept} if group.kept else {}
        header[f"group/{i}"] = json.dumps({**kind, "works": [{**w.extents, "held_out": w.held_out} for w in works], "schedules": plans})
    write_whole(path, save(tensors, header))

