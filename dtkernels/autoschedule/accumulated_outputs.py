"""Propose schedules that accumulate one output in the kernel of another, where both kernels would compute the same products.

The gradients of attention are such outputs: those of the queries and of the keys are both products of the scores' gradient, which each
kernel computes again. In one sweep over the queries for each block of keys five products are left of seven, and the gradient of the queries
is added up in memory. The default schedule does not do so; the tuner measures it.

Where one tile holds all keys, nothing is left to add up, and one kernel computes all three gradients (``whole_sum_ways``), by default too::

    d_Q.accumulate_at(d_K, m, ordered);        d_K.block(b:1, h:1);        d_K.tensorize(l:0, m:64, d:0);
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..codegen.powers_of_two import next_power_of_two
from ..lang.schedule import ORDERED, AccumulateAt, FuseAt, Primitive, Schedule, host
from ..lang.schedule_checks import reduction_labels
from .cost.kernel_config import KernelConfig
from .problem import SchedulingProblem, Way

ELEMENTS = 4096  #: of a block of the kernels that clear a sum and convert it
ROWS = 64  #: most rows of such a block
PARTS = 8  #: most parts of a sum in a fixed order, if its blocks can be so large
WIDE, WARPS = 128, 8  #: columns of a tile from which on three results of a program want this many warps
#: (elements of a tile of what is summed at once by its columns, elements summed at once, step of the loop, warps, stages): the fastest of 12 to 40
#: forms at each of 19 sizes of attention's gradients, or within 15% of it, benchmarks/h200/whole_sums.json
FORMS = ((2048, 256, 32, 4, 1), (8192, 256, 32, 4, 2), (16384, 128, 64, 8, 1), (16384, 256, 32, 8, 2))
ITEMSIZE = 2  #: bytes of an element in those measurements
FEW_PROGRAMS = (8192, 256, 128, 8, 1)  #: the same where multiprocessors are left without a program
SPLIT = (16384, 128, 64, 8, 1)  #: and where these programs share a sum over heads
FINISHING = 0.837  #: the part of the usual way's predicted time below which such a kernel was faster at these sizes


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


def whole_sum_ways(shape: SchedulingProblem) -> Iterator[Way]:
    """Yield ways to compute all outputs in one kernel, with the choices for it."""
    if shape.itemsize != ITEMSIZE:
        return
    algorithm = shape.algorithm
    inner = [f for f in algorithm.needed_by(shape.outputs) if f not in shape.outputs]
    members = {o: [o, *(f for f in inner if f in algorithm.needed_by((o,)))] for o in shape.outputs}
    for p in accumulated_placements(shape, (), members):
        if not {*members[p.func]} - {p.func} <= {*members[p.consumer]}:
            continue  # the other output is nearer to what both are made of
        others = [o for o in shape.outputs if o not in (p.func, p.consumer)]
        alike = all(_sums_alike(shape, o, p.consumer) for o in others)
        if p.ordered and alike and all(p.label in algorithm[f].labels for f in inner):
            placed = [FuseAt(f, "fuse_at", (p.consumer, p.label)) for f in inner]
            placed += [FuseAt(o, "fuse_at", (p.consumer, reduction_labels(algorithm, o)[-1])) for o in others]
            for config in _configs(shape, p):
                yield (*placed, p), {p.consumer: config}


def _sums_alike(shape: SchedulingProblem, output: str, host: str) -> bool:
    """Return whether two outputs sum over the same labels, for the same blocks."""
    algorithm = shape.algorithm
    return reduction_labels(algorithm, output) == reduction_labels(algorithm, host) and algorithm[output].labels[:-1] == algorithm[host].labels[:-1]


def _configs(shape: SchedulingProblem, p: AccumulateAt) -> Iterator[KernelConfig]:
    """Yield the choices for the kernel: a block holds everything but the batches and the loop. None where that takes too many registers."""
    algorithm = shape.algorithm
    own, at_once, around = algorithm[p.consumer].labels, reduction_labels(algorithm, p.func), reduction_labels(algorithm, p.consumer)
    blocks = {x: 1 for x in own[:-1] if x not in at_once}
    single = {x: 1 for x in around if x != p.label}
    columns = [algorithm[o].labels[-1] for o in shape.outputs] + [x for f in algorithm.needed_by(shape.outputs) for x in reduction_labels(algorithm, f)]
    whole = {x: 0 for x in (*own, *columns) if x != p.label} | blocks | single
    extents = {x: next_power_of_two(shape.sizes[x]) for x, size in whole.items() if not size}
    if not {*at_once} <= extents.keys():
        return
    held = math.prod(extents.pop(x) for x in at_once)
    area = held * max(extents.values(), default=1)
    split = _shares(shape, shape.programs(blocks), single)
    few = shape.programs(blocks) < shape.target.multiprocessors
    for most, longest, step, warps, stages in ((SPLIT,) if split else (FEW_PROGRAMS, *FORMS) if few else FORMS):
        if area <= most and held <= longest:
            tiles = whole | {p.label: min(step, max(16, next_power_of_two(shape.sizes[p.label])))}
            order = (*single, p.label) if single else ()
            yield KernelConfig(p.consumer, tuple(blocks.items()), tuple(tiles.items()), reordered=order, split=split, num_warps=warps, num_stages=stages)
            return


def _shares(shape: SchedulingProblem, programs: int, around: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Return in how many parts programs share the loop around, such that all run at once and take as many steps: 17 heads of 10 programs in 9 parts."""
    most = shape.target.multiprocessors // max(1, programs)
    return tuple((x, -(-n // -(-n // most))) for x in around if (n := shape.sizes[x]) > 1) if most > 1 else ()


__all__ = ["FINISHING", "accumulated_placements", "accumulated_tiles", "whole_sum_ways"]
