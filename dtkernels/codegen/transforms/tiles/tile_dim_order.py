"""Order tile dimensions so that values broadcast along one of them stay within a thread.

Before, for queries by heads, positions and columns, where ``cos`` is the same for all heads::

    rope_q[h, s, d] = Q[h, s, d] * cos[s, d]      threads lie along d, then h: cos is exchanged through shared memory

After::

    rope_q[s, h, d] = Q[s, h, d] * cos[s, d]      threads lie along d, then s: each has all heads of its positions, and reuses their cos

Triton distributes threads along the contiguous dimension first, then along the others from the left. A dimension that loads are broadcast
along therefore goes to the right of the others. Memory is accessed as before.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.nest import Axis, Kernel, Let, Load, Local, Loop, Statement, Store, Tile, TileDot, TileReduce, map_values, values
from ...lower.schedule_options import KernelOptions


def order_tile_dims(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Order the dimensions of elementwise tiles. Kernels with descriptors are left alone: a box keeps the order of its buffer."""
    return kernel if options.descriptors() else replace(kernel, body=ordered_for_broadcasts(kernel.body))


def ordered_for_broadcasts(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Order the dimensions of the tiles of ``body``, if it is elementwise, without loops, and at least three-dimensional."""
    stores = [s for s in body if isinstance(s, Store)]
    wide = max((s.axes for s in stores), key=len, default=())
    products = any(isinstance(n, (TileDot, TileReduce)) for v in values(body) for n in v.walk())
    if len(wide) < 3 or products or any(isinstance(s, Loop) for s in body):
        return body
    loads = [s.axes for s in body if isinstance(s, Let) and isinstance(s.value, Load) and set(s.axes) <= set(wide) and len(s.axes) > 1]
    lacking = {a: sum(a not in own for own in loads) for a in wide}
    order = (*sorted(wide[:-1], key=lacking.__getitem__), wide[-1])
    return body if order == wide else _ordered(body, order)


def _ordered(body: tuple[Statement, ...], order: tuple[Axis, ...]) -> tuple[Statement, ...]:
    place = {axis: i for i, axis in enumerate(order)}

    def sort(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(sorted(axes, key=lambda a: place.get(a, -1)))

    def change(tile: Tile) -> Tile:
        return replace(tile, axes=sort(tile.axes)) if isinstance(tile, Local) else tile

    def one(s: Statement) -> Statement:
        if isinstance(s, Store):  # where it stores may be loaded too: rows of a sum by an index
            return replace(s, axes=sort(s.axes), index=tuple(i.transform(change) for i in s.index))
        return replace(s, axes=sort(s.axes)) if isinstance(s, Let) else s

    return map_values(tuple(one(s) for s in body), lambda value: value.transform(change))
