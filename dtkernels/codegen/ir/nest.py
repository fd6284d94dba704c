"""Define the loop nest: the intermediate representation between schedule and printed kernel.

    Kernel    = grid of block labels, body of statements
    Statement = Index | Loop | Let | Accumulator | Assign | Store | DescriptorStore | Barrier
    Tile      = Const | Scalar | Size | Position | Start | BlockNumber | Step | Local | Load | DescriptorLoad | Op | Guard | TileReduce | TileDot | EveryNth | Repeat | TileScan

A tile is a value over a set of axes; an axis is a label that advances by several elements at once. Nothing here depends on a GPU or on a
syntax; the printers do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeGuard

from .tile import (  # noqa: F401 (the grammar is one: its expressions are imported from here)
    WHOLE,
    Axis,
    BlockNumber,
    Const,
    DescriptorLoad,
    EveryNth,
    Guard,
    Joined,
    Load,
    Local,
    Op,
    Position,
    Repeat,
    Scalar,
    ScaleFactor,
    Size,
    Start,
    Step,
    Tile,
    TileDot,
    TileReduce,
    TileScan,
    axes_of,
    in_order,
    mask_axes,
)


@dataclass(frozen=True)
class Statement:
    """Base class of statements."""


@dataclass(frozen=True)
class Index(Statement):
    """Define ``axis = start + 0 .. tile-1``; start is that of the block, a loop counter, or 0 for a whole extent."""

    axis: Axis
    start: str  # "block", "loop", "block+loop" or "whole"


@dataclass(frozen=True)
class Range:
    """The part of an axis that a loop goes over; without bounds its whole extent."""

    axis: Axis
    begin: Tile | None = None
    end: Tile | None = None


@dataclass(frozen=True)
class Loop(Statement):
    """Advance ``axis`` over the block or the whole extent, or over the part of it from ``begin`` to ``end``.

    A ``tail`` covers the rest of an extent after its whole tiles; it is empty where the tile divides the extent. It runs only where
    ``when`` holds, if it has one: a single truth value that is known before the loop.

    ``order``: what nested loops that it goes through as one go over, slowest first; of their axes ``axis`` alone may be a tile (joined_loops.py).
    """

    axis: Axis
    within: str  # "block" or "extent"
    body: tuple[Statement, ...]
    reduces: bool = False
    options: tuple[tuple[str, int | bool], ...] = ()
    begin: Tile | None = None
    end: Tile | None = None
    tail: bool = False
    when: Tile | None = None
    order: tuple[Range, ...] = ()

    def bounds(self) -> tuple[Tile, ...]:
        """Return where the loop begins and ends, and the condition under which it runs, as far as they are given."""
        given = (self.begin, self.end, self.when, *(bound for r in self.order for bound in (r.begin, r.end)))
        return tuple(bound for bound in given if bound is not None)


@dataclass(frozen=True)
class Let(Statement):
    name: str
    value: Tile
    axes: tuple[Axis, ...]
    origin: str = ""


@dataclass(frozen=True)
class Accumulator(Statement):
    """A value that a loop updates, with its initial value and the operator that combines two partial results.

    ``moves``: (accumulator, degree) for each running maximum that partial results are relative to.
    ``repairs``: (factor, mean, mean) for each product of two deviations from running means that is added up.
    """

    name: str
    axes: tuple[Axis, ...]
    start: float
    origin: str = ""
    combine: str = "+"
    moves: tuple[tuple[str, Fraction], ...] = ()
    terms: bool = False  #: it holds the sum of each term of a product without matrix units
    mean_of: str = ""  #: of a running mean, the accumulator that counts the elements
    repairs: tuple[tuple[float, str, str], ...] = ()


@dataclass(frozen=True)
class Assign(Statement):
    """Give accumulator ``name`` a new value."""

    name: str
    axes: tuple[Axis, ...]
    value: Tile


@dataclass(frozen=True)
class Store(Statement):
    """Write a tile. ``onto``: what the buffer holds before, where that counts.

    A "sum" is added to, by several programs. To an "ordered sum" one program adds, in the order of its statements. Of "zeros" each
    element is written once, and 0 need not be. Of other "elements" those outside the index stay, as of an input that is written. "elsewhere":
    the index is not that of the value, and may lie outside.
    """

    buffer: str
    index: tuple[Tile, ...]
    value: Tile
    axes: tuple[Axis, ...]
    origin: str = ""
    onto: str = ""


@dataclass(frozen=True)
class DescriptorStore(Statement):
    """Store a box of a buffer through its tensor descriptor; ``onto`` as in Store, ``joined`` as in DescriptorLoad."""

    buffer: str
    start: tuple[Tile, ...]
    box: tuple[Axis | None, ...]
    value: Tile
    axes: tuple[Axis, ...]
    origin: str = ""
    onto: str = ""
    joined: tuple[Joined, ...] = ()


@dataclass(frozen=True)
class Barrier(Statement):
    """Order memory writes of a program: those before the barrier complete before those after it."""


#: Statements that have a value. ``isinstance`` takes the alias.
Valued = Let | Assign | Store | DescriptorStore


def statement_kind(s: Statement) -> str:
    """Return what kind of statement ``s`` is, for messages: "loop", "descriptor store"."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(s).__name__).lower()


