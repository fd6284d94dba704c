"""Bound the caches between a call and a launch: a dict that evicts its oldest entry."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dict of at most ``limit`` entries. Read it with ``get``, which is dict's own; write with ``put``.

    ``put`` evicts the entry that was added first. Safe while other threads do the same: they may exceed the limit by one entry each.
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def put(self, key: Key, value: Value) -> Value:
        """Add or replace an entry; return its value."""
        if len(self) >= self.limit and key not in self:
            try:
                del self[next(iter(self))]
            except (KeyError, RuntimeError, StopIteration):  # another thread evicted it, or added one
                pass
        self[key] = value
        return value
