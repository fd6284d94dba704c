"""Order the blocks that program ids visit: ``f.map(x:x1/8, y, x1)``."""

from __future__ import annotations

from ...lang.schedule import Grouped, Map
from ..ir.nest import GridLabel, GridStep


def grid_order(maps: tuple[Map, ...], grid: tuple[GridLabel, ...]) -> tuple[GridStep, ...]:
    """Return the steps of the order of blocks, slowest first; labels that the last ``map`` omits come slowest, in their order."""
    order = maps[-1].order if maps else ()
    groups = {a.inner: a for a in order if isinstance(a, Grouped)}
    blocked = [g.label for g in grid]
    steps = []
    for a in order:
        if isinstance(a, Grouped):
            steps.append(GridStep(a.label, "group", a.size, a.inner))
        elif a in groups:
            steps.append(GridStep(groups[a].label, "inside", groups[a].size, a))
        else:
            steps.append(GridStep(a))
    steps = [s for s in steps if s.label in blocked]
    named = {s.label for s in steps}
    return tuple([GridStep(label) for label in blocked if label not in named] + steps)
