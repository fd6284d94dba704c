"""Workers for the tests of tuning: importable, as workers in processes of their own must be."""

import os
import time
from pathlib import Path


class Odd:
    """Does what it is told."""

    def __init__(self, index: int):
        self.index, self.calls, self.where = index, 0, f"place {index}"

    def __call__(self, message):
        self.calls += 1
        if message == "hang":
            time.sleep(600)
        if message == "die":
            os.kill(os.getpid(), 9)
        if message == "who":
            return os.getpid()
        if message == "fail":
            raise ValueError("made to\nfail")
        return message, self.index, self.calls


def make(index: int) -> Odd:
    return Odd(index)


def make_at_second(index: int, folder: str) -> Odd:
    """Does not start the first time."""
    mark = Path(folder) / f"tried {index}"
    if not mark.exists():
        mark.touch()
        raise RuntimeError("not yet")
    return Odd(index)


def make_never(index: int) -> Odd:
    raise RuntimeError("no\nGPU")
