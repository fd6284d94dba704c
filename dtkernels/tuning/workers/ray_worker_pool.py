"""Run the worker pool on the hosts of a Ray cluster; ray is an optional extra."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...lang.errors import message_line
from .worker_pool import START, Finished, answer, where_of

SOURCES = (str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[3]))  #: of the tools and of the package


class RayWorkerPool:
    """Like ``WorkerPool``, with one actor for each worker. Each takes ``gpus`` GPUs and ``cpus`` cores."""

    def __init__(self, address: str, count: int | None, gpus: float, cpus: float, make: Callable, *args):
        self.ray, self.mine = _ray(address)
        self.packed = pickle.dumps((make, args))  # unpickled by the actor once it knows where the sources are
        kind, each = ("GPU", gpus) if gpus else ("CPU", cpus)
        most = int(self.ray.cluster_resources().get(kind, 0) / each)
        count = count or (most if gpus else max(1, most - 1))
        if count > most or count < 1:
            self._leave()
            raise SystemExit(f"tune: {count or 'no'} workers of {each:g} {kind} each; the Ray cluster at {address} has room for {most}")
        self.actor = self.ray.remote(num_gpus=gpus, num_cpus=cpus, max_restarts=0)(_Actor)
        self.lives, self.stillborn = [0] * count, 0
        self.where: dict[int, str] = {}  #: devices of workers that have started
        self.starting: dict = {}  #: reference -> worker
        self.running: dict[int, tuple] = {}  #: worker -> (reference, task, time allowed, deadline)
        self.members = [self._start(i) for i in range(count)]

    def _start(self, index: int):
        member = self.actor.remote(self.packed, index, SOURCES)
        self.starting[member.begin.remote()] = index
        return member

    def idle(self) -> list[int]:
        """Return workers without a task."""
        return [i for i in range(len(self.members)) if i not in self.running]

    def busy(self) -> int:
        """Return how many are busy."""
        return len(self.running)

    def send(self, index: int, task: object, message: object, seconds: float) -> None:
        """Send a message to worker ``index``; ``task`` comes back with the result. After ``seconds`` the worker is ended."""
        limit = time.monotonic() + (seconds if index in self.where else START)  # the time counts from the worker's start
        self.running[index] = (self.members[index].run.remote(message), task, seconds, limit)

    def poll(self, seconds: float) -> list[Finished]:
        """Return what finished, failed or timed out; waits up to ``seconds`` if there is nothing."""
        if not self.running:
            time.sleep(min(seconds, 0.05))
            return []
        references = {entry[0]: i for i, entry in self.running.items()}
        awaited = [*self.starting, *references]
        self.ray.wait(awaited, num_returns=1, timeout=seconds)
        ready, _ = self.ray.wait(awaited, num_returns=len(awaited), timeout=0)
        for reference in [r for r in ready if r in self.starting]:
            self._begun(self.starting.pop(reference), reference)
        found = [self._finished(references[r], r) for r in ready if r in references]
        late = [i for i, (*_, limit) in self.running.items() if time.monotonic() > limit]
        return found + [self._replace(i, "took too long" if i in self.where else "the worker does not start") for i in late]

    def _begun(self, index: int, reference) -> None:
        """Handle the start of a worker. A failure is reported by its first task."""
        try:
            where, _ = self.ray.get(reference)
        except self.ray.exceptions.RayError:
            return
        if where:
            self.where[index], self.stillborn = where, 0
            if index in self.running:
                *rest, seconds, _ = self.running[index]
                self.running[index] = (*rest, seconds, time.monotonic() + seconds)

    def _finished(self, index: int, reference) -> Finished:
        try:
            result, failure, fatal = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            return self._replace(index, f"the worker died: {type(error).__name__}")
        if fatal:
            return self._replace(index, failure)
        _, task, *_ = self.running.pop(index)
        return Finished(task, index, result, failure, where=self.where.get(index, ""))

    def _replace(self, index: int, why: str) -> Finished:
        _, task, *_ = self.running.pop(index)
        where = self.where.pop(index, "")
        self.stillborn += not where
        if self.stillborn > 2 * len(self.members) + 2:
            raise SystemExit(f"tune: workers do not start: {why}")
        self.ray.kill(self.members[index])
        self.starting = {r: i for r, i in self.starting.items() if i != index}
        self.lives[index] += 1
        self.members[index] = self._start(index)
        return Finished(task, index, failure=why, lost=True, untried=not where, where=where)

    def close(self) -> None:
        """End every worker, and the cluster if it was started for them."""
        for member in self.members:
            self.ray.kill(member)
        self._leave()

    def _leave(self) -> None:
        if self.mine:
            self.ray.shutdown()


def _ray(address: str) -> tuple:
    """Return (ray, connected to the cluster at ``address``; whether the cluster was started here). Exits with one line if that fails."""
    try:
        import ray
    except ImportError:
        raise SystemExit("tune: --ray needs ray; pip install 'dtkernels[ray]'") from None
    if ray.is_initialized():
        return ray, False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of our own sends no usage statistics
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", include_dashboard=False)  # type: ignore[arg-type]  # a name does too, as logging takes it
    except Exception as error:  # unreachable, of another version, no address: Ray has an exception for each
        raise SystemExit(f"tune: no Ray cluster at {address!r}: {message_line(error)}; allowed: local, auto, HOST:PORT") from None
    return ray, True


class _Actor:
    def __init__(self, packed: bytes, index: int, sources: tuple[str, ...]):
        self.packed, self.index, self.sources = packed, index, sources
        self.handler: Any = None
        self.problem = ""

    def begin(self) -> tuple[str, str]:
        """Make the handler. Returns (its device, "") or ("", the error), which is reported with the first message."""
        try:
            sys.path[:0] = [p for p in self.sources if p not in sys.path]  # the sources of the running tuner, not the installed ones
            _show_own_gpus()
            make, args = pickle.loads(self.packed)
            self.handler = make(self.index, *args)
            return where_of(self.handler, self.index), ""
        except BaseException as error:
            self.problem = f"no worker: {message_line(error)}"
            return "", self.problem

    def run(self, message: object) -> tuple:
        """Return the handler's result for ``message``."""
        return (None, self.problem, True) if self.handler is None else answer(self.handler, message)


def _show_own_gpus() -> None:
    """Hide the GPUs of other workers, even if Ray was told not to."""
    import ray

    own = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if own:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
