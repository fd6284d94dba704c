"""Propose tiles of every useful size and shape for kernels without matrix products, each by several numbers of warps.

The usual choice (reduction.py) fixes what is blocked and what is looped over. Here the elements at once vary, and how many of them lie along the
label that tensors are contiguous along; the rest goes to the next labels in memory. For ``f[n, g] = rsum(A[n, g, c, s], c, s)``::

    f.tensorize(c:0, s:1024, n:1, g:1)      the usual tile: ten channels in sixteen rows
    f.tensorize(c:2, s:0, n:1, g:1)         proposed: two whole channels, which lie one after the other
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ....codegen.powers_of_two import last_power_of_two, next_power_of_two, two_tiles
from ....lang import expr as ex
from ....lang.schedule_checks import reduction_labels
from ...cost.kernel_config import KernelConfig, Sizes
from ...cost.kernel_work import WARPS
from ...cost.outline import paired_terms
from ...problem import SchedulingProblem
from ..reduction import ROW_LIMIT, loaded_accesses, reread, row_tiles, starts_anywhere, stores_while_reducing, thread_elements

ELEMENTS, PLAIN = (2048, 4096, 8192, 16384, 32768), (1024, 4096, 16384)  #: of a tile, and of one without reductions, whose shape matters little
#: the same of a kernel that has few elements for each thread that the GPU runs at once, and elements of a thread there: 1203 rows of 51 took 7.5 us in blocks of
#: 16 rows by 2 warps, 4.9 of 8 rows by 8 warps (softmax, an H100)
FEW, SMALL, SPREAD = 8, (128, 256, 512, 1024), (2, 4)
LINE, RUN = 64, 512  #: bytes of the shortest run along a label of the grid, and elements of one that a loop runs along
EACH = (16, 8, 32)  #: elements of a thread, the usual number first
MOST_WARPS = 32
PROGRAMS = (4, 2, 8)  #: a multiprocessor, over which a sum is split, the usual number first
SHORTEST, LONGEST, FULL = 512, 49153, 8192  #: elements of rows that two tiles hold, and of several such rows
STAGES, STEPS = 3, 4  #: of a loop that loads ahead, and its fewest steps


def tile_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield a schedule for each shape of tiles of a kernel that moves memory."""
    usual = row_tiles(shape, root, members)
    most = thread_elements(shape, root, loaded_accesses(shape, root, members))
    passing = stores_while_reducing(shape, root, members)
    for sizes in dict.fromkeys(_tiles(shape, root, members, usual)):
        tile = dict(sizes)
        blocks = tuple((x, tile[x]) for x, _ in usual.blocks)
        again = () if passing else reread(shape.algorithm, shape.sizes, root, tile, members)
        evicted = tuple((t, "reread") for t in again) or tuple((t, policy) for t, policy in usual.evictions if policy == "first")
        made = replace(usual, blocks=blocks, tiles=sizes, persistent=False, stages_of=(), split=(), evictions=evicted, two_tiles=())
        made = replace(made, num_warps=_warps(shape, made, most)[0])
        split = next(_splits(shape, root, made))
        yield replace(made, split=split) if split else made
    yield from _rows_by_two_tiles(shape, root, members, usual)


def _rows_by_two_tiles(shape: SchedulingProblem, root: str, members: list[str], usual: KernelConfig) -> Iterator[KernelConfig]:
    """Yield tiles that hold rows far from a power of two whole, by two tiles: 36864 elements as 32768 and 4096."""
    rows = [x for x, _ in usual.tiles if x not in dict(usual.blocks) and x not in usual.constants and shape.sizes[x] > 1]
    if stores_while_reducing(shape, root, members) or len(rows) != 1 or sum(n > 1 for _, n in usual.blocks) > 1:
        return
    (row,), once = rows, tuple((t, policy) for t, policy in usual.evictions if policy == "first")
    width, label = sum(two_tiles(shape.sizes[row], 1)), next((x for x, n in reversed(usual.blocks) if n > 1), usual.blocks[-1][0] if usual.blocks else "")
    most = ROW_LIMIT // 2 if starts_anywhere(shape, row, loaded_accesses(shape, root, members)) else LONGEST
    if not SHORTEST <= width < min(next_power_of_two(shape.sizes[row]), most):
        return
    for block in (1, 2, 4, 8):
        if block == 1 or label and block * width <= FULL and block <= shape.sizes[label]:
            blocks = tuple((x, block if x == label else 1) for x, _ in usual.blocks)
            tiles = tuple((x, 0 if x == row else dict(blocks).get(x, n)) for x, n in usual.tiles)  # a loop over one element has no block
            made = replace(usual, blocks=blocks, tiles=tiles, two_tiles=(row,), persistent=False, stages_of=(), split=(), evictions=once)
            yield replace(made, num_warps=_warps(shape, made, thread_elements(shape, root, loaded_accesses(shape, root, members)))[0])


def variants(shape: SchedulingProblem, root: str, members: list[str], made: KernelConfig) -> Iterator[KernelConfig]:
    """Yield schedules of the same tiles by other numbers of warps and parts, and with loops that load ahead."""
    if made.merged or made.single or paired_terms(shape.known.funcs[root]):  # the latter have tiles of few useful shapes
        return
    few, most = _is_short(shape, root), thread_elements(shape, root, loaded_accesses(shape, root, members))
    for split in _splits(shape, root, made):
        for stages in _ahead(shape, made, split):
            for warps in _warps(shape, made, most, (*EACH, *SPREAD) if few else EACH):
                yield replace(made, num_warps=warps, split=split, stages_of=stages)


