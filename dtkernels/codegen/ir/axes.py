"""Replace one axis of a body by another."""

from __future__ import annotations

from dataclasses import replace

from .nest import Axis, Guard, Local, Loop, Position, Start, Statement, Step, Store, Tile, TileDot, TileReduce, TileScan, map_values


def swap_axis(body: tuple[Statement, ...], old: Axis, new: Axis) -> tuple[Statement, ...]:
    """Replace the axis ``old`` by ``new`` throughout the body."""

    def in_tile(tile: Tile) -> Tile:
        changes: dict[str, Axis | tuple[Axis, ...]] = {}
        if isinstance(tile, (Position, Start, Step, TileScan)) and tile.axis == old:
            changes["axis"] = new
        if isinstance(tile, (Local, Guard, TileReduce, TileDot)) and old in tile.axes:
            changes["axes"] = tuple(new if a == old else a for a in tile.axes)
        return replace(tile, **changes) if changes else tile

    def one(s: Statement) -> Statement:
        changes: dict[str, object] = {}
        if getattr(s, "axis", None) == old:
            changes["axis"] = new
        if old in getattr(s, "axes", ()):
            changes["axes"] = tuple(new if a == old else a for a in s.axes)  # type: ignore[attr-defined]
        if isinstance(s, Store):
            changes["index"] = tuple(i.transform(in_tile) for i in s.index)
        if isinstance(s, Loop):
            changes["body"] = tuple(one(x) for x in s.body)
            changes |= {side: bound.transform(in_tile) for side in ("begin", "end", "when") if (bound := getattr(s, side)) is not None}
        return replace(s, **changes) if changes else s

    return map_values(tuple(one(s) for s in body), lambda value: value.transform(in_tile))
