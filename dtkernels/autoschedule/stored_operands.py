"""Find the operands of products that may be worth a kernel of their own: expressions that many blocks of a product would compute again.

Beside a product of many rows, conversion in the loop keeps operands from going from memory to the matrix units through shared memory alone: int8 weights
took 569 us so at 4096 rows, columns and terms on an H100, the same product of bfloat16 weights takes 217. With few rows they are read once anyhow.
"""

from __future__ import annotations

import math

from ..lang import expr as ex
from ..lang.operands import operand_names
from .memory_limit import memory_limit
from .problem import WHOLE_SIDE, SchedulingProblem

IN_LOOP = 1.5  #: the time of products of many rows that compute an operand in their loop, relative to what is predicted
MOST = 3  #: operands that are tried one by one


def stored_operands(shape: SchedulingProblem) -> list[tuple[str, ...]]:
    """Return sets of names of operands to try: all that may be worth it, then each by itself."""
    worth = tuple(name for name, e in operand_names(shape.algorithm).items() if _is_reread(shape, e) and _has_room(shape, e))
    return [worth, *((name,) for name in worth[:MOST] if len(worth) > 1)] if worth else []


def _is_reread(shape: SchedulingProblem, operand: ex.Expr) -> bool:
    """Return whether products have a long label that the operand lacks: several blocks along it read the operand."""
    free = ex.free_labels(operand)
    others = [label for d in shape.algorithm.definitions for dot in shape.dots(d.name) if operand in (dot.left, dot.right)
              for label in ex.free_labels(dot) - free - {*dot.labels}]  # fmt: skip
    return max((shape.sizes[label] for label in others), default=0) > WHOLE_SIDE


def _has_room(shape: SchedulingProblem, operand: ex.Expr) -> bool:
    """Return whether the stored operand is within the memory limit, and no larger than the inputs and outputs together."""
    size = shape.itemsize * math.prod(shape.sizes[label] for label in ex.free_labels(operand))
    given = shape.itemsize * sum(map(shape.elements, {*shape.algorithm.inputs, *shape.outputs}))
    return size <= min(given, memory_limit() or given)
