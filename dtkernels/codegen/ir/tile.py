"""Tile expressions: values with one dimension for each of a set of axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...lang.expr import field_names

if TYPE_CHECKING:
    from ...algebra.operand_types import OperandType

WHOLE = 0  #: tile size meaning the whole extent at once


@dataclass(frozen=True)
class Axis:
    """A label inside a kernel: its index variable, and how many elements it advances by (WHOLE: the extent)."""

    name: str
    label: str
    tile: int
    exact: bool = False  #: never passes the extent, so it needs no mask
    padded: bool = False  #: wider than its block; only elements of the block are inside
    offset: int = 0  #: of a part (tile_parts.py), from the first element of the tile that it is a part of
    whole: Axis | None = None  #: the axis of that tile
    every: int = 1  #: elements of ``whole`` in one of its own (packed_codes.py)
    half: int = 0  #: of a whole extent in two tiles: 1 for the first, 2 for that of the rest (tile_parts.py)

    @property
    def scalar(self) -> bool:
        return self.tile == 1

    def __str__(self) -> str:
        return f"{self.name}:{self.tile or ('all', 'low', 'rest')[self.half]}"


@dataclass(frozen=True)
class Tile:
    """Base class of tile expressions."""

    def children(self) -> tuple[Tile, ...]:
        """Return the direct subexpressions."""
        return self._children

    @cached_property
    def _children(self) -> tuple[Tile, ...]:
        found: list[Tile] = []
        for name in field_names(type(self)):
            value = getattr(self, name)
            found += [value] if isinstance(value, Tile) else [v for v in value if isinstance(v, Tile)] if isinstance(value, tuple) else []
        return tuple(found)

    def walk(self) -> Iterator[Tile]:
        """Yield this tile, then its subexpressions, parents first."""
        return iter(self._nodes)

    @cached_property
    def _nodes(self) -> tuple[Tile, ...]:
        """Return the nodes that ``walk`` yields, cached as in ``lang.expr.Expr``."""
        return (self, *(node for child in self._children for node in child._nodes))

    @cached_property
    def _axes(self) -> frozenset[Axis]:
        return _axes_of(self)

    @cached_property
    def local_names(self) -> frozenset[str]:
        """The names of the kernel's own values that the tile is computed from directly."""
        return frozenset(n.name for n in self._nodes if isinstance(n, Local))

    def rebuild(self, change: Callable[[Tile], Tile]) -> Tile:
        """Apply ``change`` to each direct subexpression. Returns the same object, with its caches, where none changes."""
        if not self._children:
            return self
        new: dict[str, Any] = {}
        for name in field_names(type(self)):
            value = getattr(self, name)
            if isinstance(value, Tile):
                if (changed := change(value)) is not value:
                    new[name] = changed
            elif isinstance(value, tuple):
                several = tuple([change(v) if isinstance(v, Tile) else v for v in value])
                if any([a is not b for a, b in zip(several, value)]):
                    new[name] = several
        return replace(self, **new) if new else self

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
class BlockNumber(Tile):
    """The number of the program's block along a label."""

    label: str

    def __str__(self) -> str:
        return f"block({self.label})"


@dataclass(frozen=True)
class Step(Tile):
    """The number of elements by which an axis advances."""

    axis: Axis

    def __str__(self) -> str:
        return f"step({self.axis.name})"


@dataclass(frozen=True)
class Local(Tile):
    """A named value; ``axes`` in the order of its dimensions, without scalar axes."""

    name: str
    axes: tuple[Axis, ...]
    kind: str = "number"  #: or "integer", "boolean"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Load(Tile):
    """A load of elements of a buffer; ``checked`` are (dimension) indices that arithmetic may push outside, which reads 0.

    ``extents``: for each of ``checked``, the label whose extent the dimension has, or None.
    """

    buffer: str
    index: tuple[Tile, ...]
    checked: tuple[int, ...] = ()
    extents: tuple[str | None, ...] = ()
    other: float = 0
    whole: bool = False  #: whether its elements are integers that are not converted
    shift: bool = False  #: whether its elements are ``log2(e) * where(s > -inf, s, 0)``
    sunk_into: Axis | None = None  #: the loop that loads these same elements in every step (load_sinking.py)
    duplicate_in: Axis | None = None  #: the loop in which this repeats another load (duplicate_wgmma_loads.py)
    hoisted_from: Axis | None = None  #: the loop before which its offsets are computed (offset_hoisting.py)
    evict: str = ""  #: eviction policy, where loads of the buffer differ (eviction_hints.py)
    only: Tile | None = None  #: the condition without which an element is not read, and 0 (load_masks.py)

    @property
    def repeats_each_step(self) -> bool:
        """Return whether it repeats, in every step of a loop, a load of the same elements."""
        return any(isinstance(n, Position) and n.axis == self.duplicate_in for i in self.index for n in i.walk())

    def __str__(self) -> str:
        other = (f" else {self.other}" if self.other else "") + (" again" if self.sunk_into or self.duplicate_in else "")
        other += f" offsets before the loop over {self.hoisted_from.name}" if self.hoisted_from else ""
        other += f" where {self.only}" if self.only is not None else ""
        return f"{self.buffer}[{', '.join(map(str, self.index))}]{other}"


