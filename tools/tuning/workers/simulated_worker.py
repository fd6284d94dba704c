"""Simulate a GPU worker for ``--dry-run`` and tests: the estimate, slightly different for each candidate."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from dtkernels.codegen.target import Target

from ..records import inputs_and_reference
from ..records.journal import Time
from ..records.problems import TuningProblem, variants_of
from ..search.candidates import ScheduleCandidate, kernels_of, part_counts
from ..search.cost import cost
from .compile_worker import Artefact, Refused


class SimulatedGpu:
    """Handle the tasks of a GpuWorker. ``pause`` is the duration of each measurement in seconds."""

    def __init__(self, to: Target, pause: float = 0.0, index: int = 0):
        self.to, self.pause, self.where = to, pause, f"stand-in {index}"

    def __call__(self, task: tuple) -> object:
        kind, *rest = task
        time.sleep(self.pause)
        return getattr(self, kind)(*rest)

    def measure(self, work: TuningProblem, funcs: tuple[str, ...], key: object, artefact: Artefact | None, best: float, candidate: tuple[ScheduleCandidate, str | None]) -> Time:
        """Return the estimate of a candidate."""
        whole, root = candidate
        _, variant = variants_of(work.group)
        extents = work.extents | part_counts(variant.algorithm, variant.outputs, whole, work.extents)
        kernels = kernels_of(variant.algorithm, variant.outputs, whole, root)
        copies = {w: work.group.itemsize for k in kernels for w in k.writes if w not in variant.algorithm}
        found = cost(kernels, extents, copies | inputs_and_reference.itemsizes(work), self.to)
        text = work.text() + "".join(p.text() for p in whole.plans if root in (None, p.root))
        factor = 1 + int(hashlib.sha256(text.encode()).hexdigest()[:4], 16) / 65536
        return Time(found.seconds * 1e6 * factor, found.seconds * 1e6 * factor)

    def race(self, work: TuningProblem, funcs: tuple[str, ...], entrants: tuple, rounds: int) -> list[Time]:
        """Return the estimates of whole schedules: the sums over their kernels."""
        found = []
        for key, artefact, (whole, _) in entrants:
            times = [self.measure(work, funcs, key, artefact, 0.0, (whole, root)) for root in whole.roots]
            found.append(Time(sum(t.cold for t in times), sum(t.warm for t in times)))
        return found

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
