"""Measure one size in a process of its own: check ours, then time ours and every peer in turn. See ``Measurer`` and ``Bench``."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import tempfile
import time
import zlib
from pathlib import Path

import bench
import common.baselines as peer_module
import torch
import torch._dynamo
import torch._functorch.config
from common import timing, workloads

import dtkernels
from dtkernels.lang.errors import error_line, message_line
from dtkernels.tuning.workers.worker_pool import Fatal, Finished, WorkerPool

from . import checking
from .checking import Deviation

OURS = "dtkernels"
LIMIT = 120.0  #: seconds for one size, peers compiled
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
HELD = 24 << 30  #: bytes that a process may still hold after a size: what failed captures leave behind
ROUND = 20.0  #: milliseconds of a round of one implementation
MATERIALIZING = ("eager", "compile", "compile-max")  #: peers that are not run for attention, whose scores they would write


def peers_of(op: str, names: tuple[str, ...]) -> list[str]:
    """Return the names that are peers of ``op``."""
    return [n for n in names if op != "attention" or n not in MATERIALIZING]


# -- in the worker process ----------------------------------------------------------------------------------------------


class Measurer:
    """Handle the sizes that ``Bench`` sends. ``stage``: a file for the name of what is running, which outlives the process."""

    def __init__(self, stage: str):
        self.stage = Path(stage)
        torch._dynamo.config.recompile_limit = 512
        torch._functorch.config.donated_buffer = False  # its graphs run backward more than once

    def __call__(self, task: tuple) -> dict:
        try:
            return self.measure(*task)
        except (torch.AcceleratorError, RuntimeError) as error:
            if "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError):
                raise Fatal(message_line(error)) from None  # no more work runs on the GPU in this process
            raise
        finally:
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()

    def _now(self, stage: str) -> None:
        self.stage.write_text(stage)

    def measure(self, op: str, shape: str, dtype: str, direction: str, names: tuple[str, ...]) -> dict:
        """Return what is known of one size: ``failed`` or ``wrong`` of ours, else microseconds, errors, the limit and the schedule."""
        self._now("inputs")
        work = workloads.at(op, shape, bench.DTYPES[dtype])
        torch.manual_seed(zlib.crc32(f"{op} {shape}".encode()))  # a wrong result is to be found again
        inputs, grads = _inputs(work, direction)
        self._now("reference")
        judge = Judge(work, inputs, direction, grads)
        found: dict = {"us": {}, "errors": {}, "notes": {}, "reference": judge.reference}
        self._now(OURS)
        ready = {}
        try:
            ready[OURS] = self._ready(work.ours, inputs, direction, grads, judge, OURS, found)
            found["how"] = chosen(work, inputs, direction)
        except Exception as problem:
            _reraise(problem)
            return found | {"failed": error_line(problem)}
        if found.get("wrong"):
            return found
        implementations, missing = peer_module.implementations(work, peers_of(op, names))
        found["notes"] |= missing
        for who, fn in implementations.items():
            if who != OURS:
                self._now(who)
                try:
                    ready[who] = self._ready(fn, inputs, direction, grads, judge, who, found)
                except Exception as problem:
                    _reraise(problem)
                    found["notes"][who] = error_line(problem)
        self._now("timing")
        found["us"] = timing.interleaved_times({who: call for who, call in ready.items() if call is not None}, ROUND)
        self._now("limit")
        found["limit"] = limit(work, direction, bench.DTYPES[dtype])
        return found | {"held": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0}

    def _ready(self, fn, inputs: tuple, direction: str, grads: tuple, judge: Judge, who: str, found: dict):
        """Return the call to time; None if its results are wrong."""
        own = tuple(t.clone() for t in inputs)  # a peer may write to its inputs
        if who not in peer_module.REFERENCES:
            error, why = judge.judged(bench.results(fn, own, judge.work.differentiable, direction, grads), who)
            found["errors"][who] = error
            if why:
                found["notes"][who] = why
                if who == OURS:
                    found["wrong"] = why
                return None
            own = tuple(t.clone() for t in inputs)
        call, in_graph = timing.captured(bench.preparation(fn, own, judge.work.differentiable, direction, grads))
        torch.cuda.synchronize()
        if not in_graph:
            found["notes"][who] = "not captured: host time is in it"
        return call


class Preparer(Measurer):
    """Compile ours and the peers at one size, for a later process of this machine. Times and checks nothing."""

    def measure(self, op: str, shape: str, dtype: str, direction: str, names: tuple[str, ...]) -> dict:
        """Run every implementation once; errors are those that ``Measurer`` finds again."""
        work = workloads.at(op, shape, bench.DTYPES[dtype])
        inputs, grads = _inputs(work, direction)
        for who, fn in peer_module.implementations(work, peers_of(op, names))[0].items():
            if who not in peer_module.REFERENCES:
                with contextlib.suppress(Exception):
                    bench.preparation(fn, tuple(t.clone() for t in inputs), work.differentiable, direction, grads)()()
                    torch.cuda.synchronize()
        return {}


def _reraise(problem: Exception) -> None:
    """Raise an error after which the GPU takes no more work; free memory after others."""
    if isinstance(problem, torch.AcceleratorError) or "CUDA error" in str(problem) and not isinstance(problem, torch.OutOfMemoryError):
        raise problem
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


def _inputs(work: workloads.Workload, direction: str) -> tuple[tuple, tuple]:
    """Return the inputs and, for a backward, the gradients of the outputs."""
    inputs = work.make()
    if direction == "forward":
        return inputs, ()
    with torch.no_grad():
        like = inputs[0] if work.op == "attention" else work.eager(*inputs)  # an attention's output is like its queries
        return inputs, (torch.randn_like(like),)


class Judge:
    """Compare results with the truth of one workload."""

    def __init__(self, work: workloads.Workload, inputs: tuple, direction: str, grads: tuple):
        self.work, self.dtype = work, inputs[0].dtype
        self.tolerance, self.least, self.least_of_peers = checking.tolerances(work, self.dtype)
        self.truth, self.reference = checking.truth(work, inputs, direction, grads)
        self.eager: Deviation | None = None
        own, asked = work.part(inputs), work.part(grads)
        if self.truth is not None and (work.op != "attention" or own[0].shape[1] * own[0].shape[2] * own[1].shape[2] <= checking.EAGER):
            try:
                self.eager = Deviation.of(bench.results(work.eager, own, work.differentiable, direction, asked), self.truth, self.least)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()

    def judged(self, results: list[torch.Tensor], who: str) -> tuple[float | None, str]:
        """Return (the error, why the results are wrong or "")."""
        if self.truth is None:
            return None, ""
        got = checking.part_of(self.work, results)
        error = Deviation.of(got, self.truth, self.least if who == OURS else self.least_of_peers)
        right = error.allowed(self.tolerance, self.eager) if who == OURS else error.loosely()
        return number(error.norm), "" if right else f"WRONG: off by {error.norm:.1e} of the norm, an element by {error.worst:.1e}; tolerance {self.tolerance:.1e}, eager {self.eager}"


def number(value: float) -> float | None:
    """Return a number that JSON has."""
    return value if math.isfinite(value) else None


def limit(work: workloads.Workload, direction: str, dtype: torch.dtype) -> float:
    """Return the microseconds of a copy of the bytes that must move, or of the operations at torch's best rate, whichever is longer."""
    moved, flops = (v[bench.DIRECTIONS.index(direction)] for v in (work.bytes, work.flops))
    return max(timing.copy_time(int(moved)), flops / timing.product_rate(dtype) * 1e6 if flops else 0.0)


