"""Make Triton's interpreter correct for our kernels: it multiplies bf16 matrices by their bit patterns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from ..log import warn_once
from ..path_counters import one_at_a_time


@contextmanager
def one_kernel() -> Iterator[None]:
    """Run one kernel at a time, without NumPy's floating-point warnings.

    The warnings say nothing about the result. Masked lanes compute too: a padded lane divides 0 by 0. Kernels follow IEEE 754, as they do
    on a GPU and as torch does on a CPU: overflow is inf, 0 / 0 is NaN.
    """
    import numpy as np

    with one_at_a_time, np.errstate(all="ignore"):
        yield


@cache
def fix_bf16_products() -> None:
    """Patch the interpreter, once per process: it widens bf16 operands of dots to float32, which is exact."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = getattr(interpreter, "InterpreterBuilder", None)
    own = getattr(builder, "create_dot", None)
    if own is None or not hasattr(builder, "cast_impl"):
        warn_once("this Triton's interpreter is not known here: its products of bf16 may be wrong")
        return

    def create_dot(self, a, b, *rest):
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return own(self, *wide, *rest)

    builder.create_dot = create_dot  # type: ignore[union-attr]
