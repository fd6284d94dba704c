"""Memories of a bounded size, of which the oldest entry goes."""

from __future__ import annotations

from typing import TypeVar

Name = TypeVar("Name")
What = TypeVar("What")


def keep(known: dict[Name, What], name: Name, what: What, most: int) -> None:
    """Put ``what`` into a memory of ``most`` entries. Other threads may do so meanwhile."""
    if len(known) >= most:
        known.pop(next(iter(known), None), None)  # type: ignore[arg-type]  # another thread may have been there
    known[name] = what
