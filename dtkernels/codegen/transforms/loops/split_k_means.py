"""Merge the running means of the parts of a split sum, and the sums relative to them (lower/running_means.py).

Each part has the mean of its own elements, and counted them. Two parts are joined as a step of the loop joins what is before it::

    sum  <- sum + sum_part + (mean_part - mean) ** 2 * count * count_part / (count + count_part)
    mean <- mean + (mean_part - mean) * count_part / (count + count_part)

What a vector of parts has in the end is joined at once, each part relative to the mean of all. A part may be empty: it counts 0.
"""

from __future__ import annotations

from ...ir.nest import Accumulator, Axis, Const, Let, Local, Op, Statement, Tile, TileReduce
from ...lower.running_means import gain

Named = dict[str, Local]


def is_relative(a: Accumulator) -> bool:
    """Return whether ``a`` is a running mean, or a sum relative to some."""
    return bool(a.mean_of or a.repairs)


def counted_shares(accumulators: tuple[Accumulator, ...], now: Named, part: Named) -> list[Statement]:
    """Return, for each mean of a step of the merge, the share of the part in all elements and how far its mean lies from that before."""
    lets: list[Statement] = []
    for count in dict.fromkeys(a.mean_of for a in accumulators if a.mean_of):
        before, more = now[count], part[count]
        share = Op("where", (Op(">", (before, Const(0.0))), Op("/", (more, Op("+", (before, more)))), Const(1.0)))
        lets.append(Let(f"{count}_share", share, before.axes))
        lets.append(Let(f"{count}_weight", Op("*", (before, Local(f"{count}_share", before.axes))), before.axes))
    return lets + [Let(f"{a.name}_moved", Op("-", (part[a.name], now[a.name])), a.axes) for a in accumulators if a.mean_of]


def stepped(a: Accumulator, accumulators: tuple[Accumulator, ...], now: Named, part: Named) -> Tile:
    """Return a mean, or a sum relative to means, after a step of the merge."""
    if a.mean_of:
        return Op("+", (now[a.name], Op("*", (Local(f"{a.name}_moved", a.axes), Local(f"{a.mean_of}_share", now[a.mean_of].axes)))))
    of = {x.name: x for x in accumulators}
    value: Tile = Op("+", (now[a.name], part[a.name]))
    for factor, one, two in a.repairs:
        count = of[one].mean_of
        first, second = (Local(f"{x}_moved", of[x].axes) for x in (one, two))
        value = Op("+", (value, gain(factor, first, second, Local(f"{count}_weight", now[count].axes))))
    return value


def joined(accumulators: tuple[Accumulator, ...], piece: Axis) -> list[Statement]:
    """Join the counts and the means of the parts of a vector."""
    lets: list[Statement] = []
    own = {a.name: Local(a.name, a.axes) for a in accumulators}

    def summed(name: str, value: Tile, axes: tuple[Axis, ...]) -> Local:
        lets.append(Let(name, value, tuple(x for x in axes if x != piece)))
        return Local(name, tuple(x for x in axes if x != piece))

    for count in dict.fromkeys(a.mean_of for a in accumulators if a.mean_of):
        all_of = summed(f"{count}_joined", TileReduce("sum", own[count], (piece,)), own[count].axes)
        some = summed(f"{count}_some", Op("maximum", (all_of, Const(1.0))), all_of.axes)
        for a in accumulators:
            if a.mean_of == count:  # what the first mean lacks by rounding, the second adds
                rough = summed(f"{a.name}_rough", Op("/", (_weighted(own[a.name], own[count], piece), some)), a.axes)
                rest = Op("/", (_weighted(Op("-", (own[a.name], rough)), own[count], piece), some))
                summed(f"{a.name}_joined", Op("+", (rough, rest)), a.axes)
    return lets


def joined_sum(a: Accumulator, accumulators: tuple[Accumulator, ...], piece: Axis) -> Tile:
    """Return the sum of all parts of a vector, relative to the means of all."""
    of = {x.name: x for x in accumulators}
    value: Tile = Local(a.name, a.axes)
    for factor, one, two in a.repairs:
        first, second = (Op("-", (Local(x, of[x].axes), Local(f"{x}_joined", tuple(y for y in of[x].axes if y != piece)))) for x in (one, two))
        count = of[of[one].mean_of]
        value = Op("+", (value, gain(factor, first, second, Local(count.name, count.axes))))
    return TileReduce("sum", value, (piece,))


def _weighted(value: Tile, count: Local, piece: Axis) -> Tile:
    return TileReduce("sum", Op("*", (value, count)), (piece,))
