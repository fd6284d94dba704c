"""Choose the order of a tile's dimensions."""

from __future__ import annotations

from .nest import Axis, Local, Tile, axes_of


def preferred_dim_order(node: Tile) -> tuple[Axis, ...]:
    """Return the cheapest order of dimensions for ``node``: that of its largest named part."""
    axes = axes_of(node)
    own = [tuple(a for a in n.axes if a in axes) for n in node.walk() if isinstance(n, Local)]
    best = max(own, key=len, default=())
    return best + tuple(sorted(axes - set(best), key=lambda a: a.name))
