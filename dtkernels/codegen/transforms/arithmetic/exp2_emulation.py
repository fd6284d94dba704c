"""Emulate a share of the exponentials by polynomials: ``f.approximate(exp:1/4)``.

Before, on the special function unit, 16 per clock on a multiprocessor::

    e = exp2(a)

After, one of every 4 neighbours in a thread by a polynomial, on units that do 128 multiply-adds per clock::

    e = exp2:1/4(a)

A polynomial takes ten instructions instead of one. The pass pays where the special function unit is the bottleneck, and costs where
instruction issue is.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.nest import Kernel, Op, Statement, Tile, axes_of, map_values, values
from ...ir.value_type import is_integer
from ...lower.schedule_options import KernelOptions


def emulate_exp2(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Mark the exponentials for the share that the schedule asks for."""
    return replace(kernel, body=with_emulated_share(kernel.body, options.exponentials()))


def with_emulated_share(body: tuple[Statement, ...], share: tuple[int, int] | None) -> tuple[Statement, ...]:
    """Mark ``share`` of the exponentials over the most axes; the others are too few to matter."""
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