def chosen(work: workloads.Workload, inputs: tuple, direction: str, gpu: str | None = None) -> dict:
    """Return how ours was chosen: by a row or the default, with its schedule in one line; ``labels`` are the extents of forward's labels."""
    given = [t.detach().requires_grad_(direction == "backward" and i in work.differentiable) for i, t in enumerate(inputs)]
    said = dtkernels.explain(work.op, *given, **work.about, **({"gpu": gpu} if gpu else {}))
    decision = said.backward if direction == "backward" else said.forward
    assert decision is not None
    by = f"row {decision.row.title()}, {decision.distance:.2f} away" if decision.row is not None else "the default schedule" if decision.schedule else decision.path
    return {"by": by, "path": decision.path, "schedule": " ".join(decision.schedule.split()), "labels": said.forward.sizes}


def make_measurer(index: int, stage: str) -> Measurer:
    """Make the handler of a worker process."""
    return Measurer(stage)


def make_preparer(index: int) -> Preparer:
    """Make the handler of a process that only compiles."""
    return Preparer(os.devnull)


# -- in the main process ------------------------------------------------------------------------------------------------


class Bench:
    """One worker process at a time. One that hangs or dies is replaced; a peer that did it is left out."""

    def __init__(self, names: tuple[str, ...], make=make_measurer):
        self.names, self.make = names, make
        self.folder = tempfile.TemporaryDirectory()
        self.stage = Path(self.folder.name) / "stage"
        self.pool = self._pool()

    def _pool(self) -> WorkerPool:
        return WorkerPool(1, self.make, str(self.stage))

    def measure(self, op: str, shape: str, dtype: str, direction: str, seconds: float = LIMIT) -> dict:
        """Measure one size in at most ``seconds``; ``skipped`` says why there is nothing, ``failed`` and ``wrong`` what is ours."""
        left_out: dict[str, str] = {}
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            names = tuple(n for n in self.names if n not in left_out)
            self.stage.write_text("start")
            done = ask(self.pool, (op, shape, dtype, direction, names), min(max(left, 1.0), LIMIT))
            if not done.failure:
                found = done.result
                found["notes"] = {**left_out, **found["notes"]}
                if found.get("held", 0) > HELD:
                    self.pool.close()
                    self.pool = self._pool()
                return found
            stage = self.stage.read_text()
            if stage not in names:
                return _unmeasured(stage, done, cut_short=left < LIMIT)
            left_out[stage] = done.failure  # and again without it
            if time.monotonic() > end:
                return {"us": {}, "errors": {}, "notes": left_out, "skipped": f"no time was left after {stage}: {done.failure}"}

    def prepare(self, sizes: list[tuple[str, str, str, str]], jobs: int, seconds: float, make=make_preparer) -> int:
        """Compile (op, shape, dtype, direction) of all ``sizes`` on ``jobs`` processes, for at most ``seconds``; return how many were."""
        return handled([(size, (*size, self.names)) for size in sizes], jobs, seconds, make)

    def close(self) -> None:
        """End the worker."""
        self.pool.close()
        self.folder.cleanup()


