"""Tile products whose sums have one term as what they are, elementwise products: no matrix unit is used.

``f[x, y] = rdot(A[x, k], B[k, y], k)`` with one ``k``. 13000 x 15000 took 196 us in tiles for the matrix units, whose results pass through shared memory,
120 in blocks of 32 x 256 by 4 warps and 128 in blocks of 8 x 512; 9001 x 12345 155, 104 and 101 (sigmoids of it in bfloat16, an H200). 2980 x 1625 took
10 to 11.5 in blocks of 2048 to 8192 elements by 2 to 8 warps, 12 to 14.4 by 16 and 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....lang import expr as ex
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..candidates.tile_space import tile_candidates, variants

MOST_WARPS = 8


def single_term_configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the choices for a kernel whose only sums are products of one term each; none for any other kernel."""
    dots = [d for m in members for d in shape.dots(m)]
    terms = {x for d in dots for x in d.labels}
    others = any(isinstance(n, ex.Reduce) for m in members for n in shape.algorithm[m].expr.walk())
    if not dots or others or any(shape.sizes[x] != 1 for x in terms):
        return
    for made in tile_candidates(shape, root, members):
        for config in (made, *variants(shape, root, members, made)):
            if config.warps <= MOST_WARPS:
                yield replace(config, tiles=tuple((x, 1 if x in terms else n) for x, n in config.tiles))
