"""Tell Triton along which dimension of a tile elements lie next to one another in memory, where it cannot see that.

Triton gives neighbours to the threads of a warp. Of ``2 * x``, ``x // 2``, ``len(x) - x``, and of the quotients and remainders of labels that are
counted together, it sees none, and Triton 3.6 then takes the tile's first dimension: stores of 64 rows of 128 pixels took 60 ns a warp and
multiprocessor on an H200, along the pixels 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ir import nest
from ...ir.integer_math import addends
from ...ir.nest import Axis, Const, Op, Position, Statement, Tile, TileReduce, values

if TYPE_CHECKING:
    from .kernel import _KernelPrinter

NEAR = 8  #: elements between neighbours that are worth a hint


def in_lane_order(pointer: str, buffer: str, index: tuple[Tile, ...], shape: tuple[Axis, ...], k: _KernelPrinter) -> str:
    """Return the pointers of a tile of the axes ``shape``, with a hint if Triton needs one. An input may lie otherwise: Triton sees the strides that are 1."""
    if len(shape) < 2 or not index:
        return pointer
    kinds = {a: _kind(index, a) for a in shape if a in nest.axes_of(index[-1])}
    if "next" in kinds.values():
        return pointer
    hidden = sorted((a for a, kind in kinds.items() if kind), key=lambda a: a.label not in k.blocks)
    if not hidden or kinds[hidden[0]] == "near" and hidden[0] in _reduced_in_rows(k.kernel.body):
        return pointer
    # near, but not next to one another: no vector may be loaded
    apart = f"tl.multiple_of({pointer}, [{', '.join('1' for _ in shape)}])" if kinds[hidden[0]] == "near" else pointer
    hinted = f"tl.max_contiguous({apart}, [{', '.join(k.tile(a) if a == hidden[0] else '1' for a in shape)}])"
    return f"({hinted} if {k.unit_constant(buffer)} else {pointer})" if buffer in k.algorithm.inputs else hinted


def _reduced_in_rows(body: tuple[Statement, ...]) -> set[Axis]:
    """Return the axes along which rows of a tile are reduced. Short rows are reduced faster by one thread each: 404 us for 716 on an H200, of 64 elements in turn from two phases."""
    found: set[Axis] = set()
    for n in (n for value in values(body) for n in value.walk() if isinstance(n, TileReduce)):
        if any(not a.scalar and a not in n.axes for a in nest.axes_of(n.arg)):
            found |= {*n.axes}
    return found


def _kind(index: tuple[Tile, ...], axis: Axis) -> str:
    """Return how elements along an axis lie, by the last dimension: "next" to one another for Triton too, "counted" so through remainders, "near", or "" for none."""
    parts = [(sign, a) for sign, a in addends(index[-1]) if axis in nest.axes_of(a)]
    if len(parts) != 1:
        return ""
    sign, part = parts[0]
    if part == Position(axis):
        return "next" if sign > 0 else "near"
    match part:
        case Op("*", (whole, Const(step)) | (Const(step), whole)) if abs(step) <= NEAR and _is_last_part(whole, axis):
            return "near"
        case Op("//", (_, Const(by))) if by <= NEAR:
            return "near"
    return "counted" if sign > 0 and _counted_together(index, axis) else ""


def _counted_together(index: tuple[Tile, ...], axis: Axis) -> bool:
    """Return whether all that varies along the axis are quotients and remainders of its index by extents, the last dimension a remainder.

    Vectors are right then: Triton makes none longer than what divides the last extent, and no index passes the end of a dimension within one.
    """
    parts = [a for i in index for sign, a in addends(i) if axis in nest.axes_of(a)]
    return all(_is_part(a, axis) for a in parts) and isinstance(parts[-1], Op) and parts[-1].fn == "%"


def _is_last_part(index: Tile, axis: Axis) -> bool:
    """Return whether neighbours along the axis differ by one here: its index, or a remainder of it."""
    return index == Position(axis) or isinstance(index, Op) and index.fn == "%" and _is_last_part(index.args[0], axis) and not nest.axes_of(index.args[1])


def _is_part(index: Tile, axis: Axis) -> bool:
    match index:
        case Position(own):
            return own == axis
        case Op("//" | "%", (whole, by)):
            return not isinstance(by, Const) and not nest.axes_of(by) and _is_part(whole, axis)
    return False
