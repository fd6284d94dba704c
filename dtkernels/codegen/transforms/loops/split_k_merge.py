"""Cutting the merge of a split reduction over programs, where those before it hold whole rows, or blocks too large to be few.

Before, one program for everything::

    y = all of it
    for part in 0 .. 256:                    acc[y] <- acc[y] + acc_part[part, y]
    f[y] := acc[y]

After, one for every 32 columns, each taking 32 parts at a time::

    y = 32 of a block
    for part in 0 .. 256 by 32:              acc[part, y] <- acc[part, y] + acc_part[part, y]
    f[y] := sum(acc[part, y], part)

So is a merge in blocks of columns: one program that goes through 256 parts of 768 columns takes longer than they took to make.
Other merges in blocks take smaller ones than the kernel before them, down to ``ELEMENTS``: that one's blocks are large so that
each reads an operand once, which nothing here does, and sixteen programs that add up 8 parts of 64 KiB take longer than their bytes.

A merge relative to a running maximum has small programs, ``ROWS`` by ``COLUMNS``, however wide the rows: one query's heads are few, and
eight programs that go through 32 parts of 16 rows one after another take longer than the parts took. Each takes as many parts at a time as
make ``LIVE`` elements, so that their loads are on their way together, and keeps a maximum for each of these: what is left after the last
step is joined once, relative to the largest. From part to part instead every step would wait for memory, and for the step before it.

The order is fixed as before: which parts meet in which element, and the tree that ``sum`` adds them up by.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...ir import nest
from ...ir.axes import swap_axis
from ...ir.nest import WHOLE, Accumulator, Axis, Index, Loop, Position, Statement, Store, TileReduce

COLUMNS = 32  #: of a program: 128 bytes of a part
ROWS = 4  #: of a program that goes from part to part, where those before it were padded for a product
PARTS = 32  #: most parts that one step takes
LIVE = 4096  #: elements of parts that such a program has at once
A_WARP = 2048  #: of them, to a warp
ELEMENTS = 2048  #: of a program's block, at most if that leaves COLUMNS of each label
LENGTH = 64  #: what a whole extent beside blocks is taken to be


def parts_at_once(body: tuple[Statement, ...], parts: int) -> int:
    """How many parts of an unsplit ``body`` one step of its merge takes: 1 where its blocks are programs already, and large."""
    stored = [s for s in body if isinstance(s, Store)]
    if _relative(body):
        return max(1, min(PARTS, parts & -parts, 1 << (LIVE // _held(body)).bit_length() >> 1))
    if _has_blocks(body):
        kept = all(len(wide := [a for a in s.axes if not a.scalar]) == 1 and wide[0].tile != WHOLE for s in stored)
    else:
        wholes = [s.axis for s in body if isinstance(s, Index) and s.axis.tile == WHOLE]
        kept = any(all(Position(a) in s.index for s in stored) for a in wholes)
    return min(PARTS, parts & -parts) if kept and stored else 1


def block_merge(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The body with blocks along whole extents, if it has no blocks and does the same along every element of them."""
    relative = _relative(body)
    if _has_blocks(body) and not relative:
        return _finer(body)
    for axis in [s.axis for s in body if isinstance(s, Index) and (s.axis.tile == WHOLE or relative and s.axis.padded)]:
        if _parallel(body, axis):
            block = replace(axis, tile=ROWS if axis.padded else COLUMNS, padded=False)
            body = tuple(Index(block, "block") if isinstance(s, Index) and s.axis == block else s for s in swap_axis(body, axis, block))
    return _finer(body) if relative else body


def _parallel(body: tuple[Statement, ...], axis: Axis) -> bool:
    """Whether the same is done along every element of the axis."""
    reduced = any(isinstance(n, (TileReduce, nest.TileDot)) and axis in n.axes for v in nest.values(body) for n in v.walk())
    return not reduced and all(Position(axis) in s.index for s in nest.statements(body) if isinstance(s, Store))


def _held(body: tuple[Statement, ...]) -> int:
    """How many elements of one part a program of a merge relative to a running maximum holds, as far as the text tells."""
    sizes = {}
    for axis in (s.axis for s in body if isinstance(s, Index)):
        cut = _parallel(body, axis) and (axis.padded or axis.tile == WHOLE)
        sizes[axis] = (ROWS if axis.padded else COLUMNS) if cut else axis.tile or LENGTH
    return _largest([[sizes.get(x, 1) for x in a.axes] for a in nest.statements(body) if isinstance(a, Accumulator)])


def merge_warps(body: tuple[Statement, ...], most: int) -> int:
    """How many warps a merge relative to a running maximum has where it takes several parts at once, ``most`` at most.

    One where that does: what is summed over the parts then crosses lanes and waits at no barrier.
    """
    held = [a.axes for a in nest.statements(body) if isinstance(a, Accumulator)]
    several = any(s.axis.tile > 1 for s in nest.statements(body) if isinstance(s, Loop) and s.reduces)
    if not _relative(body) or not several:
        return most
    return min(most, max(1, _largest([[x.tile or LENGTH for x in axes] for axes in held]) // A_WARP))


def _largest(tiles: list[list[int]]) -> int:
    return max(math.prod(one) for one in tiles)


def _finer(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The body in smaller blocks, if all it does is along each element of them."""
    stored = [s for s in nest.statements(body) if isinstance(s, Store)]
    pieces = {s.axis for s in body if isinstance(s, Loop) and s.axis.tile > 1}
    over = {a for v in nest.values(body) for n in v.walk() if isinstance(n, (TileReduce, nest.TileDot)) for a in n.axes}
    if over - pieces or any(isinstance(s, nest.Put) or isinstance(s, Index) and s.start == "block+loop" for s in nest.statements(body)):
        return body
    limit = COLUMNS * PARTS // max(a.tile for a in pieces) if pieces else ELEMENTS
    while stored:
        blocks = [s.axis for s in body if isinstance(s, Index) and s.start == "block" and not s.axis.padded]
        wide = [a for a in blocks if a.tile > COLUMNS and all(Position(a) in s.index for s in stored)]
        if not wide or max(_elements(s) for s in stored) <= limit:
            break
        axis = max(wide, key=lambda a: a.tile)
        body = swap_axis(body, axis, replace(axis, tile=axis.tile // 2))
        stored = [s for s in nest.statements(body) if isinstance(s, Store)]
    return body


def _elements(s: Store) -> int:
    """How many elements a store writes, as far as the text tells."""
    count = 1
    for axis in s.axes:
        count *= LENGTH if axis.tile == WHOLE else axis.tile
    return count


def _relative(body: tuple[Statement, ...]) -> bool:
    """Whether sums are kept relative to a maximum that moves."""
    return any(isinstance(s, Accumulator) and s.moves for s in nest.statements(body))


def _has_blocks(body: tuple[Statement, ...]) -> bool:
    return any(isinstance(s, Index) and s.start.startswith("block") for s in nest.statements(body))
