"""The form of nest that the Gluon backend prints, and how such a nest is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...ir.nest import Assign, Axis, FetchLet, Kernel, Let, Local, Loop, Statement, Tile

REGISTERS = {1: (240, 24), 2: (240, 24), 4: (120, 24)}  #: consumers -> registers of a thread that computes, that loads
HALF = frozenset({64, 128})  #: rows of a consumer
WIDEST = 256  #: columns of a product
SPARE = 40  #: registers of a thread beside accumulators and operands


class Refused(Exception):
    """A nest that has not the form; says why in one line."""


@dataclass(frozen=True)
class Product:
    """``name`` is the local that a fresh product gives, the accumulator that another adds to."""

    name: str
    left: Tile
    right: Local
    axes: tuple[Axis, ...]
    rows: Axis
    columns: Axis

    @property
    def loaded_left(self) -> Local:
        """The left operand of a fresh or direct product, which is a loaded tile."""
        assert isinstance(self.left, Local)
        return self.left


@dataclass(frozen=True)
class LoopStep:
    """The body of one loop, sorted: ``work`` on registers; ``moves``, what accumulators become before the chained products."""

    loop: Loop
    fetches: tuple[FetchLet, ...]
    fresh: tuple[Product, ...]
    work: tuple[Let | Assign, ...]
    moves: tuple[Assign, ...]
    chained: tuple[Product, ...]
    direct: tuple[Product, ...]


@dataclass(frozen=True)
class Ring:
    """Tiles that are loaded, waited for and given back together; ``late`` where a chained product reads them."""

    name: str
    tiles: tuple[FetchLet, ...]
    fresh: bool
    late: bool


@dataclass(frozen=True)
class WarpSpecializedKernel:
    """How a kernel is cut; ``kernel`` is its described form with rows first in every tile."""

    kernel: Kernel
    rows: Axis
    consumers: int
    before: tuple[Statement, ...]
    resident: tuple[FetchLet, ...]
    steps: tuple[LoopStep, ...]
    rings: tuple[Ring, ...]
    after: tuple[Statement, ...]
    stages: int
    behind: bool  #: chained products run while the next step's fresh ones are worked on; needs registers for both

    @property
    def share(self) -> int:
        """Rows of one consumer."""
        return self.rows.tile // self.consumers

    @property
    def last(self) -> LoopStep:
        return self.steps[-1]


def ring_tiles(p: WarpSpecializedKernel) -> Iterator[tuple[Ring, FetchLet]]:
    """Every tile that goes through a ring, with its ring."""
    for ring in p.rings:
        for tile in ring.tiles:
            yield ring, tile
