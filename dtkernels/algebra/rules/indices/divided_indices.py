"""Divide indices by numbers of which they are multiples, plus something smaller."""

from __future__ import annotations

from dataclasses import replace

from ....lang.algorithm import Algorithm
from ...quotients import divided


def divide_indices(algorithm: Algorithm) -> Algorithm:
    """Do divisions of index arithmetic that leave a label, or less.

    Before: ``d_A[x] = rsum(d_f[2 * x + p] * W[(2 * x + p) % 2], p);``
    After:  ``d_A[x] = rsum(d_f[2 * x + p] * W[p + 0], p);``

    ``p`` has two values here.
    """
    return algorithm.with_definitions(tuple(replace(d, expr=divided(d.expr, algorithm)) for d in algorithm.definitions))
