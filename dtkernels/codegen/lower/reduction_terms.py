"""Build the terms of a reduction: neutral outside the extents, over all of its labels, for the matrix units or elementwise."""

from __future__ import annotations

import math

from ..held_terms import HELD_BY_WARP
from ..ir import nest
from ..ir.nest import WHOLE, Axis, Guard, Op, Position, Tile, TileDot, TileReduce

LEAST_KEY = -(2**63) + 2**32 - 1  #: below the key of every number; its place is 0
#: a partial result of no terms
NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf, "shift": -math.inf, "prod": 1.0, "argmax": LEAST_KEY, "argmin": LEAST_KEY}
#: the operator that combines two partial results
COMBINE = {"sum": "+", "max": "maximum", "min": "minimum", "shift": "largest", "prod": "*", "argmax": "largest_key", "argmin": "largest_key"}
#: that operator -> the reduction over the elements of a tile
TILE_KINDS = {"+": "sum", "maximum": "max", "minimum": "min", "largest": "max", "*": "prod", "largest_key": "key"}
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
    return TileReduce(TILE_KINDS[COMBINE[kind]], terms, present, keeps_nan=kind != "shift") if present else terms


def key(kind: str, value: Tile, places: tuple[Tile, ...], labels: tuple[str, ...]) -> Tile:
    """Return what a place is found by: 64 bits that are larger for a larger value, and of equal values for an earlier place.

    The largest key is that of the first largest value, whatever the order in which keys are compared. The smallest value is the largest of
    the negatives.
    """
    place = places[0]
    for label, after in zip(labels[1:], places[1:]):
        place = Op("+", (Op("*", (place, nest.Size(label))), after))
    return Op("key", (value if kind == "argmax" else Op("neg", (value,)), place))


def place_of(kind: str, found: Tile) -> Tile:
    """Return the value of a finished reduction: of a key, its place."""
    return Op("place", (found,)) if TILE_KINDS[COMBINE[kind]] == "key" else found


def fits_matrix_units(left: Tile, right: Tile, axes: tuple[Axis, ...]) -> bool:
    """Return whether both tiles are matrices, without batch, with every side at least MIN_DOT (whole extents are padded to that)."""
    a, b, over = nest.axes_of(left), nest.axes_of(right), {x for x in axes if not x.scalar}
    sides = (a - b - over, b - a - over, over)
    return a & b == over and all(len(s) == 1 and all(x.tile == WHOLE or x.tile >= MIN_DOT for x in s) for s in sides)


def accumulates_in_registers(terms: Tile, warps: int) -> bool:
    """Return whether the terms of a product without matrix units are added up over the steps each by itself, in registers.

    They are added to one another once, after the loop. Where there is no room for that, each step adds up its own.
    """
    tiles = [a.tile for a in nest.axes_of(terms)]
    return not isinstance(terms, TileDot) and WHOLE not in tiles and math.prod(tiles) <= HELD_BY_WARP * warps
