"""Provide the context in which Triton launches a kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ..path_counters import interpreting


def one_kernel_at_a_time() -> AbstractContextManager:
    """Return the context for a launch by Triton: in the interpreter, one kernel at a time and without NumPy's warnings."""
    if not interpreting():
        return nullcontext()
    from .interpreter import one_kernel

    return one_kernel()
