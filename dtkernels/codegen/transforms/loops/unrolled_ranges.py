"""Keep Triton from running steps of an unrolled range that ends before it begins, as parts of a sum past its extent do.

The number of steps is an unsigned quotient in Triton 3.6 and 3.9, so that such a loop runs some. Before::

    for k_start in tl.range(k_from, k_to, T, loop_unroll_factor=3):

After::

    for k_start in tl.range(k_from, max(k_from, k_to), T, loop_unroll_factor=3):
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.nest import Kernel, Loop, Op, Size, Statement


def bound_unrolled_ranges(kernel: Kernel) -> Kernel:
    """Let no unrolled range end before it begins."""
    return replace(kernel, body=tuple(_bounded(s) for s in kernel.body))


def _bounded(s: Statement) -> Statement:
    if not isinstance(s, Loop):
        return s
    s = replace(s, body=tuple(_bounded(inner) for inner in s.body))
    if s.begin is None or dict(s.options).get("loop_unroll_factor", 1) == 1:
        return s
    return replace(s, end=Op("max", (s.begin, s.end or Size(s.axis.label))))
