"""Multiply a step's sum by what all of its terms have in common: ``rdot(A[x, k], W[y, k] * s[y, k // 128])`` with steps of 128.

Before::

    for k in 0 .. size_k by 128:
        A, W, s = A[x, k], W[y, k], s[y, first(k) // 128]
        acc <- acc + dot(A, W * s)                      a multiplication and a rounding for each element of W

After::

    for k in 0 .. size_k by 128:
        A, W, s = A[x, k], W[y, k], s[y, first(k) // 128]
        acc_step = 0
        acc_step <- acc_step + dot(A, W)
        acc <- acc + acc_step * s                       one for each sum, in float32, that can wait for s

Only where a step has fewer sums than elements of that operand, as beside few rows. The other operand's elements are not rounded, so
results come closer to the exact ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ....algebra.rules.canonicalize import fresh_name
from ...ir.nest import Accumulator, Assign, Axis, Kernel, Local, Loop, Op, Statement, Tile, TileDot, Valued, axes_of, is_load, names_of
from ...lower.schedule_options import KernelOptions

FEWER = 2  #: elements of the operand for each sum, at least


def scale_steps(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Take factors that a step has in common out of its products."""
    return replace(kernel, body=_bodies(kernel.body, names_of(kernel)))


def _bodies(body: tuple[Statement, ...], taken: set[str]) -> tuple[Statement, ...]:
    found: list[Statement] = []
    for s in body:
        if isinstance(s, Loop):
            s = replace(s, body=_bodies(_step(s.body, taken) if s.reduces and s.axis.tile > 1 else s.body, taken))
        found.append(s)
    return tuple(found)


class _Scaled(NamedTuple):
    """A product that is added up, without its factor; how many elements were multiplied by that."""

    dot: TileDot
    factor: Tile
    elements: int


def _step(body: tuple[Statement, ...], taken: set[str]) -> tuple[Statement, ...]:
    """Return one step with the products of each sum that have a factor in common."""
    if any(isinstance(s, Loop) for s in body):
        return body
    loaded = {s.name for s in body if is_load(s)}
    for name in dict.fromkeys(s.name for s in body if isinstance(s, Assign)):
        own = [i for i, s in enumerate(body) if isinstance(s, Assign) and s.name == name]
        parts = [part for i in own if (part := _split(body[i], loaded)) is not None]
        reads = sum(isinstance(n, Local) and n.name == name for s in body if isinstance(s, Valued) for n in s.value.walk())
        if len(parts) != len(own) or reads != len(own) or len({p.factor for p in parts}) != 1:
            continue
        if not 0 < FEWER * _size(axes_of(parts[0].dot)) <= sum(p.elements for p in parts):
            continue
        step = fresh_name(f"{name}_step", taken)
        body = _rewritten(body, own, step, [p.dot for p in parts], parts[0].factor)
    return body


def _rewritten(body: tuple[Statement, ...], own: list[int], step: str, dots: list[TileDot], factor: Tile) -> tuple[Statement, ...]:
    found: list[Statement] = []
    for i, s in enumerate(body):
        if i not in own:
            found.append(s)
            continue
        assert isinstance(s, Assign)
        inner = Local(step, s.axes)
        if i == own[0]:
            found.append(Accumulator(step, s.axes, 0.0))
        found.append(Assign(step, s.axes, Op("+", (inner, dots[own.index(i)]))))
        if i == own[-1]:
            found.append(Assign(s.name, s.axes, Op("+", (Local(s.name, s.axes), Op("*", (inner, factor))))))
    return tuple(found)


def _split(s: Statement, loaded: set[str]) -> _Scaled | None:
    """Return a product of a sum without its factor that is the same for all terms of a step."""
    match s:
        case Assign(name, axes, Op("+", (Local(own), TileDot() as dot))) if own == name and not axes_of(dot) - {*axes}:
            for side in (dot.left, dot.right):
                for value, factor in _factors(side, dot.axes):
                    if any(isinstance(n, Local) and n.name in loaded for n in factor.walk()):
                        made = replace(dot, left=value) if side is dot.left else replace(dot, right=value)
                        return _Scaled(made, factor, _size(axes_of(side)))
    return None


def _factors(side: Tile, axes: tuple[Axis, ...]) -> Iterator[tuple[Tile, Tile]]:
    """Yield (the rest, a factor of an operand that is the same along ``axes``)."""
    match side:
        case Op("*", (a, b)):
            for value, factor in ((a, b), (b, a)):
                if not axes_of(factor) & {*axes} and axes_of(value) == axes_of(side):
                    yield value, factor


def _size(axes: Iterable[Axis]) -> int:
    return math.prod(a.tile for a in axes)
