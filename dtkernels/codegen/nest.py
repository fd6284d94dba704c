"""The LoopNest: one grammar between the schedule and the printed kernel.

    Kernel    = grid of block labels, body of statements
    Statement = Index | Loop | Let | Accumulator | Assign | Store
    Tile      = Const | Scalar | Size | Position | Start | Step | Local | Load | Op | Guard | TileReduce | TileDot

A tile is a value over a set of axes; an axis is a label advanced by so many elements at once. Nothing here knows a
GPU or a syntax; printers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

WHOLE = 0  #: tile size meaning the whole extent at once


@dataclass(frozen=True)
class Axis:
    """A label inside a kernel: its index variable and how many elements it advances by (WHOLE: the extent)."""

    name: str
    label: str
    tile: int
    exact: bool = False  #: never passes the extent, so that it needs no mask

    @property
    def scalar(self) -> bool:
        return self.tile == 1

    def __str__(self) -> str:
        return f"{self.name}:{self.tile or 'all'}"


@dataclass(frozen=True)
class Tile:
    """Base of tile expressions."""

    def children(self) -> tuple[Tile, ...]:
        found: list[Tile] = []
        for f in fields(self):
            value = getattr(self, f.name)
            found += [value] if isinstance(value, Tile) else [v for v in value if isinstance(v, Tile)] if isinstance(value, tuple) else []
        return tuple(found)

    def walk(self) -> Iterator[Tile]:
        yield self
        for child in self.children():
            yield from child.walk()

    def rebuild(self, change: Callable[[Tile], Tile]) -> Tile:
        new = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tile):
                new[f.name] = change(value)
            elif isinstance(value, tuple) and any(isinstance(v, Tile) for v in value):
                new[f.name] = tuple(change(v) if isinstance(v, Tile) else v for v in value)
        return replace(self, **new) if any(new[n] is not getattr(self, n) for n in new) else self

    def transform(self, change: Callable[[Tile], Tile]) -> Tile:
        return change(self.rebuild(lambda child: child.transform(change)))


@dataclass(frozen=True)
class Const(Tile):
    value: int | float | bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and type(other.value) is type(self.value) and other.value == self.value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Scalar(Tile):
    """A scalar input."""

    name: str
    integer: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Size(Tile):
    """The extent of a label."""

    label: str

    def __str__(self) -> str:
        return f"len({self.label})"


@dataclass(frozen=True)
class Position(Tile):
    """The index vector (or number) of an axis."""

    axis: Axis

    def __str__(self) -> str:
        return self.axis.name


@dataclass(frozen=True)
class Start(Tile):
    """The first index of an axis's current tile."""

    axis: Axis

    def __str__(self) -> str:
        return f"first({self.axis.name})"


@dataclass(frozen=True)
class Step(Tile):
    """How far an axis advances at once."""

    axis: Axis

    def __str__(self) -> str:
        return f"step({self.axis.name})"


@dataclass(frozen=True)
class Local(Tile):
    """A named value; ``axes`` in the order of its dimensions, scalar axes left out."""

    name: str
    axes: tuple[Axis, ...]
    boolean: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Load(Tile):
    """Elements of a buffer; ``checked`` are (dimension) indices that arithmetic may push outside, which reads 0."""

    buffer: str
    index: tuple[Tile, ...]
    checked: tuple[int, ...] = ()
    other: float = 0

    def __str__(self) -> str:
        other = f" else {self.other}" if self.other else ""
        return f"{self.buffer}[{', '.join(map(str, self.index))}]{other}"


@dataclass(frozen=True)
class Op(Tile):
    """An elementwise function or operator; ``cast:bf16`` and the like are casts."""

    fn: str
    args: tuple[Tile, ...]

    def __str__(self) -> str:
        if len(self.args) == 2 and not self.fn[0].isalpha():
            return f"({self.args[0]} {self.fn} {self.args[1]})"
        return f"{self.fn}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class Guard(Tile):
    """``arg`` where all ``axes`` are inside their extents, ``neutral`` elsewhere."""

    arg: Tile
    axes: tuple[Axis, ...]
    neutral: float

    def __str__(self) -> str:
        return f"guard({self.arg}, {', '.join(a.name for a in self.axes)}, {self.neutral})"


@dataclass(frozen=True)
class TileReduce(Tile):
    kind: str  # sum, max or min
    arg: Tile
    axes: tuple[Axis, ...]
    keeps_nan: bool = True  #: a maximum that is only a guarded shift need not: what it is subtracted from does

    def __str__(self) -> str:
        return f"{self.kind}({self.arg}, {', '.join(a.name for a in self.axes)})"


@dataclass(frozen=True)
class TileDot(Tile):
    """Matrix product of two tiles over ``axes``, for the matrix units."""

    left: Tile
    right: Tile
    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"dot({self.left}, {self.right}, {', '.join(a.name for a in self.axes)})"


def axes_of(tile: Tile) -> frozenset[Axis]:
    """The axes a tile has more than one element along."""
    match tile:
        case Position(axis):
            return frozenset() if axis.scalar else frozenset({axis})
        case Local(_, axes):
            return frozenset(axes)
        case TileReduce(_, arg, axes):
            return axes_of(arg) - frozenset(axes)
        case TileDot(left, right, axes):
            return (axes_of(left) | axes_of(right)) - frozenset(axes)
    return frozenset().union(*(axes_of(c) for c in tile.children()))


