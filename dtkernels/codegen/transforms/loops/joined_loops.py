"""Join nested loops around products into one, so that its loads are prefetched from one step of the outer loop into the next.

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
and its indices go on with it. Where no element is computed once for an inner loop, the loops are nothing but their order.

Several loops in one are first distributed, as where heads share keys and a mask makes loops over whole and over partial tiles of queries.

Before::

    reduce h:1 over extent
      reduce m:64 over 0 .. m_partial                   d_K_acc <- d_K_acc + dot(d_scores, Q, m)
      reduce m:64 over m_partial .. len(m)              d_K_acc <- d_K_acc + dot(guard(d_scores, m), Q, m)

After::

    reduce m:64 over 0 .. m_partial, in the order h, m
    reduce m:64 over m_partial .. len(m), in the order h, m

That changes the order of a sum, and nothing else, if no bound depends on ``h``. A loop over as many steps as data say is left as it is: of a block
whose rows share an expert it has one step, from which there is nothing to prefetch.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.nest import (
    Accumulator,
    Assign,
    Axis,
    Index,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Position,
    Range,
    Start,
    Statement,
    Tile,
    has_matrix_product,
    statements,
)


def join_loops(kernel: Kernel) -> Kernel:
    """Join each perfect nest of reductions around a product on the matrix units."""
    return replace(kernel, body=tuple(_joined(s) for s in kernel.body))


def distribute_loops(kernel: Kernel) -> Kernel:
    """Join each loop over single elements with the reductions around products that it consists of."""
    values = {s.name: s.value for s in statements(kernel.body) if isinstance(s, Let)}
    return replace(kernel, body=_distributed_body(kernel.body, values))


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
    return replace(tiled[0], body=(*indices, *inner), options=tuple(options.items()), order=tuple(Range(loop.axis) for loop in nest))


def _is_whole(loop: Loop) -> bool:
    """Return whether a loop sums over the whole extent of its label."""
    return loop.reduces and loop.within == "extent" and loop.begin is None and loop.end is None and loop.when is None and not loop.tail


def _distributed_body(body: tuple[Statement, ...], values: dict[str, Tile]) -> tuple[Statement, ...]:
    found: list[Statement] = []
    for s in body:
        found += _distributed(replace(s, body=_distributed_body(s.body, values)), values) if isinstance(s, Loop) else [s]
    return tuple(found)


def _distributed(loop: Loop, values: dict[str, Tile]) -> list[Statement]:
    """Return the joined loops in place of one, after what their bounds are computed from; the loop itself where that is not the same.

    ``values``: what the names of the kernel stand for.
    """
    inner = [s for s in loop.body if isinstance(s, Loop)]
    before = [s for s in loop.body if isinstance(s, Let)]
    indices = tuple(s for s in loop.body if isinstance(s, Index))
    plain = loop.reduces and loop.axis.scalar and loop.within == "extent" and loop.when is None and not loop.tail and not loop.order
    if not plain or not inner or len(inner) + len(before) + len(indices) < len(loop.body) or not all(map(_adds_products, inner)):
        return [loop]
    bounds = [*(s.value for s in before), *(bound for s in inner for bound in s.bounds())]
    if any(_depends_on(tile, loop.axis) for tile in bounds) or any(_reads_memory(bound, values) for bound in loop.bounds()):
        return [loop]
    outer = Range(loop.axis, loop.begin, loop.end)
    return [*before, *(replace(s, body=(*indices, *s.body), order=(outer, *(s.order or (Range(s.axis, s.begin, s.end),)))) for s in inner)]


def _adds_products(loop: Loop) -> bool:
    """Return whether a loop over tiles does nothing but add to accumulators, products among it."""
    unrolled = "loop_unroll_factor" in dict(loop.options)
    plain = loop.reduces and not loop.axis.scalar and loop.within == "extent" and not unrolled and has_matrix_product(loop.body)
    return plain and all(isinstance(s, (Index, Let, Assign, Accumulator)) for s in statements(loop.body))


def _depends_on(tile: Tile, axis: Axis) -> bool:
    """Return whether a value differs from element to element of an axis, or may: it is loaded."""
    return any(isinstance(n, Load) or isinstance(n, (Position, Start)) and n.axis == axis for n in tile.walk())


def _reads_memory(tile: Tile, values: dict[str, Tile]) -> bool:
    """Return whether a value comes from memory."""
    return any(isinstance(n, Load) or isinstance(n, Local) and n.name in values and _reads_memory(values[n.name], values) for n in tile.walk())
