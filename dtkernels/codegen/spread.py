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
from .nest import WHOLE, Accumulator, Index, Position, Statement, Store, TileReduce
from .ranges import swap_axis

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
            block = replace(axis, tile=COLUMNS)
            body = tuple(Index(block, "block") if isinstance(s, Index) and s.axis == block else s for s in swap_axis(body, axis, block))
    return body


def _has_blocks(body: tuple[Statement, ...]) -> bool:
    return any(isinstance(s, Index) and s.start.startswith("block") for s in nest.statements(body))
