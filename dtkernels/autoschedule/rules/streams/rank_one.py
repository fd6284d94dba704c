"""Tile products of rank one, whose column is the product of a matrix and a vector, without matrix units.

``s[m, l] = rdot(A[m, k], B[k, l], k); f[m, n] = rdot(s[m, l], C[l, n], l)`` with one ``l``: a program reads long pieces of a few rows of ``A``, as for a
matrix-vector product, and writes their multiples of the row of ``C``. 16100 x 3730 by 200 columns took 83 us in tiles for the matrix units, 61 so, and
63 in two kernels (bfloat16, an H100).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..product_sides import main_product
from ..reduction import approximations
from .matrix_vector import FULL, PIECE, SHORTEST, WARPS
from .streamed_operands import sides_of_largest

WIDEST = 1024  #: columns of the result that each program writes whole


def rank_one_configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the choices for a kernel whose last product has one term, which is a product along the contiguous dimension of a matrix; none for any other."""
    made = [m for m in members if shape.dots(m)]
    others = any(isinstance(n, ex.Reduce) for m in members for n in shape.algorithm[m].expr.walk())
    if others or len(made) != 2 or any(len(shape.dots(m)) != 1 for m in made) or shape.has_products_alone(root, members):
        return
    main, outer = main_product(shape, members)
    (inner,) = (shape.dots(m)[0] for m in made if m != main)
    own = shape.algorithm[root].labels
    if main != root or any(shape.sizes[x] != 1 for x in outer.labels) or {*inner.labels} & {*own}:
        return
    along, across = sides_of_largest(shape, root, members, (*own, *inner.labels))
    columns = [x for x in own if x not in across]
    if len(along) != 1 or along[0] not in inner.labels or not {*across} & {*own} or shape.sizes[along[0]] < SHORTEST:
        return
    if {*columns} & ex.free_labels(inner) or math.prod(next_power_of_two(shape.sizes[x]) for x in columns) > WIDEST:
        return
    (terms,), (row,) = along, across
    block = next((n for n in (4, 2) if shape.programs({row: n}) >= FULL * shape.target.multiprocessors), 1)
    step = min(next_power_of_two(shape.sizes[terms]), PIECE // max(1, shape.itemsize))
    tile = dict.fromkeys((*outer.labels, *inner.labels), 1) | dict.fromkeys(columns, 0) | {row: block, terms: step}
    yield shape.config(root, {row: block}, tile, WARPS, 1, approximations=approximations(shape, members))
