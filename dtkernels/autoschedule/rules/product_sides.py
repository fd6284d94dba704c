"""Facts about the operands of a kernel's matrix products."""

from __future__ import annotations

from typing import Any

from ...lang import expr as ex
from ..problem import SchedulingProblem

NARROW = 64  #: a side of a product up to this leaves it bound by memory
MERGED = 16  #: steps of a loop from which on cutting it over programs gains more than the kernel that merges the parts takes


def main_product(shape: SchedulingProblem, members: list[str]) -> tuple[str, ex.Dot]:
    """Return the first Func of a kernel with a product, and its last product."""
    main = next(m for m in members if shape.dots(m))
    return main, shape.dots(main)[-1]


def sides(shape: SchedulingProblem, root: str, dot: ex.Dot) -> tuple[list[str], list[str]]:
    """Return the labels of the kernel's result that the left operand of a product alone has, and those of the right one."""
    left, right, labels = ex.free_labels(dot.left), ex.free_labels(dot.right), shape.algorithm[root].labels
    return [x for x in labels if x in left and x not in right], [x for x in labels if x in right and x not in left]


def loaded_ahead(shape: SchedulingProblem, members: list[str], dot: ex.Dot, steps: int) -> dict[str, Any]:
    """Return a small operand whose rows are no multiple of 16 elements, through a descriptor: by pointers its mask has Triton load single
    elements, which are not loaded ahead, so that a loop of so many ``steps`` waits for them at each."""
    sides = [s.tensor for s in (dot.left, dot.right) if isinstance(s, ex.Access)]
    if shape.itemsize != 2 or len(set(sides)) < 2 or not shape.target.has_tma or steps < MERGED:
        return {}
    for tensor, other in (sides, sides[::-1]):
        small = 8 * shape.elements(tensor) <= shape.elements(other)
        if small and tensor not in members and shape.row_stride(tensor) % 16 and shape.row_stride(other) % 16 == 0:
            if shape.aligned({tensor}):
                return {"descriptors": (tensor,)}
            if tensor in shape.algorithm.inputs:
                return {"staged": (tensor,), "descriptors": (tensor,)}
            if tensor not in shape.outputs:
                return {"aligns": (tensor,), "descriptors": (tensor,)}
    return {}
