"""Propose schedules of products with few rows, few columns, few results or a sum of few terms, without matrix units.

Such a product moves memory, and does next to nothing with it. A program reads tiles of the large operand with vectors along the label
that lies contiguous, multiplies each element by that of the other operand, and adds up each place of the tile by itself. Before, for
``rdot(A[x, k], B[k, y], k)`` of one column, tiles of 16 columns for the matrix units, of which 15 are empty::

    f.block(x:64, y:16); f.tensorize(x:64, y:16, k:128);      f_acc[x, y] <- f_acc + dot(A, B, k)

After::

    f.block(x:4, y:1); f.tensorize(x:4, y:1, k:1024);         f_acc[x, k] <- f_acc + A * B

The large tensor may be the result: then the sum is short, and vectors are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from ....codegen.held_terms import HELD_BY_WARP
from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..gemm_candidates import parts
from ..product_sides import packed, sides
from ..reduction import approximations
from ..sibling_gemms import products
from ..streams.streamed_operands import has_codes, sides_of_largest

VECTOR = 16  #: bytes that a thread loads at once
LOADED = (1, 2, 4)  #: vectors of a thread in a tile
WIDTHS = (4, 32, 128)  #: vectors along the contiguous label
#: elements along it where blocks of the narrowest would leave multiprocessors idle: 1 x 134 x 604 took 10.2 us in blocks of 32 columns that loop over the sum,
#: 5.3 in blocks of 8 that load all of it at once (mmsigmoid, bfloat16, an H100)
NARROW = (4, 8)
WARPS = (4, 8)
STAGES = (1, 4)  #: tiles on their way, one of them in use
AHEAD = 4  #: steps of a loop from which on tiles are loaded ahead
FEW = 8  #: rows or columns, each of which has sums of its own
FEW_TERMS = 8  #: terms of a sum that need no matrix units


def streamed_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield schedules of a kernel of products that each read, or write, one tensor much larger than the others."""
    dots = products(shape, members)
    if not shape.has_products_alone(root, members) or not all(_is_thin(shape, root, dot) for dot in dots):
        return
    if any(packed(a) > 1 for dot in dots for a in ex.accesses(dot) if ex.free_labels(a) & {*dot.labels} and has_codes(shape, a)):
        return  # unpacked part by part for the matrix units; here each element would be loaded by itself
    own, summed = shape.algorithm[root].labels, dict.fromkeys(x for dot in dots for x in dot.labels)
    others = any(isinstance(n, ex.Reduce) for m in members for n in shape.algorithm[m].expr.walk())
    if others or summed.keys() & set(own):  # they run inside the loop, or over blocks
        return
    along, across = sides_of_largest(shape, root, members, (*own, *summed))
    few = {x: max(1, shape.sizes[x]) for dot in dots for side in sides(shape, root, dot) if math.prod(shape.sizes[x] for x in side) <= FEW for x in side}
    vector = max(1, VECTOR // shape.itemsize)
    start = {x: 1 if x in summed else few.get(x, 1) for x in (*own, *summed)}
    widths = [vector * width for width in WIDTHS]
    if {*along} <= {*own} and shape.programs({x: start[x] for x in own} | dict.fromkeys(along, widths[0])) < shape.target.multiprocessors:
        widths += NARROW
    for warps, loaded, width in product(WARPS, LOADED, widths):
        tile = start | {x: min(next_power_of_two(shape.sizes[x]), width) for x in along}
        room = loaded * warps * 32 * vector // math.prod(tile[x] for x in along)
        tile |= {x: min(next_power_of_two(shape.sizes[x]), room) for x in across if room}
        if len(dots) * math.prod(tile.values()) <= HELD_BY_WARP * warps:
            yield from _split(shape, root, members, tile, warps)


def _is_thin(shape: SchedulingProblem, root: str, dot: ex.Dot) -> bool:
    """Return whether a product has few rows, few columns, few terms or few results."""
    rows, columns, terms = (math.prod(shape.sizes[x] for x in side) for side in (*sides(shape, root, dot), dot.labels))
    return min(rows, columns) <= FEW or terms <= FEW_TERMS or rows * columns <= FEW * shape.target.multiprocessors


def _split(shape: SchedulingProblem, root: str, members: list[str], tile: dict[str, int], warps: int) -> Iterator[KernelConfig]:
    """Yield schedules of these tiles, and those that split the sum over programs where blocks are few."""
    block = {x: tile[x] for x in shape.algorithm[root].labels}
    steps, longest = max((-(-shape.sizes[x] // size), x) for x, size in tile.items() if x not in block)
    for count in (0, *parts(shape.programs(block), steps, 4 * shape.target.multiprocessors)):
        for stages in STAGES if steps >= AHEAD * max(1, count) else STAGES[:1]:
            more: dict[str, Any] = {"approximations": approximations(shape, members), "stages_of": ((longest, stages),) if stages > 1 else ()}
            yield shape.config(root, block, tile, warps, 1, parts=count, **more)
