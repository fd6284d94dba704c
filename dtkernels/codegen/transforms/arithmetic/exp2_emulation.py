"""Exponentials of which a part is worked out by multiply-adds: ``f.approximate(exp:1/4)``.

Before, 16 in a clock on a multiprocessor::

    e = exp2(a)

After, of every 4 that a thread has in a row the last one by a polynomial, on units that do 128 in a clock::

    e = exp2:1/4(a)

One of them costs ten instructions for one, so it pays where the special function unit is what is waited for, and not
where instructions are.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.nest import Kernel, Op, Statement, Tile, axes_of, map_values, values
from ...ir.value_type import is_integer
from ...lower.schedule_options import KernelOptions


def emulate_exp2(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Mark the share of the exponentials that the schedule wants by polynomials."""
    return replace(kernel, body=with_emulated_share(kernel.body, options.exponentials()))


def with_emulated_share(body: tuple[Statement, ...], share: tuple[int, int] | None) -> tuple[Statement, ...]:
    """The body with ``share`` of its exponentials by polynomials: those over most axes, as other ones are few."""
    if share is None:
        return body

    def many(tile: Tile) -> int:
        return sum(not a.scalar for a in axes_of(tile))

    most = max((many(n) for v in values(body) for n in v.walk() if isinstance(n, Op) and n.fn in ("exp", "exp2")), default=0)

    def change(tile: Tile) -> Tile:
        if isinstance(tile, Op) and tile.fn in ("exp", "exp2") and most and many(tile) == most and not is_integer(tile.args[0]):
            return Op(f"{tile.fn}:{share[0]}/{share[1]}", tile.args)
        return tile

    return map_values(body, lambda v: v.transform(change))
