"""Integer arithmetic on tiles: take sums apart, simplify quotients, and avoid divisions where a comparison suffices."""

from __future__ import annotations

from collections.abc import Iterator

from ...algebra.rules.condition_folding import fold_condition
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from .nest import Const, Op, Position, Tile
from .value_type import is_integer, never_negative


def addends(index: Tile, sign: int = 1) -> Iterator[tuple[int, Tile]]:
    """Yield what a sum is made of, each with its sign."""
    match index:
        case Op("+" | "-" as op, (a, b)):
            yield from addends(a, sign)
            yield from addends(b, sign if op == "+" else -sign)
        case Op("neg", (a,)):
            yield from addends(a, -sign)
        case _:
            yield sign, index


def quotient(a: Tile, b: Tile, algorithm: Algorithm) -> Tile:
    """Return ``a // b``; ``(c * i + j) // c`` is ``i`` where j is below c."""
    match a, b:
        case Op("+", (Op("*", (Const(c), i)), Position(axis))), Const(size) if (
            c == size and 0 < (algorithm.constant_extent(axis.label) or size + 1) <= size
        ):
            return i
    return Op("//", (a, b))


def block_is_in_one_group(at: Tile, block: int, size: int | float) -> bool:
    """Return whether a block of ``block`` elements is inside one group of ``size``, so that the group number is the same for the whole tile."""
    return isinstance(at, Position) and not at.axis.scalar and block > 0 and size % block == 0 and at.axis.tile >= block


def arithmetic(expr: ex.Expr, a: Tile, b: Tile) -> Tile:
    """Return the operator ``expr`` applied to ``a`` and ``b``, in a cheaper form where both are integers."""
    match expr:
        case ex.Binary("%", moved, ex.Len()) if (turns := out_of_range_sides(moved, expr.right)) is not None:
            return wrapped(a, b, *turns)
        case ex.Binary("<" | ">" | "<=" | ">=" as op, _, _):
            return comparison(op, a, b)
    return Op(expr.op, (a, b))  # type: ignore[attr-defined]


def comparison(op: str, left: Tile, right: Tile) -> Tile:
    """Return a comparison. An integer is compared with a quotient of integers without floats.

    Before: ``d < len(d) / 2``, both as float32 for each element  After: ``d < len(d) - len(d) // 2``
    """
    turned = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
    match left, right:
        case Op("/", _), _ if is_integer(right):
            return comparison(turned[op], right, left)
        case _, Op("/", (n, Const(k))) if is_integer(left) and is_integer(n) and never_negative(n) and type(k) is int and k > 0:
            down = Op("//", (n, Const(k)))
            up = Op("-", (n, down)) if k == 2 else Op("cdiv", (n, Const(k)))  # Triton infers that half of a multiple of 16 is a multiple of 8
            return Op(op, (left, up if op in ("<", ">=") else down))
    return Op(op, (left, right))


def out_of_range_sides(at: ex.Expr, extent: ex.Expr) -> tuple[bool, bool] | None:
    """Return whether an index shifted along an extent can be (below 0, past the end) by less than one extent; None if unknown."""
    zero = ex.Const(0)

    def holds_everywhere(op: str, left: ex.Expr, right: ex.Expr) -> bool:
        return fold_condition(ex.Binary(op, left, right)) == ex.Const(True)

    if not (holds_everywhere(">=", ex.Binary("+", at, extent), zero) and holds_everywhere("<", at, ex.Binary("*", ex.Const(2), extent))):
        return None
    return not holds_everywhere(">=", at, zero), not holds_everywhere("<", at, extent)


def wrapped(at: Tile, extent: Tile, below: bool, past: bool) -> Tile:
    """Return ``at % extent`` without a division, for an index that leaves its extent by less than another one.

    Before: ``(d + len(d) // 2) % len(d)``  After: ``where(d + len(d) // 2 >= len(d), d + len(d) // 2 - len(d), d + len(d) // 2)``
    """
    result = at
    if past:
        result = Op("where", (Op(">=", (at, extent)), Op("-", (at, extent)), result))
    if below:
        result = Op("where", (Op("<", (at, Const(0))), Op("+", (at, extent)), result))
    return result
