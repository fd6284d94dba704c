"""Choose the order of a tile's dimensions."""

from __future__ import annotations

from dataclasses import replace

from .nest import Axis, Local, Op, Tile, axes_of


def preferred_dim_order(node: Tile) -> tuple[Axis, ...]:
    """Return the cheapest order of dimensions for ``node``: that of its largest named part."""
    axes = axes_of(node)
    own = [tuple(a for a in n.axes if a in axes) for n in node.walk() if isinstance(n, Local)]
    best = max(own, key=len, default=())
    return best + tuple(sorted(axes - set(best), key=lambda a: a.name))


def as_no_matrix_product(node: Tile, order: tuple[Axis, ...]) -> Tile:
    """Return a sum's terms, printed in ``order``, with factors exchanged where Triton would make the sum a product in TF32.

    Triton 3.6 does so for ``tl.sum(A[:, :, None] * B[None, :, :], 1)`` whatever the precision asked for, and wrongly for fewer than 8
    terms. It knows this order of the factors alone.
    """

    def change(tile: Tile) -> Tile:
        if not isinstance(tile, Op) or tile.fn != "*":
            return tile
        left, right = (axes_of(factor) for factor in tile.args)
        return replace(tile, args=tile.args[::-1]) if left and right and order[2] not in left and order[0] not in right else tile

    return node.transform(change) if len(order) > 2 else node
