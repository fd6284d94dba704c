"""Tile matrix-vector products whose rows lie contiguous along the sum: a program reads long pieces of a few rows, and no matrix unit is used.

Measured on an H100 in bfloat16 (us, 9565 x 3997, 1835 x 12675, 8192 x 5120): 2 to 4 rows by 1024 terms 43, 33, 41; 16 by 256 47, 56, 43; 64 by 64 61, 43, 52;
256 by 32 66, 45, 62. Splitting the sum gained nothing. A sum over rows took 48, 34, 43, a copy 69, 45, 61.

Few rows, each of a program by itself, need more bytes on their way (the same on an H200, 100 x 11000, 240 x 12000, 1000 x 4096): 4096 terms by 8 warps 8.5, 9.5,
8.5, by 4 warps 10.9, 12.3, 8.8; 1024 terms by 4 warps 11.0, 12.5, 9.0; two rows of 4096 terms by 8 warps 8.6, 9.8, 8.7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..product_sides import packed, sides
from ..reduction import approximations
from ..sibling_gemms import products
from .streamed_operands import has_codes, sides_of_largest

PIECE, SHORTEST = 2048, 256  #: bytes of a row in a step, and terms from which on rows are long
LONG_PIECE = 8192  #: bytes of a row in a step of a program that has one row
WARPS = 4
FULL = 6  #: programs a multiprocessor that blocks of four, or of two, rows must leave


def matrix_vector_configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the choices for a product of a matrix and a vector along the matrix's contiguous dimension; none for any other kernel."""
    dots = products(shape, members)
    if len(dots) != 1 or not shape.has_products_alone(root, members) or any(packed(a) > 1 or has_codes(shape, a) for a in ex.accesses(dots[0])):
        return
    own, summed = shape.algorithm[root].labels, dots[0].labels
    others = any(isinstance(n, ex.Reduce) for m in members for n in shape.algorithm[m].expr.walk())
    wide = [math.prod(shape.sizes[x] for x in side) for side in sides(shape, root, dots[0])]
    along, across = sides_of_largest(shape, root, members, (*own, *summed))
    if others or min(wide) != 1 or len(along) != 1 or along[0] not in summed or {*summed} & {*own} or not across or across[0] not in own:
        return
    (terms,), (row,) = along, across
    if shape.sizes[terms] < SHORTEST:
        return
    block = dict.fromkeys(own, 1)
    cores = shape.target.multiprocessors
    block[row] = next((n for n in (4, 2) if shape.programs({**block, row: n}) >= FULL * cores), 1)
    few = shape.programs(block)
    parts = min(-(-shape.sizes[terms] * shape.itemsize // PIECE), cores // few) if 2 * few <= cores else 0
    piece = LONG_PIECE if block[row] == 1 and parts <= 1 else PIECE
    step = min(next_power_of_two(shape.sizes[terms]), piece // max(1, shape.itemsize))
    warps = 2 * WARPS if step * shape.itemsize == LONG_PIECE else WARPS
    more: dict[str, Any] = {"approximations": approximations(shape, members)}
    yield shape.config(root, block, {**dict.fromkeys(summed, 1), **block, terms: step}, warps, 1, parts=parts if parts > 1 else 0, **more)
