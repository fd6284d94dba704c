"""Compute a tile that is no power of two in parts that are: ``f.block(y:192); f.tensorize(y:192)``.

Before::

    y = 192 of a block
    for k in 0 .. size_k:
        A = A[x, k]
        B = B[k, y]
        acc[x, y] <- acc + dot(A, B)
    f[x, y] := sigmoid(acc)

After::

    y_0, y_128 = the first 128 of a block, the last 64
    for k in 0 .. size_k:
        A = A[x, k]                                 loaded once, for both products
        B_0, B_128 = B[k, y_0], B[k, y_128]
        acc_0[x, y_0] <- acc_0 + dot(A, B_0)
        acc_128[x, y_128] <- acc_128 + dot(A, B_128)
    f[x, y_0] := sigmoid(acc_0)
    f[x, y_128] := sigmoid(acc_128)

Few rows of a product without matrix units are parts of one row each, ``f.block(x:3); f.tensorize(x:3, y:1, k:1024)``::

    for k in 0 .. size_k by 1024:
        B = B[y, k]                                 each thread keeps its elements for all rows
        acc_0[y, k] <- acc_0 + A[x_0, k] * B
        acc_1[y, k] <- acc_1 + A[x_1, k] * B
        acc_2[y, k] <- acc_2 + A[x_2, k] * B

As one tile of three dimensions, both operands would pass through shared memory to be broadcast.

A whole extent, ``f.tensorize(d:0); f.two_tiles(d)``, is held by the largest power of two below it and one for the rest, 64 and 32 of 96, where one
tile would be 128. Which they are, the wrapper says at run time::

    d_low, d_rest = the first tile of d, the second
    Q_low, Q_rest = Q[m, d_low], Q[m, d_rest]
    s[m, l] = dot(Q_low, K_low) + dot(Q_rest, K_rest)

Each statement whose value varies along the axis is made once for each part, others once. What is reduced along the axis is reduced along each
part, and the results are combined. Loops keep the bounds that they have for the whole tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from ....algebra.rules.canonicalize import fresh_name
from ....lang.errors import DTError
from ...ir import nest
from ...ir.nest import (
    WHOLE,
    Axis,
    Guard,
    Index,
    Kernel,
    Let,
    Local,
    Loop,
    Op,
    Position,
    Start,
    Statement,
    Store,
    Tile,
    TileDot,
    TileReduce,
    TileScan,
    axes_of,
)
from ...ir.value_type import is_integer
from ...lower.reduction_terms import MIN_DOT, TILE_KINDS
from ...lower.schedule_options import KernelOptions
from ...powers_of_two import binary_parts

HALVES = ("low", "rest")  #: suffixes of the names of two tiles
FEW_ROWS = 8  #: most rows, of which each is a part
_COMBINED = {kind: fn for fn, kind in TILE_KINDS.items() if fn != "largest"}


def cut_tiles_into_parts(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Replace each axis whose tile is no power of two by axes that are. Raises DTError where a part is too small for what it computes."""
    body = kernel.body
    named: dict[tuple[str, str, str], str] = {}
    for axis in [s.axis for s in nest.statements(body) if isinstance(s, Index) and s.axis.tile > 1]:
        sizes = (1,) * axis.tile if _is_few_rows(body, axis) else binary_parts(axis.tile)
        if len(sizes) > 1:
            _check(kernel, axis, sizes, options)
            body = AxisCut(body, axis, kernel, named).into(sizes)
    for axis in _of_two_tiles(body, options):
        body = AxisCut(body, axis, kernel, {}).in_two()
    return replace(kernel, body=body)


def _of_two_tiles(body: tuple[Statement, ...], options: KernelOptions) -> list[Axis]:
    """Return the axes of whole extents that the schedule has two tiles for. A kernel that merges parts may hold none."""
    return [s.axis for s in nest.statements(body) if isinstance(s, Index) and s.axis.tile == WHOLE and s.axis.label in options.two_tiles()]


def _is_few_rows(body: tuple[Statement, ...], axis: Axis) -> bool:
    """Return whether an axis is that of few rows, in all sums of terms that have it, which an operand of two dimensions lacks."""
    if axis.tile > FEW_ROWS:
        return False
    held = {s.name for s in nest.statements(body) if isinstance(s, nest.Accumulator) and s.terms and axis in s.axes}
    updates = [s for s in nest.statements(body) if isinstance(s, nest.Assign) and s.name in held]
    block = any(isinstance(s, Index) and s.axis == axis and s.start == "block" for s in body)
    lacked = all(any(isinstance(n, Local) and len(n.axes) > 1 and axis not in n.axes for n in s.value.walk()) for s in updates)
    return block and bool(updates) and lacked


