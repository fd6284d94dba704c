"""Schedule matrix products in a nested loop: start a product whose result is needed soon before accumulations that can wait.

Before::

    e            = exp2(dot(K, Q) - shift)
    d_V         += dot(e, d_out)
    d_e          = dot(V, d_out)                 needed at once, but queued behind the product above
    d_K         += dot(d_e * e, Q)

After::

    e            = exp2(dot(K, Q) - shift)
    d_e          = dot(V, d_out)                 needs only loads: it overlaps the exponentials
    d_V         += dot(e, d_out)                 overlaps d_e * e
    d_K         += dot(d_e * e, Q)

Each sum adds up in the same order, so results are bitwise the same. Measured on an H200 for the kernel of d_K and d_V in 16 bits, causal,
64 columns, four heads that share one: 1520 us, before 1661. Without the loop over heads the reordered kernel is 0 to 9% slower, since it
holds more values at once; such loops keep their order.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.nest import Accumulator, Assign, Kernel, Let, Loop, Statement, TileDot, Valued
from ...lower.schedule_options import KernelOptions


def schedule_dots(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Move work on one product behind the start of the next, so that both overlap."""
    return replace(kernel, body=with_dots_first(kernel.body))


def with_dots_first(body: tuple[Statement, ...], within: bool = False) -> tuple[Statement, ...]:
    """Place each product that an inner loop accumulates behind the later products of its step that do not read the sum.

    ``within``: whether ``body`` is the body of a loop.
    """

    def step(loop: Loop) -> tuple[Statement, ...]:
        inner = with_dots_first(loop.body, within=True)
        return _reordered(inner) if within else inner

    return tuple(replace(s, body=step(s)) if isinstance(s, Loop) else s for s in body)


def _reordered(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Reorder one step of a loop."""
    order = list(body)
    for s in reversed(body):
        if isinstance(s, Assign) and _product(s):
            at = order.index(s)
            behind = next((i for i, other in reversed([*enumerate(order)][at + 1 :]) if isinstance(other, Let) and _product(other)), at)
            if all(_independent(s, other) for other in order[at + 1 : behind + 1]):
                order.insert(behind, order.pop(at))
    return tuple(order)


def _product(s: Let | Assign) -> bool:
    return any(isinstance(n, TileDot) for n in s.value.walk())


def _independent(s: Assign, other: Statement) -> bool:
    """Return whether ``s`` may move behind ``other``: neither reads or changes what the other changes."""
    if isinstance(other, (Loop, Accumulator)):
        return False
    if isinstance(other, Valued) and s.name in _names(other):
        return False
    return not (isinstance(other, Assign) and (other.name == s.name or other.name in _names(s)))


def _names(s: Valued) -> set[str]:
    return set(s.value.local_names)
