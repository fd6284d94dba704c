"""Name the operands of matrix products and of sums over pairs of rows, so that a schedule can give one a kernel of its own.

An operand is loaded, and computed if it is an expression, in the loop of its product, once for each block that reads it. A schedule that has statements on its
name computes it once, in a kernel of its own, and stores it in the dtype of the product's operands::

    y[m, n] = rdot(A[m, k], cast(W[n, k], bf16), k);                        y_right.block(n:64, k:64); ...

is scheduled as::

    y_right[n, k] = cast(W[n, k], bf16);    y[m, n] = rdot(A[m, k], y_right[n, k], k);

A sum over all pairs of rows, ``y[m, n] = rsum(abs(A[m, k] - B[n, k]), k)``, reads copies in float32 with rows side by side, ``y_left[k, m]`` and ``y_right[k, n]``.

The names are ``f_left`` and ``f_right`` for the product of a Func ``f``, ``f_left2`` and ``f_right2`` for its second one. Equal operands share
the first of their names.
"""

from __future__ import annotations

from dataclasses import replace

from ...lang.algorithm import with_operands
from ...lang.schedule import Program


def name_operands(program: Program) -> Program:
    """Make a Func of each operand that the schedule has statements on."""
    algorithm = with_operands(program.algorithm, program.schedule.subjects())
    return program if algorithm is program.algorithm else replace(program, algorithm=algorithm)
