"""Specialize interior blocks: a block that lies inside its extent runs without masks.

Before::

    x_ok = (x < size_x) | EVEN_x
    A = tl.load(A_ptr + x * A_stride_x, mask=x_ok, other=0.0)
    tl.store(f_ptr + x * f_stride_x, 2 * A, mask=x_ok)

After::

    if EVEN_x or (block_x + 1) * BLOCK_x <= size_x:
        A = tl.load(A_ptr + x * A_stride_x)
        tl.store(f_ptr + x * f_stride_x, 2 * A)
    else:
        x_ok = x < size_x
        ...

Triton vectorizes a load where neighbouring elements share a mask. For an extent that may be odd it cannot prove this for any pair, and
moves single elements in every block because of the last one. The pass applies to kernels of one label whose tensors have one dimension.
Rows of other tensors do not start at multiples of 16 bytes where the extent is odd, and are moved by single elements anyway.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir import nest
from ...ir.axes import swap_axis
from ...ir.nest import Axis, Guard, Index, InteriorOrEdge, Kernel, Let, Load, Position, Start, Store


def specialize_interior_blocks(kernel: Kernel) -> Kernel:
    """Give interior blocks a body without masks, in an elementwise kernel over one label."""
    axis = _only_axis(kernel)
    if axis is None:
        return kernel
    rest = tuple(s for s in kernel.body if not isinstance(s, Index))
    index = next(s for s in kernel.body if isinstance(s, Index))
    return replace(kernel, body=(index, InteriorOrEdge(axis, swap_axis(rest, axis, replace(axis, exact=True)), rest)))


def _only_axis(kernel: Kernel) -> Axis | None:
    """Return the block axis of a loop-free kernel if it is the only axis, and the only dimension of every tensor that it indexes."""
    axes = [s.axis for s in kernel.body if isinstance(s, Index)]
    straight = all(isinstance(s, (Index, Let, Store)) for s in kernel.body)
    if not straight or len(axes) != 1 or [(g.label, g.parts) for g in kernel.grid] != [(axes[0].label, 0)]:
        return None
    axis = axes[0]
    nodes = [n for value in nest.values(kernel.body) for n in value.walk()]
    loads = [n.index for n in nodes if isinstance(n, Load) and any(axis in nest.axes_of(i) for i in n.index)]
    alone = all(len(index) == 1 for index in loads) and all(s.index == (Position(axis),) for s in kernel.body if isinstance(s, Store))
    plain = not (axis.scalar or axis.exact or axis.padded) and not any(isinstance(n, (Guard, Start)) for n in nodes)
    return axis if alone and plain else None
