"""Define the plan of a warp-specialized kernel: the division of a nest into producer and consumer warps, for the Gluon backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...ir.nest import (
    Assign,
    Axis,
    DescriptorLoadLet,
    DescriptorStore,
    Kernel,
    Let,
    LoadLet,
    Local,
    Loop,
    Position,
    Statement,
    Tile,
    axes_of,
    is_load,
)

REGISTERS = {1: (240, 24), 2: (240, 24), 4: (120, 24)}  #: consumers -> registers of a consumer thread, of a producer thread
HALF = frozenset({64, 128})  #: rows that one consumer may have
WIDEST = 256  #: most columns of a product
SPARE = 40  #: registers of a thread that are left for neither accumulators nor operands


class Refused(Exception):
    """Raised for a nest that the Gluon backend does not support; says why in one line."""


@dataclass(frozen=True)
class Product:
    """A matrix product. ``name`` is the local that a fresh product defines, or the accumulator that another one adds to."""

    name: str
    left: Tile
    right: Local
    axes: tuple[Axis, ...]
    rows: Axis
    columns: Axis
    rest: Product | None = None  #: the product of the second tiles of a whole extent, which adds to this one
    start: Local | None = None  #: numbers of columns that a fresh product adds to, which takes no registers beside it

    @property
    def whole_columns(self) -> Axis:
        """Return the columns of the tile that these are a part of, else these."""
        return self.columns.whole or self.columns

    @property
    def operands(self) -> frozenset[str]:
        """Return the names of the tiles that are multiplied as they are."""
        own = frozenset(side.name for side in (self.left, self.right) if isinstance(side, Local))
        return own | self.rest.operands if self.rest else own

    @property
    def loaded_left(self) -> Local:
        """The left operand of a fresh or direct product, which is a loaded tile."""
        assert isinstance(self.left, Local)
        return self.left


@dataclass(frozen=True)
class AddedProduct:
    """A product over the rows of a block, which each step adds to a sum in memory: ``store`` <- ``store`` + left^T right.

    ``left`` is computed, rows by the loop's columns. All consumers have a part of it, so it passes through shared memory.
    Of two tiles of a whole extent each of two consumers adds one.
    """

    store: DescriptorStore
    left: Tile
    right: Local
    rows: Axis  #: of the result: those of the loop
    columns: Axis
    rest: AddedProduct | None = None  #: that of the second tile of a whole extent

    @property
    def tiles(self) -> tuple[AddedProduct, ...]:
        """Return the products of all tiles."""
        return (self, self.rest) if self.rest else (self,)


@dataclass(frozen=True)
class LoopStep:
    """The body of one loop, sorted by role.

    ``work`` is computed in registers; ``moves`` rescale accumulators before the chained products add to them.
    """

    loop: Loop
    fetches: tuple[DescriptorLoadLet, ...]
    fresh: tuple[Product, ...]
    work: tuple[Let | Assign, ...]
    moves: tuple[Assign, ...]
    chained: tuple[Product, ...]
    direct: tuple[Product, ...]
    added: tuple[AddedProduct, ...] = ()

    @property
    def lines(self) -> tuple[LoadLet, ...]:
        """Return the loads of one number for each column of the loop's tiles, in an order that memory has."""
        axis = self.loop.axis
        loads = [s for s in self.work if is_load(s) and s.axes == (axis,) and not s.value.whole and not s.value.other]
        return tuple(s for s in loads if all(i == Position(axis) or not axes_of(i) for i in s.value.index))


@dataclass(frozen=True)
class Ring:
    """Tiles of one ring buffer, loaded, waited for and released together; ``late`` where a chained product reads them."""

    name: str
    tiles: tuple[DescriptorLoadLet, ...]
    fresh: bool
    late: bool


@dataclass(frozen=True)
class WarpSpecializedKernel:
    """A kernel divided between producer and consumer warps; ``kernel`` is its descriptor form with rows first in every tile."""

    kernel: Kernel
    rows: Axis
    consumers: int
    before: tuple[Statement, ...]
    resident: tuple[DescriptorLoadLet, ...]
    steps: tuple[LoopStep, ...]
    rings: tuple[Ring, ...]
    after: tuple[Statement, ...]
    stages: int
    turns: bool  #: two consumers take whole blocks in turn: the products of one run beside what the other does with its results
    float8: bool  #: its products multiply float8, and only add up
    behind: bool  #: chained products overlap the work on the next step's fresh ones; needs registers for both
    outer: Loop | None = None  #: a loop over single elements around all others

    @property
    def share(self) -> int:
        """Return how many rows one consumer computes."""
        return self.rows.tile if self.turns else self.rows.tile // self.consumers

    @property
    def promotes(self) -> bool:
        """Return whether the sums of each step are added in float32 by the cores, as the matrix units keep too few bits of sums of float8."""
        return self.float8 and "rdot" not in self.kernel.approximate

    @property
    def in_order(self) -> bool:
        """Return whether each loop is run by itself and each product is issued as soon as its operands are there."""
        plain = bool(self.last.chained) and not (self.behind or self.rescales or self.turns or self.float8)
        return bool(self.last.added) or self.outer is not None or plain

    @property
    def rescales(self) -> bool:
        """Return whether a step gives accumulators new values before products add to them."""
        return any(step.moves or any(isinstance(s, Assign) for s in step.work) for step in self.steps)

    @property
    def lines(self) -> tuple[LoadLet, ...]:
        """Return the loads of numbers of columns that the producer copies to shared memory; consumers have no registers to load them ahead."""
        return self.last.lines if self.in_order else ()

    def rings_of(self, q: Product) -> list[Ring]:
        """Return the rings that a product of two loaded tiles reads."""
        return [r for r in self.rings if {t.name for t in r.tiles} & q.operands]

    @property
    def crossing(self) -> frozenset[str]:
        """Return the tiles of which each consumer reads the rows of the others too."""
        return frozenset(tile.right.name for a in self.last.added for tile in a.tiles)

    @property
    def inside(self) -> tuple[Let, ...]:
        """Return the values that are computed in the outer loop, before the loops in it."""
        return tuple(s for s in self.outer.body if isinstance(s, Let)) if self.outer else ()

    @property
    def last(self) -> LoopStep:
        return self.steps[-1]


def producer_names(p: WarpSpecializedKernel) -> set[str]:
    """Return the locals that the producer needs: what the places of its loads and the ends of its loop depend on."""
    values = {s.name: s.value for s in (*p.before, *p.inside) if isinstance(s, Let)}
    loops = [step.loop for step in p.steps] + ([p.outer] if p.outer else [])
    bounds = [t for loop in loops for t in (loop.begin, loop.end)] if p.in_order else [p.steps[0].loop.begin, p.last.loop.end]
    ends = [t for t in bounds if t is not None] + [i for s in p.lines for i in s.value.index]
    found, todo = set[str](), [*(s.value for s in p.resident), *(t.value for _, t in ring_tiles(p)), *ends]
    while todo:
        for n in todo.pop().walk():
            if isinstance(n, Local) and n.name in values and n.name not in found:
                found.add(n.name)
                todo.append(values[n.name])
    return found


def ring_tiles(p: WarpSpecializedKernel) -> Iterator[tuple[Ring, DescriptorLoadLet]]:
    """Yield every tile that goes through a ring, with its ring."""
    for ring in p.rings:
        for tile in ring.tiles:
            yield ring, tile