# -- statements -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """Base of statements."""


@dataclass(frozen=True)
class Index(Statement):
    """``axis = start + 0 .. tile-1``; start is the block's, a loop's counter, or nothing for a whole extent."""

    axis: Axis
    start: str  # "block", "loop", "block+loop" or "whole"


@dataclass(frozen=True)
class Loop(Statement):
    """Advance ``axis`` over the block or the whole extent, or over the part of it from ``begin`` to ``end``.

    A ``tail`` is what is left of an extent after its whole tiles; it is empty where the tile divides the extent.
    """

    axis: Axis
    within: str  # "block" or "extent"
    body: tuple[Statement, ...]
    reduces: bool = False
    options: tuple[tuple[str, int | bool], ...] = ()
    begin: Tile | None = None
    end: Tile | None = None
    tail: bool = False


@dataclass(frozen=True)
class Let(Statement):
    name: str
    value: Tile
    axes: tuple[Axis, ...]
    origin: str = ""


@dataclass(frozen=True)
class Accumulator(Statement):
    """A value that a loop changes, with what it starts from."""

    name: str
    axes: tuple[Axis, ...]
    start: float
    origin: str = ""


@dataclass(frozen=True)
class Assign(Statement):
    """Give accumulator ``name`` a new value."""

    name: str
    axes: tuple[Axis, ...]
    value: Tile


@dataclass(frozen=True)
class Store(Statement):
    buffer: str
    index: tuple[Tile, ...]
    value: Tile
    axes: tuple[Axis, ...]
    origin: str = ""


@dataclass(frozen=True)
class GridLabel:
    """A label whose blocks are programs."""

    label: str
    block: int


@dataclass(frozen=True)
class GridStep:
    """One place in the order in which program ids walk the blocks: a label, the groups of one, or the inside of its group."""

    label: str
    part: str = "all"  # "all", "group" or "inside"
    size: int = 0
    name: str = ""


@dataclass(frozen=True)
class Kernel:
    """One kernel: what it reads, what it writes, its grid, slowest step first, and its body."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scalars: tuple[str, ...]
    grid: tuple[GridLabel, ...]
    order: tuple[GridStep, ...]
    body: tuple[Statement, ...]
    num_warps: int = 4
    num_stages: int = 3
    persistent: bool = False
    options: tuple[tuple[str, int], ...] = ()  #: further launch options
    evict: tuple[tuple[str, str], ...] = ()  #: buffer -> which of its cached lines go first
    constants: tuple[str, ...] = ()  #: labels whose extent is known at compile time


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement, outer ones first."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            yield from statements(s.body)


def values(body: tuple[Statement, ...]) -> Iterator[Tile]:
    """Every tile expression of the body that is no index."""
    return (s.value for s in statements(body) if isinstance(s, (Let, Assign, Store)))


def any_product(body: tuple[Statement, ...]) -> bool:
    """Whether the matrix units are used."""
    return any(isinstance(n, TileDot) for value in values(body) for n in value.walk())


def map_values(body: tuple[Statement, ...], change: Callable[[Tile], Tile]) -> tuple[Statement, ...]:
    """The body with ``change`` applied to the value of every statement that has one."""

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=map_values(s.body, change))
        return replace(s, value=change(s.value)) if isinstance(s, (Let, Assign, Store)) else s

    return tuple(one(s) for s in body)


def nest_text(kernel: Kernel) -> str:
    """The nest as indented text, for people."""
    grid = ", ".join(f"{g.label}:{g.block}" for g in kernel.grid) or "one program"
    extra = [*(["persistent"] if kernel.persistent else []), *(f"{k} {v}" for k, v in kernel.options)]
    extra += [f"evict {t} {policy}" for t, policy in kernel.evict] + [f"constant len({label})" for label in kernel.constants]
    lines = ["; ".join([f"kernel {kernel.name}: grid {grid}", f"num_warps {kernel.num_warps}, num_stages {kernel.num_stages}", *extra])]
    _lines(kernel.body, 1, lines)
    return "\n".join(lines)


def _lines(body: tuple[Statement, ...], depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for s in body:
        match s:
            case Index(axis, start):
                lines.append(f"{pad}index {axis} from {start}")
            case Loop(axis, within, inner, reduces, options):
                extra = "".join(f", {k} {v}" for k, v in options)
                where = within if s.end is None else f"{s.begin or 0} .. {s.end}{' (tail)' if s.tail else ''}"
                lines.append(f"{pad}{'reduce' if reduces else 'loop'} {axis} over {where}{extra}")
                _lines(inner, depth + 1, lines)
            case Let(name, value, axes, origin):
                lines.append(f"{pad}{name}{_axes(axes)} = {value}" + (f"   # {origin}" if origin else ""))
            case Accumulator(name, axes, start, origin):
                lines.append(f"{pad}accumulate {name}{_axes(axes)} from {start}" + (f"   # {origin}" if origin else ""))
            case Assign(name, _, value):
                lines.append(f"{pad}{name} <- {value}")
            case Store(buffer, index, value, _, origin):
                lines.append(f"{pad}{buffer}[{', '.join(map(str, index))}] := {value}" + (f"   # {origin}" if origin else ""))


def _axes(axes: tuple[Axis, ...]) -> str:
    return f"[{', '.join(a.name for a in axes)}]" if axes else ""
