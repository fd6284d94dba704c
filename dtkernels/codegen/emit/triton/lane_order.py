"""Tell Triton along which dimension of a tile elements follow one another in memory, where it cannot see that.

Triton gives consecutive elements to the threads of a warp. Through a quotient and a remainder of an index it sees none, and Triton 3.6 then takes the
tile's first dimension: stores of 64 rows of 128 pixels took 60 ns a warp and multiprocessor on an H200, 4 along the pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ...ir import nest
from ...ir.nest import Axis, Const, Op, Position, Tile


def in_lane_order(pointer: str, index: tuple[Tile, ...], shape: tuple[Axis, ...], blocked: Collection[str], tile: Callable[[Axis], str]) -> str:
    """Return the pointers of a tile of two dimensions or more, with a hint if Triton needs one.

    ``shape``: the axes of the tile, in order; ``blocked``: the labels that the kernel's blocks are of; ``tile``: the constant of an axis.
    """
    axis = _hidden_axis(index, shape, blocked)
    if axis is None:
        return pointer
    if _interleaved(index, axis):  # neighbours are in two places: no vector may be loaded
        pointer = f"tl.multiple_of({pointer}, [{', '.join('1' for _ in shape)}])"
    elif not _counted_together(index, axis):
        return pointer
    return f"tl.max_contiguous({pointer}, [{', '.join(tile(a) if a == axis else '1' for a in shape)}])"


def _hidden_axis(index: tuple[Tile, ...], shape: tuple[Axis, ...], blocked: Collection[str]) -> Axis | None:
    """Return the axis that the last dimension of a tensor goes along only within a quotient or remainder; one of a block before others."""
    if len(shape) < 2 or not index:
        return None
    divided = [a for n in _divisions(index[-1]) for a in shape if a in nest.axes_of(n)]
    plain = [a for a in shape if a in nest.axes_of(index[-1]) and a not in divided]
    if plain or not divided:
        return None
    return next((a for a in divided if a.label in blocked), divided[0])


def _divisions(index: Tile) -> Iterator[Op]:
    yield from (n for n in index.walk() if isinstance(n, Op) and n.fn in ("//", "%"))


def _interleaved(index: tuple[Tile, ...], axis: Axis) -> bool:
    """Return whether the last dimension goes along a quotient by a number, and another along the remainder: the phases of a transposed convolution."""
    quotients = {n.args for n in _divisions(index[-1]) if n.fn == "//" and isinstance(n.args[1], Const) and axis in nest.axes_of(n)}
    return any(n.fn == "%" and n.args in quotients for i in index[:-1] for n in _divisions(i))


def _counted_together(index: tuple[Tile, ...], axis: Axis) -> bool:
    """Return whether all that varies along the axis are quotients and remainders of its index by extents, the last dimension a remainder.

    Vectors are right then: Triton makes none longer than what divides the last extent, and no index passes the end of a dimension within one.
    """
    varying = [i for i in index if axis in nest.axes_of(i)]
    parts = [_without_uniform(i, axis) for i in varying]
    return all(p is not None and _is_part(p, axis) for p in parts) and isinstance(parts[-1], Op) and parts[-1].fn == "%"


def _without_uniform(index: Tile, axis: Axis) -> Tile | None:
    """Return the one addend that varies along the axis; None where several do."""
    match index:
        case Op("+", (a, b)):
            sides = [s for s in (a, b) if axis in nest.axes_of(s)]
            return _without_uniform(sides[0], axis) if len(sides) == 1 else None
        case Op("-", (a, b)) if axis not in nest.axes_of(b):
            return _without_uniform(a, axis)
    return index


def _is_part(index: Tile, axis: Axis) -> bool:
    match index:
        case Position(own):
            return own == axis
        case Op("//" | "%", (whole, by)):
            return not isinstance(by, Const) and not nest.axes_of(by) and _is_part(whole, axis)
    return False
