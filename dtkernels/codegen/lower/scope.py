"""Where statements land while a kernel is lowered: nested loop bodies, what is known in each, which names are taken."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.nest import Axis, Local, Position, Statement, Tile


class Scope:
    """One loop body (or the kernel's own), with the axes open in it and the values computed so far."""

    def __init__(self, parent: Scope | None = None, reserved: Iterable[str] = ()):
        self.parent = parent
        self.body: list[Statement] = []
        self.axes: set[Axis] = set()
        self.names: set[str] = set(reserved)
        self.within: set[str] = set()  #: names used here or in a scope inside, open or over
        self._values: dict[object, Tile] = {}

    def child(self) -> Scope:
        return Scope(self)

    def chain(self) -> Iterable[Scope]:
        """This scope, then the ones around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def open(self, axis: Axis) -> None:
        """Make ``axis`` usable here and in scopes inside."""
        self.axes.add(axis)

    def find(self, key: object) -> Tile | None:
        """The value known under ``key`` here or further out."""
        for scope in self.chain():
            if key in scope._values:
                return scope._values[key]
        return None

    def know(self, key: object, value: Tile) -> None:
        self._values[key] = value

    def take(self, name: str) -> None:
        """Mark ``name`` as used here."""
        for scope in self.chain():
            scope.within.add(name)
        self.names.add(name)

    def fresh(self, wish: str, home: Scope | None = None) -> str:
        """A name no open scope uses: ``wish`` itself, else numbered.

        Loops that are over may have used it, but not if it is defined further out, in ``home``: they would change it.
        """
        taken = {name for scope in self.chain() for name in scope.names}
        if home is not None:
            taken |= home.within
        name, count = wish, 0
        while name in taken:
            count += 1
            name = f"{wish}_{count}"
        return name

    def home(self, tiles: Iterable[Tile]) -> Scope:
        """The outermost scope in which everything that ``tiles`` mention exists."""
        axes = {node.axis for tile in tiles for node in tile.walk() if isinstance(node, Position)}
        locals_ = {node.name for tile in tiles for node in tile.walk() if isinstance(node, Local)}
        for scope in self.chain():
            here = scope.axes & axes or scope.names & locals_
            if here or scope.parent is None:
                return scope
        raise AssertionError("a chain of scopes ends at the kernel")
