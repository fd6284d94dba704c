"""Tile sums over the elements that data picks for each element of a label, such as the gradient of an embedding.

``d_W[v, y] = rsum(where(x >= first[v] and x < past[v] and t[x] == v, d[x, y], 0), x)`` (algebra/rules/data_index/data_bounds.py): a block of several ``v`` would
read all that lies between the first element of one and the last of another, which for indices in any order is nearly everything.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....algebra.smart_constructors import conjuncts_of
from ....codegen.powers_of_two import next_power_of_two
from ....lang import expr as ex
from ....lang.schedule_checks import reduction_labels
from ...cost.kernel_config import KernelConfig
from ...problem import SchedulingProblem

ROW, ELEMENTS = 512, 4096  #: elements of a block's row, and of a tile
WARPS = 4


def picked_sum_configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the choices for a kernel that sums what data picks, perhaps weighted; none for any other, and none for products of two matrices."""
    picking = _picking_labels(shape, root)
    if not picking or any(_has_rows_and_columns(dot) for m in members for dot in shape.dots(m)):
        return
    labels, reduced = shape.algorithm[root].labels, reduction_labels(shape.algorithm, root)
    block = dict.fromkeys(labels, 1)
    if labels[-1] not in picking:
        block[labels[-1]] = min(ROW, next_power_of_two(shape.sizes[labels[-1]]))
    steps = dict.fromkeys(reduced, 1)
    steps[reduced[-1]] = max(1, min(next_power_of_two(shape.sizes[reduced[-1]]), ELEMENTS // block[labels[-1]]))
    yield shape.config(root, block, {**steps, **block}, WARPS, 1)


def _picking_labels(shape: SchedulingProblem, func: str) -> set[str]:
    """Return the labels of ``func`` whose elements bound the loop of its sum by data."""
    found: set[str] = set()
    for node in shape.algorithm[func].expr.walk():
        terms = (node.arg,) if isinstance(node, ex.Reduce) else (node.left, node.right) if isinstance(node, ex.Dot) else ()
        for condition in (term.args[0] for term in terms if isinstance(term, ex.Call) and term.fn == "where"):
            for test in conjuncts_of(condition):
                match test:
                    case ex.Binary(">=", ex.Label(label), ex.Access() as bound) if label in node.labels:  # type: ignore[attr-defined]
                        found |= ex.free_labels(bound)
    return found & {*shape.algorithm[func].labels}


def _has_rows_and_columns(dot: ex.Dot) -> bool:
    left, right = ex.free_labels(dot.left), ex.free_labels(dot.right)
    return bool(left - right) and bool(right - left)
