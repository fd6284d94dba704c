"""Distribute the merge kernel of a split-K reduction over programs.

Before, one program for everything::

    y = all of it
    for part in 0 .. 256:                    acc[y] <- acc[y] + acc_part[part, y]
    f[y] := acc[y]

After, one for every 32 columns, each taking 32 parts at a time::

    y = 32 of a block
    for part in 0 .. 256 by 32:              acc[part, y] <- acc[part, y] + acc_part[part, y]
    f[y] := sum(acc[part, y], part)

The kernels before the merge may hold whole rows, and would then leave one program to the merge. That program would go through 256
parts of 768 columns, and take longer than the parts took to make. A merge in blocks of columns is distributed in the same way.

Other merges use smaller blocks than the kernel before them, down to ``ELEMENTS``. Blocks of that kernel are large so that each operand
is read once; a merge has no operand to reuse. Sixteen programs that add up 8 parts of 64 KiB would not reach the memory bandwidth.

A merge relative to a running maximum or mean has small programs, ``ROWS`` by ``COLUMNS``, however wide the rows are. One query has few heads:
eight programs that go through 32 parts of 16 rows one by one take longer than the parts took. Each program takes as many parts at a
time as make ``LIVE`` elements, so that their loads overlap, and keeps one maximum for each of these parts. These partial results are
joined once after the last step, relative to the largest maximum, or to the mean of all. Part by part, every step would wait for memory and for the step before.

A merge that goes on to write along the split label has a program for each step of that loop, not one that goes through it: the sums of a long
row are split so that more than a few multiprocessors work, and writing the row is as much work. Each of these programs merges the parts
for itself, which are a few numbers.

The order of summation is fixed: which parts are added to which element, and the tree by which ``sum`` adds them up.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...ir import nest
from ...ir.axes import swap_axis
from ...ir.nest import WHOLE, Accumulator, Axis, Index, Loop, Position, Statement, Store, TileReduce

COLUMNS = 32  #: columns of one program: 128 bytes of a part
ROWS = 4  #: rows of one program, where the kernel before it pads them for a matrix product
PARTS = 32  #: most parts that one step takes
NUMBERS = 1024  #: the same where a part is one number: one by one, 1024 parts take 40 microseconds
LIVE = 4096  #: elements that a program loads at once, over all parts of a step
A_WARP = 2048  #: elements for each warp
AHEAD = 4096  #: elements that the iterations of an unrolled loop read, for each warp: with 16384, ptxas spilled 4176 bytes of a thread
UNROLL = "loop_unroll_factor"
WITH_MEANS = 4  #: values of an element of each accumulator that a merge relative to means holds: at one warp for 2048, ptxas spills
ELEMENTS = 2048  #: most elements of a program's block, as long as each label keeps COLUMNS
MANY = 16  #: parts from which on a program's block is the smaller the more there are: 64 parts of 32 x 64 elements spilled 896 bytes of a thread
FEWEST = 4  #: the same of several results with extents that are held whole: parts of 32 columns of 71 rows spilled, and took 280 us on an H100
LENGTH = 64  #: assumed length of an unblocked extent


def parts_at_once(body: tuple[Statement, ...], parts: int) -> int:
    """Return how many parts one step of the merge of ``body`` takes; 1 where its blocks already give enough programs."""
    stored = [s for s in body if isinstance(s, Store)]
    if stored and parts & -parts > PARTS and not any(_wide(s) for s in stored) and not _is_relative(body):
        return min(NUMBERS, parts & -parts)
    if _is_relative(body):
        live = _live_elements(body)
        numbers = live == 1 and not any(isinstance(s, Accumulator) and s.moves for s in body)
        return max(1, min(NUMBERS if numbers else PARTS, parts & -parts, 1 << (LIVE // live).bit_length() >> 1))
    if _has_blocks(body):
        kept = all(len(wide := _wide(s)) == 1 and wide[0].tile != WHOLE for s in stored)
    else:
        wholes = [s.axis for s in body if isinstance(s, Index) and s.axis.tile == WHOLE]
        kept = any(all(Position(a) in s.index for s in stored) for a in wholes)
    return min(PARTS, parts & -parts) if kept and stored else 1


def _wide(s: Store) -> list[Axis]:
    return [a for a in s.axes if not a.scalar]


def block_merge(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Block the whole extents of a merge that has no blocks, or only of one element, where every element along them is computed independently."""
    relative = _is_relative(body)
    if not relative and any(s.start.startswith("block") and s.axis.tile != 1 for s in body if isinstance(s, Index)):
        return _shrink_blocks(body)
    for axis in [s.axis for s in body if isinstance(s, Index) and (s.axis.tile == WHOLE or relative and s.axis.padded)]:
        if _is_parallel_axis(body, axis):
            block = replace(axis, tile=ROWS if axis.padded else COLUMNS, padded=False)
            body = tuple(Index(block, "block") if isinstance(s, Index) and s.axis == block else s for s in swap_axis(body, axis, block))
    return _shrink_blocks(body) if relative else body


