"""Kernels of one call that overlap: programmatic dependent launch (CUDA C++ Programming Guide, compute capability 9.0 on).

A kernel is launched while the one before it runs, once every program of that one has said so or ended, and asks for the end of
that one before it reads what came before. So a launch costs a microsecond or two less, and kernels that do not read one another's
results run side by side. Every kernel of a call asks, so that the end of the last one is the end of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.nest import Kernel, Link


def links(kernels: Sequence[Kernel]) -> dict[str, Link]:
    """The link of each of several kernels, by name, in the order in which they are launched; none for a kernel alone."""
    if len(kernels) < 2:
        return {}
    needs = [any(set(k.reads) & set(before.writes) for before in kernels[:i]) for i, k in enumerate(kernels)]
    waits = [needed and k.num_warps > 1 for k, needed in zip(kernels, needs)]  # and would keep programs of the one before it out
    releases = ["stores" if waiting else "first" for waiting in waits[1:]] + [""]
    return {k.name: Link(needed, release) for k, needed, release in zip(kernels, needs, releases)}
