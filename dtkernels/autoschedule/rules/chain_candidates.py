"""Propose tiles for two chained products with one accumulator, such as attention's forward. The cost model decides among them.

Where few rows share what the loop reads, as one query of attention and the heads of a group share keys, those heads are the rows of a
tile, so that keys are read once a group. The loop is split into as many parts as the GPU has room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...codegen.powers_of_two import next_power_of_two
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig
from ..problem import SchedulingProblem, whole_parts
from .chained_gemm import Chain

#: (elements of the loop, warps, stages), each the fastest at some size with one query of schedule_tables/nvidia_h200/measurements.safetensors
FEW_ROWS = ((64, 4, 4), (128, 2, 3), (128, 4, 3), (256, 4, 3))
#: (rows, elements of the loop, warps, stages) for loops of up to SHORT: measured within 2% of the fastest at 10 of 25 sizes. For longer ones
#: there is none: there the order that the model predicts for tiles of 64 and 128 rows is not the measured one (at 113 sizes, correlation -0.56)
SHORT, SHORT_LOOP = 256, (64, 32, 4, 3)
FEW = 16  #: rows of the smallest tile of the matrix units
WAVES = (1, 2)  #: programs a multiprocessor that parts make
LEAST_STEPS = 2  #: steps of a part
MOST_WASTED = 2  #: a tile this many times as long as its extent is not proposed


def chain_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield choices beside the usual ones of ``chained_gemm.py``."""
    chain = Chain.of(shape, root, members)
    loops = reduction_labels(shape.algorithm, root)
    if chain is None or len(loops) != 1 or not chain.rows or shape.itemsize != 2 or shape.target.backend != "cuda" or not chain.is_plain_pair():
        return
    usual, (loop,), row = chain.usual(), loops, chain.rows[-1]
    wide = max((next_power_of_two(shape.sizes[c]) for c in chain.columns), default=1)
    if not dict(usual.tiles).get(loop):
        return
    packed = chain.packed_groups()
    ways = [packed] if packed else []
    if shape.sizes[row] > 1 or not packed:
        ways.append({**dict.fromkeys(packed, (1, 1)), row: (FEW, FEW)})
    for tiles in ways if shape.sizes[row] <= FEW else ():
        rows = max(tile for _, tile in tiles.values())
        for step, warps, stages in ((max(32, FEW * step // rows), warps, stages) for step, warps, stages in FEW_ROWS):
            yield from _parts(shape, _tiled(chain, usual, tiles, loop, step, warps, chain.stages(rows, step, wide, stages)), loop)
    rows, step, warps, stages = SHORT_LOOP
    if shape.sizes[loop] <= SHORT and rows < MOST_WASTED * shape.sizes[row]:
        yield from _parts(shape, _tiled(chain, usual, {row: (rows, rows)}, loop, step, warps, chain.stages(rows, step, wide, stages)), loop)


def _tiled(chain: Chain, usual: KernelConfig, tiles: dict[str, tuple[int, int]], loop: str, step: int, warps: int, stages: int) -> KernelConfig | None:
    """Return ``usual`` with other blocks and tiles; None where its loads are not ahead of their use or the loop is shorter than a step."""
    if stages < 2 or step >= MOST_WASTED * chain.shape.sizes[loop]:
        return None
    block = dict(usual.blocks) | {label: size for label, (size, _) in tiles.items()}
    tile = dict(usual.tiles) | {label: size for label, (_, size) in tiles.items()} | {loop: step}
    order = chain.program_order(block, any(size < tile[label] for label, size in block.items()))
    return replace(usual, blocks=tuple(block.items()), tiles=tuple(tile.items()), order=order, split=(), num_warps=warps, num_stages=stages)


def _parts(shape: SchedulingProblem, config: KernelConfig | None, loop: str) -> Iterator[KernelConfig]:
    """Yield the choices as they are, and with the loop split so that its parts fill one wave of programs or more."""
    if config is None:
        return
    yield config
    programs, cores = shape.programs(dict(config.blocks)), shape.target.multiprocessors
    most = shape.sizes[loop] // dict(config.tiles)[loop] // LEAST_STEPS
    found = (whole_parts(min(most, waves * cores // programs)) for waves in WAVES if programs < waves * cores)
    yield from (replace(config, split=((loop, parts),)) for parts in dict.fromkeys(found) if parts > 1)