def distribute_stores(body: tuple[Statement, ...], label: str) -> tuple[Statement, ...]:
    """Turn a last loop over ``label`` into blocks, if it only writes, every element independently; of sums that are numbers, loops around and inside it too.

    What is stored before it, each program stores alike.
    """
    *before, loop = body
    if not isinstance(loop, Loop) or loop.axis.label != label and not _sums_numbers(body):
        return body
    if loop.reduces or (loop.within, loop.begin, loop.end, loop.when) != ("extent", None, None, None) or loop.tail:
        return body
    inside = list(nest.statements(loop.body))
    made = {s.name for s in inside if isinstance(s, Accumulator)}
    carried = any(isinstance(s, nest.Assign) and s.name not in made for s in inside)
    if carried or not all(Position(loop.axis) in s.index for s in inside if isinstance(s, Store)) or any(isinstance(s, (nest.DescriptorStore, nest.Barrier)) for s in inside):
        return body
    start = Index(loop.axis, "loop")
    if loop.body[0] != start or any(isinstance(s, Index) and s.axis.label == loop.axis.label for s in nest.statements(tuple(before))):
        return body
    at = 1 + max((i for i, s in enumerate(before) if isinstance(s, Index) and s.start == "block"), default=-1)
    spread = (*before[:at], Index(loop.axis, "block"), *before[at:], *loop.body[1:])
    return distribute_stores(spread, label) if _sums_numbers(body) else spread


def _sums_numbers(body: tuple[Statement, ...]) -> bool:
    """Return whether the sums of a merge are a number for each part."""
    pieces = {s.axis for s in body if isinstance(s, Loop)}
    held = [s for s in nest.statements(body) if isinstance(s, Accumulator)]
    return bool(held) and all({*a.axes} <= pieces for a in held)


def _is_parallel_axis(body: tuple[Statement, ...], axis: Axis) -> bool:
    """Return whether every element along the axis is computed independently."""
    reduced = any(isinstance(n, (TileReduce, nest.TileDot)) and axis in n.axes for v in nest.values(body) for n in v.walk())
    return not reduced and all(Position(axis) in s.index for s in nest.statements(body) if isinstance(s, Store))


def _live_elements(body: tuple[Statement, ...]) -> int:
    """Estimate how many elements of one part a program holds in a merge relative to a running maximum or mean."""
    sizes = {}
    for axis in (s.axis for s in body if isinstance(s, Index)):
        cut = _is_parallel_axis(body, axis) and (axis.padded or axis.tile == WHOLE)
        sizes[axis] = (ROWS if axis.padded else COLUMNS) if cut else axis.tile or LENGTH
    return _largest([[sizes.get(x, 1) for x in a.axes] for a in nest.statements(body) if isinstance(a, Accumulator)])


