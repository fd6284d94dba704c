"""Correct the cost model by measured rows: near the sizes of a row its time counts, far from them the model alone.

A row says two things of its sizes: what its own schedule takes, and that no other schedule of the table is faster there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from ...autoschedule.cost.outline import Known, Outline
from ...autoschedule.cost.predicted_time import kernels_in_one_step, predicted_time
from ...codegen.target import TARGETS, Target
from ..tables.table import Row

FADES = 2.0  #: distance at which evidence counts 1/e
SLOWER = 1.5  #: how many times slower than the fastest a schedule is, by the model alone, that no evidence is looked at for
DOUBT = 0.01  #: part of a time that each unit of distance from the nearest row of its schedule adds
NEAREST = 6  #: rows whose times bound those of other schedules
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class TimeModel:
    """The cost model for one kind of call on ``target``. Rows were measured on ``measured``."""

    known: Known
    target: Target
    measured: Target

    @staticmethod
    def unknown(labels: Iterable[str]) -> TimeModel:
        """Return the model of an algorithm of which only the labels are known."""
        return _unknown(tuple(labels))

    def at(self, schedule: str, sizes: Sizes, dtype: str) -> float:
        """Return the predicted microseconds of ``schedule``."""
        return _time(schedule, sizes, ITEMSIZE[dtype], self.known, self.target)

    def loops_alike(self, schedule: str, row: Row, sizes: Sizes) -> bool:
        """Return whether each kernel of ``schedule`` goes over its rows in one step at both sizes, or at neither: of two steps one loads while the other computes."""
        there = kernels_in_one_step(schedule, self.known, row.sizes, ITEMSIZE[row.dtype], self.measured)
        return there == kernels_in_one_step(schedule, self.known, dict(sizes), ITEMSIZE[row.dtype], self.target)

    def ratio(self, schedule: str, row: Row) -> float:
        """Return the logarithm of the row's time over that predicted for ``schedule`` at the row's sizes."""
        assert row.microseconds
        return math.log(row.microseconds / _time(schedule, tuple(row.sizes.items()), ITEMSIZE[row.dtype], self.known, self.measured))


@lru_cache(maxsize=16)
def _unknown(labels: tuple[str, ...]) -> TimeModel:
    target = TARGETS["h200"]
    return TimeModel(Known(Outline.unknown(labels)), target, target)


@lru_cache(maxsize=8192)
def _time(schedule: str, sizes: Sizes, itemsize: int, known: Known, target: Target) -> float:
    return predicted_time(schedule, known, dict(sizes), itemsize, target)


def weight(distance: float) -> float:
    """Return how much evidence counts at a distance."""
    return math.exp(-distance / FADES)


def predictions(near: list[tuple[float, Row]], model: TimeModel, sizes: Sizes, usable: Callable[[str], bool], told: bool = True) -> dict[str, float]:
    """Return the predicted microseconds of each schedule of the rows ``near``, which are sorted by distance.

    ``usable``: whether a schedule may be chosen; others are left out. ``told``: whether the rows' times are evidence, which those of another
    number are not: heads in groups of 5 may take 20 times as long by a row for groups of 4. Evidence is looked at only where the model finds a schedule not
    much slower than the fastest. Rows nearer than a schedule's own bound its time: the fastest's alone, until it stays the fastest.
    """
    first: dict[str, tuple[float, Row]] = {}
    for distance, row in near:
        if row.schedule not in first and usable(row.schedule):
            first[row.schedule] = distance, row
    alone = {schedule: math.log(model.at(schedule, sizes, row.dtype)) for schedule, (_, row) in first.items()}
    limit = min(alone.values(), default=0.0) + math.log(SLOWER)
    found = {schedule: time + DOUBT * first[schedule][0] for schedule, time in alone.items()}
    own: dict[str, float] = {}
    for schedule, (distance, row) in first.items():
        if told and alone[schedule] <= limit and _is_measured(row) and model.loops_alike(schedule, row, sizes):
            found[schedule] += weight(distance) * model.ratio(schedule, row)
            own[schedule] = distance
    timed = [(distance, row) for distance, row in near if told and _is_measured(row)][:NEAREST]
    checked: set[str] = set()
    while found and (best := min(found, key=found.__getitem__)) not in checked:
        checked.add(best)
        nearer = [(d, row) for d, row in timed if row.schedule != best and d <= own.get(best, math.inf)]
        bound = max([weight(d) * model.ratio(best, row) for d, row in nearer], default=-math.inf)
        found[best] = max(found[best], alone[best] + bound + DOUBT * first[best][0])
    return {schedule: math.exp(logarithm) for schedule, logarithm in found.items()}


def _is_measured(row: Row) -> bool:
    """Whether a row's time is evidence."""
    return row.measured and bool(row.microseconds)
