"""Find Funcs that a kernel writes from inside loops or blocks that they lack: where one of those is empty, nothing is written."""

from __future__ import annotations

from collections.abc import Iterator

from ...lang.algorithm import Algorithm
from ..ir.nest import Kernel, Loop, Statement, Store


def written_inside(kernel: Kernel, algorithm: Algorithm, stored: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the Funcs of ``stored`` that the kernel writes besides its own, each with the labels that may leave it unwritten."""
    found: dict[str, tuple[str, ...]] = {}
    for func, around in _stores(kernel.body, ()):
        if func in stored and func != kernel.func and func in algorithm:
            outside = (*(algorithm[kernel.func].labels if kernel.grid else ()), *around)
            labels = tuple(dict.fromkeys(x for x in outside if x not in algorithm[func].labels))
            if labels:
                found[func] = labels
    return found


def _stores(body: tuple[Statement, ...], around: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for s in body:
        if isinstance(s, Loop):
            yield from _stores(s.body, (*around, s.axis.label))
        elif isinstance(s, Store) and s.onto != "elsewhere":  # a rearrangement has no element that is made nowhere
            yield s.buffer, around
