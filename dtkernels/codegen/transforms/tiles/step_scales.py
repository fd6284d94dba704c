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

from dataclasses import replace

from ...ir.nest import Accumulator, Assign, Kernel, Local, Loop, Op, Statement, Tile, TileDot, axes_of, is_load, names_in
from ...lower.schedule_options import KernelOptions

FEWER = 2  #: elements of the operand for each sum, at least


def scale_steps(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Take factors that a step has in common out of its products."""
    return replace(kernel, body=_bodies(kernel.body, names_in(kernel.body)))


def _bodies(body: tuple[Statement, ...], taken: set[str]) -> tuple[Statement, ...]:
    found: list[Statement] = []
    for s in body:
        if isinstance(s, Loop):
            s = replace(s, body=_bodies(_step(s.body, taken) if s.reduces and s.axis.tile > 1 else s.body, taken))
        found.append(s)
    return tuple(found)


def _step(body: tuple[Statement, ...], taken: set[str]) -> tuple[Statement, ...]:
    """Return one step with the products of each sum that have a factor in common."""
    loaded = {s.name for s in body if is_load(s)}
    for name in dict.fromkeys(s.name for s in body if isinstance(s, Assign)):
        own = [i for i, s in enumerate(body) if isinstance(s, Assign) and s.name == name]
        parts = [_split(body[i], loaded) for i in own]
        factors = {factor for _, factor in filter(None, parts)}
        if not all(parts) or len(factors) != 1 or _reads(body, name) != len(own) or not _pays([p[0] for p in parts if p]):
            continue
        (factor,) = factors
        step = f"{name}_step"
        while step in taken:
            step += "_"
        taken.add(step)
        body = _rewritten(body, own, step, [p[0] for p in parts if p], factor)
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


def _split(s: Statement, loaded: set[str]) -> tuple[TileDot, Tile] | None:
    """Return the product without its factor, and the factor: of what the step loads, the same for all its terms."""
    match s:
        case Assign(name, axes, Op("+", (Local(own), TileDot() as dot))) if own == name and not axes_of(dot) - {*axes}:
            for side in ("left", "right"):
                match getattr(dot, side):
                    case Op("*", pair):
                        for value, factor in (pair, pair[::-1]):
                            names = {n.name for n in factor.walk() if isinstance(n, Local)}
                            if names & loaded and not axes_of(factor) & {*dot.axes} and {*dot.axes} <= axes_of(value) and axes_of(value) == axes_of(getattr(dot, side)):
                                return replace(dot, **{side: value}), factor
    return None


def _reads(body: tuple[Statement, ...], name: str) -> int:
    """Return how often a step reads a sum."""
    return sum(isinstance(n, Local) and n.name == name for s in body if not isinstance(s, Loop) for n in _nodes(s)) + sum(10 for s in body if isinstance(s, Loop))


def _nodes(s: Statement):
    return s.value.walk() if hasattr(s, "value") else ()


def _pays(dots: list[TileDot]) -> bool:
    """Return whether the products' sums are fewer than the elements that need no factor."""
    elements = sum(_size(dot.axes) * _narrow(dot) for dot in dots)
    return 0 < FEWER * _size(axes_of(dots[0])) <= elements


def _narrow(dot: TileDot) -> int:
    """Return the larger side of a product, which has the factor where that pays."""
    return max(_size(axes_of(side) - {*dot.axes}) for side in (dot.left, dot.right))


def _size(axes) -> int:
    size = 1
    for a in axes:
        size *= a.tile
    return size
