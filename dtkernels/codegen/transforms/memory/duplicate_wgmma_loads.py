"""Work around a race in Triton's pipeliner (3.6 to 3.9): a tile that feeds both a wgmma and registers is loaded twice.

Before::

    for k in 0 .. size_k:
        A = load(A[x, k])
        acc <- acc + dot(A, load(B[y, k]))
        sums <- sums + A * A

After::

    for k in 0 .. size_k:
        A = load(A[x, k])
        A_read = load(A[x, k])               a separate load, which Triton cannot merge with the first
        acc <- acc + dot(A, load(B[y, k]))
        sums <- sums + A_read * A_read

A wgmma (Hopper) reads shared memory while the next step begins. For a load that feeds both a wgmma and registers, Triton (seen in 3.6 and
3.9) allocates one buffer less than for a load that feeds the wgmma alone. The next load then overwrites the tile that the wgmma still
reads, and results are wrong and differ from run to run. Measured on an H200; the TTGIR has ``warp_group_dot_wait {pendings = 1}`` before
the copy into the same slot.
"""

from __future__ import annotations

from dataclasses import replace

from ....algebra.rules.canonicalize import fresh_name
from ...ir.nest import Kernel, Let, Load, Local, Loop, Statement, Tile, TileDot, axes_of, map_values, names_in, statements, values
from ...lower.schedule_options import KernelOptions

ROWS = 64  #: fewest rows of a tile for which Triton emits a wgmma


def duplicate_wgmma_loads(kernel: Kernel, options: KernelOptions) -> Kernel:
    """Load tiles twice that feed both a matrix product and registers."""
    return replace(kernel, body=with_loads_duplicated(kernel.body))


def with_loads_duplicated(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Give the other uses of a product's operands in each loop a load of their own."""
    return tuple(_loop(s, names_in(body)) if isinstance(s, Loop) else s for s in body)


def _loop(loop: Loop, taken: set[str]) -> Loop:
    inside = tuple(_loop(s, taken) if isinstance(s, Loop) else s for s in loop.body)
    rebound = [_bound_within(s) for s in inside]
    found: dict[str, Local] = {}
    made: list[Statement] = []
    bound: list[set[str]] = []
    for s, within in zip(inside, rebound):
        made.append(s)
        bound.append(within)
        if isinstance(s, Let) and isinstance(s.value, Load) and not s.value.sunk_into:
            seen = tuple(other for other, names in zip(inside, rebound) if s.name not in names)
            nodes = [n for value in values(seen) for n in value.walk()]
            sides = sum(side == s.name for n in nodes if isinstance(n, TileDot) and _is_large(n) for side in _operands(n))
            if 0 < sides < sum(isinstance(n, Local) and n.name == s.name for n in nodes):
                name = fresh_name(f"{s.name}_read", taken)
                found[s.name] = Local(name, s.axes)
                made.append(Let(name, replace(s.value, duplicate_in=loop.axis), s.axes))
                bound.append(set())
    return replace(loop, body=tuple(_with_reads(s, {n: d for n, d in found.items() if n not in names}) for s, names in zip(made, bound)) if found else inside)


def _bound_within(s: Statement) -> set[str]:
    """Return the names that a loop rebinds: inside it they name other tiles."""
    return {inner.name for inner in statements(s.body) if isinstance(inner, Let)} if isinstance(s, Loop) else set()


def _operands(dot: TileDot) -> list[str]:
    return [side.name for side in (dot.left, dot.right) if isinstance(side, Local)]


def _with_reads(s: Statement, found: dict[str, Local]) -> Statement:
    (changed,) = map_values((s,), lambda value: _with_duplicates(value, found))
    return changed


def _with_duplicates(tile: Tile, found: dict[str, Local]) -> Tile:
    """Replace the names in ``found`` by their duplicates, except as operands of products."""
    if isinstance(tile, Local):
        return replace(found[tile.name], axes=tile.axes) if tile.name in found else tile
    return tile.rebuild(lambda child: child if isinstance(tile, TileDot) and isinstance(child, Local) else _with_duplicates(child, found))


def _is_large(dot: TileDot) -> bool:
    return any(not a.tile or a.tile >= ROWS for a in axes_of(dot))
