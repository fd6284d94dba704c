"""Query the loops of a kernel."""

from __future__ import annotations

from .nest import Kernel, Loop, has_matrix_product, statements


def is_single_reduction_loop(kernel: Kernel) -> bool:
    """Return whether all the work is one reduction loop, which Triton can pipeline from one block into the next."""
    loops = [s for s in statements(kernel.body) if isinstance(s, Loop)]
    specialized = any(name == "warp_specialize" for s in loops for name, _ in s.options)  # Triton fails on both together
    return len(loops) == 1 and loops[0].reduces and not specialized and has_matrix_product(kernel.body)
