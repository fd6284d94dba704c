"""Propose blocks of both sides of a matrix product for a kernel that reduces its rows.

Before, each program sweeps whole rows of the product, or a given number of parts of them::

    f.block(x:128); f.tensorize(x:128, y:256, k:64);

After, each makes one tile of it as a plain product does, and what that adds to its rows; a second kernel adds up the tiles of a row::

    f.block(x:128, y:256); f.tensorize(x:128, y:256, k:64); f.map(x:x1/4, y, x1); f.persistent(); f.descriptor(H, W);

A sweep reads its rows of the first operand anew in each step. Where all programs together have more of it than the L2 holds, that comes from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..gemm import product_configs
from ..gemm_row_reduction import gemm_row_reduction_tiles, swept_row

TALL = 64  #: rows that the matrix units multiply at once


def swept_configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the choices for a kernel that reduces rows of a product: sweeps, then blocks of both sides; these alone where the product is stored too."""
    usual = gemm_row_reduction_tiles(shape, root, members)
    if usual is None:
        return
    found = swept_row(shape, root, members)
    written = next((m for m in members if found and m in shape.outputs and shape.algorithm[m].labels == shape.algorithm[found[0]].labels), "")
    blocked = list(_blocked(shape, root, members, *found, written)) if found else []
    yield from blocked if written and blocked else (usual, *_taller(shape, usual), *blocked)


def _taller(shape: SchedulingProblem, usual: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the kernel of whole rows of a float32 product with 64 of them in a block: blocks of fewer read the other operand, of all rows, more often."""
    few = [x for x, n in usual.blocks if 1 < n < TALL <= shape.sizes[x]]
    if shape.itemsize == 4 and len(few) == 1 and 0 in dict(usual.tiles).values():
        blocks, tiles = ({x: TALL if x in few else n for x, n in sizes} for sizes in (usual.blocks, usual.tiles))
        yield replace(usual, blocks=tuple(blocks.items()), tiles=tuple(tiles.items()), num_warps=8)


def _blocked(shape: SchedulingProblem, root: str, members: list[str], main: str, row: str, written: str) -> Iterator[KernelConfig]:
    """Yield schedules in which each program makes one tile of the product ``main``, and stores it as ``written``."""
    below = [m for m in members if m in shape.algorithm.needed_by((main,))]
    for config in product_configs(shape, main, below, written):
        if row in dict(config.blocks) and not (config.split or config.tail or config.stream):
            yield replace(config, func=root)
