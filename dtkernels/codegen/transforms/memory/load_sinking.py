"""What the products of a part's loop take and no step changes, loaded by each step: so its first load is not waited for.

Before::

    Q = load(Q[h, d])                            stored to shared memory, so waited for
    for l in part's share of size_l:             the first loads of K and V begin here
        acc <- acc + dot(Q, load(K[l, d]))

After::

    for l in part's share of size_l:             the first loads of Q, K and V are on their way together
        Q = load(Q[h, d])
        acc <- acc + dot(Q, load(K[l, d]))

A split loop has few steps, so that the time until its first bytes come is a good part of its own; and what is loaded again is small,
no more than ``MIN_DOT`` rows, and comes from L2. Triton would move such a load before the loop: its address has a term that is 0 in
every step, which the compiler does not know.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from ...ir.nest import Guard, Let, LoadLet, Local, Loop, Statement, Tile, TileDot, is_load, values
from ...lower.reduction_terms import MIN_DOT


def sink_loads(before: tuple[Statement, ...], loop: Loop) -> tuple[tuple[Statement, ...], Loop]:
    """What stands before a part's loop, and the loop, with what its products alone take loaded in it."""
    if loop.axis.scalar:
        return before, loop
    moved = [s for s in before if _small(s) and _taken_by_products(s.name, before, loop)]
    again = tuple(replace(s, value=replace(s.value, sunk_into=loop.axis)) for s in moved)
    at = next((i for i, s in enumerate(loop.body) if isinstance(s, Let)), 0)
    return tuple(s for s in before if s not in moved), replace(loop, body=(*loop.body[:at], *again, *loop.body[at:]))


def _small(s: Statement) -> TypeGuard[LoadLet]:
    """Whether ``s`` loads a tile of a few rows."""
    return is_load(s) and not s.value.checked and any(1 < a.tile <= MIN_DOT for a in s.axes)


def _taken_by_products(name: str, before: tuple[Statement, ...], loop: Loop) -> bool:
    """Whether nothing but products inside the loop asks for ``name``."""
    inside = [n for v in values(loop.body) for n in v.walk()]
    sides = sum(x == name for n in inside if isinstance(n, TileDot) for x in (_name(n.left), _name(n.right)))
    asked = sum(isinstance(n, Local) and n.name == name for v in (*values(before), *values(loop.body)) for n in v.walk())
    return 0 < sides == asked


def _name(tile: Tile) -> str | None:
    while isinstance(tile, Guard):
        tile = tile.arg
    return tile.name if isinstance(tile, Local) else None
