"""Build the terms of a reduction: neutral outside the extents, over all of its labels, for the matrix units or elementwise."""

from __future__ import annotations

import math

from ..ir import nest
from ..ir.nest import WHOLE, Axis, Guard, Op, Position, Tile, TileReduce

NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf, "shift": -math.inf}
MIN_DOT = 16  #: smallest side of a tile that the matrix units take


def broadcast_over(terms: Tile, axes: tuple[Axis, ...], neutral: float) -> Tile:
    """Broadcast ``terms`` over all of ``axes``: a Func may have a label that its value does not vary with."""
    return repeated(terms, tuple(a for a in axes if a not in nest.axes_of(terms)), neutral)


def repeated(terms: Tile, axes: tuple[Axis, ...], neutral: float) -> Tile:
    """Repeat ``terms`` along ``axes``, as a tile that has these axes."""
    for axis in axes:
        if not axis.scalar:
            terms = Op("where", (Op(">=", (Position(axis), nest.Const(0))), terms, nest.Const(neutral)))
    return terms


def guarded(terms: Tile, axes: tuple[Axis, ...], neutral: float) -> Tile:
    inexact = tuple(a for a in axes if not a.exact)
    return Guard(terms, inexact, neutral) if inexact else terms


def reduced(kind: str, terms: Tile, axes: tuple[Axis, ...]) -> Tile:
    present = tuple(a for a in axes if a in nest.axes_of(terms))
    return TileReduce("max" if kind == "shift" else kind, terms, present, keeps_nan=kind != "shift") if present else terms


def fits_matrix_units(left: Tile, right: Tile, axes: tuple[Axis, ...]) -> bool:
    """Return whether both tiles are matrices, without batch, with every side at least MIN_DOT (whole extents are padded to that)."""
    a, b, over = nest.axes_of(left), nest.axes_of(right), {x for x in axes if not x.scalar}
    sides = (a - b - over, b - a - over, over)
    return a & b == over and all(len(s) == 1 and all(x.tile == WHOLE or x.tile >= MIN_DOT for x in s) for s in sides)
