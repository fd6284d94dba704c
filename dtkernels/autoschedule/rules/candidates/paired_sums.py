"""Propose tiles for sums over all pairs of rows that are no products: ``f[x, y] = rsum(abs(A[x, k] - B[y, k]), k)``.

Each thread holds several pairs and adds one term of each in every step. Tiles of several terms spread a pair over threads, which exchange their
parts in each step: 2048 x 2048 distances of 128 terms took 106 us on an H100 by tiles of 128 x 64 pairs and one term, 235 us by 16 x 32 and 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...cost.kernel_config import KernelConfig
from ...cost.outline import paired_terms
from ...problem import SchedulingProblem
from ..reduction import row_tiles

PAIRS = ((128, 64, 4), (64, 64, 4), (64, 32, 4), (32, 32, 2))  #: rows, columns and warps


def paired_sum_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield tiles of one term of many pairs."""
    func = shape.known.funcs[root]
    reduced = paired_terms(func)
    if not reduced and len(members) > 1:
        yield from _reduced_pairs(shape, root, members)
    if not reduced or len(func.labels) < 2 or len(members) > 1:
        return
    usual = row_tiles(shape, root, members)
    for rows, columns, warps in PAIRS:  # the largest whose programs are enough
        block = dict.fromkeys(func.labels, 1) | {func.labels[-2]: rows, func.labels[-1]: columns}
        tile = tuple((x, block.get(x, 1)) for x, _ in usual.tiles)
        yield replace(usual, blocks=tuple(block.items()), tiles=tile, split=(), stages_of=(), evictions=(), persistent=False, num_warps=warps)
        if shape.programs(block) >= shape.target.multiprocessors:
            return


def _reduced_pairs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the same for a kernel that reduces one side of the pairs, as the nearest of some centres does."""
    labels, reduced = shape.known.funcs[root].labels, shape.known.funcs[root].reduced
    inner = [f for m in members if m != root and paired_terms(f := shape.known.funcs[m])]
    if len(inner) != 1 or not labels or len(reduced) != 1 or inner[0].labels != (*labels, *reduced):
        return
    usual = row_tiles(shape, root, members)
    for rows, columns, warps in PAIRS:
        block = dict.fromkeys(labels, 1) | {labels[-1]: rows}
        tiles = {**dict(usual.tiles), **block, reduced[0]: columns, **dict.fromkeys(inner[0].reduced, 1)}
        yield replace(usual, blocks=tuple(block.items()), tiles=tuple(tiles.items()), split=(), stages_of=(), evictions=(), persistent=False, num_warps=warps)
        if shape.programs(block) >= shape.target.multiprocessors:
            return
