"""Workers in processes of their own, each at one task at a time: one that hangs is ended, one that dies is replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

READY = "ready"
START = 180.0  #: seconds that a worker may take to start
FORGOTTEN = "what was sent once is not kept any more"  #: what a handler answers that wants it again


class Fatal(Exception):
    """Raised by a handler after which its process is of no use, such as a GPU in an error state."""


@dataclass
class Finished:
    """What became of a task: its result, or why there is none."""

    task: Any
    worker: int
    result: Any = None
    failure: str = ""
    lost: bool = False  #: the worker's process is gone, with what it remembered
    untried: bool = False  #: no worker looked at it: the failure is the worker's, not the task's
    where: str = ""  #: the device of the worker, as its handler says


@dataclass
class _Member:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    task: object = None
    busy: bool = False
    ready: bool = False  #: has made its handler
    unheard: bool = False  #: was gone when its task was sent
    where: str = ""
    allowed: float = 0.0
    limit: float = 0.0


class WorkerPool:
    """``count`` processes, each with its own ``make(index, *args)``, a callable that takes what ``send`` is given."""

    def __init__(self, count: int, make: Callable, *args):
        self.make, self.args = make, args
        self.stillborn = 0  #: workers in a row that did not start
        self.context = multiprocessing.get_context("spawn")
        self.lives = [0] * count  #: processes that each worker has used up: one that is replaced remembers nothing
        self.members = [self._start(i) for i in range(count)]

    def _start(self, index: int) -> _Member:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.make, index, self.args), daemon=True)
        with _undisturbed():
            process.start()
        theirs.close()
        return _Member(process, ours)

    def idle(self) -> list[int]:
        """Workers without a task."""
        return [i for i, m in enumerate(self.members) if not m.busy]

    def busy(self) -> int:
        """How many work."""
        return sum(m.busy for m in self.members)

    def send(self, index: int, task: object, message: object, seconds: float) -> None:
        """Give worker ``index`` a message; ``task`` comes back with the result. After ``seconds`` the worker is ended."""
        m = self.members[index]
        m.task, m.busy, m.allowed = task, True, seconds
        m.limit = time.monotonic() + (seconds if m.ready else START)  # the time counts from when it is ready
        try:
            m.pipe.send(message)
        except (BrokenPipeError, OSError):
            m.limit, m.unheard = 0.0, True  # it died while idle: noticed by the next poll

    def poll(self, seconds: float) -> list[Finished]:
        """What finished, failed or ran out of time; waits up to ``seconds`` where nothing did."""
        found: list[Finished] = []
        pipes = {m.pipe: i for i, m in enumerate(self.members)}
        for pipe in wait(list(pipes), timeout=seconds if self.busy() else min(seconds, 0.05)):
            done = self._receive(pipes[pipe])  # type: ignore[index]
            found += [done] if done is not None and done.task is not None else []
        for i, m in enumerate(self.members):
            if m.busy and time.monotonic() > m.limit:
                found.append(self._replace(i, "took too long" if m.process.is_alive() else "the worker died"))
        return found

    def _receive(self, index: int) -> Finished | None:
        m = self.members[index]
        try:
            message = m.pipe.recv()
        except (EOFError, OSError):
            m.process.join(5)
            return self._replace(index, f"the worker died with exit code {m.process.exitcode}")
        if message[0] == READY:
            m.ready, m.where, m.limit, self.stillborn = True, message[1], time.monotonic() + m.allowed, 0
            return None
        result, failure, fatal = message
        if fatal:
            return self._replace(index, failure)
        task, m.task, m.busy = m.task, None, False
        return Finished(task, index, result, failure, where=m.where)

    def _replace(self, index: int, why: str) -> Finished:
        m = self.members[index]
        _end(m.process)
        m.pipe.close()
        self.stillborn += not m.ready
        if self.stillborn > 2 * len(self.members) + 2:
            raise SystemExit(f"tune: workers do not start: {why}")
        self.lives[index] += 1
        self.members[index] = self._start(index)
        return Finished(m.task, index, failure=why, lost=True, untried=not m.ready or m.unheard, where=m.where)

    def close(self) -> None:
        """End every worker."""
        for m in self.members:
            m.process.terminate()
        for m in self.members:
            _end(m.process)
            m.pipe.close()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits, and what is started here never hears of it: it is for the process that decides."""
    resource_tracker.ensure_running()  # which would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.terminate()
    process.join(1)
    if process.is_alive():
        process.kill()
        process.join(5)


def answer(handler: Callable, message: object) -> tuple[object, str, bool]:
    """(result, failure, whether the process is of no more use)"""
    try:
        return handler(message), "", False
    except Fatal as error:
        return None, line_of(error), True
    except Exception as error:  # whatever a compiler or a kernel raises is this candidate's failure
        return None, f"{type(error).__name__}: {line_of(error)}", False


def line_of(error: BaseException) -> str:
    """What it says, in one line."""
    return " ".join(str(error).split())[:200]


def where_of(handler: Callable, index: int) -> str:
    """What the handler calls its device; the worker's number where it has none."""
    return getattr(handler, "where", f"worker {index}")


def _serve(pipe: Connection, make: Callable, index: int, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    nowhere = os.open(os.devnull, os.O_WRONLY)  # compilers that give up print pages
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        handler = make(index, *args)
        pipe.send((READY, where_of(handler, index)))
    except BaseException as error:
        pipe.send((None, f"no worker: {line_of(error)}", True))
        return
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        found = answer(handler, message)
        pipe.send(found)
        if found[2]:
            return


def _die_with_parent() -> None:
    """Nothing is left running where the parent is killed."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            os._exit(1)
    except (OSError, AttributeError):
        pass
