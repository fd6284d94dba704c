"""Backend selection: Gluon prints the descriptor form of a kernel where the GPU and the nest allow it, else Triton."""

from __future__ import annotations

from ...ir.nest import Kernel, Loop, statements
from ...target import Target
from ..memory.tensor_descriptors import use_descriptors, without_warp_specialization
from .plan import Refused, WarpSpecializedKernel
from .planner import plan


def backend(kernel: Kernel, target: Target | None) -> tuple[str, str]:
    """("gluon" or "triton", why) for a kernel with descriptors. Gluon's text is for compute capability 9.0 alone."""
    found = warp_specialized(kernel, target)
    if isinstance(found, str):
        return "triton", found
    return "gluon", f"{found.consumers} consumers of {found.share} rows of {found.rows.label}"


def warp_specialized(kernel: Kernel, target: Target | None) -> WarpSpecializedKernel | str:
    """The plan of producer and consumer warps for a kernel with descriptors; why there is none."""
    if target is None or target.backend != "cuda" or target.arch != 90:
        return f"{target.name if target else 'no one GPU'}: Gluon is printed for compute capability 9.0"
    try:
        return plan(use_descriptors(kernel))
    except Refused as reason:
        return str(reason)


def descriptor_form(kernel: Kernel) -> Kernel:
    """The kernel through descriptors, as Triton can compile it.

    Triton specialises warps where there are 4 alone, and not in several loops in a row.
    """
    found = use_descriptors(kernel)
    loops = [s.axis.label for s in statements(found.body) if isinstance(s, Loop) and s.reduces and not s.tail]
    return found if found.num_warps == 4 and len(set(loops)) == len(loops) else without_warp_specialization(found)
