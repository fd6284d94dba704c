"""What the elements of a tile are: truth values, integers, or numbers."""

from __future__ import annotations

from collections.abc import Iterable

from ..lang.expr import COMPARISONS
from .nest import Const, Load, Local, Op, Position, Scalar, Size, Start, Step, Tile, TileReduce

_ARITHMETIC = frozenset({"+", "-", "*", "/", "//", "%", "neg", "abs", "maximum", "minimum", "min", "max"})


def kind_of(tile: Tile) -> str:
    """``boolean``, ``integer`` or ``number``."""
    return "boolean" if is_boolean(tile) else "integer" if is_integer(tile) else "number"


def is_boolean(tile: Tile) -> bool:
    """Whether the elements of ``tile`` are truth values."""
    match tile:
        case Const(value):
            return isinstance(value, bool)
        case Local(_, _, kind):
            return kind == "boolean"
        case Op("where", (_, a, _)):
            return is_boolean(a)
        case Op(fn, _):
            return fn in ("and", "or", "not", *COMPARISONS)
    return False


def is_integer(tile: Tile) -> bool:
    """Whether the elements are integers: indices, extents, integer constants and arithmetic on them."""
    match tile:
        case Const(value):
            return type(value) is int
        case Position() | Size() | Start() | Step() | Op("floor_to_int" | "ceil_to_int", _):
            return True
        case Scalar(_, integer):
            return integer
        case Local(_, _, kind):
            return kind == "integer"
        case Load():
            return tile.whole
        case Op("where", (_, a, b)):
            return is_integer(a) and is_integer(b)
        case Op(fn, args):
            return fn in ("+", "-", "*", "//", "%", "neg", "maximum", "minimum", "abs", "min", "max", "cdiv") and all(
                is_integer(a) for a in args
            )
    return False


def whole_quotient(tile: Tile) -> Tile:
    """``tile``; the floor of a quotient of whole numbers as their whole quotient."""
    match tile:
        case Op("floor", (Op("/", (a, b)),)) if is_integer(a) and is_integer(b):
            return Op("//", (a, b))
    return tile


def never_negative(tile: Tile) -> bool:
    """Whether an index is known to be at least 0. A scalar that divides is taken to be positive."""
    match tile:
        case Position() | Size() | Start() | Step():
            return True
        case Const(value):
            return value >= 0
        case Op("+" | "*" | "min", args):
            return all(never_negative(a) for a in args)
        case Op("max", args):
            return any(never_negative(a) for a in args)
        case Op("%", (_, b)):
            return isinstance(b, Scalar) or never_negative(b)
        case Op("//", (a, b)):
            return never_negative(a) and (isinstance(b, Scalar) or never_negative(b))
    return False


def outgrown(nodes: Iterable[Tile], integers: frozenset[str]) -> frozenset[str]:
    """Those of the loaded ``integers`` whose own type may not hold what is computed with them.

    Triton computes in the type of the tensor: ``2 * t`` of an int8 wraps around, and ``t - 1`` of a uint8 is 255 for 0.
    """
    found: set[str] = set()
    for n in nodes:
        match n:
            case Op(fn, args) if fn in _ARITHMETIC or fn in COMPARISONS and any(_wide(a) for a in args):
                found |= {a.name for a in args if isinstance(a, Local)}
            case TileReduce("sum", Local(name), _):
                found.add(name)
    return integers & found


def _wide(tile: Tile) -> bool:
    return isinstance(tile, Const) and not -128 <= tile.value <= 127
