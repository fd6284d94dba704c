"""Keep large Funcs between kernels in pieces, so that memory holds no more of them than a limit."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..algebra.autodiff.rematerialization import is_limit_set, memory_limit
from ..codegen.powers_of_two import last_power_of_two
from ..lang import expr as ex
from ..lang.schedule import Primitive, Sized, Sizes
from ..lang.schedule_checks import reduction_labels
from .problem import SchedulingProblem

SMALL = 16  #: what takes less than this part of the limit is kept whole
MUCH_FASTER = 0.6  #: the share of the usual way's time below which one is taken that keeps more than the L2: products of long sums, or no more than inputs and results together
FAR_FASTER = 0.5  #: the same where it keeps more than that, within the limit: the usual way makes something again for many elements
RESCUED = 0.1  #: the same beyond the limit, unless the user sets it: 4.9 seconds in place of 1 ms help no one, and torch keeps as much
SHORTEST = 128  #: elements of a piece, at least: with fewer, products do not fill the GPU


def pieces_within_limit(shape: SchedulingProblem, roots: tuple[str, ...], members: dict[str, list[str]]) -> Iterator[tuple[Primitive, ...]]:
    """Yield ``chunk`` statements that bring what kernels leave for each other within the limit, best first; none if it is.

    Where inputs and outputs as large as what is left take more than the limit, that counts instead: torch holds a tensor of their size for
    every step of the same program, and pieces take launches, smaller grids and float32 sums. A limit that the user sets holds there too.

    The best label is that along which sums over it take the least memory: they are held in float32 until the last piece. For the
    logits of a last layer that is the vocabulary: the gradient of the weight is finished piece by piece.
    """
    limit = memory_limit()
    between = [r for r in roots if r not in shape.outputs and SMALL * _bytes(shape, r) > limit and _meets_products(shape, r, roots, members)]
    limit = limit_beside(shape, between)
    large = between if sum(_bytes(shape, r) for r in between) > limit else []
    if not limit or not large:
        return
    shared = [label for label in shape.algorithm[large[0]].labels if all(label in shape.algorithm[r].labels for r in large)]
    found = []
    for label in shared:
        sums = _summed_bytes(shape, label, roots)
        room = limit - sums if 2 * sums <= limit else limit
        each = sum(_bytes(shape, r) for r in large) // shape.sizes[label]
        size = max(_shortest(shape, label, large), last_power_of_two(max(1, room // each)))
        if size < shape.sizes[label]:
            found.append((size * each > limit, sums, tuple(Sizes(r, "chunk", (Sized(label, size),)) for r in large)))
    yield from (pieces for *_, pieces in sorted(found, key=lambda f: f[:2]))


def share_for_memory(shape: SchedulingProblem, most: int, short: int, kept: int) -> float:
    """Return the share of the usual way's time that one may take which has kernels keep ``kept`` bytes, more than ``most``; ``short`` of them of no long product.

    Inputs and results are memory that a call needs anyway: as much again is allowed where a way is much faster, unless the user sets a limit below.
    """
    limit = memory_limit()
    given = sum(4 * shape.elements(t) for t in (*shape.algorithm.inputs, *shape.outputs))
    given = min(given, limit) if limit and is_limit_set() else given
    if short <= max(most, given):
        return MUCH_FASTER
    return FAR_FASTER if not limit or kept <= limit else 0.0 if is_limit_set() else RESCUED


def limit_beside(shape: SchedulingProblem, between: list[str]) -> int:
    """Return the limit of the bytes of the Funcs ``between`` kernels, 0 for none: of the user, else at least those of inputs and outputs as large."""
    limit = memory_limit()
    return max(limit, _bytes_of_caller(shape, between)) if between and limit and not is_limit_set() else limit


def _bytes_of_caller(shape: SchedulingProblem, between: list[str]) -> int:
    """Return the bytes of inputs and outputs that have all labels of one of the Funcs ``between`` kernels."""
    tensors = [*map(shape.algorithm.plain_labels, shape.algorithm.inputs), *(shape.algorithm[o].labels for o in shape.outputs)]
    held = [labels for labels in tensors if any(set(shape.algorithm[r].labels) <= set(labels) for r in between)]
    return sum(shape.itemsize * math.prod(shape.sizes.get(x, 1) if x else 1 for x in labels) for labels in held)


def _bytes(shape: SchedulingProblem, func: str) -> int:
    return shape.elements(func) * shape.stored_bytes(func)


def _meets_products(shape: SchedulingProblem, func: str, roots: tuple[str, ...], members: dict[str, list[str]]) -> bool:
    """Return whether a product makes ``func``, or is in a kernel that reads it: its time then hides that of a launch for each piece."""
    if any(shape.dots(m) for m in members[func]):
        return True
    readers = [r for r in roots if any(a.tensor == func for m in members[r] for a in ex.accesses(shape.algorithm[m].expr))]
    return any(shape.dots(m) for r in readers for m in members[r])


def _summed_bytes(shape: SchedulingProblem, label: str, roots: tuple[str, ...]) -> int:
    """Return the bytes in float32 of the sums over ``label``."""
    sums = [f for f in {*roots, *shape.outputs} if label in reduction_labels(shape.algorithm, f)]
    return sum(4 * math.prod(shape.sizes.get(x, 1) for x in shape.algorithm[f].labels) for f in sums)


def _shortest(shape: SchedulingProblem, label: str, large: list[str]) -> int:
    """Return the fewest elements of a piece along ``label`` with which products fill the GPU: of a batch as many as have a block for each multiprocessor.

    32 x 32 heads of 512 rows and 1024 columns in float32 took 42 ms in pieces of 128 rows on an H100, each of which reads all keys and values; a piece of four
    batches reads its own.
    """
    dots = [dot for d in shape.algorithm.definitions for dot in shape.dots(d.name)]
    if any((label in ex.free_labels(dot.left)) != (label in ex.free_labels(dot.right)) or label in dot.labels for dot in dots):
        return SHORTEST
    each = min(shape.elements(f) // shape.sizes[label] for f in large)
    return min(SHORTEST, last_power_of_two(2 * -(-shape.target.multiprocessors * SHORTEST**2 // max(1, each)) - 1))  # a power of two that is no less
