"""Propose to compute several neighbours of a result by one thread, which loads once what their windows share.

Before, for ``f[b, t, c] = rsum(A[b, t + k - 12, c], k)`` of 25 places, each thread loads 25 elements for each of its results::

    f.block(b:1, t:32, c:64); f.tensorize(k:1, b:1, t:32, c:64); f.unroll(k:8);

After, 40 elements for 16 results::

    f.block(b:1, t:16, c:128); f.tensorize(k:1, b:1, t:16, c:128); f.unroll(t:16, k:25);

Only of windows that the innermost loop goes over, and where another label lies contiguous, which lanes go along. Of the gradient of weights,
``d_W[r, c] = rsum(g[l, c] * A[l + r, c], l)``, the neighbours are the places of the window, and the loop goes along what they slide over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ....lang.extents.linear_form import linear_form
from ....lang.schedule_checks import reduction_labels
from ...cost.kernel_config import STAGES, KernelConfig, Sizes
from ...problem import SchedulingProblem
from ..reduction import contiguous_label, loaded_accesses, row_tiles, stores_while_reducing

OWN = (4, 8, 16)  #: results of a thread, at most
TERMS = 512  #: terms of these results that the text of a step has, at most
STEPS = 32  #: places of a window at once, at most
EACH, WARPS = (1, 2, 4, 8), (1, 2, 4)  #: elements of a thread along the lanes, and warps
PROGRAMS = (4, 8, 16)  #: a multiprocessor, over which a sum is split
LIVE = 128  #: sums of a thread, with the elements of its windows and as many of what they are multiplied by, at most: 168 took 167 registers


def unrolled_window_candidates(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield schedules of a kernel whose innermost loop goes over windows."""
    own, reduced = shape.algorithm[root].labels, reduction_labels(shape.algorithm, root)
    if not own or not reduced or any(shape.dots(m) for m in members) or stores_while_reducing(shape, root, members):
        return
    if any(reduction_labels(shape.algorithm, m) not in ((), reduced) for m in members):
        return
    read, inner = loaded_accesses(shape, root, members), reduced[-1]
    sliding = [x for x in own if any(_slides(i, x, inner) for a in read for i in a.index)]
    lanes = [x for x in (*own[-1:], *(x for a in read for x in contiguous_label(a))) if x in own and x not in sliding]
    if len(sliding) != 1 or not lanes or any({inner, *sliding} & {*contiguous_label(a)} and len(a.index) > 2 for a in read):
        return
    (at,), usual = sliding, row_tiles(shape, root, members)
    for most, each, warps in product(OWN, EACH, WARPS):
        many = _evenly(shape.sizes[at], most)
        steps = min(_evenly(shape.sizes[inner], STEPS), TERMS // many)
        if many == 1 or steps == 1 or 2 * each * (many + steps) > LIVE:
            continue
        block, room = {at: many}, warps * each * shape.target.warp_size
        for x in dict.fromkeys((*lanes, *reversed(own))):
            if x != at:
                block[x] = min(next_power_of_two(shape.sizes[x]), room)
                room //= block[x]
        if room > 1:  # threads without an element
            continue
        block = {x: block[x] for x in own}
        constants = tuple(dict.fromkeys((*usual.constants, *((inner,) if shape.sizes[inner] <= STEPS else ()))))
        config = KernelConfig(
            root, tuple(block.items()), tuple((dict.fromkeys(reduced, 1) | block).items()), unrolled=((at, many), (inner, steps)),
            num_warps=warps, num_stages=STAGES, constants=constants, approximations=usual.approximations,
        )  # fmt: skip
        yield from (replace(config, split=split) for split in _splits(shape, shape.programs(block), reduced[:-1]))


def _splits(shape: SchedulingProblem, programs: int, outer: tuple[str, ...]) -> Iterator[Sizes]:
    """Yield into how many parts the longest loop around that of the windows goes: none where there are programs enough."""
    cores, longest = shape.target.multiprocessors, max(outer, key=lambda x: shape.sizes[x], default="")
    if 2 * programs >= cores or not longest:
        yield ()
    elif programs < max(PROGRAMS) * cores:
        size = shape.sizes[longest]
        found = (_evenly(size, -(-size // min(size, times * cores // programs))) for times in PROGRAMS)  # steps of a part
        yield from (((longest, n),) for n in dict.fromkeys(-(-size // steps) for steps in found) if n > 1)


def _evenly(size: int, most: int) -> int:
    """Return the length of equal parts of ``size``, none longer than ``most``."""
    return -(-size // -(-size // most)) if size else 1


def _slides(index: ex.Expr, at: str, inner: str) -> bool:
    """Return whether an index is a label of the result shifted by that of a window, element by element."""
    form = {x.name if isinstance(x, ex.Label) else str(x): abs(times) for x, times in linear_form(index).items() if x is not None and times}
    return form == {at: 1, inner: 1}
