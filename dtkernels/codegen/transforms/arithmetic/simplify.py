"""Simplify tile expressions, and prove that one step of a loop changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

from ....lang.expr import DTYPES
from ...ir.nest import Accumulator, Assign, Const, Guard, Let, Load, Local, Loop, Op, Statement, Store, Tile, TileDot, TileReduce, axes_of
from ...lower.reduction_terms import LEAST_KEY

TRUE, FALSE = Const(True), Const(False)


def simplified(tile: Tile) -> Tile:
    """Drop the choices in ``tile`` that constants decide."""
    match tile:
        case Op("and", (a, b)):
            return FALSE if FALSE in (a, b) else b if a == TRUE else a if b == TRUE else tile
        case Op("or", (a, b)):
            return TRUE if TRUE in (a, b) else b if a == FALSE else a if b == FALSE else tile
        case Op("not", (Const(bool(value)),)):
            return Const(not value)
        case Op("where", (Const(bool(value)), a, b)):
            return a if value else b
    return tile


def is_noop(body: tuple[Statement, ...], assume: Callable[[Tile], Tile]) -> bool:
    """Return whether a step of ``body`` leaves every accumulator and all memory unchanged; ``assume`` substitutes what is known in that step.

    Exact in real arithmetic: 0 times anything is 0. A factor ``exp(x - where(x > -inf, x, 0))`` on an accumulator is 1, unless nothing
    was accumulated yet: ``lower/reductions.py`` makes such factors only from running maxima.
    """
    values: dict[str, Tile] = {}
    inner: set[str] = set()

    def value(tile: Tile) -> Tile:
        return assume(tile).transform(lambda n: values.get(n.name, n) if isinstance(n, Local) else evaluated(n))

    def unchanged(statements: tuple[Statement, ...]) -> bool:
        for s in statements:
            if isinstance(s, Store) and not (s.onto not in ("", "elements", "elsewhere") and _is_constant(value(s.value), 0)) or isinstance(s, Loop) and not unchanged(s.body):
                return False
            if isinstance(s, Accumulator):
                inner.add(s.name)
            elif isinstance(s, Let) and not isinstance(s.value, Load):
                values[s.name] = value(s.value)
            elif isinstance(s, Assign) and s.name not in inner:
                new = value(s.value)
                if not (isinstance(new, Local) and new.name == s.name):
                    return False
        return True

    return unchanged(body)


def evaluated(tile: Tile) -> Tile:
    """Return ``tile`` as far as constants decide it, exact in real arithmetic."""
    tile = simplified(tile)
    match tile:
        case Guard(Const(value), _, neutral) if value == neutral:
            return tile.arg
        case TileReduce(kind, Const(value), _) if kind not in ("sum", "prod") or value == (0 if kind == "sum" else 1):
            return tile.arg
        case TileDot(a, b, _) if _is_constant(a, 0) or _is_constant(b, 0):
            return Const(0.0)
        case Op("where", (condition, a, b)) if _selects_by(a, condition) or _selects_by(b, condition):
            return evaluated(Op("where", (condition, _simplify_under_condition(condition, 1, a), _simplify_under_condition(condition, 2, b))))
        case Op(fn, args):
            return _simplify_op(tile, fn, args)
    return tile


def _simplify_under_condition(condition: Tile, side: int, tile: Tile) -> Tile:
    """Simplify ``tile`` inside a choice by ``condition``: nested choices by it are decided.

    Before: ``where(c, exp(where(c, -inf, 0)), 0)``  After: ``where(c, exp(-inf), 0)``
    """

    def chosen(node: Tile) -> Tile:
        return node.args[side] if isinstance(node, Op) and node.fn == "where" and node.args[0] == condition else node

    return tile.transform(chosen).transform(evaluated)


def _selects_by(tile: Tile, condition: Tile) -> bool:
    return any(isinstance(n, Op) and n.fn == "where" and n.args[0] == condition for n in tile.walk())


def _simplify_op(tile: Op, fn: str, args: tuple[Tile, ...]) -> Tile:
    match fn, args:
        case ("neg", (Const(value),)):
            return Const(-value)
        case ("exp" | "exp2", (a,)) if _is_constant(a, -math.inf):
            return Const(0.0)
        case ("*", (a, b)) if _is_constant(a, 0) or _is_constant(b, 0):
            return Const(0.0)
        case ("*", (a, b)) if _is_constant(b, 1):
            return a
        case ("largest_key", (a, Const(value))) if value == LEAST_KEY:
            return a
        case ("*", (a, Const(value))) if _is_constant(a, -math.inf) and value > 0:
            return a
        case ("*", (a, Op("exp", (d,)))) if _is_zero_shift(d):
            return a
        case ("/", (a, _)) if _is_constant(a, 0):
            return a
        case ("+" | "-", (a, _)) if isinstance(a, Const) and a.value in (math.inf, -math.inf):
            return a
        case ("+" | "-", (a, b)) if _is_constant(b, 0):
            return a
        case ("+", (a, b)) if _is_constant(a, 0):
            return b
        case ("maximum" | "largest", (a, b)) if _is_constant(a, -math.inf) or _is_constant(b, -math.inf):
            return b if _is_constant(a, -math.inf) else a
        case ("minimum", (a, b)) if _is_constant(a, math.inf) or _is_constant(b, math.inf):
            return b if _is_constant(a, math.inf) else a
        case ("where", (c, a, b)) if a == b and axes_of(c) <= axes_of(a) or isinstance(b, Const) and not isinstance(b.value, bool) and _is_constant(a, b.value):
            return a
        case (cast, (Const(value),)) if cast.startswith("cast:") and cast[5:] in DTYPES and (value == 0 or math.isinf(value)):  # others are rounded
            return Const(float(value))
    return tile


def _is_constant(tile: Tile, value: float) -> bool:
    return isinstance(tile, Const) and not isinstance(tile.value, bool) and tile.value == value


def _is_zero_shift(difference: Tile) -> bool:
    """Match ``x - where(x > -inf, x, 0)``, or a multiple of it."""
    match difference:
        case Op("*", (d, Const())):
            return _is_zero_shift(d)
        case Op("-", (x, Op("where", (Op(">", (a, low)), b, zero)))):
            return x == a == b and _is_constant(low, -math.inf) and _is_constant(zero, 0)
    return False
