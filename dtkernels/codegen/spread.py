"""Cutting the merge of a split reduction over programs, where the programs before it hold whole rows.

Before, one program for everything::

    y = all of it
    for part in 0 .. 256:                    acc[y] <- acc[y] + acc_part[part, y]
    f[y] := acc[y]

After, one for every 32 columns, each taking 32 parts at a time::

    y = 32 of a block
    for part in 0 .. 256 by 32:              acc[part, y] <- acc[part, y] + acc_part[part, y]
    f[y] := sum(acc[part, y], part)

The order is fixed as before: which parts meet in which element, and the tree that ``sum`` adds them up by.
"""

from __future__ import annotations

from dataclasses import replace

from . import nest
from .nest import (
    WHOLE,
    Accumulator,
    Assign,
    Axis,
    Guard,
    Index,
    Let,
    Local,
    Loop,
    Position,
    Start,
    Statement,
    Step,
    Store,
    Tile,
    TileReduce,
)

COLUMNS = 32  #: of a program: 128 bytes of a part
PARTS = 32  #: most parts that one step takes


def at_once(body: tuple[Statement, ...], parts: int) -> int:
    """How many parts of an unsplit ``body`` one step of its merge takes: 1 where its blocks are programs already."""
    relative = any(isinstance(s, Accumulator) and s.moves for s in nest.statements(body))
    wholes = [s.axis for s in body if isinstance(s, Index) and s.axis.tile == WHOLE]
    stored = [s for s in body if isinstance(s, Store)]
    kept = any(all(Position(a) in s.index for s in stored) for a in wholes)
    return 1 if relative or not kept or _has_blocks(body) else min(PARTS, parts & -parts)


def spread(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The body with blocks along whole extents, if it has no blocks and does the same along every element of them."""
    if _has_blocks(body):
        return body
    for axis in [s.axis for s in body if isinstance(s, Index) and s.axis.tile == WHOLE]:
        reduced = any(isinstance(n, (TileReduce, nest.TileDot)) and axis in n.axes for v in nest.values(body) for n in v.walk())
        if not reduced and all(Position(axis) in s.index for s in nest.statements(body) if isinstance(s, Store)):
            body = _with_axis(body, axis, replace(axis, tile=COLUMNS))
    return body


def _has_blocks(body: tuple[Statement, ...]) -> bool:
    return any(isinstance(s, Index) and s.start.startswith("block") for s in nest.statements(body))


def _with_axis(body: tuple[Statement, ...], old: Axis, new: Axis) -> tuple[Statement, ...]:
    """The body with a block of ``new`` where all of ``old`` was."""

    def axes(found: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(new if a == old else a for a in found)

    def change(tile: Tile) -> Tile:
        match tile:
            case Position(axis) | Start(axis) | Step(axis) if axis == old:
                return replace(tile, axis=new)
            case Local() | Guard():
                return replace(tile, axes=axes(tile.axes))
        return tile.rebuild(lambda child: child)

    def one(s: Statement) -> Statement:
        match s:
            case Index(axis, _):
                return Index(new, "block") if axis == old else s
            case Loop():
                return replace(s, body=tuple(one(x) for x in s.body))
            case Store():
                return replace(s, index=tuple(i.transform(change) for i in s.index), value=s.value.transform(change), axes=axes(s.axes))
            case Let() | Assign():
                return replace(s, value=s.value.transform(change), axes=axes(s.axes))
            case Accumulator():
                return replace(s, axes=axes(s.axes))
        return s

    return tuple(one(s) for s in body)
