"""Join nested loops around a product into one, so that its loads are prefetched from one step of the outer loop into the next.

Before::

    reduce c:64 over extent
      reduce r:1 over extent
        A[c, x] = A[b, c, x + r]
        W[c, o] = W[r, c, o]
        f_acc <- f_acc + dot(A, W, c)

After::

    reduce c:64 over extent, in the order c, r
      A[c, x] = A[b, c, x + r]
      W[c, o] = W[r, c, o]
      f_acc <- f_acc + dot(A, W, c)

Triton pipelines innermost loops alone, and a loop over three taps would begin with nothing loaded each time. The joined loop counts steps,
from which each step computes its indices. Where no element is computed once for an inner loop, the loops are nothing but their order.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.nest import Index, Kernel, Loop, Statement, has_matrix_product


def join_loops(kernel: Kernel) -> Kernel:
    """Join each perfect nest of reductions around a product on the matrix units."""
    return replace(kernel, body=tuple(_joined(s) for s in kernel.body))


def _joined(s: Statement) -> Statement:
    if not isinstance(s, Loop):
        return s
    if not s.reduces:
        return replace(s, body=tuple(_joined(x) for x in s.body))
    nest, indices = [s], [x for x in s.body if isinstance(x, Index)]
    while len(inner := [x for x in nest[-1].body if not isinstance(x, Index)]) == 1 and isinstance(inner[0], Loop):
        nest.append(inner[0])
        indices += [x for x in inner[0].body if isinstance(x, Index)]
    options = {name: value for loop in nest for name, value in loop.options}
    tiled = [loop for loop in nest if not loop.axis.scalar]
    plain = all(map(_is_whole, nest)) and "loop_unroll_factor" not in options
    if len(nest) < 2 or len(tiled) != 1 or not plain or not has_matrix_product(tuple(inner)) or any(isinstance(x, Loop) for x in inner):
        return s
    return replace(tiled[0], body=(*indices, *inner), options=tuple(options.items()), order=tuple(loop.axis for loop in nest))


def _is_whole(loop: Loop) -> bool:
    """Return whether a loop sums over the whole extent of its label."""
    return loop.reduces and loop.within == "extent" and loop.begin is None and loop.end is None and loop.when is None and not loop.tail
