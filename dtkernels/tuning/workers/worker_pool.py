"""Run workers in processes of their own, one task at a time. A hanging worker is ended, a dead one replaced."""

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

from ...lang.errors import error_line, message_line

READY = "ready"
START = 180.0  #: seconds that a worker may take to start
FORGOTTEN = "what was sent once is not kept any more"  #: a handler's answer that asks for something to be sent again


class Fatal(Exception):
    """Raised by a handler whose process is unusable afterwards, for example with a GPU in an error state."""


@dataclass
class Finished:
    """The outcome of a task: its result, or why there is none."""

    task: Any
    worker: int
    result: Any = None
    failure: str = ""
    lost: bool = False  #: the worker's process is gone, with what it remembered
    untried: bool = False  #: no worker tried it: the failure is the worker's, not the task's
    where: str = ""  #: the device of the worker, as its handler reports it


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
        self.stillborn = 0  #: consecutive workers that did not start
        self.context = multiprocessing.get_context("spawn")
        self.lives = [0] * count  #: processes that each worker has used; a replacement remembers nothing
        self.members = [self._start(i) for i in range(count)]

    def _start(self, index: int) -> _Member:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.make, index, self.args), daemon=True)
        with _deferring_interrupts():
            process.start()
        theirs.close()
        return _Member(process, ours)

    def idle(self) -> list[int]:
        """Return workers without a task."""
        return [i for i, m in enumerate(self.members) if not m.busy]

    def busy(self) -> int:
        """Return how many are busy."""
        return sum(m.busy for m in self.members)

    def send(self, index: int, task: object, message: object, seconds: float) -> None:
        """Send a message to worker ``index``; ``task`` comes back with the result. After ``seconds`` the worker is ended."""
        m = self.members[index]
        m.task, m.busy, m.allowed = task, True, seconds
        m.limit = time.monotonic() + (seconds if m.ready else START)  # the time counts from when it is ready
        try:
            m.pipe.send(message)
        except (BrokenPipeError, OSError):
            m.limit, m.unheard = 0.0, True  # it died while idle; the next poll notices

    def poll(self, seconds: float) -> list[Finished]:
        """Return what finished, failed or timed out; waits up to ``seconds`` if there is nothing."""
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
def _deferring_interrupts() -> Iterator[None]:
    """Defer Ctrl-C, and hide it from processes started here: only the main process handles it."""
    resource_tracker.ensure_running()  # it would unblock the signals again
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
    """Return (result, failure, whether the process is unusable from now on)."""
    try:
        return handler(message), "", False
    except Fatal as error:
        return None, message_line(error), True
    except Exception as error:  # any error of a compiler or a kernel is this candidate's failure
        return None, error_line(error), False


def where_of(handler: Callable, index: int) -> str:
    """Return the device that the handler reports; without one, the worker's number."""
    return getattr(handler, "where", f"worker {index}")


def _serve(pipe: Connection, make: Callable, index: int, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    nowhere = os.open(os.devnull, os.O_WRONLY)  # failing compilers print pages
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        handler = make(index, *args)
        pipe.send((READY, where_of(handler, index)))
    except BaseException as error:
        pipe.send((None, f"no worker: {message_line(error)}", True))
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
    """End this process when its parent is killed."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            os._exit(1)
    except (OSError, AttributeError):
        pass
