"""Kernels of one call that overlap: programmatic dependent launch (CUDA C++ Programming Guide, compute capability 9.0 on).

A kernel is launched while the one before it runs, once every program of that one has said so or ended, and asks for the end of
that one before it reads what came before. So a launch costs a microsecond or two less, and kernels that do not read one another's
results run side by side. Every kernel of a call asks, so that the end of the last one is the end of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.nest import Kernel

WAIT, RELEASE = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


@dataclass(frozen=True)
class Link:
    """Where a kernel stands among those of its call."""

    needs: bool  #: it reads what one before it writes: it waits first of all, else last of all
    releases: str  #: when the next may start: "first" where it need not wait or its programs take next to no room, "stores" before this one's stores, "" for the last

    def head(self) -> list[str]:
        """What a kernel begins with."""
        return _lines([WAIT] * self.needs + [RELEASE] * (self.releases == "first"))

    def before_stores(self) -> list[str]:
        """What stands before the stores that end a kernel."""
        return _lines([RELEASE] * (self.releases == "stores"))

    def tail(self) -> list[str]:
        """What a kernel ends with."""
        return _lines([WAIT] * (not self.needs))


def _lines(calls: list[str]) -> list[str]:
    return ["    if DEPENDENT:", *(f"        {call}" for call in calls)] if calls else []


def links(kernels: Sequence[Kernel]) -> dict[str, Link]:
    """The link of each of several kernels, in the order in which they are launched; none for a kernel alone."""
    if len(kernels) < 2:
        return {}
    needs = [any(set(k.reads) & set(before.writes) for before in kernels[:i]) for i, k in enumerate(kernels)]
    waits = [needed and k.num_warps > 1 for k, needed in zip(kernels, needs)]  # and would keep programs of the one before it out
    releases = ["stores" if waiting else "first" for waiting in waits[1:]] + [""]
    return {k.name: Link(*link) for k, *link in zip(kernels, needs, releases)}
