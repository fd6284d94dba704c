"""What a product of a loop takes from memory is taken by nothing else in it.

Before::

    for k in 0 .. size_k:
        A = load(A[x, k])
        acc <- acc + dot(A, load(B[y, k]))
        sums <- sums + A * A

After::

    for k in 0 .. size_k:
        A = load(A[x, k])
        A_read = load(A[x, k])               of its own, which Triton does not see to be the same
        acc <- acc + dot(A, load(B[y, k]))
        sums <- sums + A_read * A_read

Hopper's products read shared memory while the next step begins. Triton (3.6 and 3.9) gives a load that feeds such a product and
registers too one buffer less than one that feeds the product alone, and the next load is written over what the product still reads:
wrong numbers, other ones in every run (measured on an H200; in its TTGIR ``warp_group_dot_wait {pendings = 1}`` before the copy into
the same slot).
"""

from __future__ import annotations

from dataclasses import replace

from ....algebra.rules.canonicalize import fresh_name
from ...ir.nest import Kernel, Let, Load, Local, Loop, Statement, Tile, TileDot, axes_of, map_values, names_in, values
from ...lower.schedule_options import KernelOptions

ROWS = 64  #: of a tile from which on products are of the kind that reads shared memory by itself


def duplicate_wgmma_loads(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Load twice what feeds both a product and registers."""
    return replace(kernel, body=with_loads_duplicated(kernel.body))


def with_loads_duplicated(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The body with loads of their own for what products of a loop take, and others in it."""
    return tuple(_loop(s, names_in(body)) if isinstance(s, Loop) else s for s in body)


def _loop(loop: Loop, taken: set[str]) -> Loop:
    inside = tuple(_loop(s, taken) if isinstance(s, Loop) else s for s in loop.body)
    nodes = [n for value in values(inside) for n in value.walk()]
    sides = [side.name for n in nodes if isinstance(n, TileDot) and _large(n) for side in (n.left, n.right) if isinstance(side, Local)]
    asked = [n.name for n in nodes if isinstance(n, Local)]
    found: dict[str, Local] = {}
    made: list[Statement] = []
    for s in inside:
        made.append(s)
        if isinstance(s, Let) and isinstance(s.value, Load) and not s.value.sunk_into and 0 < sides.count(s.name) < asked.count(s.name):
            name = fresh_name(f"{s.name}_read", taken)
            found[s.name] = Local(name, s.axes)
            made.append(Let(name, replace(s.value, duplicate_in=loop.axis), s.axes))
    return replace(loop, body=map_values(tuple(made), lambda value: _read(value, found)) if found else inside)


def _read(tile: Tile, found: dict[str, Local]) -> Tile:
    """``tile`` with what is found for the names in it, but where products take them."""
    if isinstance(tile, Local):
        return replace(found[tile.name], axes=tile.axes) if tile.name in found else tile
    return tile.rebuild(lambda child: child if isinstance(tile, TileDot) and isinstance(child, Local) else _read(child, found))


def _large(dot: TileDot) -> bool:
    return any(not a.tile or a.tile >= ROWS for a in axes_of(dot))