def merge_warps(body: tuple[Statement, ...], most: int) -> int:
    """Choose the warps of a merge relative to a running maximum or mean that takes several parts at once: at most ``most``.

    With one warp, sums over the parts are shuffles between lanes and need no barrier. More hold the parts that an unrolled loop reads ahead.
    """
    held = [a for a in nest.statements(body) if isinstance(a, Accumulator)]
    several = any(s.axis.tile > 1 for s in nest.statements(body) if isinstance(s, Loop) and s.reduces)
    if not _is_relative(body) or not several:
        return most
    sizes = [math.prod(x.tile or LENGTH for x in a.axes) for a in held]
    live = WITH_MEANS * sum(sizes) if any(a.mean_of for a in held) else max(sizes)
    ahead = max((_unrolled(s) * _elements_merged(body, s) for s in nest.statements(body) if isinstance(s, Loop)), default=1) // AHEAD
    return min(most, 1 << max(1, live // A_WARP, ahead).bit_length() - 1)


def read_fewer_ahead(body: tuple[Statement, ...], warps: int) -> tuple[Statement, ...]:
    """Unroll the loop of a merge relative to a running maximum or mean less often, where registers do not hold the parts read ahead."""
    if not _is_relative(body):
        return body

    def bounded(s: Statement) -> Statement:
        if not isinstance(s, Loop) or _unrolled(s) <= (most := max(1, AHEAD * warps // max(1, _elements_merged(body, s)))):
            return s
        return replace(s, options=tuple((name, most if name == UNROLL else value) for name, value in s.options))

    return tuple(bounded(s) for s in body)


def _elements_merged(body: tuple[Statement, ...], loop: Loop) -> int:
    """Return the elements of the largest accumulator that a loop changes."""
    changed = {s.name for s in nest.statements(loop.body) if isinstance(s, nest.Assign)}
    held = [a for a in nest.statements(body) if isinstance(a, Accumulator) and a.name in changed]
    return max((math.prod(x.tile or LENGTH for x in a.axes) for a in held), default=0)


def _unrolled(loop: Loop) -> int:
    return dict(loop.options).get(UNROLL, 1)


def _largest(tiles: list[list[int]]) -> int:
    return max(math.prod(one) for one in tiles)


def _shrink_blocks(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Make the blocks smaller, if every element of them is computed independently."""
    stored = [s for s in nest.statements(body) if isinstance(s, Store)]
    pieces = {s.axis for s in body if isinstance(s, Loop) and s.axis.tile > 1}
    over = {a for v in nest.values(body) for n in v.walk() if isinstance(n, (TileReduce, nest.TileDot)) for a in n.axes}
    if over - pieces or any(isinstance(s, nest.DescriptorStore) or isinstance(s, Index) and s.start == "block+loop" for s in nest.statements(body)):
        return body
    parts = max((int(s.end.value) for s in body if isinstance(s, Loop) and isinstance(s.end, nest.Const)), default=1)
    limit = COLUMNS * PARTS // max(a.tile for a in pieces) if pieces else ELEMENTS
    several = sum(any(axis.tile == WHOLE for axis in s.axes) for s in stored) > 1
    narrowest, limit = (FEWEST, min(limit, FEWEST * LENGTH)) if several else (COLUMNS, limit)
    many = not pieces and parts > MANY
    limit = min(limit, max(COLUMNS * FEWEST, ELEMENTS * MANY // parts)) if many else limit
    while stored:
        blocks = [s.axis for s in body if isinstance(s, Index) and s.start == "block" and not s.axis.padded]
        last = {i.axis for s in stored for i in s.index[-1:] if isinstance(i, Position)}
        wide = [a for a in blocks if a.tile > (FEWEST if many and a not in last else narrowest) and all(_is_stored_along(s, a) for s in stored)]
        if not wide or max(_elements(s) for s in stored) <= limit:
            break
        axis = max(wide, key=lambda a: a.tile)
        body = swap_axis(body, axis, replace(axis, tile=min(axis.tile // 2, axis.tile & -axis.tile)))
        stored = [s for s in nest.statements(body) if isinstance(s, Store)]
    return body


def _is_stored_along(s: Store, axis: Axis) -> bool:
    """Return whether each index along ``axis`` is one of the store's, or several labels are one axis, of which the store has quotients and remainders."""
    return Position(axis) in s.index or axis in s.axes


def _elements(s: Store) -> int:
    """Estimate how many elements a store writes; a whole extent counts as ``LENGTH``."""
    count = 1
    for axis in s.axes:
        count *= LENGTH if axis.tile == WHOLE else axis.tile
    return count


def _is_relative(body: tuple[Statement, ...]) -> bool:
    """Return whether an accumulator is relative to a running maximum or to a running mean."""
    return any(isinstance(s, Accumulator) and (s.moves or s.mean_of) for s in nest.statements(body))


def _has_blocks(body: tuple[Statement, ...]) -> bool:
    return any(isinstance(s, Index) and s.start.startswith("block") for s in nest.statements(body))
