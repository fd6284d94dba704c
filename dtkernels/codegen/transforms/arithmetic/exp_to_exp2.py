"""Compute exponentials relative to a shift in base two, which GPUs have in hardware.

Before::

    scores = scale * dot(Q, K)
    e = exp(scores - shift)                                   a product, a difference, a product inside exp

After, where nothing else uses ``scores``::

    scores_unscaled = dot(Q, K)
    e = exp2(scale * log2(e) * scores_unscaled - log2(e) * shift)     one fused multiply-add; the shift's product is one a row

The pass applies only to shifts that ``max_subtraction.py`` makes, ``where(s > -inf, s, 0)``. There the rounding error of the product
``log2(e) * shift`` cancels, or is as small as that of the shift itself.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TypeGuard

from ...ir import nest
from ...ir.nest import (
    Const,
    Kernel,
    Let,
    Local,
    Loop,
    Op,
    Position,
    Statement,
    Tile,
    axes_of,
    map_values,
    statements,
)
from ...lower.schedule_options import KernelOptions
from ..dce import tiles_of

LOG2_E = Const(math.log2(math.e))


def rewrite_exp_to_exp2(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Compute exponentials in base two, with one multiply-add for the argument."""
    return replace(kernel, body=in_base_two(kernel.body))


def in_base_two(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Rewrite ``exp(a - shift)`` as ``exp2`` of a multiply-add."""
    shifts = {s.name for s in statements(body) if isinstance(s, Let) and _is_shift(s.value)}
    nodes = [n for s in statements(body) for v in tiles_of(s) for n in v.walk()]
    used = Counter(n.name for n in nodes if isinstance(n, Local))
    lets = Counter(s.name for s in statements(body) if isinstance(s, (Let, nest.Accumulator)))
    return _change(body, shifts, {name for name, count in used.items() if count == lets[name]})


def _change(body: tuple[Statement, ...], shifts: set[str], single: set[str]) -> tuple[Statement, ...]:
    """Rewrite one straight-line run of statements; ``single`` are the names of values that are used once."""
    lets = [(s.name, s.value) for s in body if isinstance(s, Let) and s.name in single]
    factors = {name: value for name, value in lets if _is_scaled(value)}
    bare: dict[str, Local] = {}

    def scaled(tile: Tile) -> Tile:
        if isinstance(tile, Local) and tile.name in factors:
            factor, rest = factors[tile.name].args
            bare[tile.name] = Local(f"{tile.name}_unscaled", tile.axes)
            return Op("*", (Op("*", (factor, LOG2_E)), bare[tile.name]))
        if _is_scaled(tile):
            factor, rest = tile.args
            return Op("*", (Op("*", (factor, LOG2_E)), rest))
        return Op("*", (tile, LOG2_E))

    def change(tile: Tile) -> Tile:
        match tile:
            case Op("exp", (Op("-", (a, b)),)) if _is_shift(b) or isinstance(b, Local) and b.name in shifts:
                return Op("exp2", (Op("-", (scaled(a), scaled(b))),))
            case Op("exp2", (Op("-", (Op("*", (a, factor)), Local(name) as b)),)) if factor == LOG2_E and name in shifts:
                return Op("exp2", (Op("-", (scaled(a), b)),))  # another kernel already scaled it: stage_aligned_copies.py
        return tile

    changed = [
        replace(s, body=_change(s.body, shifts, single)) if isinstance(s, Loop) else map_values((s,), lambda v: v.transform(change))[0]
        for s in body
    ]
    return tuple(
        replace(s, name=bare[s.name].name, value=factors[s.name].args[1]) if isinstance(s, Let) and s.name in bare else s for s in changed
    )


def _is_shift(tile: Tile) -> bool:
    """Match ``where(s > -inf, s, 0)``, or a load of such a shift that another kernel stored."""
    match tile:
        case nest.Load():
            return tile.shift
        case Op("where", (Op(">", (a, Const(low))), b, Const(zero))):
            return a == b and low == -math.inf and zero == 0
    return False


def _is_scaled(tile: Tile) -> TypeGuard[Op]:
    """Match a scalar times a tile."""
    return (
        isinstance(tile, Op) and tile.fn == "*" and not axes_of(tile.args[0]) and bool(axes_of(tile.args[1])) and not _reads(tile.args[0])
    )


def _reads(tile: Tile) -> bool:
    return any(isinstance(n, (nest.Load, nest.DescriptorLoad, Position)) for n in tile.walk())
