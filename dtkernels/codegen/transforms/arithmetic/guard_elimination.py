"""Eliminate guards: drop the masks of reduction operands where masked loads already give the neutral element.

Before::

    A = load(A[x, k])                                   0 outside the extents
    total <- total + guard(A * A, k, 0)

After::

    A = load(A[x, k])
    total <- total + A * A

A masked load gives 0 or -inf outside the extents; the pass chooses the value that removes more guards.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ....lang.expr import DTYPES, FUNCTIONS
from ...ir import nest
from ...ir.nest import (
    Accumulator,
    Assign,
    Const,
    Guard,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Op,
    Statement,
    Store,
    Tile,
    map_values,
    mask_axes,
    statements,
)
from ...lower.schedule_options import KernelOptions


def eliminate_guards(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Drop needless guards and choose the fill value of each masked load.

    A descriptor always gives 0, and integers and numbers of e4m3 are never -inf.
    """
    finite = options.algorithm.integral | options.algorithm.float8_buffers.keys()
    return replace(kernel, body=drop_guards(kernel.body, frozenset(options.descriptors()) | finite))


def drop_guards(body: tuple[Statement, ...], zero_outside: frozenset[str] = frozenset()) -> tuple[Statement, ...]:
    """Remove guards that the fill values of loads make needless, choosing 0 or -inf for each load."""
    buffers = {s.name: s.value for s in statements(body) if isinstance(s, Let) and isinstance(s.value, Load)}
    loads = dict.fromkeys(buffers, 0.0)
    best = _guards_left(body, loads)
    for name in [name for name, load in buffers.items() if load.buffer not in zero_outside and not (load.whole or load.shift or load.checked)]:
        left = _guards_left(body, {**loads, name: -math.inf})
        if left < best:
            loads[name], best = -math.inf, left
    lets = _single_assignments(body)

    def strip(tile: Tile) -> Tile:
        return tile.arg if isinstance(tile, Guard) and _is_redundant(tile, lets, loads) else tile

    body = map_values(body, lambda value: value.transform(strip))
    return _set_other(body, loads)


def _set_other(body: tuple[Statement, ...], loads: dict[str, float]) -> tuple[Statement, ...]:
    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(one(x) for x in s.body))
        if isinstance(s, Let) and isinstance(s.value, Load) and not s.value.checked:
            return replace(s, value=replace(s.value, other=loads[s.name]))
        return s

    return tuple(one(s) for s in body)


def _single_assignments(body: tuple[Statement, ...]) -> dict[str, Tile]:
    """Return the names that stand for one value wherever they occur; sibling loops may reuse a name for another."""
    values: dict[str, set[Tile | None]] = {}
    for s in statements(body):
        if isinstance(s, (Let, Accumulator)):
            values.setdefault(s.name, set()).add(s.value if isinstance(s, Let) else None)
    return {name: value for name, found in values.items() if len(found) == 1 and (value := next(iter(found))) is not None}


def _guards_left(body: tuple[Statement, ...], loads: dict[str, float]) -> int:
    lets = _single_assignments(body)
    guards = {n for s in statements(body) if isinstance(s, (Let, Assign, Store)) for n in s.value.walk() if isinstance(n, Guard)}
    return sum(not _is_redundant(g, lets, loads) for g in guards)


def _is_redundant(guard: Guard, lets: dict[str, Tile], loads: dict[str, float]) -> bool:
    """Return whether ``guard.arg`` is the neutral element anyway past the extent of each guarded axis."""
    return all(_PastExtent(axis, lets, loads).value(guard.arg) == guard.neutral for axis in guard.axes)


class _PastExtent:
    """What values are where an axis is past its extent. Each name is looked at once: of a chain of names that are used twice each there are 2^n uses."""

    def __init__(self, axis: nest.Axis, lets: dict[str, Tile], loads: dict[str, float]):
        self.axis, self.lets, self.loads = axis, lets, loads
        self.known: dict[str, float | None] = {}
        self.never: dict[tuple[str, float], bool] = {}

    def value(self, tile: Tile) -> float | None:
        """Return the constant value of ``tile``; None if it is not known."""
        match tile:
            case Const(value):
                return None if isinstance(value, bool) else float(value)
            case Local(name, _):
                if name not in self.known:
                    self.known[name] = self._named(name)
                return self.known[name]
            case Guard(arg, axes, neutral):
                return neutral if self.axis in axes else self.value(arg)
            case Op("+" | "-" as fn, (a, b)) if (left := self.value(a)) is not None and math.isinf(left):
                right = self.value(b)
                cancels = left if fn == "-" else -left  # inf - inf is NaN
                if right is None:  # past the extent an operand that varies along the axis may be NaN: sqrt(0 - 1)
                    return left if self.axis not in nest.axes_of(b) and self._is_never(b, cancels) else None
                return left if right != cancels else None
            case Op(fn, args):
                return _value_of_op(fn, [self.value(a) for a in args])
        return None

    def _named(self, name: str) -> float | None:
        named = self.lets.get(name)
        if isinstance(named, Load):
            masked = self.axis in mask_axes(named.index)
            return (0.0 if named.checked else self.loads[name]) if masked else None
        return self.value(named) if named is not None else None

    def _is_never(self, tile: Tile, value: float) -> bool:
        """Return whether no element of ``tile`` can be the infinity ``value``, for any inputs."""
        match tile:
            case Const(own):
                return own != value
            case nest.Position() | nest.Size() | nest.Start() | nest.Step():
                return True
            case Local(name, _):
                if (name, value) not in self.never:
                    self.never[name, value] = name in self.lets and self._is_never(self.lets[name], value)
                return self.never[name, value]
            case Load():
                return tile.shift and value == -math.inf
            case Guard(arg, _, neutral):
                return neutral != value and self._is_never(arg, value)
            case Op("where", (Op(">", (x, Const(low))), y, other)) if x == y and low == value == -math.inf:
                return self._is_never(other, value)
            case Op("where", (_, a, b)) | Op("+", (a, b)):
                return self._is_never(a, value) and self._is_never(b, value)
            case Op("-", (a, b)):
                return self._is_never(a, value) and self._is_never(b, -value)
            case Op("neg", (a,)):
                return self._is_never(a, -value)
            case Op(fn, _) if fn in FUNCTIONS and FUNCTIONS[fn].is_finite:
                return True
            case Op("exp" | "exp2" | "abs" | "sqrt", _):
                return value < 0
        return False


def _value_of_op(fn: str, args: list[float | None]) -> float | None:
    match fn, args:
        case ("neg", [a]) if a is not None:
            return -a
        case ("exp" | "exp2", [a]) if a == -math.inf:
            return 0.0
        case (_, [a]) if a == 0 and fn in FUNCTIONS and FUNCTIONS[fn].keeps_zero:
            return 0.0
        case ("*", [a, b]) if a == 0 and b == 0:
            return 0.0
        case ("*", [a, b]) if a is not None and b is not None and not math.isnan(a * b):
            return a * b
        case ("+" | "-", [a, b]) if a == 0 and b == 0:
            return 0.0
        case ("where", [_, a, b]) if a == b:
            return a
        case (cast, [a]) if cast.startswith("cast:") and (a == 0 or a is not None and math.isinf(a) and cast[5:] in DTYPES):  # others are rounded
            return a
        case ("maximum", [a, b]) if a is not None and b is not None:
            return max(a, b)
    return None
