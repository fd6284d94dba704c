"""Make a part of a split sum from each block of its label: ``f.block(x:128, y:256)``, where ``f`` has no ``y``.

Before, the share of a part is a loop::

    for y in part's share of size_y:    m_next = max(m, max(u, y));    s <- s * exp(m - m_next) + sum(exp(u - m_next), y);    m <- m_next
    s_part[part] := s

After, it is the one step of a block, from the values that the accumulators start with::

    y = block                           m = max(u, y);                 s = sum(exp(u - m), y)
    s_part[block] := s

The kernel is then one of a product and what follows it: its loads are pipelined over the terms of the product alone, ``map`` orders its blocks along
both sides, and the backend for specialized warps takes it. A sweep that is split into a given number of parts starts its pipeline anew for each step.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir import nest
from ...ir.nest import Accumulator, Assign, Axis, Const, Index, Let, Local, Loop, Statement, Tile, statements
from ...lower.schedule_options import Split
from ..arithmetic.simplify import evaluated


def summed_axis(body: tuple[Statement, ...], split: Split) -> Axis:
    """Return the axis of the loop over the split label. Raises DTError where its step is not a block, or it does not take all of them."""
    loop = next(s for s in statements(body) if isinstance(s, Loop) and s.reduces and s.axis.label == split.label)
    if loop.axis.tile != split.block:
        raise split.refuse(f"tensorize({split.label}:{loop.axis.tile})", f"tensorize({split.label}:{split.block}), as large as the block")
    if (loop.within, loop.begin, loop.end, loop.when) != ("extent", None, None, None):
        raise split.refuse(f"a loop over {split.label} that does not take all of it", f"split({split.label}:...)")
    return loop.axis


def one_step(loop: Loop, accumulators: tuple[Accumulator, ...], axis: Axis) -> tuple[Statement, ...]:
    """Return ``loop`` with one step of that over ``axis``; without accumulators where no other loop adds to them."""
    step = _without_loop((loop,), axis)
    inner = {s.name for one in step if isinstance(one, Loop) for s in statements(one.body) if isinstance(s, Assign)}
    if inner & {a.name for a in accumulators}:
        return (*accumulators, *step)
    sums = {a.name: a for a in accumulators}
    known: dict[str, Tile] = {a.name: Const(a.start) for a in accumulators}
    body: list[Statement] = []

    def value(tile: Tile) -> Tile:
        return tile.transform(lambda n: known.get(n.name, n) if isinstance(n, Local) else evaluated(n))

    for s in step:
        (s,) = nest.map_values((s,), value)
        if isinstance(s, Assign) and s.name in known:
            del known[s.name]
            s = replace(sums[s.name], start=s.value.value) if isinstance(s.value, Const) else Let(s.name, s.value, s.axes)  # a constant is still a tile
        body.append(s)
    return tuple(body)


def _without_loop(body: tuple[Statement, ...], axis: Axis) -> tuple[Statement, ...]:
    found: list[Statement] = []
    for s in body:
        if not isinstance(s, Loop):
            found.append(s)
        elif s.reduces and s.axis == axis:
            found += [x for x in s.body if x != Index(axis, "loop")]
        else:
            found.append(replace(s, body=_without_loop(s.body, axis)))
    return tuple(found)