@dataclass(frozen=True)
class Joined:
    """Dimensions ``first`` to ``last`` of a buffer as one; ``extents``: the labels of those after the first."""

    first: int
    last: int
    extents: tuple[str, ...]


@dataclass(frozen=True)
class DescriptorLoad(Tile):
    """A load of a box of a buffer through its tensor descriptor: where it starts, and the axis of each dimension (None: one element).

    ``joined``: dimensions of the buffer that are one in the box (merged_dimensions.py).
    """

    buffer: str
    start: tuple[Tile, ...]
    box: tuple[Axis | None, ...]
    joined: tuple[Joined, ...] = ()

    def __str__(self) -> str:
        return f"{self.buffer}[{', '.join(f'{s}:+{b.tile or b.label}' if b else str(s) for s, b in zip(self.start, self.box))}]"


@dataclass(frozen=True)
class Op(Tile):
    """An elementwise function or operator; casts are named ``cast:bf16`` and the like."""

    fn: str
    args: tuple[Tile, ...]

    def __str__(self) -> str:
        if len(self.args) == 2 and not self.fn[0].isalpha():
            return f"({self.args[0]} {self.fn} {self.args[1]})"
        return f"{self.fn}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class ScaleFactor(Tile):
    """A factor moved from inside a maximum to its outside where ``scale`` is positive; it is then 1 on the inside."""

    scale: Scalar
    inside: bool

    def __str__(self) -> str:
        return f"{'inside' if self.inside else 'outside'}({self.scale})"


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
    keeps_nan: bool = True  #: False for a maximum used only as a guarded shift: the value it is subtracted from keeps NaN

    def __str__(self) -> str:
        return f"{self.kind}({self.arg}, {', '.join(a.name for a in self.axes)})"


@dataclass(frozen=True)
class TileDot(Tile):
    """A matrix product of two tiles over ``axes``, for the matrix units. ``operands``: their type, None for the results' dtype."""

    left: Tile
    right: Tile
    axes: tuple[Axis, ...]
    operands: OperandType | None = None

    def __str__(self) -> str:
        return f"dot({self.left}, {self.right}, {', '.join(a.name for a in self.axes)})"


@dataclass(frozen=True)
class EveryNth(Tile):
    """Select the elements at position ``part`` of each group of ``group.every`` along ``axis`` of a loaded tile."""

    arg: Local
    axis: Axis
    group: Axis
    part: int

    def __str__(self) -> str:
        return f"every({self.arg}, {self.part}, {self.group.every})"


@dataclass(frozen=True)
class Repeat(Tile):
    """Repeat each element of a tile loaded along ``group`` for all elements of ``axis`` that share it."""

    arg: Tile
    axis: Axis
    group: Axis

    def __str__(self) -> str:
        return f"repeat({self.arg}, {self.axis.tile // self.group.tile})"


@dataclass(frozen=True)
class TileScan(Tile):
    """Partial results along ``axis``: of one argument for sum, prod, max and min, of two for recur, ``h = args[0] * h + args[1]``."""

    kind: str
    args: tuple[Tile, ...]
    axis: Axis
    reverse: bool = False  #: from the last element to the first

    def __str__(self) -> str:
        return f"scan_{self.kind}({', '.join(map(str, self.args))}, {self.axis.name}{', reversed' if self.reverse else ''})"


def axes_of(tile: Tile) -> frozenset[Axis]:
    """Return the axes along which a tile has more than one element."""
    return tile._axes


def _axes_of(tile: Tile) -> frozenset[Axis]:
    match tile:
        case Position(axis):
            return frozenset() if axis.scalar else frozenset({axis})
        case Local(_, axes):
            return frozenset(axes)
        case DescriptorLoad(_, _, box, _):
            return frozenset(a for a in box if a is not None)
        case TileReduce(_, arg, axes):
            return axes_of(arg) - frozenset(axes)
        case Guard(arg, axes, _):  # arg may be the same for all of a tile
            return axes_of(arg) | frozenset(a for a in axes if not a.scalar)
        case EveryNth(arg, axis, group):
            return axes_of(arg) - {axis} | {group}
        case Repeat(arg, axis, group):
            return axes_of(arg) - {group} | {axis}
        case TileDot(left, right, axes):
            return (axes_of(left) | axes_of(right)) - frozenset(axes)
    return frozenset().union(*(axes_of(c) for c in tile.children()))


def in_order(axes: frozenset[Axis], wanted: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return ``axes`` without repetition: first those in ``wanted``, in its order, then the others by name. A diagonal wants one axis twice."""
    return tuple(dict.fromkeys(a for a in wanted if a in axes)) + tuple(sorted(axes - set(wanted), key=lambda a: a.name))


def mask_axes(index: tuple[Tile, ...]) -> tuple[Axis, ...]:
    """Return the axes whose masks an access of ``index`` carries: all that the index varies with and that may pass their extents.

    An axis may occur only inside a named part of the index, as ``s`` in ``W[t, c]`` after ``t = t[s]``. Past the extent of such an axis a load
    gives ``other`` and reads nothing.
    """
    nodes = (n for i in index for n in i.walk())
    axes = (a for n in nodes for a in ((n.axis,) if isinstance(n, Position) else n.axes if isinstance(n, Local) else ()))
    return tuple(dict.fromkeys(a for a in axes if not a.exact))
