"""Query the operands of a kernel's matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ...codegen.analysis.product_types import BYTES
from ...lang import expr as ex
from ...lang.extents.linear_form import is_at_label, linear_form
from ..problem import SchedulingProblem

NARROW = 64  #: a side of a product up to this leaves it bound by memory
CODES = (*ex.FLOAT8, *ex.INTEGERS)  #: dtypes that are converted to a product's
MOST_PACKED = 8  #: elements that share one; more share a scale
MERGED = 16  #: steps of a loop from which on cutting it over programs gains more than the kernel that merges the parts takes


def main_product(shape: SchedulingProblem, members: list[str]) -> tuple[str, ex.Dot]:
    """Return the first Func of a kernel with a product of which no other product is made, and the product in it with the most terms, of equal ones the last."""
    products = [m for m in members if shape.dots(m)]
    made = {f for m in products for f in shape.algorithm.needed_by((m,)) if f != m}
    main = next(m for m in products if m not in made)
    return main, max(reversed(shape.dots(main)), key=lambda dot: math.prod(shape.sizes.get(label, 1) for label in ex.free_labels(dot) | {*dot.labels}))


def sides(shape: SchedulingProblem, root: str, dot: ex.Dot) -> tuple[list[str], list[str]]:
    """Return the labels of the kernel's result that the left operand of a product alone has, and those of the right one."""
    left, right, labels = ex.free_labels(dot.left), ex.free_labels(dot.right), shape.algorithm[root].labels
    return [x for x in labels if x in left and x not in right], [x for x in labels if x in right and x not in left]


def bytes_of_term(shape: SchedulingProblem, members: list[str], side: ex.Expr) -> float:
    """Return the bytes of memory in which a term of a product finds its operand, where that is converted from fewer than the operand has."""
    if isinstance(side, ex.Access) and side.tensor in shape.algorithm and side.tensor in members:
        side = shape.algorithm[side.tensor].expr
    own = dict(shape.types.of) if shape.types else {}
    every = ex.free_labels(side)
    found = [BYTES[own[a.tensor]] / packed(a) for a in ex.accesses(side) if own.get(a.tensor) in CODES and ex.free_labels(a) == every]
    return max(found, default=float(shape.itemsize))


def leaves_out_terms(shape: SchedulingProblem, dot: ex.Dot) -> bool:
    """Return whether an operand is an input where a term's place compares with the result's, else 0, as in ``rdot(where(x <= k, A[x, k], 0), B[k, y], k)``: in 16 bits, in aligned rows.

    The loop leaves out tiles of zeros, and whole tiles are loaded as they are (loop_partition.py): a stored operand would hide both.
    """
    return shape.itemsize == 2 and any(_is_bounded(shape, side, dot) for side in (dot.left, dot.right))


def _is_bounded(shape: SchedulingProblem, side: ex.Expr, dot: ex.Dot) -> bool:
    match side:
        case ex.Call("where", (ex.Binary(op, ex.Label(a), ex.Label(b)), ex.Access(tensor), ex.Const(0))) if op in ex.ORDERED:
            return tensor in shape.algorithm.inputs and shape.aligned({tensor}) and len({a, b} & {*dot.labels}) == 1
    return False


def packed(access: ex.Access) -> int:
    """Return how many elements share one that is loaded: 2 of ``W[n, k // 2]``."""
    found = [i.right.value for i in access.index if isinstance(i, ex.Binary) and i.op in ("/", "//") and isinstance(i.left, ex.Label) and isinstance(i.right, ex.Const)]
    return int(max(found, default=1))


def lies_in_tiles(index: tuple[ex.Expr, ...], tiled: Iterable[tuple[str, ...]]) -> bool:
    """Return whether a descriptor reaches tiles of what is at ``index``; ``tiled``: the labels of each dimension of a tile.

    The last dimensions are those of the tile, plain labels. A number may shift the others. Labels that are one dimension of a tile lie together.
    See codegen/transforms/memory/tensor_descriptors.py for what descriptors can express.
    """
    runs = [tuple(map(ex.Label, labels)) for labels in tiled]
    index = tuple(ex.Label(*ex.free_labels(i)) if is_at_label(i) else i for i in index)
    found = {x for i in index for x in ex.free_labels(i)}

    def holds(labels: tuple[ex.Label, ...]) -> bool:
        return any(index[n : n + len(labels)] == labels for n in range(len(index)))

    last = any(index[-len(labels) :] == labels for labels in runs)
    together = all(holds(labels) for labels in runs if len(labels) > 1 and found & {x.name for x in labels})
    places = [linear_form(i) for i in index if any(x.name in ex.free_labels(i) for labels in runs for x in labels)]
    shifted = all(times in (0, 1) and isinstance(atom, ex.Label) for form in places for atom, times in form.items() if atom is not None)
    return last and together and shifted


def loaded_ahead(shape: SchedulingProblem, members: list[str], dot: ex.Dot, steps: int) -> dict[str, Any]:
    """Return a small operand whose rows are no multiple of 16 elements, through a descriptor: by pointers its mask has Triton load single
    elements, which are not loaded ahead, so that a loop of so many ``steps`` waits for them at each."""
    every = [(x,) for x in shape.algorithm.labels]
    sides = [s.tensor for s in (dot.left, dot.right) if isinstance(s, ex.Access) and lies_in_tiles(s.index, every)]
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
