"""Propose to split the sums of few, long rows over programs.

A row that one program adds up takes the time of that program, while the other multiprocessors have nothing to do. Before, for
``s[x] = rsum(A[x, y], y)`` of 4 rows of 100,000::

    s.block(x:1); s.tensorize(x:1, y:16384);                   4 programs of 7 steps

After::

    s.block(x:1); s.tensorize(x:1, y:2048); s.split(y:32);     128 programs of 2 steps, and a kernel that adds up 32 parts

Where the row is then written, as by a softmax, the second kernel has programs for each of its pieces. Of a volume that several labels make up
the longest one is split; loops go over the others, element by element, or whole lines are held: of 32 volumes of 512 x 512, 8 lines a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ....lang.schedule_checks import reduction_labels
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..reduction import ROW_LIMIT, row_tiles, stores_while_reducing
from .tile_space import distances

STEPS = (1024, 2048, 4096, 8192)  #: elements at once
WARPS = (4, 8)
PARTS = (4, 8, 16, 32, 64, 128)  #: as many as a merge takes in whole steps
WAVES = 2  #: of programs, at most


def split_row_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield schedules of a kernel that adds up long rows, fewer than there are multiprocessors, and may write along them."""
    over = {tuple(x for x in reduction_labels(shape.algorithm, m) if not shape.is_picked(shape.algorithm[m].expr, x)) for m in members} - {()}
    summed = {x for labels in over for x in labels}
    if len(over) != 1 or stores_while_reducing(shape, root, members) or any(shape.is_picked(shape.algorithm[root].expr, x) for x in summed):
        return
    if len(summed) > 1 and math.prod(shape.sizes[x] for x in summed) <= ROW_LIMIT:
        return
    usual, label = row_tiles(shape, root, members), max(sorted(summed), key=lambda x: shape.sizes[x])
    programs, size = shape.programs(dict(usual.blocks)), shape.sizes[label]
    if summed & {*dict(usual.blocks)} or programs >= shape.target.multiprocessors:
        return
    most = WAVES * shape.target.multiprocessors // max(1, programs)
    for step, warps, parts in product(STEPS, WARPS, PARTS):
        if step <= size and parts <= -(-size // step) and parts <= most:
            tiles = tuple((x, step if x == label else 1 if x in summed else n) for x, n in usual.tiles)
            yield replace(usual, tiles=tiles, split=((label, parts),), num_warps=warps, stages_of=(), evictions=())
    at = distances(shape, root, members, sorted(summed))
    places, alone = sorted(summed, key=at.__getitem__), not summed & {*shape.algorithm[root].labels} and list(at.values()).count(0) == 1
    volume = len(summed) > 1 and alone and all({*n.labels} == summed for m in members for n in ex.reductions(shape.algorithm[m].expr))
    for step, warps in product(STEPS, WARPS) if volume else ():
        tile = _lines(shape, places, step)
        outer = max(tile, key=lambda x: (-(-shape.sizes[x] // (tile[x] or shape.sizes[x])), shape.sizes[x]))
        tiles = tuple((x, tile.get(x, n)) for x, n in usual.tiles)
        for parts in (n for n in PARTS if n <= min(most, -(-shape.sizes[outer] // (tile[outer] or shape.sizes[outer])))):
            yield replace(usual, tiles=tiles, split=((outer, parts),), num_warps=warps, stages_of=(), evictions=())


def _lines(shape: SchedulingProblem, places: list[str], step: int) -> dict[str, int]:
    """Return tiles of ``step`` elements of a volume: whole lines along its labels ``places``, the last in memory first, as far as they go."""
    found: dict[str, int] = {}
    for x in places:
        size = next_power_of_two(shape.sizes[x])
        found[x] = 0 if size <= step else step
        step = max(1, step // size)
    return found
