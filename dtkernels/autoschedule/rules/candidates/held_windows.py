"""Propose schedules of products that are read in windows and whose rows, such as the channels of a pixel, are reduced in the same kernel.

Before, tiles along one label, read as the caller laid them out::

    y[b, o, v, u] = rdot(X[b, c, v + r, u + s], W[o, c, r, s], c, r, s);        f[b, v, u] = rmin(y[b, o, v, u], o);
    y.fuse_at(f, o); f.block(b:1, v:1, u:128); f.tensorize(b:1, v:1, u:128, o:0, c:64, r:1, s:1);

After, as for a convolution alone (window_products.py), tiles over all positions, of copies in which channels lie contiguous::

    y.fuse_at(f, o); f.merge(b_v_u, b, v, u); f.block(b_v_u:128); f.tensorize(b_v_u:128, o:0, c:64, r:1, s:1); f.stage(X:c, W:c); f.specialize(r, s);
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ...cost.kernel_config import KernelConfig
from ...problem import WHOLE_SIDE, SchedulingProblem
from ..gemm_row_reduction import gemm_row_reduction_tiles, reduced_row
from .window_products import SHALLOW, TileSide, copies_of, loaded, slides_over, tile_sides

BLOCKS = ((64, 4), (128, 4), (128, 8), (256, 8))  #: positions, and warps
ELEMENTS = 128 * 256  #: of a product's tile, at most
DEPTH, STAGES = 64, 3


def held_window_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield schedules of a kernel that holds the rows of a product over windows and reduces them."""
    found, own = reduced_row(shape, root, members), shape.algorithm[root].labels
    if found is None or gemm_row_reduction_tiles(shape, root, members) is None or shape.itemsize == 1:
        return
    (main, row, (dot, *others)), size = found, shape.sizes[found[1]]
    reads = [a for side in (dot.left, dot.right) if (a := loaded(side)) is not None]
    if others or len(reads) < 2 or size > WHOLE_SIDE or not any(map(slides_over, reads)):
        return
    window = next(a for a in reads if slides_over(a))
    positions = [x for x in own if x != row and x in ex.free_labels(window)]
    if not positions or any(x not in positions and shape.sizes[x] > SHALLOW for x in own if x != row) or not {*positions} <= {*shape.algorithm[main].labels}:
        return
    columns = TileSide(shape, (row,), (row,))
    for position in tile_sides(shape, positions, dot, own[0]):
        for summed in tile_sides(shape, dot.labels, dot):
            copies = copies_of(shape, reads, (summed, columns, position), slides=True)
            if copies is not None:
                yield from _tiled(shape, root, position, row, summed, dot.labels, copies)


def _tiled(
    shape: SchedulingProblem, root: str, position: TileSide, row: str, summed: TileSide, labels: tuple[str, ...], copies: tuple[str, ...]
) -> Iterator[KernelConfig]:
    own, width = shape.algorithm[root].labels, max(16, next_power_of_two(shape.sizes[row]))
    shape = replace(shape, sizes={**shape.sizes, **{side.name: side.size for side in (position, summed)}})
    taps = [x for x in labels if x not in summed.labels]
    depth = max(16, min(DEPTH, next_power_of_two(summed.size)))
    for rows, warps in BLOCKS:
        if rows * width > ELEMENTS or rows > max(64, next_power_of_two(position.size)):
            continue
        block = {x: 1 for x in own if x != row and x not in position.labels} | {position.name: rows}
        tile = block | dict.fromkeys(taps, 1) | {row: 0, summed.name: depth}
        yield shape.config(
            root, block, tile, warps, STAGES, merged=(*position.merged, *summed.merged), staged=copies, constants=tuple(x for x in taps if shape.sizes[x] <= SHALLOW)
        )