def loaded(tile: Tile) -> Tile:
    """Return the tile that ``tile`` selects elements from; itself for any other tile."""
    return tile.arg if isinstance(tile, EveryNth) else tile


class LoadLet(Let):
    """A ``Let`` whose value is a Load, for type checkers: ``is_load`` narrows to it; no instance is created."""

    value: Load


class DescriptorLoadLet(Let):
    """A ``Let`` whose value is a DescriptorLoad, for type checkers: ``is_descriptor_load`` narrows to it; no instance is created."""

    value: DescriptorLoad


def is_load(s: Statement) -> TypeGuard[LoadLet]:
    """Return whether ``s`` names the result of a Load."""
    return isinstance(s, Let) and isinstance(s.value, Load)


def is_descriptor_load(s: Statement) -> TypeGuard[DescriptorLoadLet]:
    """Return whether ``s`` names the result of a DescriptorLoad."""
    return isinstance(s, Let) and isinstance(s.value, DescriptorLoad)


@dataclass(frozen=True)
class InteriorOrEdge(Statement):
    """Two versions of the rest of the body: for a block inside its extent along ``axis``, and for one that passes it."""

    axis: Axis
    interior: tuple[Statement, ...]
    edge: tuple[Statement, ...]


@dataclass(frozen=True)
class Link:
    """The position of a kernel among kernels of one call that overlap by programmatic dependent launch."""

    needs: bool  #: it reads results of an earlier kernel: it waits at its start, otherwise at its end
    releases: str  #: when the next may start: "first" where it need not wait or its programs take next to no room, "stores" before this one's stores, "" for the last


@dataclass(frozen=True)
class GridLabel:
    """A label whose blocks are programs, or the ``parts`` of a split reduction.

    In the kernel of a tail, ``inside`` blocks make up one block of the main kernel.
    """

    label: str
    block: int
    parts: int = 0
    inside: int = 1


@dataclass(frozen=True)
class GridStep:
    """One step in the order in which program ids visit the blocks: a label, its groups, or the inside of a group."""

    label: str
    part: str = "all"  # "all", "group" or "inside"
    size: int = 0
    name: str = ""


@dataclass(frozen=True)
class Workspace:
    """A buffer between two kernels: the first dimension is the parts, one for each block of a label where ``parts`` is 0, then one for each label."""

    name: str
    part: str
    parts: int
    labels: tuple[str, ...]
    dtype: str = "float32"
    blocks: tuple[str, int] = ("", 0)  #: that label, and the size of its blocks
    extents: tuple[int, ...] = ()  #: of a last wave (tail_wave.py): the size of each label in memory, 0 for its extent


@dataclass(frozen=True)
class Kernel:
    """One kernel: its reads, writes, grid (slowest step first) and body. ``func`` is the Func that it computes."""

    name: str
    func: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scalars: tuple[str, ...]
    grid: tuple[GridLabel, ...]
    order: tuple[GridStep, ...]
    body: tuple[Statement, ...]
    num_warps: int = 4
    num_stages: int = 3
    persistent: bool = False
    ping_pong: bool = False  #: its consumer warpgroups take blocks in turn, where they are specialized
    options: tuple[tuple[str, int], ...] = ()  #: further launch options
    evict: tuple[tuple[str, str], ...] = ()  #: buffer -> which of its cached lines go first
    constants: tuple[str, ...] = ()  #: labels whose extent is known at compile time
    merged: tuple[tuple[str, tuple[str, ...]], ...] = ()  #: labels that count several others together, with these
    workspaces: tuple[Workspace, ...] = ()  #: those it reads or writes
    block_stages: int = 0  #: pipelining depth of the loop over blocks of a persistent kernel
    approximate: tuple[str, ...] = ()  #: functions computed by the GPU's approximate instruction
    descriptors: tuple[str, ...] = ()  #: buffers reached through descriptors where the GPU and the tensors allow it
    tail: tuple[Kernel, ...] = ()  #: the kernels that compute the last wave, in smaller blocks or with split sums
    last_wave: bool = False  #: it is one of those of another kernel
    aligned: tuple[str, ...] = ()  #: written buffers whose row pitch is a multiple of 16 elements
    aligned_reads: tuple[str, ...] = ()  #: such buffers among its reads
    link: Link | None = None  #: to the kernels of its call that overlap with it


def names_in(body: tuple[Statement, ...]) -> set[str]:
    """Return the names that the text of ``body`` uses."""
    found = {s.name for s in statements(body) if isinstance(s, (Let, Accumulator))}
    found |= {s.axis.name for s in statements(body) if isinstance(s, Index)}
    values = [s.value for s in statements(body) if isinstance(s, (Let, Assign, Store))]
    return found | {n.name for v in values for n in v.walk() if isinstance(n, Scalar)}


