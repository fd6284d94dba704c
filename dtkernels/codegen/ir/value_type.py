"""Classify the elements of a tile: booleans, integers, or numbers."""

from __future__ import annotations

from collections.abc import Iterable

from ...lang.expr import BOOLEAN, COMPARISONS, INTEGERS
from .nest import BlockNumber, Const, Guard, Load, Local, Op, Position, Repeat, Scalar, Size, Start, Step, Tile, TileReduce

_ARITHMETIC = frozenset({"+", "-", "*", "/", "//", "%", "<<", "neg", "abs", "maximum", "minimum", "min", "max"})


def value_type(tile: Tile) -> str:
    """Return ``boolean``, ``integer`` or ``number``."""
    return "boolean" if is_boolean(tile) else "integer" if is_integer(tile) else "number"


def is_boolean(tile: Tile) -> bool:
    """Return whether the elements of ``tile`` are booleans."""
    match tile:
        case Const(value):
            return isinstance(value, bool)
        case Local(_, _, kind):
            return kind == "boolean"
        case Op("where", (_, a, _)):
            return is_boolean(a)
        case Op(fn, _):
            return fn == "cast:bool" or fn in ("and", "or", "not", *COMPARISONS) or fn in BOOLEAN
    return False


def is_integer(tile: Tile) -> bool:
    """Return whether the elements are integers: indices, extents, integer constants and arithmetic on them."""
    match tile:
        case Const(value):
            return type(value) is int
        case Position() | Size() | Start() | BlockNumber() | Step() | Op("floor_to_int" | "ceil_to_int" | "key" | "place" | "largest_key" | "wide", _) | TileReduce("key", _, _):
            return True
        case Scalar(_, integer):
            return integer
        case Local(_, _, kind):
            return kind == "integer"
        case Load():
            return tile.whole
        case Repeat(arg):
            return is_integer(arg)
        case Guard(arg, _, neutral):
            return type(neutral) is int and is_integer(arg)
        case Op("where", (_, a, b)):
            return is_integer(a) and is_integer(b)
        case Op(fn, args):
            if fn.startswith("cast:"):
                return fn[5:] in INTEGERS and fn != "cast:bool"
            return fn in ("+", "-", "*", "//", "%", "&", "|", "^", "~", "<<", ">>", "neg", "maximum", "minimum", "abs", "min", "max", "cdiv") and all(
                is_integer(a) for a in args
            )
    return False


def whole_quotient(tile: Tile) -> Tile:
    """Rewrite the floor of a quotient of integers as an integer division."""
    match tile:
        case Op("floor", (Op("/", (a, b)),)) if is_integer(a) and is_integer(b):
            return Op("//", (a, b))
    return tile


def never_negative(tile: Tile) -> bool:
    """Return whether an index is known to be at least 0. A scalar divisor is assumed to be positive."""
    match tile:
        case Position() | Size() | Start() | BlockNumber() | Step():
            return True
        case Const(value):
            return value >= 0
        case Op("-", (Position(axis), Start(own))) if axis == own:
            return True
        case Op("+" | "*" | "min", args):
            return all(never_negative(a) for a in args)
        case Op("&", args):
            return any(never_negative(a) for a in args)
        case Op("max", args):
            return any(never_negative(a) for a in args)
        case Op("%", (_, b)):
            return isinstance(b, Scalar) or never_negative(b)
        case Op("//", (a, b)):
            return never_negative(a) and (isinstance(b, Scalar) or never_negative(b))
    return False


def overflowing_integers(nodes: Iterable[Tile], integers: frozenset[str]) -> frozenset[str]:
    """Return those of the loaded ``integers`` whose dtype may not hold the results of arithmetic on them.

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