def _unmeasured(stage: str, done: Finished, cut_short: bool) -> dict:
    """Return what is said of a size whose process failed outside of a peer."""
    found: dict = {"us": {}, "errors": {}, "notes": {}}
    late = done.lost and "took too long" in done.failure and cut_short
    if not done.lost or stage not in (OURS, "timing") or late:
        return found | {"skipped": f"{done.failure} ({stage}{', at the end of the time' if late else ''})"}
    return found | {"failed": f"{done.failure}{' while timing' if stage == 'timing' else ''}"}


def handled(tasks: list[tuple[object, object]], jobs: int, seconds: float, make, *args) -> int:
    """Send (task, message) of all ``tasks`` to ``jobs`` processes, for at most ``seconds``; return how many were answered."""
    threads = os.environ.get(THREADS)
    os.environ[THREADS] = "1"  # the processes share the cores already
    try:
        pool = WorkerPool(jobs, make, *args)
    finally:
        os.environ.pop(THREADS)
        os.environ.update({THREADS: threads} if threads is not None else {})
    left, done, end = tasks[::-1], 0, time.monotonic() + seconds
    try:
        while (left or pool.busy()) and time.monotonic() < end:
            for index in pool.idle():
                if left:
                    task, message = left.pop()
                    pool.send(index, task, message, LIMIT)
            done += len(pool.poll(0.2))
    finally:
        pool.close()
    return done


def ask(pool: WorkerPool, message: tuple, seconds: float) -> Finished:
    """Send one message to the only worker of ``pool`` and wait for the answer."""
    for _ in range(3):
        pool.send(0, message, message, seconds)
        finished: list[Finished] = []
        while not finished:
            finished = pool.poll(0.5)
        if not finished[0].untried:
            break
        time.sleep(0.1)
    return finished[0]
