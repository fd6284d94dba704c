"""Propose loops over several labels as one, where these are the last dimensions of all that a kernel without products moves.

A tile of a power of two holds 512 elements of a row of 258, and rows of odd lengths begin anywhere. Before, for a group normalization of
images of 258 x 258, ``mean[b, g] = rmean(x[b, g, o, v, u], o, v, u)``::

    f.tensorize(o:1, v:8, u:0, b:1, g:1);                                16 of 31 elements are padding

After::

    f.merge(v_u, v, u); f.tensorize(o:1, v_u:4096, b:1, g:1);            none is, but at the end
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ....codegen.powers_of_two import last_power_of_two, next_power_of_two
from ....lang import expr as ex
from ....lang.schedule_checks import reduction_labels
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem
from ..reduction import ROW_LIMIT, reread, row_tiles, stores_while_reducing

ELEMENTS = (1024, 2048, 4096, 8192, 16384)  #: of a tile
EACH = (8, 16)  #: elements of a thread
PROGRAMS = (4, 8)  #: a multiprocessor, over which a sum is split
LEAST = 4  #: warps of a program
EMPTY = 0.9  #: the part of the usual tiles that is filled, above which nothing is gained where rows begin at whole vectors
VECTOR = 16  #: bytes of a load


def merged_row_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield schedules of a kernel whose sums go over the last dimensions of all that it reads and writes, as one."""
    usual = row_tiles(shape, root, members)
    run = _last_dimensions(shape, root, members)
    blocks = dict(usual.blocks)
    looped = [x for x, _ in usual.tiles if x not in blocks]
    if len(run) < 2 or not {*run} <= {*looped} or stores_while_reducing(shape, root, members):
        return
    if shape.sizes[run[-1]] * shape.itemsize % VECTOR == 0 and _filled(shape, usual) > EMPTY:
        return
    name, size = shape.unused_label("_".join(run), bare=True), math.prod(shape.sizes[x] for x in run)
    whole = replace(shape, sizes={**shape.sizes, name: size})
    fewer = dict.fromkeys(blocks, 1)
    for elements in ELEMENTS:
        if elements > min(ROW_LIMIT, next_power_of_two(size)):
            break
        tile = {x: 1 for x, _ in usual.tiles if x not in run} | {name: elements}
        again = reread(shape.algorithm, whole.sizes, root, tile, members)
        more: dict[str, Any] = {"merged": (", ".join((name, *run)),), "evictions": tuple((t, "reread") for t in again), "approximations": usual.approximations}
        for warps in dict.fromkeys(max(LEAST, min(32, last_power_of_two(elements // (each * shape.target.warp_size)))) for each in EACH):
            for split in _splits(whole, root, tile, fewer):
                yield whole.config(root, fewer, tile, warps, 3, split=split, **more)


def _splits(shape: SchedulingProblem, root: str, tile: dict[str, int], blocks: dict[str, int]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield into how many parts the longest loop of the root's own sum goes: none where there are programs enough."""
    programs, cores = shape.programs(blocks), shape.target.multiprocessors
    merged = next(reversed(tile))
    summed = {*reduction_labels(shape.algorithm, root)}
    loops = {x: -(-shape.sizes[x] // n) for x, n in tile.items() if x not in blocks and (x in summed or x == merged and summed)}
    if 2 * programs >= cores or not loops:
        yield ()
    longest = max(loops, key=lambda x: loops[x], default="")
    if longest and longest != merged and programs < max(PROGRAMS) * cores:
        yield from (((longest, n),) for n in dict.fromkeys(min(loops[longest], last_power_of_two(max(1, times * cores // programs))) for times in PROGRAMS) if n > 1)


def _filled(shape: SchedulingProblem, usual: KernelConfig) -> float:
    """Return the part of the usual tiles' elements that there are."""
    filled = 1.0
    for x, n in usual.tiles:
        step = n or next_power_of_two(shape.sizes[x])
        filled *= shape.sizes[x] / (-(-shape.sizes[x] // step) * step) if shape.sizes[x] else 1.0
    return filled


def _last_dimensions(shape: SchedulingProblem, root: str, members: list[str]) -> tuple[str, ...]:
    """Return the most labels that end, in this order, whatever has one of them: each tensor read, each Func of the kernel, and each sum."""
    labels = shape.algorithm[root].labels
    kernel = [shape.algorithm[f] for f in dict.fromkeys((root, *members))]
    longest = max((d.labels for d in kernel), key=len)
    summed = max((reduction_labels(shape.algorithm, d.name) for d in kernel), key=len, default=())
    order = longest if len(longest) >= len(labels) + len(summed) else (*[x for x in labels if x not in summed], *summed)
    for first in range(len(order) - 1):
        run = tuple(order[first:])
        if all(shape.sizes[x] > 1 for x in run) and all(_keeps_together(shape, d.name, run) for d in kernel):
            return run
    return ()


def _keeps_together(shape: SchedulingProblem, func: str, run: tuple[str, ...]) -> bool:
    """Return whether a Func has the labels of ``run`` all, as its last ones or among those of its sum, or none of them; and so has each tensor that it reads."""
    d, wanted = shape.algorithm[func], {*run}
    for labels in (d.labels, *(n.labels for n in ex.reductions(d.expr))):
        if wanted & {*labels} and tuple(x for x in labels if x in wanted) != run:
            return False
    if wanted & {*d.labels} and d.labels[-len(run) :] != run:
        return False
    reads = tuple(ex.accesses(d.expr))
    places = sum(isinstance(n, ex.Label) and n.name in wanted for a in reads for i in a.index for n in i.walk())
    if places != sum(isinstance(n, ex.Label) and n.name in wanted for n in d.expr.walk()):
        return False  # a value depends on a place itself
    plain = tuple(map(ex.Label, run))
    return all(a.index[-len(run) :] == plain for a in reads if any(wanted & ex.free_labels(i) for i in a.index))
