"""Bucket sizes: calls of similar sizes and equal alignment are decided once."""

from __future__ import annotations

import math

from ...codegen.powers_of_two import next_power_of_two

STEPS = 8  #: anchors per power of two
SMALL, LARGE = 128, 256  #: up to these, steps are shorter than 16, and of 16
SHORT, SHORT_STEP = 64, 8  #: steps of rows this short: a rank of 17 is not decided as one of 31, which has twice the work
REGULAR = 16  #: the default schedule and the builds distinguish sizes by divisibility up to this


def bucket_anchor(size: int, pitch: bool = True) -> int:
    """Return the size that represents ``size``: the largest in its eighth of an octave with the same greatest common divisor with 16.

    Both sizes have the same next power of two, which is the tile extent of a label held whole. Sizes up to 16 represent themselves. ``pitch``: rows of
    a tensor begin this many elements apart. Of other extents, kernels only know whether 16 divides them: no more is told apart of large ones, nor of
    small ones, whose steps are an eighth of an octave too. 20 heads must not count as 28: these may leave no multiprocessor idle where 20 do.
    """
    if size <= REGULAR:
        return size
    alike = pitch or SMALL < size <= LARGE
    shortest = 1 if not alike else SHORT_STEP if size <= SHORT else REGULAR
    step = max(shortest, next_power_of_two(size) // (2 * STEPS))
    above = -(-size // step) * step
    anchor = above - (math.gcd(size, REGULAR) % REGULAR if alike else (size % REGULAR > 0 and above % REGULAR == 0))
    return max(anchor, size)
