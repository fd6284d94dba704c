"""Link kernels of one call that overlap by programmatic dependent launch (CUDA C++ Programming Guide, compute capability 9.0 on).

A kernel is launched while its predecessor runs, once every program of the predecessor has triggered the launch or ended. It waits for the
end of the predecessor before it reads earlier results. A launch then costs a microsecond or two less, and kernels that do not read one
another's results run side by side. Every kernel of a call waits, so the end of the last kernel is the end of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.nest import Kernel, Link


def links(kernels: Sequence[Kernel]) -> dict[str, Link]:
    """Return the link of each kernel by name, for kernels in launch order; none for a single kernel."""
    if len(kernels) < 2:
        return {}
    needs = [any(set(k.reads) & set(before.writes) for before in kernels[:i]) for i, k in enumerate(kernels)]
    waits = [needed and k.num_warps > 1 for k, needed in zip(kernels, needs)]  # too early, it would keep programs of its predecessor out
    releases = ["stores" if waiting else "first" for waiting in waits[1:]] + [""]
    return {k.name: Link(needed, release) for k, needed, release in zip(kernels, needs, releases)}
