"""Workers for test_tuning.py: importable, as workers in processes of their own must be."""

import os
import time


class Odd:
    """Does what it is told."""

    def __init__(self, index: int):
        self.index, self.calls = index, 0

    def __call__(self, message):
        self.calls += 1
        if message == "hang":
            time.sleep(600)
        if message == "die":
            os.kill(os.getpid(), 9)
        if message == "fail":
            raise ValueError("made to\nfail")
        return message, self.index, self.calls


def make(index: int) -> Odd:
    return Odd(index)
