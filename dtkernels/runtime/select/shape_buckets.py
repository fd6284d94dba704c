"""What is compiled where no kernel is prebuilt: the program of a row, or by formula; found once for all sizes that are near each other.

A cache of keys that grows is a call at sizes never seen before with every token. So the formula is asked at an anchor of the sizes,
which depends on them alone and never on earlier calls: sizes that share it share the schedule, the emitted file and its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from ...codegen.target import Target
from ...lang.errors import DTError
from ..log import log, warn_once
from .row_ranking import Candidate
from .schedule_selection import Choice, by_default_schedule, room_for, scheduled

if TYPE_CHECKING:
    from ...codegen.analysis.product_types import InputTypes
    from ...lang.algorithm import Algorithm
    from ...lang.schedule import Program

STEPS = 8  #: anchors between a power of two and the next
REGULAR = 16  #: neither the formula nor a build knows of more than that a size is a multiple of this
REMEMBERED = 256  #: schedules that one kind of call keeps


def bucket_anchor(size: int) -> int:
    """The size that stands for ``size``: the largest of its eighth of an octave with the same common divisor with 16.

    So it has the same next power of two, which is what a label that is held whole takes. Sizes up to 16 stand for themselves.
    """
    if size <= REGULAR:
        return size
    step = max(REGULAR, (1 << (size - 1).bit_length()) // (2 * STEPS))
    return -(-size // step) * step - math.gcd(size, REGULAR) % REGULAR


@dataclass(frozen=True)
class PlannedKernel:
    """A program to compile. ``candidate``: the row it is from, None for the formula, which was asked at the sizes ``asked``."""

    program: Program
    candidate: Candidate | None = None
    asked: dict[str, int] = field(default_factory=dict)


class ScheduleCache:
    """The programs of one prepared algorithm, which ``algorithm()`` gives; labels of ``fixed`` have one extent only."""

    def __init__(self, algorithm: Callable[[], Algorithm], outputs: tuple[str, ...], fixed: frozenset[str] = frozenset()):
        self.algorithm, self.outputs, self.fixed = algorithm, outputs, fixed
        self._of_row = lru_cache(REMEMBERED)(self._read)
        self._by_formula = lru_cache(REMEMBERED)(self._ask)
        self._fits = lru_cache(REMEMBERED)(self._checked)

    def plan(self, choice: Choice, itemsize: int | InputTypes, target: Target) -> PlannedKernel:
        """The program of the nearest row that fits, else that of the formula."""
        for candidate in choice.usable:
            found: Program | Exception
            try:
                found = self._of_row(candidate.row.schedule, _powers(choice.sizes), itemsize, target)
            except Exception as error:  # a row from somewhere must not end the call
                found = error
            if isinstance(found, Exception):
                tell = log.info if isinstance(found, DTError) and candidate.distance else warn_once  # a neighbour may well not fit
                tell(f"a row is passed over ({candidate.row.title()}): {type(found).__name__}: {found}")
            elif found.outputs() == self.outputs:
                return PlannedKernel(found, candidate)
        return self.formula(choice, itemsize, target)

    def formula(self, choice: Choice, itemsize: int | InputTypes, target: Target) -> PlannedKernel:
        """The formula's program: that of the sizes' anchor where it is legal at the sizes themselves, else of just these sizes."""
        near = {label: n if label in self.fixed else bucket_anchor(n) for label, n in choice.sizes.items()}
        if near != choice.sizes and not self._fits(tuple(near.items()), _powers(choice.sizes), itemsize, target):
            near = dict(choice.sizes)
        return PlannedKernel(self._by_formula(tuple(near.items()), itemsize, target), None, near)

    def _read(self, text: str, powers: tuple[tuple[str, int], ...], itemsize: int | InputTypes, target: Target) -> Program | DTError:
        """The program of a row's schedule, or why it does not fit."""
        try:
            program = scheduled(self.algorithm(), text)
            room_for(program, self.outputs, dict(powers), itemsize, target)
        except DTError as error:
            return error.with_traceback(None)
        return program

    def _ask(self, sizes: tuple[tuple[str, int], ...], itemsize: int | InputTypes, target: Target) -> Program:
        return by_default_schedule(self.algorithm(), self.outputs, dict(sizes), itemsize, target)

    def _checked(self, asked: tuple[tuple[str, int], ...], powers: tuple[tuple[str, int], ...], itemsize: int | InputTypes, target: Target) -> bool:
        """Whether what the formula says at sizes ``asked`` is legal at sizes of these powers of two."""
        try:
            room_for(self._by_formula(asked, itemsize, target), self.outputs, dict(powers), itemsize, target)
        except DTError:
            return False
        return True


def _powers(sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """The next powers of two: what a kernel takes of a GPU depends on nothing else of the sizes."""
    return tuple((label, 1 << max(0, n - 1).bit_length()) for label, n in sizes.items())
