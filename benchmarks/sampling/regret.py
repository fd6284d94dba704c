"""Measure regret: the dispatched schedule's time over that of the best found by the tuner's search at the same size."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

from dtkernels.lang.tuning_space import Shapes
from dtkernels.runtime.select.schedule_selection import target_for
from dtkernels.tuning.records.journal import Journal, Time
from dtkernels.tuning.records.problems import TuningProblem, problems_of, variants_of
from dtkernels.tuning.records.write_table import entrants, gpu_named
from dtkernels.tuning.search.candidates import ScheduleCandidate, split_by_kernel
from dtkernels.tuning.search.playoffs import Playoffs
from dtkernels.tuning.search.search import ScheduleSearch
from dtkernels.tuning.search.search_state import SearchState
from dtkernels.tuning.search.warm_start import WarmStart
from dtkernels.tuning.workers.benchmark_worker import make_gpu_worker
from dtkernels.tuning.workers.compile_worker import make_cpu_worker
from dtkernels.tuning.workers.worker_pool import WorkerPool

from .measuring import ask

TABLES = Path(__file__).resolve().parents[2] / "schedule_tables"
SEARCH = 0.85  #: the part of the seconds for the search; the rest is for the race
RACE = 60.0  #: seconds that a race may take longer
DRAIN = 20.0  #: seconds for compilers to end what a search began


def problem_of(op: str, shape: str, direction: str, dtype: str, labels: dict[str, int]) -> TuningProblem:
    """Return the tuner's problem for a call. ``labels``: the extents that the forward's algorithm has there."""
    params: dict[str, int | bool] = {}
    if op == "attention":
        grouped = re.search(r"H(\d+)/(\d+)", shape)
        params = {"causal": shape.endswith("causal"), "group": int(grouped[1]) // int(grouped[2]) if grouped else 1}
    asked = Shapes({label: (extent,) for label, extent in labels.items()}, params, (dtype,), (direction,))
    return next(w for w in problems_of(op, [asked]) if w.group.direction == direction and not w.group.saved)


class Dispatched(WarmStart):
    """The rows of a table, and the schedule that a call takes: a search that starts from it ends no worse."""

    def __init__(self, folder: Path | None, work: TuningProblem, schedule: str):
        super().__init__(folder, [work])
        self.schedule = schedule

    def schedules(self, work: TuningProblem) -> tuple[str, ...]:
        """Return the dispatched schedule, then those of the rows."""
        return tuple(dict.fromkeys((self.schedule, *super().schedules(work))))


class RegretSearch:
    """The tuner's workers, and a search with them at one size after another."""

    def __init__(self, dtype: str, make=make_gpu_worker, *rest, compiling: bool = True):
        self.dtype, self.compiling = dtype, compiling
        self.gpus = WorkerPool(1, make, *rest)
        about = ask(self.gpus, ("about",), 120.0)
        gpu = gpu_named(about.result) if about.result else None
        self.target = target_for(gpu) if gpu is not None else None
        if gpu is None or self.target is None:
            self.gpus.close()
            raise RuntimeError(f"the tuner's worker does not start: {about.failure or f'no target for {gpu}'}")
        self.folder = TABLES / gpu.folder if (TABLES / gpu.folder).is_dir() else None
        self.cpus = self._compilers()

    def _compilers(self) -> WorkerPool:
        """Start the compilers and wait for them: a search is not to spend its time on that."""
        pool = WorkerPool(max(1, (os.cpu_count() or 2) - 2), make_cpu_worker, self.target, self.compiling)
        end = time.monotonic() + RACE
        while not all(m.ready for m in pool.members) and time.monotonic() < end:
            pool.poll(0.05)
        return pool

    def at(self, op: str, shape: str, direction: str, how: dict, seconds: float) -> dict:
        """Search for ``seconds``, then race. Return the regret, the microseconds of both, the best schedule and how many were tried."""
        work = problem_of(op, shape, direction, self.dtype, how["labels"])
        _, variant = variants_of(work.group)
        own = split_by_kernel(variant.algorithm, variant.outputs, how["schedule"])
        begin = time.monotonic()

        def past(limit: float):
            return lambda: time.monotonic() - begin > limit

        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(folder) / "journal.jsonl", {"gpu": "here", "measured": True})
            known = SearchState([work], journal)
            limits = {"measure": 30.0, "compile": 60.0}
            try:
                search = ScheduleSearch(known, journal, self.cpus, self.gpus, limits, Dispatched(self.folder, work, how["schedule"]))
                for _ in search.explore(past(SEARCH * seconds), past(seconds)):
                    pass
                if work.group not in known.cuts:
                    return {"note": "no schedules within the time"}
                known.cuts[work.group].setdefault(own.fused, own)
                races = entrants(known, {work: own})
                for _ in Playoffs(known, journal, self.cpus, self.gpus, search.artefacts, limits).run(races, past(seconds + RACE)):
                    pass
                return outcome(work, own, races.get(work, []), journal, variant.outputs) | {"tried": search.measured, "tried_failed": search.failed}
            finally:
                self._drain()
                journal.close()

    def _drain(self) -> None:
        """Let no answer of this search reach the next one."""
        end = time.monotonic() + DRAIN
        for name in ("gpus", "cpus"):
            pool = getattr(self, name)
            while pool.busy() and time.monotonic() < end:
                pool.poll(0.2)
        if self.cpus.busy():
            self.cpus.close()
            self.cpus = self._compilers()

    def close(self) -> None:
        """End the workers."""
        self.cpus.close()
        self.gpus.close()


def outcome(work: TuningProblem, own: ScheduleCandidate, raced: list[ScheduleCandidate], journal: Journal, outputs: tuple[str, ...]) -> dict:
    """Return the regret from the times of a race, cold and warm L2 alike, as the tuner judges."""
    times: dict[ScheduleCandidate, Time] = {c: t for c in raced if (t := journal.times.get((work.text(), c.text()))) is not None and not t.failure}
    if own not in times:
        why = journal.times.get((work.text(), own.text()))
        return {"note": f"the dispatched schedule was not timed: {why.failure if why else 'no time was left'}"}
    best = min(times, key=lambda c: times[c].score)
    return {"regret": times[own].score / times[best].score, "dispatched": times[own].cold, "best": times[best].cold,
            "schedule": " ".join(best.schedule(outputs).split())}  # fmt: skip
