"""Propose tiles of every useful size for chained products: rows of a block, elements of the loop, warps and stages.

For attention's gradient of queries, 64 columns, beside the usual 64 rows by 4 warps::

    d_Q.block(b:1, h:1, m:128); d_Q.tensorize(b:1, h:1, m:128, d:0, l:64, n:0); d_Q.num_warps(8);
    d_Q.tensorize(b:1, h:1, m:64, d:0, l:0, n:0); d_Q.num_stages(1);                  few keys all at once: no loop
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....codegen.powers_of_two import next_power_of_two
from ....lang.schedule_checks import reduction_labels
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem, whole_parts
from ..chained_gemm import ADDRESSED, SMALLEST, Chain
from .two_tiles import fits_two_tiles, in_two_tiles, tiled_extent

ROWS, STEPS = (32, 64, 128), (32, 64, 128)  #: of a block, and elements of the loop
LONGEST = 64  #: elements of the loop of two products with one accumulator: on an H100 steps of 128 took 1.2 to 1.3 times as long in long loops
STAGES = (3, 2)
WAVES = (1, 2, 4, 8)  #: programs a multiprocessor that parts make
DEPENDENT_WAVES = (2, 4)  #: the same where each of several products waits for another: one program alone leaves a multiprocessor idle
LEAST_STEPS = 2  #: steps of a part
WASTED = 2  #: a tile this many times as long as its extent is not proposed
WARP_GROUP_ROWS = 64  #: of the matrix units' tile
WIDE = 128  #: columns from which on four warps have no room for two sums of 64 rows
REGISTERS, SPILLING = 200, 160  #: of a thread, for accumulators and intermediates; from the second on four warps spill, which pays where multiprocessors are idle alone


def chain_tiles(chain: Chain) -> Iterator[KernelConfig]:
    """Yield tiles for a chain, each by one number of warps and stages; of several labels that are summed over, each is looped over in tiles."""
    two = any(fits_two_tiles(chain.shape.sizes, c) for c in chain.columns)  # of one, four warps have no room for sums of 160 columns
    for walked in chain.summed():
        usual = chain.usual(walked)
        block, tile = dict(usual.blocks), dict(usual.tiles)
        if not tile.get(walked) or not chain.rows or chain.rows[-1] not in block or any(c in block for c in chain.columns):
            continue
        row, extent = chain.rows[-1], chain.shape.sizes[walked]
        whole = (0,) if next_power_of_two(extent) <= max(STEPS) else ()
        tallest = block[row] if len(chain.comparisons()) > 1 else max(ROWS)  # a window or segment begins and ends within a block: what lies outside is work for nothing
        for rows in (r for r in ROWS if r < WASTED * max(SMALLEST, chain.shape.sizes[row]) and r <= tallest):
            for step in (*(s for s in STEPS if s < extent and (s <= LONGEST or not chain.is_plain_pair())), *whole):
                blocks, tiles = block | {row: rows}, tile | {row: rows, walked: step}
                order, split = chain.program_order(blocks, False), chain.even_split(blocks, tiles)
                made = replace(usual, blocks=tuple(blocks.items()), tiles=tuple(tiles.items()), order=order, split=())
                for config in filling(chain, next(_by_warps(chain, replace(made, **split)), None)):
                    yield config
                    yield from in_two_tiles(chain.shape, config) if two else ()


def filling(chain: Chain, config: KernelConfig | None) -> Iterator[KernelConfig]:
    """Yield the choices, and those with the longest sum split where programs are few."""
    if config is None:
        return
    tiles = dict(config.tiles)
    steps = {x: chain.shape.sizes[x] // size for x in chain.summed() if (size := tiles.get(x, 1))}
    yield from (config,) if config.split or not steps else in_parts(chain.shape, config, max(steps, key=lambda x: steps[x]), DEPENDENT_WAVES)


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
    wide = max((tiled_extent(shape.sizes, x) for x in chain.columns), default=1)
    step = tile.get(walked, 1) or next_power_of_two(shape.sizes[walked])
    sums, operands = chain.accumulators(), chain.products() - chain.accumulators()
    idle = shape.programs(dict(made.blocks)) <= shape.target.multiprocessors
    room = {warps: (REGISTERS if idle or warps > 4 else SPILLING) * shape.target.warp_size * warps for warps in (8, 4)}
    taken = rows * (sums * wide + (operands + ADDRESSED * chain.addressed()) * step)
    for warps in (8, 4) if rows > WARP_GROUP_ROWS or wide > WIDE and taken > room[4] else (4,):  # where four had room, 8 were faster for 64 rows at 1 of 123 kernels on an H100, by 7%
        if taken <= room[warps]:
            for stages in STAGES if tile.get(walked) else (1,):
                if (max(1, operands) * rows + 2 * stages * step) * wide * shape.itemsize <= shape.target.shared_bytes:
                    yield replace(made, num_warps=warps, num_stages=stages)


def in_parts(shape: SchedulingProblem, config: KernelConfig | None, loop: str, all_waves: tuple[int, ...] = WAVES) -> Iterator[KernelConfig]:
    """Yield the choices unchanged, and with the loop split so that its parts fill at least one wave of programs."""
    if config is None:
        return
    yield config
    programs, cores = shape.programs(dict(config.blocks)), shape.target.multiprocessors
    steps = shape.sizes[loop] // dict(config.tiles)[loop]
    most = steps if len(reduction_labels(shape.algorithm, config.func)) > 1 else steps // LEAST_STEPS  # each step is a loop
    found = (whole_parts(min(most, waves * cores // programs)) for waves in all_waves if programs < waves * cores)
    yield from (replace(config, split=((loop, parts),)) for parts in dict.fromkeys(found) if parts > 1)
