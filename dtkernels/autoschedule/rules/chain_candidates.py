"""Propose tiles for chained products, such as those of attention and of its gradients. The cost model decides among them.

Where few rows share what the loop reads, as one query of attention and the heads of a group share keys, those heads are the rows of a
tile, so that keys are read once a group. The loop is split into as many parts as the GPU has room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...codegen.powers_of_two import next_power_of_two
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig
from ..problem import SchedulingProblem
from .candidates.chain_tiles import WASTED, chain_tiles, filling, in_parts
from .candidates.two_tiles import fits_two_tiles, in_two_tiles
from .chained_gemm import Chain

#: (elements of the loop, warps, stages), each the fastest at some size with one query of schedule_tables/nvidia_h200/measurements.safetensors
FEW_ROWS = ((64, 4, 4), (128, 2, 3), (128, 4, 3), (256, 4, 3))
#: (rows, elements of the loop, warps, stages) for loops of up to SHORT: measured within 2% of the fastest at 10 of 25 sizes. For longer ones
#: there is none: there the order that the model predicts for tiles of 64 and 128 rows is not the measured one (at 113 sizes, correlation -0.56)
SHORT, SHORT_LOOP = 256, (64, 32, 4, 3)
#: (rows, elements of the loop, warps, stages) of kernels with more products, for columns up to SIDE and wider ones. They leave little to spill; the first was the
#: fastest of those measured on an H100 at 703 rows of 72 columns
SEVERAL_PRODUCTS, SIDE = (((64, 64, 4, 2),), ((64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2))), 128
#: the same for columns that two tiles hold: on an H100 within 2% of the fastest of twelve at 72 to 96 columns, and of eight at 160 and 192
BY_TWO_TILES = ((64, 64, 4, 3), (128, 64, 8, 3))
SHARES = (8, 16, 32)  #: programs of a multiprocessor that share long and short loops
FEW = 16  #: rows of the smallest tile of the matrix units


def chain_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield choices beside the usual ones of ``chained_gemm.py``, each also with two tiles for a whole extent where these are shorter."""
    chain = Chain.of(shape, root, members)
    if chain is None or shape.itemsize != 2 or shape.target.backend != "cuda" or chain.of_vectors():
        return
    plain = chain.is_plain_pair() and len(reduction_labels(shape.algorithm, root)) == 1
    if plain:
        yield from in_two_tiles(shape, chain.usual())
        for config in _of_plain_pair(chain):
            yield config
            yield from in_two_tiles(shape, config)
    if chain.has_narrow_product() or not chain.rows:
        return
    ways = (chain, replace(chain, packing=False)) if chain.packed_groups() and shape.sizes[chain.rows[-1]] > 1 else (chain,)
    for way in ways:
        for config in (*(() if plain else _of_several_products(way)), *chain_tiles(way)):
            yield config
            yield from _in_shares(way, config)


def _in_shares(chain: Chain, config: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the same tiles with a sum that a mask does not cut short in more parts: programs that all run at once take as long as the longest of them."""
    if config.split or not chain.has_mask() or chain.usual().split:
        return
    splits = (chain.even_split(dict(config.blocks), dict(config.tiles), programs) for programs in SHARES)
    yield from (replace(config, **split) for split in splits if split)


def _of_plain_pair(chain: Chain) -> Iterator[KernelConfig]:
    """Yield tiles for two products with one accumulator, for few rows and for short loops."""
    shape, usual, row = chain.shape, chain.usual(), next(reversed(chain.rows), "")
    (loop,) = reduction_labels(shape.algorithm, chain.root)
    if not dict(usual.tiles).get(loop):
        return
    wide, count = chain.widest(), shape.sizes.get(row, 1)
    packed = chain.packed_groups()
    ways = [packed] if packed else []
    if count > 1 or not packed:
        ways.append({**dict.fromkeys(packed, (1, 1)), **({row: (FEW, FEW)} if row else {})})
    for tiles in ways if count <= FEW else ():
        rows = max((tile for _, tile in tiles.values()), default=FEW)
        for step, warps, stages in ((max(32, FEW * step // rows), warps, stages) for step, warps, stages in FEW_ROWS):
            yield from in_parts(shape, _tiled(chain, usual, tiles, loop, step, warps, chain.stages(rows, step, wide, stages)), loop)
    rows, step, warps, stages = SHORT_LOOP
    if row and shape.sizes[loop] <= SHORT and rows < WASTED * shape.sizes[row]:
        yield from in_parts(shape, _tiled(chain, usual, {row: (rows, rows)}, loop, step, warps, chain.stages(rows, step, wide, stages)), loop)


def _of_several_products(chain: Chain) -> Iterator[KernelConfig]:
    """Yield tiles for kernels of more products or accumulators, such as those of attention's gradients.

    Smaller blocks than the usual ones may fill the GPU better. Of several labels that are summed over, each may be the one that
    a tile has more than one element of: queries, or the heads of a group.
    """
    shape, row = chain.shape, chain.rows[-1]
    wide = chain.widest()
    two = any(fits_two_tiles(shape.sizes, c) for c in chain.columns)
    for walked in chain.summed():
        usual = chain.usual(walked)
        yield usual
        block, longest = dict(usual.blocks), next_power_of_two(shape.sizes[walked])
        if not dict(usual.tiles).get(walked) or row not in block:
            continue
        rows, step, warps, stages = BY_TWO_TILES[wide > SIDE]
        if two and rows < WASTED * shape.sizes[row] and (found := _tiled(chain, usual, {row: (rows, rows)}, walked, step, warps, stages)):
            yield from in_two_tiles(shape, replace(found, **chain.even_split(dict(found.blocks), dict(found.tiles))))
        for rows, step, warps, stages in SEVERAL_PRODUCTS[wide > SIDE] if block[row] > FEW else ():
            step = min(step, max(FEW, longest))
            better = usual.split or shape.fills_better(block, row, rows)
            if better and rows < WASTED * shape.sizes[row] and (found := _tiled(chain, usual, {row: (rows, rows)}, walked, step, warps, chain.stages(2 * rows, step, wide, stages))):
                yield from filling(chain, found)


def _tiled(chain: Chain, usual: KernelConfig, tiles: dict[str, tuple[int, int]], loop: str, step: int, warps: int, stages: int) -> KernelConfig | None:
    """Return ``usual`` with other blocks and tiles; None where its loads are not ahead of their use or the loop is shorter than a step."""
    if stages < 2 or step > FEW and step >= WASTED * chain.shape.sizes[loop]:
        return None
    block = dict(usual.blocks) | {label: size for label, (size, _) in tiles.items()}
    tile = dict(usual.tiles) | {label: size for label, (_, size) in tiles.items()} | {loop: step}
    order = chain.program_order(block, any(size < tile[label] for label, size in block.items()))
    return replace(usual, blocks=tuple(block.items()), tiles=tuple(tile.items()), order=order, split=(), num_warps=warps, num_stages=stages)
