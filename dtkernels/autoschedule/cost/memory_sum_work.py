"""Count what sums in memory take besides their additions (codegen/prelower/accumulated_sums.py)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .kernel_config import NAMED, ORDERED
from .outline import SECTOR

if TYPE_CHECKING:
    from .kernel_plan import KernelPlan
    from .kernel_work import KernelCount
    from .outline import FuncOutline


def revisited_labels(plan: KernelPlan, func: FuncOutline) -> tuple[str, ...]:
    """Return the labels whose loops, inside a block, come back to the same elements of a sum in memory."""
    within = [x for x in func.reduced if x in plan.blocks or x in plan.root.reduced]
    return tuple([x for x in within if any(y in plan.root.reduced for y in func.labels)])


def added_bytes(count: KernelCount, func: FuncOutline) -> float:
    """Return the bytes that a program adds to a sum: whole sectors where data names the place along the last label, as the bins of a histogram."""
    picked = func.picked_labels()
    again = count.elements(count.extent, func.reduced) if picked else count.times(revisited_labels(count.plan, func), ())
    each = float(SECTOR) if func.labels and func.labels[-1] in picked else 4.0
    return each * count.elements(count.extent, func.labels) * again


def meeting_terms(count: KernelCount) -> float:
    """Return how many terms are added to one element, of sums over the elements that data picks."""
    found = 0.0
    for func, _ in count.plan.members:
        if func.name in count.plan.added and (picked := func.picked_labels()):
            found = max(found, math.prod(count.sizes.get(x, 1) for x in func.reduced) / math.prod(max(1, count.sizes.get(x, 1)) for x in picked))
    return found


def cleared_bytes(count: KernelCount, func: FuncOutline) -> float:
    """Return the bytes of clearing and converting a sum: one part, or in a fixed order one for each block that adds to the same elements.

    Where only elements that data names are cleared and read, there are no more of them than terms.
    """
    whole, order = 1.0, count.plan.config.added[func.name]
    for x in func.labels:
        for y in (x,) if x in count.sizes else count.plan.known.aliases.get(x, ()):
            whole *= max(1, count.sizes.get(y, 1))
    if order == NAMED:
        picked = func.picked_labels()
        rows = math.prod(count.sizes.get(x, 1) for x in picked)
        terms = math.prod(count.sizes.get(x, 1) for x in func.reduced)
        return whole * (8.0 * min(1.0, terms / max(1, rows)) + count.bytes_of(func.name))
    parts = math.prod(count.count.get(x, 1) for x in func.reduced) if order == ORDERED else 1
    return whole * (8.0 * parts + count.bytes_of(func.name))
