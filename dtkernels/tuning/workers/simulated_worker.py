"""Simulate a GPU worker for ``--dry-run`` and tests: predicted times, slightly different for each candidate."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from ...autoschedule.cost.coefficients import rates_of
from ...codegen.target import Target
from ..records.journal import Time
from ..records.problems import TuningProblem, variants_of
from ..records.roofline import roofline
from ..search.candidates import KernelCandidate, ScheduleCandidate
from .compile_worker import Artefact, Refused, predicted_kernel

SPREAD = 0.05  #: how much the times of candidates differ from what the model predicts, at most


class SimulatedGpu:
    """Handle the tasks of a GpuWorker. ``pause`` is the duration of each measurement in seconds."""

    def __init__(self, to: Target, pause: float = 0.0, index: int = 0):
        self.to, self.pause, self.where = to, pause, f"stand-in {index}"

    def __call__(self, task: tuple) -> object:
        kind, *rest = task
        time.sleep(self.pause)
        return getattr(self, kind)(*rest)

    def measure(self, work: TuningProblem, funcs: tuple[str, ...], key: object, artefact: Artefact | None, best: float, candidate: tuple[ScheduleCandidate, str | None]) -> Time:
        """Return the predicted time of a candidate."""
        whole, root = candidate
        text = whole.schedule(variants_of(work.group)[1].outputs)
        time = sum(predicted_kernel(work, text, r, self.to, rates_of(self.to.arch)) * self.factor(work, p) for r, p in zip(whole.roots, whole.plans) if root in (None, r))
        return Time(time, time)

    def factor(self, work: TuningProblem, plan: KernelCandidate) -> float:
        """Return the simulated time of a kernel over its predicted time."""
        return 1 + SPREAD * int(hashlib.sha256(f"{work.text()}{plan.text()}".encode()).hexdigest()[:4], 16) / 65536

    def race(self, work: TuningProblem, funcs: tuple[str, ...], entrants: tuple, rounds: int) -> list[Time]:
        """Return the times of whole schedules: the sums over their kernels."""
        found = []
        for key, artefact, (whole, _) in entrants:
            times = [self.measure(work, funcs, key, artefact, 0.0, (whole, root)) for root in whole.roots]
            found.append(Time(sum(t.cold for t in times), sum(t.warm for t in times)))
        return found

    def peer(self, work: TuningProblem, name: str) -> Time:
        """Return twice the roofline for any peer."""
        return Time(2 * roofline(work, self.to), 2 * roofline(work, self.to))

    def about(self) -> dict:
        """Describe the simulated GPU."""
        return {"name": f"NVIDIA {self.to.name.upper()}", "arch": self.to.arch, "multiprocessors": self.to.multiprocessors,
                "torch": "none", "triton": "none", "driver": "none", "memory": 1 << 37}  # fmt: skip


class FaultySimulatedGpu(SimulatedGpu):
    """For tests: fail, die and hang, once each; ``folder`` records what has happened."""

    def __init__(self, to: Target, pause: float, folder: str):
        super().__init__(to, pause)
        self.folder = Path(folder)

    def measure(self, work, funcs, key, artefact, best, candidate):
        """Like SimulatedGpu, with trouble."""
        for trouble in ("fail", "die", "hang"):
            mark = self.folder / trouble
            if not mark.exists():
                mark.touch()
                if trouble == "fail":
                    raise Refused("made to fail")
                if trouble == "die":
                    os.kill(os.getpid(), 9)
                time.sleep(3600)
        return super().measure(work, funcs, key, artefact, best, candidate)


def make_simulated_gpu(index: int, to: Target, pause: float = 0.0) -> SimulatedGpu:
    """Make the handler of a worker process."""
    return SimulatedGpu(to, pause, index)


def make_faulty_simulated_gpu(index: int, to: Target, pause: float, folder: str) -> SimulatedGpu:
    """Make the handler of a misbehaving worker process."""
    return FaultySimulatedGpu(to, pause, folder)
