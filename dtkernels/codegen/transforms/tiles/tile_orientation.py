"""Choose the orientation of two-dimensional tiles: transpose those that most matrix products would have to transpose.

Before, in a kernel whose products take a tile transposed::

    e[m, l]       = exp2(dot(Q, trans(K)) - shift)
    d_V[l, n]    += dot(trans(e), d_out)                    transposed through shared memory in every step

After::

    e[l, m]       = exp2(dot(K, trans(Q)) - shift)
    d_V[l, n]    += dot(e, d_out)

All values over the same two axes are transposed together, if more products of the kernel then take them without a transpose.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ...ir.nest import (
    Axis,
    DescriptorLoad,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Statement,
    Tile,
    TileDot,
    Valued,
    axes_of,
    map_values,
    statements,
)
from ...lower.schedule_options import KernelOptions


def orient_tiles(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Transpose two-dimensional tiles where most products want them transposed."""
    return replace(kernel, body=with_tiles_oriented(kernel.body))


def with_tiles_oriented(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Give the computed two-dimensional tiles of ``body`` the orientation that most products take."""
    lets: set[tuple[str, tuple[Axis, ...]]] = {
        (s.name, s.axes) for s in statements(body) if isinstance(s, Let) and len(s.axes) == 2 and not isinstance(s.value, (Load, DescriptorLoad))
    }
    votes: Counter[tuple[Axis, ...]] = Counter()
    for s in statements(body):
        if isinstance(s, Valued):
            votes.update(_preferred_orders(s.value, s.axes, lets))
    turned = frozenset(key for key in lets if votes[key[1][::-1]] > votes[key[1]])
    return _transpose(body, turned) if turned else body


def _preferred_orders(value: Tile, order: tuple[Axis, ...], lets: set[tuple[str, tuple[Axis, ...]]]) -> list[tuple[Axis, ...]]:
    """Return the axis order in which each product in ``value`` takes its named operands; ``order``: the axes of the result."""
    found = []
    for dot in (n for n in value.walk() if isinstance(n, TileDot)):
        left, right = dot.left, dot.right
        rows, columns = (tuple(axes_of(side) - set(dot.axes)) for side in (left, right))
        if tuple(a for a in order if a in rows + columns) == columns + rows:
            left, right, rows, columns = right, left, columns, rows
        for side, wanted in ((left, rows + dot.axes), (right, dot.axes + columns)):
            found += [wanted for n in side.walk() if isinstance(n, Local) and (n.name, n.axes) in lets and set(n.axes) == set(wanted)]
    return found


def _transpose(body: tuple[Statement, ...], turned: frozenset[tuple[str, tuple[Axis, ...]]]) -> tuple[Statement, ...]:
    def change(tile: Tile) -> Tile:
        return replace(tile, axes=tile.axes[::-1]) if isinstance(tile, Local) and (tile.name, tile.axes) in turned else tile

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(one(x) for x in s.body))
        return replace(s, axes=s.axes[::-1]) if isinstance(s, Let) and (s.name, s.axes) in turned else s

    return map_values(tuple(one(s) for s in body), lambda value: value.transform(change))
