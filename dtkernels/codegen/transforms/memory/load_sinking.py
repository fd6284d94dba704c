"""Sink loop-invariant operand loads into a split-K loop, so that the software pipeline overlaps them with the other first loads.

Before::

    Q = load(Q[h, d])                            stored to shared memory, so waited for
    for l in part's share of size_l:             the first loads of K and V begin here
        acc <- acc + dot(Q, load(K[l, d]))

After::

    for l in part's share of size_l:             the first loads of Q, K and V overlap
        Q = load(Q[h, d])
        acc <- acc + dot(Q, load(K[l, d]))

A split loop has few steps, and the latency of its first loads is a good part of its time. The tile that is loaded again is small, at most
``MIN_DOT`` rows, and comes from L2. Triton would hoist such a load out of the loop, so its address has a term that is 0 in every step,
which the compiler cannot know.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from ...ir.nest import Guard, Let, LoadLet, Local, Loop, Statement, Tile, TileDot, is_load, values
from ...lower.reduction_terms import MIN_DOT


def sink_loads(before: tuple[Statement, ...], loop: Loop) -> tuple[tuple[Statement, ...], Loop]:
    """Return the statements before a split-K loop, and the loop, with the operands that only its products read loaded inside."""
    if loop.axis.scalar:
        return before, loop
    moved = [s for s in before if _is_small_load(s) and _taken_by_products(s.name, before, loop)]
    again = tuple(replace(s, value=replace(s.value, sunk_into=loop.axis)) for s in moved)
    at = next((i for i, s in enumerate(loop.body) if isinstance(s, Let)), 0)
    return tuple(s for s in before if s not in moved), replace(loop, body=(*loop.body[:at], *again, *loop.body[at:]))


def _is_small_load(s: Statement) -> TypeGuard[LoadLet]:
    """Return whether ``s`` loads a tile of a few rows."""
    return is_load(s) and not s.value.checked and any(1 < a.tile <= MIN_DOT for a in s.axes)


def _taken_by_products(name: str, before: tuple[Statement, ...], loop: Loop) -> bool:
    """Return whether only matrix products inside the loop read ``name``."""
    inside = [n for v in values(loop.body) for n in v.walk()]
    sides = sum(x == name for n in inside if isinstance(n, TileDot) for x in (_name(n.left), _name(n.right)))
    asked = sum(isinstance(n, Local) and n.name == name for v in (*values(before), *values(loop.body)) for n in v.walk())
    return 0 < sides == asked


def _name(tile: Tile) -> str | None:
    while isinstance(tile, Guard):
        tile = tile.arg
    return tile.name if isinstance(tile, Local) else None
