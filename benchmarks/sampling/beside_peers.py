"""Time chosen schedules of an op beside its peers, all in one rotation: what ends benchmarks/schedule_study.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import bench
import common.baselines as peer_module
from common import timing, workloads

from dtkernels.codegen.emit.module import emit
from dtkernels.lang.errors import error_line
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.select.schedule_selection import scheduled
from dtkernels.tuning.records import inputs_and_reference
from dtkernels.tuning.records.problems import TuningProblem, variants_of

from .measuring import ROUND, Preparer, _reraise, peers_of

BY_HAND: dict[str, tuple[tuple[int, int, int], int]] = {
    "triton 128x128x32": ((128, 128, 32), 4),
    "triton 128x256x64": ((128, 256, 64), 8),
    "triton 64x64x32": ((64, 64, 32), 4),
}  #: a textbook matrix product (published_matmul.py): name -> tiles and warps


def by_hand(op: str) -> dict[str, Callable]:
    """Return forms of ``op`` from a product written by hand in Triton, as its tutorial writes it: with a sigmoid, or two launches."""
    if op not in ("mmsigmoid", "two_mm"):
        return {}
    import published_matmul

    def form(tiles: tuple[int, int, int], warps: int) -> Callable:
        if op == "mmsigmoid":
            return lambda a, b: published_matmul.by_hand(a, b, tiles, warps, sigmoid=True)
        return lambda a, b, c: published_matmul.by_hand(published_matmul.by_hand(a, b, tiles, warps), c, tiles, warps)

    return {name: form(*how) for name, how in BY_HAND.items()}


class Finalists(Preparer):
    """Handle (op, shape, dtype, problem, peers, schedules): microseconds by name, and what is to be said of those without."""

    def measure(self, op: str, shape: str, dtype: str, work: TuningProblem, names: tuple[str, ...], schedules: dict[str, str]) -> dict:  # type: ignore[override]
        """Time everything in rotation; results of ours and of peers are checked, those of ``schedules`` were before."""
        load = workloads.at(op, shape, bench.DTYPES[dtype])
        inputs = load.make()
        implementations, notes = peer_module.implementations(load, peers_of(op, names))
        ready: dict[str, Callable] = {}
        right = load.eager(*(t.double() for t in load.part(inputs)))
        for who, fn in {**implementations, **by_hand(op)}.items():
            self._now(who)
            try:
                error = bench.errors(bench.results(fn, inputs, (), "forward", ()), [right], load.part) if who not in peer_module.REFERENCES else 0.0
                if not error <= 0.05:
                    notes[who] = f"WRONG: off by {error:.1e} of the norm"
                    continue
                ready[who], captured = timing.captured(bench.preparation(fn, inputs, (), "forward", ()))
                notes |= {} if captured else {who: "not captured: host time is in it"}
            except Exception as problem:
                _reraise(problem)
                notes[who] = error_line(problem)
        values = inputs_and_reference.make(work, (), "cuda").values
        for name, text in schedules.items():
            self._now(name)
            try:
                ready[name], _ = timing.captured(prepared(work, text, values))
            except Exception as problem:
                _reraise(problem)
                notes[name] = error_line(problem)
        self._now("timing")
        return {"us": timing.interleaved_times(ready, ROUND), "notes": notes, "copy_us": timing.copy_time(int(load.bytes[0]))}


def prepared(work: TuningProblem, schedule: str, values: tuple) -> Callable:
    """Return what prepares a call of the op of ``work`` by ``schedule``, as its emitted file launches it."""
    from dtkernels.runtime.bind.variant import device_target

    module = load_module(emit(scheduled(variants_of(work.group)[1].algorithm, schedule), "call", device_target(values[0].device)), "study")
    return lambda: lambda: module.call(*values)


class PeerPreparer(Preparer):
    """Handle (dtype, op, shape, peers): compile them, for a later process."""

    def __call__(self, task: tuple) -> dict:
        dtype, op, shape, peers = task
        return super().__call__((op, shape, dtype, "forward", peers))


def make_finalists(index: int, stage: str) -> Finalists:
    """Make the handler of the process that times."""
    return Finalists(stage)


def make_peer_preparer(index: int) -> PeerPreparer:
    """Make the handler of a process that only compiles."""
    return PeerPreparer(os.devnull)