def names_of(kernel: Kernel) -> set[str]:
    """Return the names that the text of a kernel uses, those of its loops and scalars too."""
    return names_in(kernel.body) | {s.axis.name for s in statements(kernel.body) if isinstance(s, Loop)} | {*kernel.scalars}


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Yield every statement, outer ones first."""
    found: list[Statement] = []
    _add_statements(body, found)
    return iter(found)


def _add_statements(body: tuple[Statement, ...], found: list[Statement]) -> None:
    for s in body:
        found.append(s)
        if isinstance(s, Loop):
            _add_statements(s.body, found)
        elif isinstance(s, InteriorOrEdge):  # both compute the same, the edge with masks
            _add_statements(s.edge, found)


def values(body: tuple[Statement, ...]) -> Iterator[Tile]:
    """Yield every tile expression of the body except indices."""
    return (s.value for s in statements(body) if isinstance(s, Valued))


def has_matrix_product(body: tuple[Statement, ...]) -> bool:
    """Return whether the body uses the matrix units."""
    return any(isinstance(n, TileDot) for value in values(body) for n in value.walk())


def unrolled_product(body: tuple[Statement, ...]) -> int:
    """Return the unroll factor of a loop around a product on the matrix units; 1 if there is none."""
    loops = [s for s in statements(body) if isinstance(s, Loop) and has_matrix_product(s.body)]
    return max((int(dict(s.options).get("loop_unroll_factor", 1)) for s in loops), default=1)


def map_values(body: tuple[Statement, ...], change: Callable[[Tile], Tile]) -> tuple[Statement, ...]:
    """Apply ``change`` to the value of every statement that has one."""

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=map_values(s.body, change))
        return replace(s, value=change(s.value)) if isinstance(s, Valued) else s

    return tuple(one(s) for s in body)


def nest_text(kernel: Kernel) -> str:
    """Print the nest as indented text, for people."""
    grid = ", ".join(f"{g.label}:{g.block}" for g in kernel.grid) or "one program"
    extra = [*(["persistent"] if kernel.persistent else []), *(["ping_pong"] if kernel.ping_pong else []), *(f"{k} {v}" for k, v in kernel.options)]
    extra += [f"evict {t} {policy}" for t, policy in kernel.evict] + [f"constant len({label})" for label in kernel.constants]
    extra += [f"descriptor {', '.join(kernel.descriptors)}"] if kernel.descriptors else []
    extra += [f"overlaps the kernel before it, waits {'first' if kernel.link.needs else 'last'}"] if kernel.link else []
    lines = ["; ".join([f"kernel {kernel.name}: grid {grid}", f"num_warps {kernel.num_warps}, num_stages {kernel.num_stages}", *extra])]
    _lines(kernel.body, 1, lines)
    lines += [nest_text(t).replace("kernel ", "last wave by ", 1) for t in kernel.tail]
    return "\n".join(lines)


_SIGNS = {"": ":=", "zeros": ":=", "elements": ":=", "elsewhere": ":=", "sum": "+=", "ordered sum": "+="}


def _lines(body: tuple[Statement, ...], depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for s in body:
        match s:
            case Index(axis, start):
                lines.append(f"{pad}index {axis} from {start}")
            case Loop(axis, within, inner, reduces, options):
                extra = "".join(f", {k} {v}" for k, v in options)
                extra += f", in the order {', '.join(r.axis.name for r in s.order)}" if s.order else ""
                where = within if s.end is None else f"{s.begin or 0} .. {s.end}{' (tail)' if s.tail else ''}"
                extra += f", where {s.when}" if s.when is not None else ""
                lines.append(f"{pad}{'reduce' if reduces else 'loop'} {axis} over {where}{extra}")
                _lines(inner, depth + 1, lines)
            case InteriorOrEdge(axis, interior, edge):
                lines.append(f"{pad}where the block lies inside len({axis.label})")
                _lines(interior, depth + 1, lines)
                lines.append(f"{pad}else")
                _lines(edge, depth + 1, lines)
            case Let(name, value, axes, origin):
                lines.append(f"{pad}{name}{_axes(axes)} = {value}" + (f"   # {origin}" if origin else ""))
            case Accumulator(name, axes, start, origin):
                lines.append(f"{pad}accumulate {name}{_axes(axes)} from {start}" + (f"   # {origin}" if origin else ""))
            case Assign(name, _, value):
                lines.append(f"{pad}{name} <- {value}")
            case DescriptorStore(buffer, start, box, value, _, origin):
                lines.append(f"{pad}{DescriptorLoad(buffer, start, box)} {_SIGNS[s.onto]} {value}" + (f"   # {origin}" if origin else ""))
            case Store(buffer, index, value, _, origin):
                lines.append(f"{pad}{buffer}[{', '.join(map(str, index))}] {_SIGNS[s.onto]} {value}" + (f"   # {origin}" if origin else ""))
            case Barrier():
                lines.append(f"{pad}barrier")


def _axes(axes: tuple[Axis, ...]) -> str:
    return f"[{', '.join(a.name for a in axes)}]" if axes else ""
