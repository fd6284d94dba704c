"""The context in which Triton launches a kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ..path_counters import interpreting


def in_turn() -> AbstractContextManager:
    """The context that a kernel launched by Triton runs in: in the interpreter one at a time, and without NumPy's warnings."""
    if not interpreting():
        return nullcontext()
    from .interpreter import one_kernel

    return one_kernel()
