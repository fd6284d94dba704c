"""Index arithmetic that is one thing for a whole tile."""

from __future__ import annotations

from ..lang.algorithm import Algorithm
from .nest import Const, Op, Position, Tile


def quotient(a: Tile, b: Tile, algorithm: Algorithm) -> Tile:
    """``a // b``; of ``(c * i + j) // c``, where j stays below c, just ``i``."""
    match a, b:
        case Op("+", (Op("*", (Const(c), i)), Position(axis))), Const(size) if (
            c == size and 0 < (algorithm.constant_extent(axis.label) or size + 1) <= size
        ):
            return i
    return Op("//", (a, b))


def inside_one(at: Tile, block: int, size: int | float) -> bool:
    """Whether a block of ``block`` elements lies in one group of ``size``, so that the number of its group is one for all of the tile."""
    return isinstance(at, Position) and not at.axis.scalar and block > 0 and size % block == 0 and at.axis.tile >= block
