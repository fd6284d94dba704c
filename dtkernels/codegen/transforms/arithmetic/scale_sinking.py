"""Sink a positive scale below a maximum: scale the maximum of a row instead of each element.

Before, with a ``scale`` that is a scalar argument of the call::

    scores = scale * dot(Q, K)                                                a product an element
    shift = max(scores)
    e = exp2(scores * log2(e) - shift * log2(e))                              a multiply-add an element

After, where ``scale`` is positive, which the wrapper passes to the kernel as a compile-time constant::

    scores = dot(Q, K)
    shift = scale * max(scores)                                               a product a row
    e = exp2(scores * (scale * log2(e)) - shift * log2(e))

``inside(scale)`` is then 1 and ``outside(scale)`` is ``scale``. Otherwise they are the other way round, and the kernel computes what it did
before the pass. Rounding is monotonic, so the maximum is bitwise the same.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from ...ir.nest import (
    Accumulator,
    Assign,
    Const,
    Guard,
    Kernel,
    Let,
    Local,
    Loop,
    Op,
    Scalar,
    ScaleFactor,
    Statement,
    Tile,
    TileReduce,
    axes_of,
    map_values,
    statements,
    values,
)
from ...lower.schedule_options import KernelOptions
from .exp_to_exp2 import LOG2_E


def sink_scales(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Scale a maximum instead of the values that it is taken over."""
    return replace(kernel, body=with_scales_sunk(kernel.body))


def with_scales_sunk(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Move products by a scalar behind a maximum, where only exponentials relative to that maximum read the products too."""
    factors = _scaled_names(body)
    used = Counter(n.name for v in values(body) for n in v.walk() if isinstance(n, Local))
    wheres = Counter(_masked_multiple(s.value, factors) for s in statements(body) if isinstance(s, Let))
    maxima = Counter(_maximum_of_multiple(n, factors) for v in values(body) for n in v.walk())
    powers = Counter(_exponential_of_multiple(n, factors) for v in values(body) for n in v.walk())
    kept = {scale for name, scale in factors.items() if used[name] != wheres[name] + maxima[name] + powers[name]}
    reached = {scale for name, scale in factors.items() if maxima[name]} - kept
    factors = {name: scale for name, scale in factors.items() if scale in reached}
    return _changed(body, factors) if factors else body


def _scaled_names(body: tuple[Statement, ...]) -> dict[str, Scalar]:
    """Map each name that is always a multiple of one scalar to that scalar."""
    found: dict[str, Scalar] = {}
    other: set[str] = {s.name for s in statements(body) if isinstance(s, (Accumulator, Assign))}
    for s in statements(body):
        if not isinstance(s, Let):
            continue
        scale = _factor(s.value) or found.get(_masked_multiple(s.value, found))
        if scale is None or found.setdefault(s.name, scale) != scale:
            other.add(s.name)
    return {name: scale for name, scale in found.items() if name not in other}


def _factor(tile: Tile) -> Scalar | None:
    match tile:
        case Op("*", (Scalar(_, False) as scale, rest)) if axes_of(rest):
            return scale
    return None


def _masked_multiple(tile: Tile, factors: dict[str, Scalar]) -> str:
    """Return the name of the multiple that ``tile`` masks with -inf."""
    match tile:
        case Op("where", (_, Local(name), Const(low))) if low == -math.inf and name in factors:
            return name
    return ""


def _maximum_of_multiple(tile: Tile, factors: dict[str, Scalar]) -> str:
    """Return the name of the multiple that ``tile`` is the maximum of."""
    if not isinstance(tile, TileReduce) or tile.kind != "max":
        return ""
    arg = tile.arg.arg if isinstance(tile.arg, Guard) and tile.arg.neutral == -math.inf else tile.arg
    return arg.name if isinstance(arg, Local) and arg.name in factors else _masked_multiple(arg, factors)


def _exponential_of_multiple(tile: Tile, factors: dict[str, Scalar]) -> str:
    """Return the name of the multiple that ``tile`` is an exponential of."""
    match tile:
        case Op("exp2", (Op("-", (Op("*", (Local(name), factor)), _)),)) if factor == LOG2_E and name in factors:
            return name
    return ""


def _changed(body: tuple[Statement, ...], factors: dict[str, Scalar]) -> tuple[Statement, ...]:
    def change(tile: Tile) -> Tile:
        if name := _maximum_of_multiple(tile, factors):
            return Op("*", (ScaleFactor(factors[name], inside=False), tile))
        if name := _exponential_of_multiple(tile, factors):
            ((difference,), scale) = tile.args, ScaleFactor(factors[name], inside=False)  # type: ignore[attr-defined]
            product, shift = difference.args
            return Op("exp2", (Op("-", (Op("*", (product.args[0], Op("*", (scale, LOG2_E)))), shift)),))
        return tile

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(map(one, s.body)))
        if isinstance(s, Let) and s.name in factors and (scale := _factor(s.value)):
            return replace(s, value=Op("*", (ScaleFactor(scale, inside=True), s.value.args[1])))  # type: ignore[attr-defined]
        return map_values((s,), lambda v: v.transform(change))[0]

    return tuple(map(one, body))
