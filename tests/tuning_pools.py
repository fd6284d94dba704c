"""A pool of the tuner that runs its tasks in this process, one at a time, so that a test can watch."""

from dtkernels.tuning.workers.worker_pool import Finished, answer


class Inline:
    """In place of WorkerPool."""

    def __init__(self, handler):
        self.handler, self.lives, self.members = handler, [0], [None]
        self.task = self.message = None

    def idle(self) -> list[int]:
        return [] if self.task else [0]

    def busy(self) -> int:
        return int(self.task is not None)

    def send(self, index, task, message, seconds) -> None:
        self.task, self.message = task, message

    def poll(self, seconds) -> list[Finished]:
        if self.task is None:
            return []
        task, message, self.task = self.task, self.message, None
        result, failure, _ = answer(self.handler, message)
        return [Finished(task, 0, result, failure)]
