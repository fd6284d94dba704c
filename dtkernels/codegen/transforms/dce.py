"""Eliminate dead code in the body of a kernel."""

from __future__ import annotations

from dataclasses import replace

from ..ir.nest import (
    Accumulator,
    Assign,
    Axis,
    BlockNumber,
    Const,
    DescriptorStore,
    Guard,
    Index,
    Let,
    Local,
    Loop,
    Position,
    Start,
    Statement,
    Store,
    Tile,
    Valued,
    statements,
)


def tiles_of(s: Statement) -> tuple[Tile, ...]:
    """Return the tile expressions of one statement: its value and its index."""
    own = (s.value,) if isinstance(s, Valued) else ()
    return own + (s.index if isinstance(s, Store) else s.start if isinstance(s, DescriptorStore) else ())


def eliminate_dead_code(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Remove names, accumulators and indices that nothing reads, and loops that are empty then."""
    while True:
        found = [(s, n) for s in statements(body) for v in (*tiles_of(s), *(s.bounds() if isinstance(s, Loop) else ())) for n in v.walk()]
        nodes = [n for _, n in found]
        names = {n.name for s, n in found if isinstance(n, Local) and not (isinstance(s, Assign) and s.name == n.name)}
        axes = {n.axis for n in nodes if isinstance(n, (Position, Start))}
        axes |= {a for n in nodes if isinstance(n, Guard) for a in n.axes}
        numbered = {n.label for n in nodes if isinstance(n, BlockNumber)}
        axes |= {s.axis for s in statements(body) if isinstance(s, Index) and s.start == "block" and s.axis.label in numbered}
        kept = _keep(body, names, axes)
        if kept == body:
            return body
        body = kept


def _keep(body: tuple[Statement, ...], names: set[str], axes: set[Axis]) -> tuple[Statement, ...]:
    kept: list[Statement] = []
    for s in body:
        if isinstance(s, Loop):
            inner = _keep(s.body, names, axes)
            kept += [replace(s, body=inner)] if any(isinstance(x, (Assign, Store, DescriptorStore)) for x in statements(inner)) else []
        elif isinstance(s, (Let, Accumulator, Assign)):
            kept += [s] if s.name in names else []
        elif isinstance(s, Index):
            kept += [s] if s.axis in axes or s.start.endswith("loop") else []
        else:
            kept.append(s)
    return tuple(kept)


def cleared(body: tuple[Statement, ...], buffer: str) -> tuple[Statement, ...]:
    """Return the body that sets to 0 what ``body`` stores to a buffer or adds to it, and does nothing else."""

    def one(s: Statement) -> tuple[Statement, ...]:
        if isinstance(s, Loop):
            return (replace(s, body=tuple(made for inner in s.body for made in one(inner))),)
        if isinstance(s, (Store, DescriptorStore)):
            return (replace(s, value=Const(0.0), onto="elsewhere"),) if isinstance(s, Store) and s.buffer == buffer else ()
        return (s,)

    return eliminate_dead_code(tuple(made for s in body for made in one(s)))


def without_stores(body: tuple[Statement, ...], buffer: str) -> tuple[Statement, ...]:
    """Remove the stores to a buffer that nothing reads."""
    return tuple(
        replace(s, body=without_stores(s.body, buffer)) if isinstance(s, Loop) else s
        for s in body
        if not (isinstance(s, (Store, DescriptorStore)) and s.buffer == buffer)
    )
