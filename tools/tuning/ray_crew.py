"""The same crew on the hosts of a Ray cluster; ray is an optional extra."""

from __future__ import annotations

import time
from collections.abc import Callable

from .crew import START, Done, answer


class RayCrew:
    """As ``Crew``, with one actor a worker. ``gpus`` is how many GPUs each takes, ``cpus`` how many cores."""

    def __init__(self, address: str, count: int | None, gpus: float, cpus: float, make: Callable, *args):
        try:
            import ray
        except ImportError:
            raise SystemExit("tune: --ray needs ray; pip install 'dtkernels[ray]'") from None
        self.ray, self.make, self.args = ray, make, args
        if not ray.is_initialized():
            ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level="error", include_dashboard=False)
        resources = ray.cluster_resources()
        if count is None:
            count = int(resources.get("GPU", 0) / gpus) if gpus else max(1, int(resources.get("CPU", 1)) - 1)
        if count < 1:
            raise SystemExit(f"tune: the Ray cluster at {address} has no GPU")
        self.actor = ray.remote(num_gpus=gpus, num_cpus=cpus, max_restarts=0)(_Actor)
        self.members = [self._start(i) for i in range(count)]
        self.running: dict[int, tuple] = {}  #: worker -> (reference, task, when it is too late)
        self.ready: set[int] = set()

    def _start(self, index: int):
        return self.actor.remote(self.make, index, self.args)

    def idle(self) -> list[int]:
        """Workers without a task."""
        return [i for i in range(len(self.members)) if i not in self.running]

    def busy(self) -> int:
        """How many work."""
        return len(self.running)

    def send(self, index: int, task: object, message: object, seconds: float) -> None:
        """Give worker ``index`` a message; ``task`` comes back with the result. After ``seconds`` the worker is ended."""
        if index not in self.ready:  # the time counts from when the worker is there
            start, _ = self.ray.wait([self.members[index].begin.remote()], timeout=START)
            if start:
                self.ready.add(index)
        self.running[index] = (self.members[index].run.remote(message), task, time.monotonic() + seconds)

    def poll(self, seconds: float) -> list[Done]:
        """What finished, failed or ran out of time; waits up to ``seconds`` where nothing did."""
        found = []
        if not self.running:
            time.sleep(min(seconds, 0.05))
            return found
        references = {entry[0]: i for i, entry in self.running.items()}
        ready, _ = self.ray.wait(list(references), num_returns=1, timeout=seconds)
        more, _ = self.ray.wait(list(references), num_returns=len(references), timeout=0)
        for reference in dict.fromkeys([*ready, *more]):
            index = references[reference]
            _, task, _ = self.running.pop(index)
            try:
                result, failure, fatal = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                found.append(self._replace(index, task, f"the worker died: {type(error).__name__}"))
                continue
            found.append(self._replace(index, task, failure) if fatal else Done(task, index, result, failure))
        for index, (_, task, limit) in list(self.running.items()):
            if time.monotonic() > limit:
                del self.running[index]
                found.append(self._replace(index, task, "took too long"))
        return found

    def _replace(self, index: int, task: object, why: str) -> Done:
        self.ray.kill(self.members[index])
        self.ready.discard(index)
        self.members[index] = self._start(index)
        return Done(task, index, failure=why, lost=True)

    def close(self) -> None:
        """End every worker."""
        for member in self.members:
            self.ray.kill(member)


class _Actor:
    def __init__(self, make: Callable, index: int, args: tuple):
        self.make, self.index, self.args, self.handler = make, index, args, None

    def begin(self) -> None:
        """Make the handler; what goes wrong is told when a message comes."""
        try:
            self.handler = self.make(self.index, *self.args)
        except BaseException as error:
            self.problem = f"no worker: {error}"

    def run(self, message: object) -> tuple:
        """What the handler says to ``message``."""
        return (None, self.problem, True) if self.handler is None else answer(self.handler, message)
