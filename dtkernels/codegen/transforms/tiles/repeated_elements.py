"""Load once what several elements of a tile share, and repeat it in registers: ``W[k, n // 8]``, ``s[n, k // 32]`` in steps of 128.

Before::

    W = W[k, n // 8]                                            each packed element loaded eight times, by itself
    acc <- acc + dot(A, (W >> (4 * (n % 8))) & 15)

After::

    n_part = 8 from n // 8
    W = W[k, n_part]
    acc <- acc + dot(A, (repeat(W) >> (4 * ((n - first(n)) % 8))) & 15)

In kernels with products, where the tile begins at a whole pack and has several. Codes along the sum are split where a step has enough of
them (packed_codes.py); others are repeated. The place in the pack is counted from the tile's begin, so that it is known when the kernel
is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....algebra.rules.canonicalize import fresh_name
from ...ir import nest
from ...ir.nest import (
    Axis,
    Const,
    Guard,
    Index,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Op,
    Position,
    Repeat,
    Start,
    Statement,
    Tile,
    TileDot,
    is_load,
)
from ...lower.schedule_options import KernelOptions
from .packed_codes import known_values, starts_at_steps


def repeat_elements(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Load shared elements once for each tile."""
    if not nest.has_matrix_product(kernel.body):
        return kernel
    blocks = options.schedule.sizes(options.root, "block")
    first = {s.axis for s in kernel.body if isinstance(s, Index) and s.start == "block" and blocks.get(s.axis.label) == s.axis.tile and not s.axis.padded}
    repeats = _Repeats(kernel)
    body = repeats.body(kernel.body, frozenset(first))
    return replace(kernel, body=tuple(_with_indices(body, repeats.groups)))


def _with_indices(body: tuple[Statement, ...], groups: dict[tuple[Axis, int], Axis]) -> Iterator[Statement]:
    """Define the index of each group behind that of its axis."""
    for s in body:
        yield replace(s, body=tuple(_with_indices(s.body, groups))) if isinstance(s, Loop) else s
        if isinstance(s, Index):
            yield from (Index(group, s.start) for (axis, _), group in groups.items() if axis == s.axis)


class _Repeats:
    def __init__(self, kernel: Kernel):
        self.kernel, self.known = kernel, known_values(kernel)
        self.taken = nest.names_of(kernel)
        self.operands = _part_of_operands(kernel.body)
        self.groups: dict[tuple[Axis, int], Axis] = {}
        self.changed: dict[str, Tile] = {}  #: what a load's name stands for now

    def body(self, body: tuple[Statement, ...], whole: frozenset[Axis]) -> tuple[Statement, ...]:
        """Return a body; ``whole``: axes whose tiles begin at multiples of their lengths."""
        whole |= {s.axis for s in body if isinstance(s, Index) and s.axis.whole in whole and s.axis.every > 1}
        found: list[Statement] = []
        for s in body:
            if isinstance(s, Loop):
                begins = s.reduces and s.within == "extent" and s.axis.tile > 1 and starts_at_steps(s.begin, s.axis, self.known)
                found.append(replace(s, body=self.body(s.body, whole | {s.axis} if begins else whole)))
            elif is_load(s):
                found.append(self._load(s, whole))
            else:
                found.append(replace(s, value=self._value(s.value)) if isinstance(s, nest.Valued) else s)
        return tuple(found)

    def _load(self, s: Let, whole: frozenset[Axis]) -> Statement:
        """Return a load along the groups if its index contains only these; otherwise unchanged."""
        load, steps = s.value, dict[Axis, Axis]()
        assert isinstance(load, Load)
        for at, axis, by in _shared(load, whole) if s.name in self.operands else ():
            if axis in s.axes and len(s.axes) <= 2 and load.buffer not in self.kernel.descriptors and self._varies(load, axis) == 1:
                steps[axis] = self._group(axis, by)
                load = replace(load, index=tuple(Position(steps[axis]) if i == at else old for i, old in enumerate(load.index)))
        self.changed.pop(s.name, None)  # of an earlier loop
        if not steps:
            return replace(s, value=load.transform(self._named))
        axes = tuple(steps.get(a, a) for a in s.axes)
        value: Tile = Local(s.name, axes, "integer" if load.whole else "number")
        for axis, group in steps.items():
            value = Repeat(value, axis, group)
            value = value if axis.exact else Guard(value, (axis,), 0 if load.whole else 0.0)
        self.changed[s.name] = value
        return replace(s, value=load, axes=axes)

    def _group(self, axis: Axis, by: int) -> Axis:
        if (axis, by) not in self.groups:
            name = fresh_name(f"{(axis.whole or axis).name}_part", self.taken)
            every = by * (axis.every if axis.whole else 1)
            self.groups[axis, by] = Axis(name, axis.label, axis.tile // by, exact=axis.exact, whole=axis.whole or axis, every=every)
        return self.groups[axis, by]

    def _varies(self, load: Load, axis: Axis) -> int:
        """Return how often an axis stands in a load."""
        parts = (*load.index, *([] if load.only is None else [load.only]))
        return sum(isinstance(n, Position) and n.axis == axis or isinstance(n, Local) and axis in n.axes for i in parts for n in i.walk())

    def _value(self, tile: Tile) -> Tile:
        return tile.transform(self._named).transform(self._placed) if any(isinstance(n, Local) and n.name in self.changed for n in tile.walk()) else tile

    def _named(self, n: Tile) -> Tile:
        return self.changed.get(n.name, n) if isinstance(n, Local) else n

    def _placed(self, n: Tile) -> Tile:
        """Count a place in a pack from the begin of the tile."""
        match n:
            case Op("%", (Position(axis), Const(by))) if any(axis == own and axis.tile % by == 0 for own, _ in self.groups):
                return Op("%", (Op("-", (Position(axis), Start(axis))), Const(by)))
        return n


def _part_of_operands(body: tuple[Statement, ...]) -> frozenset[str]:
    """Return what operands of products are computed from, but for what stands in an index."""
    lets = [s for s in nest.statements(body) if isinstance(s, Let)]
    todo = [side for value in nest.values(body) for n in value.walk() if isinstance(n, TileDot) for side in (n.left, n.right)]
    found: set[str] = set()
    while todo:
        names = {n.name for n in todo.pop().walk() if isinstance(n, Local)} - found
        found |= names
        todo += [s.value for s in lets if s.name in names and not isinstance(s.value, Load)]
    placed = (n.name for s in lets if isinstance(s.value, Load) for i in s.value.index for n in i.walk() if isinstance(n, Local))
    return frozenset(found - {*placed})


def _shared(load: Load, whole: frozenset[Axis]) -> Iterator[tuple[int, Axis, int]]:
    """Yield (dimension, axis, elements that share one) of a load's index."""
    for at, i in enumerate(load.index):
        match i:
            case Op("//", (Position(axis), Const(by))) if axis in whole and type(by) is int and 1 < by < axis.tile and axis.tile % by == 0 and not by & (by - 1):
                yield at, axis, by
