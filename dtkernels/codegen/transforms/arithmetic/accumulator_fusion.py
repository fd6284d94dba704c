"""Add up products that are only added to each other in one accumulator.

Before::

    accumulate u from 0;   reduce k:  u <- u + dot(A, B)
    accumulate v from 0;   reduce l:  v <- v + dot(C, D)
    f[x, y] := u + v

After::

    accumulate u from 0;   reduce k:  u <- u + dot(A, B)
                           reduce l:  u <- u + dot(C, D)
    f[x, y] := u

Such are gradients of an operand that two products share, and gates of recurrent layers. Half the registers leave room for tiles twice as large. Products
of one loop then have a loop each, if their operands would not have room in shared memory together.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from ...ir.nest import Accumulator, Assign, Index, Kernel, Let, Local, Loop, Op, Statement, Tile, TileDot, Valued, statements, values
from ...lower.schedule_options import KernelOptions

LARGE = 128 * 256  #: elements of an accumulator beside which three steps of one product's operands have room, of two products' not


def fuse_accumulators(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Return the kernel with one accumulator for products that nothing reads but a sum of them."""
    return replace(kernel, body=with_fused_accumulators(kernel.body))


def with_fused_accumulators(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Fuse pairs of accumulators of one list of statements until no sum of two is left."""
    while pair := _summed_pair(body):
        body = _distributed(_joined(body, *pair), pair[0])
    return tuple(replace(s, body=with_fused_accumulators(s.body)) if isinstance(s, Loop) else s for s in body)


def _summed_pair(body: tuple[Statement, ...]) -> tuple[str, str] | None:
    """Return two accumulators of which the sum is all that is read."""
    found = {s.name: s for s in body if isinstance(s, Accumulator) and s == Accumulator(s.name, s.axes, 0.0, s.origin)}
    updates: Counter[str] = Counter()
    for s in statements(body):
        if isinstance(s, Assign) and s.name in found:
            match s.value:
                case Op("+", (Local(name), TileDot())) if name == s.name:
                    updates[name] += 1
                case _:
                    del found[s.name]
    read = Counter(n.name for v in values(body) for n in v.walk() if isinstance(n, Local))
    for v in values(body):
        for n in v.walk():
            match n:
                case Op("+", (Local(a), Local(b))) if a != b and {a, b} <= {*found}:
                    if found[a].axes == found[b].axes and all(updates[x] and read[x] == updates[x] + 1 for x in (a, b)):
                        return a, b
    return None


def _joined(body: tuple[Statement, ...], kept: str, other: str) -> tuple[Statement, ...]:
    """Return the statements with what ``other`` adds up added to ``kept``."""

    def change(tile: Tile) -> Tile:
        match tile:
            case Op("+", (Local(a), Local(b))) if a == b == kept:
                return tile.args[0]
            case Local(name) if name == other:
                return replace(tile, name=kept)
        return tile

    def one(s: Statement) -> Statement:
        if isinstance(s, Loop):
            return replace(s, body=tuple(map(one, s.body)))
        s = replace(s, value=s.value.transform(change)) if isinstance(s, Valued) else s
        return replace(s, name=kept) if isinstance(s, Assign) and s.name == other else s

    first = next(s.name for s in body if isinstance(s, Accumulator) and s.name in (kept, other))
    gone = other if first == kept else kept
    renamed = tuple(one(s) for s in body if not (isinstance(s, Accumulator) and s.name == gone))
    return tuple(replace(s, name=kept) if isinstance(s, Accumulator) and s.name == other else s for s in renamed)


def _distributed(body: tuple[Statement, ...], name: str) -> tuple[Statement, ...]:
    """Give each product that one loop adds to a large accumulator a loop of its own, where no two read the same operand."""
    axes = next(s.axes for s in body if isinstance(s, Accumulator) and s.name == name)
    if math.prod(a.tile or 1 for a in axes) < LARGE:
        return body
    return tuple(part for s in body for part in (_loop_of_each(s) if isinstance(s, Loop) else (s,)))


def _loop_of_each(loop: Loop) -> tuple[Loop, ...]:
    sums = [s for s in loop.body if isinstance(s, Assign)]
    if len(sums) < 2 or not all(isinstance(s, (Index, Let, Assign)) for s in loop.body):
        return (loop,)
    needed = [_needed_lets(loop.body, s) for s in sums]
    if len(set().union(*needed)) < sum(map(len, needed)):
        return (loop,)
    return tuple(replace(loop, body=tuple(s for s in loop.body if isinstance(s, Index) or s is own or isinstance(s, Let) and s.name in lets)) for own, lets in zip(sums, needed))


def _needed_lets(body: tuple[Statement, ...], of: Assign) -> set[str]:
    """Return the names of a loop's body that a value is made of."""
    lets, found, left = {s.name: s.value for s in body if isinstance(s, Let)}, set[str](), [of.value]
    while left:
        names = {n.name for n in left.pop().walk() if isinstance(n, Local)} & {*lets} - found
        found |= names
        left += [lets[name] for name in names]
    return found
