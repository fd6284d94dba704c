"""Propose tiles of every useful size for chained products: rows of a block, elements of the loop, warps and stages.

For attention's gradient of queries, 64 columns, beside the usual 64 rows by 4 warps::

    d_Q.block(b:1, h:1, m:128); d_Q.tensorize(b:1, h:1, m:128, d:0, l:64, n:0); d_Q.num_warps(8);
    d_Q.tensorize(b:1, h:1, m:64, d:0, l:0, n:0); d_Q.num_stages(1);                  few keys all at once: no loop
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....codegen.powers_of_two import next_power_of_two
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..chained_gemm import SMALLEST, Chain
from .two_tiles import held_width, in_two_tiles

ROWS, STEPS = (32, 64, 128), (32, 64, 128)  #: of a block, and elements of the loop
WARPS, STAGES = (4, 8), (3, 2)
WASTED = 2  #: a tile this many times as long as its extent is not proposed
REGISTERS = 200  #: of a thread, for accumulators and intermediates


def chain_tiles(chain: Chain) -> Iterator[KernelConfig]:
    """Yield tiles for a chain, each by one number of warps and stages; of several labels that are summed over, each is looped over in tiles."""
    for walked in chain.summed():
        usual = chain.usual(walked)
        block, tile = dict(usual.blocks), dict(usual.tiles)
        if not tile.get(walked) or not chain.rows or chain.rows[-1] not in block or any(c in block for c in chain.columns):
            continue
        row, extent = chain.rows[-1], chain.shape.sizes[walked]
        whole = (0,) if next_power_of_two(extent) <= max(STEPS) else ()
        for rows in (r for r in ROWS if r < WASTED * max(SMALLEST, chain.shape.sizes[row])):
            for step in (*(s for s in STEPS if s < extent), *whole):
                blocks, tiles = block | {row: rows}, tile | {row: rows, walked: step}
                order, split = chain.program_order(blocks, False), chain.even_split(blocks, tiles)
                made = replace(usual, blocks=tuple(blocks.items()), tiles=tuple(tiles.items()), order=order, split=())
                yield from list(_by_warps(chain, replace(made, **split)))[:1]


def chain_variants(shape: SchedulingProblem, root: str, members: list[str], made: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the same tiles by other numbers of warps and stages, and with two tiles for each whole extent that is shorter so."""
    chain = Chain.of(shape, root, members)
    if chain is None or not chain.rows or chain.rows[-1] not in dict(made.blocks) or made.specialized:
        return
    for config in _by_warps(chain, made):
        yield config
        yield from in_two_tiles(shape, config)


def _by_warps(chain: Chain, made: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the tiles by the warps and stages that registers and shared memory have room for, the usual ones first."""
    shape, tile = chain.shape, dict(made.tiles)
    rows = max(size for label, size in made.tiles if label in dict(made.blocks))
    walked = next((x for x in chain.summed() if tile.get(x, 1) != 1), "")
    wide = max((held_width(shape.sizes, x) for x in chain.columns), default=1)
    step = tile.get(walked, 1) or next_power_of_two(shape.sizes[walked])
    sums, operands = chain.accumulators(), chain.products() - chain.accumulators()
    for warps in sorted(WARPS, key=lambda w: abs(w - rows // SMALLEST)):
        if rows * (sums * wide + operands * step) <= REGISTERS * shape.target.warp_size * warps:
            for stages in STAGES if tile.get(walked) else (1,):
                if (max(1, operands) * rows + 2 * stages * step) * wide * shape.itemsize <= shape.target.shared_bytes:
                    yield replace(made, num_warps=warps, num_stages=stages)
