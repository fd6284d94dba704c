"""Propose to split the sums of few, long rows over programs.

A row that one program adds up takes the time of that program, while the other multiprocessors have nothing to do. Before, for
``s[x] = rsum(A[x, y], y)`` of 4 rows of 100,000::

    s.block(x:1); s.tensorize(x:1, y:16384);                   4 programs of 7 steps

After::

    s.block(x:1); s.tensorize(x:1, y:2048); s.split(y:32);     128 programs of 2 steps, and a kernel that adds up 32 parts

Where the row is then written, as by a softmax, the second kernel has programs for each of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ....lang.schedule_checks import reduction_labels
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..reduction import row_tiles, stores_while_reducing

STEPS = (1024, 2048, 4096, 8192)  #: elements at once
WARPS = (4, 8)
PARTS = (4, 8, 16, 32, 64, 128)  #: as many as a merge takes in whole steps
WAVES = 2  #: of programs, at most


def split_row_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield schedules of a kernel that adds up long rows, fewer than there are multiprocessors, and may write along them."""
    summed = {x for m in members for x in reduction_labels(shape.algorithm, m) if not shape.is_picked(shape.algorithm[m].expr, x)}
    if len(summed) != 1 or stores_while_reducing(shape, root, members) or shape.is_picked(shape.algorithm[root].expr, *summed):
        return
    usual, label = row_tiles(shape, root, members), *summed
    programs, size = shape.programs(dict(usual.blocks)), shape.sizes[label]
    if label in dict(usual.blocks) or programs >= shape.target.multiprocessors:
        return
    for step, warps, parts in product(STEPS, WARPS, PARTS):
        if step <= size and parts <= -(-size // step) and programs * parts <= WAVES * shape.target.multiprocessors:
            tiles = tuple((x, step if x == label else n) for x, n in usual.tiles)
            yield replace(usual, tiles=tiles, split=((label, parts),), num_warps=warps, stages_of=(), evictions=())
