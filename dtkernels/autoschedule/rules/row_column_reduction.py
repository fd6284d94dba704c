"""Tile kernels that sum along rows and down columns in one pass: each program loops over rows that it holds whole.

for x in a part's share of the rows:
    row[x] = rsum(... A[x, y] ..., y)            from registers
    f[x, y] := ... A[x, y] ... row[x] ...
    column[y] <- column[y] + ... A[x, y] ...     merged over parts by a kernel after it
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...codegen.powers_of_two import next_power_of_two
from ...lang import expr as ex
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig, Sizes
from ..problem import SchedulingProblem, whole_parts
from .product_sides import sides
from .reduction import approximations

WARPS, SHARES, EACH = (4, 8, 16), (0.5, 1, 2), (4, 32)  #: of candidates: warps, parts relative to the usual ones, elements of a thread at least and at most
STEP = 4096  #: elements of the rows of one step, if one row is not more
ROOM = 88  #: registers of a thread for values as wide as a row, which leaves 40 for the rest where 512 threads share them all
STAGES = 3
SCRATCH = 4096  #: bytes of shared memory for reductions over warps and for numbers of a row


def row_column_tiles(shape: SchedulingProblem, root: str, members: list[str]) -> KernelConfig | None:
    """Return the choices for a kernel whose ``root`` is summed down columns, where members are summed along
    rows of it; None where that is not so, or where rows are too long to be held."""
    labels, down = shape.algorithm[root].labels, reduction_labels(shape.algorithm, root)
    sums = [m for m in members if set(reduction_labels(shape.algorithm, m)) & set(labels)]
    along = {label for m in sums for label in reduction_labels(shape.algorithm, m)}
    plain = not any(_multiplies_matrices(shape, m) or _is_chained(shape, m, members) for m in members)
    if not down or not along or not along <= set(labels) or not plain or any(set(shape.algorithm[m].labels) - {*down, *labels} for m in sums):
        return None
    width = 1
    for label in along:
        width *= next_power_of_two(shape.sizes[label])
    if width > STEP and any(map(shape.dots, members)):  # 27.8 us for rows of 7250, two kernels 22.8; 14.7 and 16.5 for rows of 462, on an H100
        return None
    rows = min(next_power_of_two(shape.sizes[down[-1]]), max(1, STEP // width))
    read, held = _row_sized_values(shape, members, along, down)
    threads = {warps: warps * shape.target.warp_size for warps in (8, 16)}
    warps = next((w for w, n in threads.items() if held * rows * width <= ROOM * n), 0)
    if not warps:
        return None
    ahead = (shape.target.shared_bytes - SCRATCH) // (read * rows * width * shape.itemsize)  # steps that shared memory holds
    block = {label: 1 for label in labels if label not in along}
    tile = {**dict.fromkeys(down, 1), down[-1]: rows, **block, **dict.fromkeys((label for label in labels if label in along), 0)}
    loop = ((down[-1], min(STAGES, ahead + 1)),) if ahead else ()
    shared = _split_rows(shape, {label: tile[label] for label in down}, shape.programs(block), 16 // warps)
    return shape.config(root, block, tile, warps, 3, split=shared, stages_of=loop, approximations=approximations(shape, members))


def _multiplies_matrices(shape: SchedulingProblem, func: str) -> bool:
    """Return whether ``func`` has a product with several rows and several columns."""
    return any(all(shape.several(side) for side in sides(shape, func, dot)) for dot in shape.dots(func))


def _is_chained(shape: SchedulingProblem, func: str, members: list[str]) -> bool:
    """Return whether ``func`` is a product of what another product of the kernel makes."""
    return bool(shape.dots(func)) and any(f != func and f in members and shape.dots(f) for f in shape.algorithm.needed_by((func,)))


def row_column_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield schedules of such a kernel with more rows at once, other numbers of warps and parts, and without loading ahead."""
    usual = row_column_tiles(shape, root, members)
    if usual is None:
        return
    tile, row = dict(usual.tiles), reduction_labels(shape.algorithm, root)[-1]
    width = math.prod(next_power_of_two(shape.sizes[x]) for x, n in usual.tiles if n == 0)
    for rows, warps, part in product((tile[row], 2 * tile[row], 4 * tile[row]), WARPS, SHARES):
        each = rows * width // (warps * shape.target.warp_size)
        if EACH[0] <= each <= EACH[1] and rows <= shape.sizes[row]:
            split = tuple((x, whole_parts(int(n * part))) for x, n in usual.split if whole_parts(int(n * part)) > 1)
            made = replace(usual, tiles=tuple((x, rows if x == row else n) for x, n in usual.tiles), num_warps=warps, split=split)
            yield from (made, replace(made, stages_of=()))


def _split_rows(shape: SchedulingProblem, steps: dict[str, int], programs: int, share: int) -> Sizes:
    """Split the rows over as many programs as run at once, ``share`` per multiprocessor, each with several steps to pipeline."""
    longest = max(steps, key=lambda label: shape.sizes[label] // steps[label])
    parts = min(shape.target.multiprocessors * share // max(programs, 1), shape.sizes[longest] // steps[longest] // 4)
    return ((longest, whole_parts(parts)),) if parts > 1 else ()


def _row_sized_values(shape: SchedulingProblem, members: list[str], along: set[str], down: tuple[str, ...]) -> tuple[int, int]:
    """Return (inputs with a row of their own for each row, row-wide values live at once: all inputs and column sums)."""
    found = {a for m in members for a in ex.accesses(shape.algorithm[m].expr) if along <= ex.free_labels(a)}
    found = {a for a in found if a.tensor in shape.algorithm.inputs}
    columns = [m for m in members if reduction_labels(shape.algorithm, m) == down]
    return sum(bool(ex.free_labels(a) & set(down)) for a in found) or 1, len(found) + len(columns)
