"""Cache the schedules of calls without a prebuilt kernel, bucketed by size: a row's program or the default schedule.

A growing KV cache calls at new sizes with every token. The default schedule is therefore made at a bucket's anchor, which depends on
the sizes alone and never on earlier calls. Sizes with the same anchor share the schedule, the emitted file and its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from ...autoschedule.cost.outline import Known
from ...codegen.powers_of_two import next_power_of_two
from ...codegen.target import Target
from ...lang.errors import DTError
from ..bounded_cache import BoundedCache
from ..log import log, warn_once
from .addition_order import fixed_order
from .row_ranking import Candidate, Sizes
from .schedule_selection import Choice, by_default_schedule, check_resources_of, default_may_be_faster, scheduled, settled
from .size_buckets import bucket_anchor

if TYPE_CHECKING:
    from ...codegen.analysis.product_types import InputTypes
    from ...lang.algorithm import Algorithm
    from ...lang.schedule import Program

REMEMBERED = 256  #: programs cached per kind of call
DECIDED = 8192  #: buckets whose default schedule is known by its text; few texts serve many buckets


@dataclass(frozen=True)
class PlannedKernel:
    """A program to compile. ``candidate`` is its row. It is None for the default schedule, which was made at the sizes ``asked``."""

    program: Program
    candidate: Candidate | None = None
    asked: dict[str, int] = field(default_factory=dict)


class ScheduleCache:
    """Cache the programs of one prepared algorithm. ``algorithm()`` returns it, ``known()`` its outline; labels in ``fixed`` have a constant extent."""

    def __init__(
        self, algorithm: Callable[[], Algorithm], outputs: tuple[str, ...], fixed: frozenset[str] = frozenset(), known: Callable[[], Known] | None = None
    ):
        self.algorithm, self.outputs, self.fixed = algorithm, outputs, fixed
        self._known = known or (lambda: Known.of(algorithm(), outputs))
        self._of_row = lru_cache(REMEMBERED)(self._read)
        self._default_text = lru_cache(DECIDED)(self._make_default_text)
        self._default_programs: BoundedCache[str, Program] = BoundedCache(REMEMBERED)
        self._with_terms = lru_cache(REMEMBERED)(self._outline_with_terms)
        self._fits = lru_cache(DECIDED)(self._is_legal)

    def plan(self, choice: Choice, itemsize: int | InputTypes, target: Target) -> PlannedKernel:
        """Return the program of the best row that fits, else of the default schedule."""
        for candidate in choice.preferred:
            found: Program | Exception
            try:
                found = self._of_row(candidate.row.schedule, _powers(choice.sizes), itemsize, target)
            except Exception as error:  # a faulty row must not end the call
                found = error
            if isinstance(found, Exception):
                tell = log.info if isinstance(found, DTError) and candidate.distance else warn_once  # a row of other sizes may well not fit
                tell(f"a row is passed over ({candidate.row.title()}): {type(found).__name__}: {found}")
            elif found.outputs() == self.outputs:
                return PlannedKernel(found, candidate)
        return self.default_plan(choice, itemsize, target)

    def compete(self, choice: Choice, dtype: str, itemsize: int | InputTypes, known: Known, target: Target) -> Choice:
        """Let the default schedule compete where it may be faster than the best row."""
        if not default_may_be_faster(choice, known):
            return choice
        try:
            text = self._default_text(self._asked(choice.sizes, itemsize, target), itemsize, target, fixed_order())
            return settled(choice, text, dtype, known, target, self._with_terms(text))
        except DTError:
            return choice

    def default_plan(self, choice: Choice, itemsize: int | InputTypes, target: Target) -> PlannedKernel:
        """Return the program of the default schedule, made at the bucket's anchor where that is legal at these sizes, else at these sizes."""
        asked = self._asked(choice.sizes, itemsize, target)
        return PlannedKernel(self._default_program(self._default_text(asked, itemsize, target, fixed_order())), None, dict(asked))

    def _asked(self, sizes: dict[str, int], itemsize: int | InputTypes, target: Target) -> Sizes:
        """Return the sizes that the default schedule of a call is made for."""
        near = tuple([(label, n if label in self.fixed else bucket_anchor(n, label in self.known.strides)) for label, n in sizes.items()])
        own = tuple(sizes.items())
        return near if near == own or self._fits(near, _powers(sizes), itemsize, target) else own

    @cached_property
    def known(self) -> Known:
        """What the cost model knows of the algorithm."""
        return self._known()

    def _make_default_text(self, sizes: Sizes, itemsize: int | InputTypes, target: Target, in_order: bool) -> str:
        program = by_default_schedule(self.algorithm(), self.outputs, dict(sizes), itemsize, target, in_order)
        self._default_programs.put(text := str(program.schedule), program)
        return text

    def _default_program(self, text: str) -> Program:
        """Return the program of a default schedule's text, which may have been evicted since the text was made."""
        if (program := self._default_programs.get(text)) is None:
            self._default_programs.put(text, program := scheduled(self.algorithm(), text))
        return program

    def _outline_with_terms(self, text: str) -> Known | None:
        """Return the outline with the terms that a schedule adds to memory. Without them such a kernel would be no part of its time."""
        from ...lang.algorithm import with_operands

        schedule = self._default_program(text).schedule
        return Known.of(with_operands(self.algorithm(), schedule.subjects()), self.outputs) if schedule.unordered_sums() else None

    def _read(self, text: str, powers: tuple[tuple[str, int], ...], itemsize: int | InputTypes, target: Target) -> Program | DTError:
        """Return the program of a row's schedule, or the error if it does not fit."""
        try:
            program = scheduled(self.algorithm(), text)
            check_resources_of(program, self.outputs, dict(powers), itemsize, target)
        except DTError as error:
            return error.with_traceback(None)
        return program

    def _is_legal(self, asked: Sizes, powers: tuple[tuple[str, int], ...], itemsize: int | InputTypes, target: Target) -> bool:
        """Tell whether the default schedule of sizes ``asked`` is legal at sizes with these next powers of two."""
        try:
            program = self._default_program(self._default_text(asked, itemsize, target, fixed_order()))
            check_resources_of(program, self.outputs, dict(powers), itemsize, target)
        except DTError:
            return False
        return True


def _powers(sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the next powers of two. Resource use depends on nothing else of the sizes."""
    return tuple((label, next_power_of_two(n)) for label, n in sizes.items())
