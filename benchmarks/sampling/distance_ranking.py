"""Rank rows as dispatch did before it had a cost model: by distance in log2 of sizes and by quantization. A baseline for ``choice_regret.py``.

A row's blocks suit its own sizes. At other sizes they may reach past the end, need one more wave, or be too few to give every
multiprocessor one.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from dtkernels.codegen.powers_of_two import next_power_of_two
from dtkernels.runtime.tables.table import Row

LIMIT = 2.0  #: beyond this distance a row was not taken, nor where it took longer by this factor for the same work
LAUNCH = 4.0  #: microseconds of a launch, whatever the kernel does

_CUT = re.compile(r"\.(block|tensorize|split)\(([^)]*)\)")
_SIZED = re.compile(r"(\w+'*)\s*:\s*(\d+)")


@lru_cache(maxsize=4096)
def cuts(schedule: str) -> tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...]:
    """Return (Func, "block", "tensorize" or "split", labels with their sizes) of each such statement of a row.

    Read without the parser: a first call with prebuilt kernels imports none, and ranks a hundred rows in less time than the parser takes for
    five. A test holds it to what the parser reads.
    """
    found = []
    for m in _CUT.finditer(schedule):
        begin = max(schedule.rfind("\n", 0, m.start()), schedule.rfind(";", 0, m.start())) + 1
        found.append((schedule[begin : m.start()].strip(), m[1], tuple([(label, int(size)) for label, size in _SIZED.findall(m[2])])))
    return tuple(found)


@lru_cache(maxsize=4096)
def _kernels(schedule: str) -> tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...]:
    """Return, for each kernel, the number of split-K parts and (label, tile, block). 0 stands for the next power of two, or no block."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for func, name, sized in cuts(schedule):
        found.setdefault(func, {"block": {}, "tensorize": {}, "split": {}})[name].update(sized)
    made = []
    for said in found.values():
        tiles = said["block"] | said["tensorize"]
        made.append((math.prod(said["split"].values()), tuple((label, tile, said["block"].get(label, 0)) for label, tile in tiles.items())))
    return tuple(made)


def _durations(schedule: str, sizes: dict[str, int], multiprocessors: int) -> tuple[float, float]:
    """Return (duration, duration without waste), in loop elements per multiprocessor."""
    total = useful = 0.0
    for parts, labels in _kernels(schedule):
        elements = filled = 1
        programs = parts
        for label, tile, block in labels:
            size = max(sizes.get(label, 1), 1)
            elements *= size
            filled *= -(-size // tile) * tile if tile else next_power_of_two(size)
            programs *= -(-size // block) if block else 1
        total += filled / programs * -(-programs // multiprocessors)
        useful += elements / multiprocessors
    return total, useful


def quantization_cost(row: Row, sizes: dict[str, int]) -> float:
    """Return how many times longer the same work takes at ``sizes`` than at the row's own, by quantization alone; at least 1.

    A kernel that takes little longer than a launch can waste little. Returns 1 where the row does not record its GPU's multiprocessors.
    """
    multiprocessors = row.by.get("multiprocessors")
    if not isinstance(multiprocessors, int) or multiprocessors < 1 or sizes == row.sizes:
        return 1.0
    own, there = _own_durations(row.schedule, tuple(row.sizes.items()), multiprocessors), _durations(row.schedule, sizes, multiprocessors)
    if not own[0]:  # no label is blocked
        return 1.0
    lasts, worth = there[0] / own[0], there[1] / own[1]
    if row.microseconds:
        launch = LAUNCH / max(row.microseconds - LAUNCH, row.microseconds / 10)
        lasts, worth = launch + lasts, launch + worth
    return max(1.0, lasts / worth)


@lru_cache(maxsize=4096)
def _own_durations(schedule: str, sizes: tuple[tuple[str, int], ...], multiprocessors: int) -> tuple[float, float]:
    return _durations(schedule, dict(sizes), multiprocessors)


def reach(row: Row, sizes: dict[str, int], distance: float) -> float:
    """Return the key that rows were ordered by: infinite where the row was refused."""
    wasted = quantization_cost(row, sizes) if distance <= LIMIT else math.inf
    return math.sqrt(distance * distance + 2.0 * math.log2(wasted) ** 2) if wasted <= LIMIT else math.inf
