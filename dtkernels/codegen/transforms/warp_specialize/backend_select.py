"""Select the backend: Gluon prints the descriptor form of a kernel where the GPU and the nest allow it, Triton prints the rest."""

from __future__ import annotations

from ...ir.nest import Kernel, Loop, statements
from ...target import Target
from ..loops.joined_loops import join_loops
from ..memory.tensor_descriptors import use_descriptors, without_warp_specialization
from .plan import Refused, WarpSpecializedKernel
from .planner import plan


def backend(kernel: Kernel, target: Target | None) -> tuple[str, str]:
    """Return ("gluon" or "triton", reason) for a kernel with descriptors. Gluon is emitted for compute capability 9.0 only."""
    found = warp_specialized(kernel, target)
    if isinstance(found, str):
        return "triton", found
    return "gluon", f"{found.consumers} consumers of {found.share} rows of {found.rows.label}"


def warp_specialized(kernel: Kernel, target: Target | None) -> WarpSpecializedKernel | str:
    """Return the plan of producer and consumer warps for a kernel with descriptors, or the reason why there is none."""
    if target is None or target.backend != "cuda" or target.arch != 90:
        return f"{target.name if target else 'no one GPU'}: Gluon is printed for compute capability 9.0"
    try:
        return plan(join_loops(use_descriptors(kernel)))
    except Refused as reason:
        return str(reason)


def descriptor_form(kernel: Kernel) -> Kernel:
    """Return the descriptor form of a kernel as Triton can compile it.

    Triton specializes warps only in programs of 4 warps, and not in several consecutive loops.
    """
    found = join_loops(use_descriptors(kernel))
    loops = [s.axis.label for s in statements(found.body) if isinstance(s, Loop) and s.reduces and not s.tail]
    return found if found.num_warps == 4 and len(set(loops)) == len(loops) else without_warp_specialization(found)
