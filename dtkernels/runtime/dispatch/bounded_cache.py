"""Bound the size of caches: evict the oldest entry."""

from __future__ import annotations

from typing import TypeVar

Name = TypeVar("Name")
What = TypeVar("What")


def keep(known: dict[Name, What], name: Name, what: What, most: int) -> None:
    """Add an entry to a cache of at most ``most`` entries. Safe while other threads do the same."""
    if len(known) >= most:
        known.pop(next(iter(known), None), None)  # type: ignore[arg-type]  # another thread may have evicted it
    known[name] = what
