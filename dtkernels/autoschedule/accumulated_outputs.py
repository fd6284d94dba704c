"""Propose schedules that accumulate one output in the kernel of another, where both kernels would compute the same products.

The gradients of attention are such outputs: those of the queries and of the keys are both products of the scores' gradient, which each
kernel computes again. In one sweep over the queries for each block of keys five products are left of seven, and the gradient of the queries
is added up in memory. The default schedule does not do so; the tuner measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..codegen.powers_of_two import next_power_of_two
from ..lang.schedule import ORDERED, AccumulateAt, Primitive, Schedule, host
from ..lang.schedule_checks import reduction_labels
from .cost.kernel_config import KernelConfig
from .problem import SchedulingProblem

ELEMENTS = 4096  #: of a block of the kernels that clear a sum and convert it
ROWS = 64  #: most rows of such a block
PARTS = 8  #: most parts of a sum in a fixed order, if its blocks can be so large
WIDE, WARPS = 128, 8  #: columns of a tile from which on three results of a program want this many warps


def accumulated_placements(shape: SchedulingProblem, fused: tuple[Primitive, ...], members: dict[str, list[str]]) -> Iterator[AccumulateAt]:
    """Yield ways to add one output up in the kernel of another, given what is fused into what: in any order, then in a fixed one."""
    placed = Schedule(fused).fused()
    inside = {host(f, placed) for f in (*shape.outputs, *(p.func for p in fused if p.name == "store")) if f in placed}
    for func in (o for o in shape.outputs if o not in placed and o not in inside and len(_sums(shape, o)) == 1):
        for other in (o for o in shape.outputs if o != func and o not in placed and func not in shape.algorithm.needed_by((o,))):
            again = {m for m in members[func] if shape.dots(m)} & {m for m in members[other] if shape.dots(m)}
            loop = next((x for x in reduction_labels(shape.algorithm, other) if x in shape.algorithm[func].labels), None)
            if again and loop is not None:
                yield AccumulateAt(func, "accumulate_at", (other, loop))
                yield AccumulateAt(func, "accumulate_at", (other, loop, ORDERED))


def accumulated_tiles(shape: SchedulingProblem, p: AccumulateAt, tiles: dict[str, KernelConfig]) -> dict[str, KernelConfig]:
    """Return the choices for all kernels, given those without ``p``."""
    own = shape.algorithm[p.func].labels
    rows = max(1, min(ROWS, ELEMENTS // next_power_of_two(max(1, shape.sizes[own[-1]])))) if own else 1
    block = {x: rows if x in own[-2:-1] else 1 for x in own[:-1]}
    tile = {**block, **({own[-1]: 0} if own else {})}
    if own and shape.sizes[own[-1]] > ELEMENTS:
        block[own[-1]] = tile[own[-1]] = ELEMENTS
    return {**tiles, p.consumer: _adding(shape, p, tiles[p.consumer]), p.func: KernelConfig(p.func, tuple(block.items()), tuple(tile.items()), num_warps=4)}


def _adding(shape: SchedulingProblem, p: AccumulateAt, config: KernelConfig) -> KernelConfig:
    """Return the choices for the kernel that adds, given those without ``p``."""
    if config.specialized:  # which adds in bulk, and has no room to gather results beside these sums
        return replace(config, descriptors=(*config.reading(shape.outputs).descriptors, p.func))
    columns = max((next_power_of_two(shape.sizes[x]) for x, size in config.tiles if size == 0), default=0)
    config = replace(config, split=(), tail=(), stream=(), cluster=None, num_warps=max(config.warps, WARPS) if columns >= WIDE else config.num_warps)
    if p.ordered:
        over = reduction_labels(shape.algorithm, p.func)
        config = replace(config, blocks=tuple((x, _of_few_parts(shape.sizes[x], size) if x in over else size) for x, size in config.blocks))
    return config


def _of_few_parts(size: int, block: int) -> int:
    """Return a block of whole tiles of which there are at most ``PARTS``."""
    return block * next_power_of_two(max(1, -(-size // (block * PARTS))))


def _sums(shape: SchedulingProblem, func: str) -> list:
    """Return the products in the definition of a Func that has no other reduction."""
    dots = shape.dots(func)
    return dots if {x for d in dots for x in d.labels} == {*reduction_labels(shape.algorithm, func)} else []


__all__ = ["accumulated_placements", "accumulated_tiles"]