def _is_short(shape: SchedulingProblem, root: str) -> bool:
    """Return whether a kernel has few elements for each thread that the GPU runs at once: one program after another is what it waits for."""
    labels = dict.fromkeys((*shape.algorithm[root].labels, *reduction_labels(shape.algorithm, root)))
    threads = shape.target.multiprocessors * WARPS * shape.target.warp_size
    return math.prod(shape.sizes[x] for x in labels) <= FEW * threads


def _warps(shape: SchedulingProblem, made: KernelConfig, most: int, elements_each: tuple[int, ...] = EACH) -> list[int]:
    """Return numbers of warps, the usual one first; a thread has no more than ``most`` elements."""
    elements = 1
    for x, size in made.tiles:
        elements *= sum(two_tiles(shape.sizes[x], 1)) if x in made.two_tiles else size or next_power_of_two(shape.sizes[x])
    return list(dict.fromkeys(min(MOST_WARPS, last_power_of_two(elements // (min(each, most) * shape.target.warp_size))) for each in elements_each))


def _tiles(shape: SchedulingProblem, root: str, members: list[str], usual: KernelConfig) -> Iterator[Sizes]:
    """Yield tiles as the usual one has labels: the first label in memory takes a run, the labels after it what is left of the elements."""
    blocks, kept = dict(usual.blocks), {x: size for x, size in usual.tiles if shape.is_short(x) or x in usual.constants}
    at = distances(shape, root, members, [x for x, _ in usual.tiles])
    order = sorted([x for x in at if x not in kept], key=lambda x: (at[x], -shape.sizes[x]))
    if sum(at[x] == 0 and shape.sizes[x] > 1 for x in at) > 1:  # a transpose, whose tile has room for lines of both
        yield usual.tiles
        return
    if not order:
        return
    least = max(1, LINE // shape.itemsize) if order[0] in blocks else RUN
    orders = [order, [order[0], *(x for x in order[1:] if x not in blocks), *(x for x in order[1:] if x in blocks)]]
    whole = next_power_of_two(shape.sizes[order[0]])
    for places in orders[: 1 if orders[0] == orders[1] else 2]:
        usual_sizes = ELEMENTS if any(reduction_labels(shape.algorithm, m) for m in members) else PLAIN
        for elements in (*(SMALL if _is_short(shape, root) else ()), *usual_sizes):
            run = min(whole, elements)
            while run >= min(whole, least):
                left, tile = elements, dict(kept)
                for x in places:
                    n = min(next_power_of_two(shape.sizes[x]), run if x == places[0] else left)
                    tile[x] = 0 if x not in blocks and n >= shape.sizes[x] else n
                    left //= n
                yield tuple((x, tile[x]) for x, _ in usual.tiles)
                run //= 4


def distances(shape: SchedulingProblem, root: str, members: list[str], labels: list[str]) -> dict[str, int]:
    """Return how far each label is from the last dimension in the tensors that have most of them; one of extent 1 is in none."""
    wanted = {x for x in labels if shape.sizes[x] > 1}
    places = [[frozenset(ex.free_labels(i) & wanted) for i in reversed(a.index)] for a in loaded_accesses(shape, root, members)]
    places += [[frozenset({x} & wanted) for x in reversed(shape.algorithm[m].labels)] for m in members if m == root or m in shape.outputs]
    most = max((len(set().union(*place)) for place in places if place), default=0)
    full = [place for place in places if place and len(set().union(*place)) == most]
    return {x: min((i for place in full for i, found in enumerate(place) if x in found), default=len(labels)) for x in labels}


def _splits(shape: SchedulingProblem, root: str, made: KernelConfig) -> Iterator[Sizes]:
    """Yield into how many parts the longest loop of the root's own sum goes."""
    tile, blocks = dict(made.tiles), dict(made.blocks)
    programs, cores = shape.programs(blocks), shape.target.multiprocessors
    looped = [x for x in reduction_labels(shape.algorithm, root) if tile.get(x, 0) and x not in blocks and not shape.is_picked(shape.algorithm[root].expr, x)]
    split: list[Sizes] = []
    if looped and programs < max(PROGRAMS) * cores:
        longest = max(looped, key=lambda x: shape.sizes[x] // tile[x])
        steps = -(-shape.sizes[longest] // tile[longest])
        split = [((longest, n),) for times in PROGRAMS if (n := shape.whole_parts(root, tile, min(times * cores // max(programs, 1), steps))) > 1]
    if 2 * programs >= cores or not split:
        yield ()
    yield from dict.fromkeys(split)


def _ahead(shape: SchedulingProblem, made: KernelConfig, split: Sizes) -> Iterator[Sizes]:
    """Yield the loops that load ahead: none, or the longest one."""
    yield ()
    parts = dict(split)
    steps = {x: -(-shape.sizes[x] // size) // parts.get(x, 1) for x, size in made.tiles if size and x not in dict(made.blocks)}
    longest = max(steps, key=lambda x: steps[x], default="")
    if longest and steps[longest] >= STEPS:
        yield ((longest, STAGES),)


