"""Report what ``fuse`` cannot express, with the place in the user's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class UnsupportedOperation(NotImplementedError):
    """Raised where a function uses something that has no DT form. ``operation`` names it; ``place`` is the user's file and line."""

    def __init__(self, operation: str, why: str = "", place: str = "", allowed: str = ""):
        self.operation, self.why, self.place, self.allowed = operation, why, place, allowed
        self.decided: Any = None  #: the decisions about sizes before it, see tracing.py
        self.applies: Callable[[list[Any]], bool] = lambda tensors: True  #: tells whether calls of other sizes are refused too
        super().__init__(operation, why, place, allowed)

    def at(self, place: str) -> UnsupportedOperation:
        """Return the error with a place, if it has none yet."""
        return self if self.place else UnsupportedOperation(self.operation, self.why, place, self.allowed)

    def __str__(self) -> str:
        text = f"{self.place + ': ' if self.place else ''}dtkernels.fuse does not support {self.operation}"
        text += f": {self.why}" if self.why else ""
        return text + (f"; allowed: {self.allowed}" if self.allowed else "")


def refuse_generator(generator: Any) -> None:
    """Refuse a generator of random numbers that is passed to an operation."""
    if generator is not None:
        raise UnsupportedOperation("a generator of one's own", allowed="torch's default generator")
