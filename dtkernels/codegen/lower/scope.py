"""Track scopes during lowering: nested loop bodies, the values known in each, and the names in use."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.nest import Axis, Local, Position, Statement, Tile


class Scope:
    """One loop body (or the kernel's own), with its open axes and the values computed so far."""

    def __init__(self, parent: Scope | None = None, reserved: Iterable[str] = ()):
        self.parent = parent
        self.body: list[Statement] = []
        self.axes: set[Axis] = set()
        self.names: set[str] = set(reserved)
        self.within: set[str] = set()  #: names used here or in a nested scope, open or finished
        self._values: dict[object, Tile] = {}

    def child(self) -> Scope:
        return Scope(self)

    def chain(self) -> Iterable[Scope]:
        """Yield this scope, then the enclosing ones."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def open(self, axis: Axis) -> None:
        """Make ``axis`` usable here and in nested scopes."""
        self.axes.add(axis)

    def find(self, key: object) -> Tile | None:
        """Return the value known under ``key`` here or in an enclosing scope."""
        for scope in self.chain():
            if key in scope._values:
                return scope._values[key]
        return None

    def record(self, key: object, value: Tile) -> None:
        self._values[key] = value

    def reserve(self, name: str) -> None:
        """Mark ``name`` as used here."""
        for scope in self.chain():
            scope.within.add(name)
        self.names.add(name)

    def fresh(self, wish: str, home: Scope | None = None) -> str:
        """Return a name that no open scope uses: ``wish`` itself, or ``wish`` with a number.

        A finished loop may have used it, unless it is defined in an enclosing scope up to ``home``: the loop would then change that value.
        """
        taken = {name for scope in self.chain() for name in scope.names}
        if home is not None:
            taken |= home.within
        name, count = wish, 0
        while name in taken:
            count += 1
            name = f"{wish}_{count}"
        return name

    def defining_scope(self, tiles: Iterable[Tile]) -> Scope:
        """Return the outermost scope in which everything that ``tiles`` mention is defined."""
        axes = {node.axis for tile in tiles for node in tile.walk() if isinstance(node, Position)}
        locals_ = {node.name for tile in tiles for node in tile.walk() if isinstance(node, Local)}
        for scope in self.chain():
            here = scope.axes & axes or scope.names & locals_
            if here or scope.parent is None:
                return scope
        raise AssertionError("a chain of scopes ends at the kernel")
