"""Offsets of loads that do not change from step to step, computed before the loop.

Before::

    for k_start in range(0, size_k, TILE_k):
        k = k_start + tl.arange(0, TILE_k)
        A = tl.load(A_ptr + x[:, None] * A_stride_x + k[None, :] * A_stride_k)

After::

    k_tile = tl.arange(0, TILE_k)
    A_at = x[:, None] * A_stride_x + k_tile[None, :] * A_stride_k
    for k_start in range(0, size_k, TILE_k):
        A = tl.load(A_ptr + (A_at + k_start * A_stride_k))

In loops that do nothing but multiply what they load: there the instructions between two loads of a step keep the matrix
units waiting. Measured on an H200 (benchmarks/h200_published_matmul.json): 128x128x32 at 4096^3 4 to 6 percent faster, at
4095x4097x1000 20 percent; attention's loops did not gain.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ir.nest import Axis, Index, Kernel, Let, Load, Local, Loop, Position, Statement, TileDot, statements, values


def steady_loads(kernel: Kernel) -> dict[int, Axis]:
    """id of a load -> the axis of the loop around it, where the rest of its index is fixed in that loop."""
    return dict(_of(kernel.body))


def _of(body: tuple[Statement, ...]) -> Iterable[tuple[int, Axis]]:
    for loop in (s for s in body if isinstance(s, Loop)):
        yield from _of(loop.body)
        if loop.within != "extent" or loop.axis.scalar or not _multiplies_loads(loop.body):
            continue
        inside = {s.axis for s in statements(loop.body) if isinstance(s, Index)} - {loop.axis}
        names = {s.name for s in statements(loop.body) if hasattr(s, "name")}
        for s in loop.body:
            if isinstance(s, Let) and isinstance(s.value, Load) and _steady(s.value, loop.axis, inside, names):
                yield id(s), loop.axis


def _multiplies_loads(body: tuple[Statement, ...]) -> bool:
    """Whether there are matrix products in ``body``, and all of what it loads."""
    loads = {s.name for s in statements(body) if isinstance(s, Let) and isinstance(s.value, Load)}
    sides = [side for v in values(body) for n in v.walk() if isinstance(n, TileDot) for side in (n.left, n.right)]
    return bool(sides) and all(isinstance(side, Local) and side.name in loads for side in sides)


def _steady(load: Load, axis: Axis, inside: set[Axis], names: set[str]) -> bool:
    """Whether the index has ``axis`` by itself, and beside it nothing that changes in the loop."""
    rest = [n for i in load.index if i != Position(axis) for n in i.walk()]
    moving = any(isinstance(n, Local) and n.name in names or isinstance(n, Position) and n.axis in inside | {axis} for n in rest)
    return Position(axis) in load.index and not load.checked and not moving