def _check(kernel: Kernel, axis: Axis, sizes: tuple[int, ...], options: KernelOptions) -> None:
    at = options.where("tensorize")
    least = min(sizes)
    nodes = [n for v in nest.values(kernel.body) for n in v.walk()]
    if any(isinstance(n, TileScan) and n.axis == axis for n in nodes):
        raise DTError("a scan runs along one tile", found=f"{axis.label}:{axis.tile}", allowed="a power of two", at=at)
    if least < MIN_DOT and any(isinstance(n, TileDot) and axis in axes_of(n.left) | axes_of(n.right) for n in nodes):
        raise DTError("a tile of a product is a sum of powers of two from 16 on", found=f"{axis.label}:{axis.tile}",
                      allowed=f"{axis.label}:{-(-axis.tile // MIN_DOT) * MIN_DOT}", at=at)  # fmt: skip


class AxisCut:
    """Replaces one axis of a body by its parts. ``named``: names of parts by label, name and offset.

    A label has another axis in a loop that never passes its extent. What both loops add up has the same names in them.
    """

    def __init__(self, body: tuple[Statement, ...], axis: Axis, kernel: Kernel, named: dict[tuple[str, str, str], str]):
        self.body, self.axis, self.named = body, axis, named
        self.taken = nest.names_of(replace(kernel, body=body))
        self.parts: list[Axis] = []

    def into(self, sizes: tuple[int, ...]) -> tuple[Statement, ...]:
        """Return the body with parts of these sizes."""
        offset = 0
        for size in sizes:
            self.parts.append(Axis(self._fresh(self.axis.name, str(offset)), self.axis.label, size, offset=offset, whole=self.axis))
            offset += size
        return self._cut(self.body)

    def in_two(self) -> tuple[Statement, ...]:
        """Return the body with two tiles for the whole extent."""
        for half, suffix in enumerate(HALVES, 1):
            self.parts.append(Axis(self._fresh(self.axis.name, suffix), self.axis.label, WHOLE, whole=self.axis, half=half))
        return self._cut(self.body)

    def _fresh(self, name: str, suffix: str) -> str:
        return fresh_name(f"{name}_{suffix}", self.taken)

    def _cut(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(made for s in body for made in self._statement(s))

    def _statement(self, s: Statement) -> Iterator[Statement]:
        match s:
            case Index(axis, start) if axis == self.axis:
                yield from (Index(part, start) for part in self.parts)
            case Loop():
                bounds = {side: self._of(bound, None) for side in ("begin", "end") if (bound := getattr(s, side)) is not None}
                yield replace(s, body=self._cut(s.body), **bounds)  # type: ignore[arg-type]
            case Let(name, _, axes) | nest.Accumulator(name, axes) | nest.Assign(name, axes) if self.axis in axes:
                for part in self.parts:
                    value = {} if isinstance(s, nest.Accumulator) else {"value": self._of(s.value, part)}
                    yield replace(s, name=self._name(name, part), axes=self._axes(axes, part), **value)  # type: ignore[arg-type]
            case Store(_, index, value, axes) if self.axis in axes:
                for part in self.parts:
                    own = tuple(self._of(i, part) for i in index)
                    yield replace(s, index=own, value=self._of(value, part), axes=self._axes(axes, part))
            case Store(_, index, value):
                yield replace(s, index=tuple(self._of(i, None) for i in index), value=self._of(value, None))
            case Let() | nest.Assign():
                yield replace(s, value=self._of(s.value, None))
            case _:
                yield s

    def _name(self, name: str, part: Axis) -> str:
        suffix = HALVES[part.half - 1] if part.half else str(part.offset)
        key = self.axis.label, name, suffix
        if key not in self.named:
            self.named[key] = self._fresh(name, suffix)
        return self.named[key]

    def _axes(self, axes: tuple[Axis, ...], part: Axis) -> tuple[Axis, ...]:
        return tuple(part if a == self.axis else a for a in axes if a != self.axis or not part.scalar)

    def _of(self, tile: Tile, part: Axis | None) -> Tile:
        """Return the value of one part, or of none: what is reduced along the axis is combined from the parts."""
        match tile:
            case Position(axis) if axis == self.axis and part is not None:
                return Position(part)
            case Start(axis) if axis == self.axis:
                return Position(self.parts[0]) if self.parts[0].scalar else Start(self.parts[0])
            case Local(name, axes) if part is not None and self.axis in axes:
                return replace(tile, name=self._name(name, part), axes=self._axes(axes, part))
            case Guard(arg, axes) if part is not None and self.axis in axes:
                return replace(tile, arg=self._of(arg, part), axes=tuple(part if a == self.axis else a for a in axes))
            case TileReduce(kind, arg, axes) if self.axis in axes:
                fn = "largest" if kind == "max" and not tile.keeps_nan and not is_integer(arg) else _COMBINED[kind]
                over = [(self._of(arg, p), self._axes(axes, p)) for p in self.parts]
                each = [replace(tile, arg=own, axes=left) if left else own for own, left in over]
                return reduce(lambda a, b: Op(fn, (a, b)), each)
            case TileDot(left, right, axes) if self.axis in axes:
                sides = [(self._of(left, p), self._of(right, p), self._axes(axes, p)) for p in self.parts]
                dots: list[Tile] = [replace(tile, left=a, right=b, axes=over) for a, b, over in sides]
                return reduce(lambda a, b: Op("+", (a, b)), dots)
        return tile.rebuild(lambda child: self._of(child, part))
