"""Count how often a kernel without products loads what its windows share, as in ``f[t] = rsum(A[t + k], k)``.

A loop over ``k`` loads each element of ``A`` for each place of a window. Where ``t`` and ``k`` are unrolled (codegen/transforms/tiles/held_windows.py), a
thread loads it once for all windows that it computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from .outline import WINDOW, FuncOutline, Read

if TYPE_CHECKING:
    from .kernel_plan import Access
    from .kernel_work import KernelCount

PLACES = 300  #: as many operations take the place of an element and its masks: 1.8 to 4.5 us a million elements, of five convolutions on an H100
Windows = Mapping[str, Mapping[str, str]]  #: tensor -> a label of the result -> the label of the windows that are read there


def windows_of(members: Iterable[FuncOutline]) -> Windows:
    """Return the windows in which each tensor is read; what a Func that is read so is made of, element by element, is read so too."""
    funcs = {f.name: f for f in members}
    found: dict[str, dict[str, str]] = {}
    for f in (f for f in funcs.values() if f.reduced):
        own = [x.split(WINDOW) for x in f.bounded if WINDOW in x]
        for tensor, *pair in own:
            at, places = pair if pair[1] in f.reduced else pair[::-1]
            if places in f.reduced and at in f.labels:
                found.setdefault(tensor, {})[at] = places
    for name in list(found):
        _pass_on(name, funcs, found)
    return found


def _pass_on(name: str, funcs: Mapping[str, FuncOutline], found: dict[str, dict[str, str]]) -> None:
    f = funcs.get(name)
    for read in f.reads if f is not None and not f.reduced else ():
        shared = {at: k for at, k in found[name].items() if any(at == x for x, _ in read.labels)}
        if shared and read.tensor not in found:
            found[read.tensor] = shared
            _pass_on(read.tensor, funcs, found)


class WindowCount:
    """The counting of a kernel's windows at one set of sizes."""

    def __init__(self, count: KernelCount):
        self.count, self.windows = count, {} if count.plan.products else count.plan.windows
        self.unrolled = dict(count.plan.config.unrolled)

    def loads(self, read: Read) -> float:
        """Return how often a thread loads an element of ``read``, on the average, for the windows of its own elements."""
        found = 1.0
        for at, places, again in self._windows(read):
            found *= self.count.filled.get(again, 1.0) * self._share(at, places)
        return found

    def reach(self, read: Read) -> float:
        """Return the elements that a program's windows reach over those that ``read`` counts by one label."""
        found = 1.0
        for at, places, again in self._windows(read):
            own = self.count.extent.get(at if again == places else places, 1.0)
            found *= (own + self.count.extent.get(again, 1.0) - 1) / own
        return found

    def _windows(self, read: Read) -> Iterator[tuple[str, str, str]]:
        """Yield the two labels of each window of ``read``, and the one of them that its labels leave out."""
        labels = {x for x, _ in read.labels}
        for at, places in self._places(read.tensor):
            if {at, places} & labels:
                yield at, places, places if at in labels else at

    def evaluations(self, func: FuncOutline) -> float:
        """Return how often an element of ``func`` is computed for windows; below 1 where terms of a sum are shared."""
        found = 1.0
        for at, places in self._places(func.name):
            found *= self.count.filled.get(places, 1.0) * self._share(at, places) if at in func.labels else 1.0
        alone = {x for r in func.reads for x, _ in r.labels}
        for at, places in {pair for r in func.reads for pair in self._places(r.tensor)} if func.reduced else ():
            found *= self._share(at, places) if places in func.reduced and places not in alone else 1.0
        return found

    def run_of_thread(self, each: int) -> float:
        """Return the bytes that a thread has side by side, of elements of ``each`` bytes: those along the lanes, where others are single numbers."""
        plan, single = self.count.plan, self.count.plan.config.single
        along = math.prod(self.count.step.get(x, 1) for x in plan.root.labels if x not in single)
        return max(1.0, along / (self.count.target.warp_size * plan.config.warps)) * each if single else math.inf

    def steps(self, label: str) -> int:
        """Return the steps of a loop that one takes at once."""
        return self.unrolled.get(label, 1) if self._holds(label) else 1

    def _places(self, tensor: str) -> Iterable[tuple[str, str]]:
        return self.windows.get(tensor, {}).items()

    def _share(self, at: str, places: str) -> float:
        """Return the loads of a window's place over those that there are without sharing."""
        own, steps = self.unrolled.get(at, 1), self.unrolled.get(places, 1)
        return (own + steps - 1) / (own * steps) if own > 1 else 1.0

    def _holds(self, label: str) -> bool:
        return any(label == places and at in self.unrolled for pairs in self.windows.values() for at, places in pairs.items())


def places_of_windows(count: KernelCount, reads: Iterable[tuple[Access, int, float]]) -> float:
    """Return the arithmetic on places of the elements that windows read one by one, where a loop goes through taps and other labels as one."""
    together = {x for name, parts in count.plan.merged.items() if name not in count.plan.blocks for x in parts}
    apart = [amount / each for access, each, amount in reads if count.slides(access.read) and {*access.read.last} & together]
    return PLACES * sum(apart)
