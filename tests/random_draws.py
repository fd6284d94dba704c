"""Where random programs take their choices from: a number, or a list of choices, which can be shortened."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Choices drawn by the generator of ``number``, or replayed from ``tape``; those made are on ``made``.

    Every choice is an integer from 0, and 0 is the simplest. A tape that ends, or names a choice that is not there,
    goes on with the simplest.
    """

    def __init__(self, number: int | None = None, tape: Sequence[int] | None = None):
        self._random = random.Random(number) if tape is None else None
        self._tape = list(tape or ())
        self.made: list[int] = []

    def below(self, count: int) -> int:
        """A whole number from 0 to ``count - 1``."""
        if self._random is not None:
            found = self._random.randrange(count)
        else:
            at = len(self.made)
            found = min(self._tape[at], count - 1) if at < len(self._tape) else 0
        self.made.append(found)
        return found

    def between(self, least: int, most: int) -> int:
        return least + self.below(most - least + 1)

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def pick(self, options: Iterable[T]) -> T:
        options = list(options)
        return options[self.below(len(options))]

    def several(self, options: Iterable[T], least: int, most: int) -> list[T]:
        """``least`` to ``most`` different ones of ``options``, in the order drawn."""
        left = list(options)
        count = self.between(least, min(most, len(left)))
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def permuted(self, options: Iterable[T]) -> list[T]:
        left = list(options)
        return self.several(left, len(left), len(left))


def shortened(tape: list[int], fails: Callable[[list[int]], bool], tries: int = 400) -> list[int]:
    """A shorter or simpler tape that still ``fails``: runs of choices left out, then single ones made smaller."""
    left = tries

    def better(candidate: list[int]) -> bool:
        nonlocal left
        left -= 1
        return fails(candidate)

    size = max(1, len(tape) // 2)
    while size and left > 0:
        at = 0
        while at < len(tape) and left > 0:
            shorter = tape[:at] + tape[at + size :]
            zeros = tape[:at] + [0] * len(tape[at : at + size]) + tape[at + size :]
            if better(shorter):
                tape = shorter
            elif any(tape[at : at + size]) and better(zeros):
                tape, at = zeros, at + size
            else:
                at += size
        size //= 2
    for at in range(len(tape)):
        if tape[at] > 1 and left > 0 and better(smaller := [*tape[:at], tape[at] // 2, *tape[at + 1 :]]):
            tape = smaller
    return tape
