"""Predict the time of one kernel's candidates before they are part of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .kernel_config import read_kernels
from .kernel_work import KernelPlan
from .predicted_time import plan_time

if TYPE_CHECKING:
    from ...lang.schedule import Primitive
    from ..problem import SchedulingProblem


class CandidateTime:
    """The kernel that computes ``members``, the first of which is ``root``, at the sizes of a problem."""

    def __init__(self, problem: SchedulingProblem, root: str, members: Sequence[str]):
        self.problem, self.root = problem, root
        self.known = problem.known
        reduced = self.known.funcs[root].reduced
        self.fused = tuple((m, reduced[-1] if reduced else "") for m in members if m != root)

    def microseconds(self, primitives: Sequence[Primitive]) -> float:
        """Return the predicted time of the kernel by these statements, with the copies that they ask for."""
        configs = read_kernels(" ".join(map(str, primitives)))
        config = replace(next(c for c in configs if c.func == self.root), fused=self.fused)
        aligned = frozenset(c.func for c in configs if c.aligned)
        plan = KernelPlan(config, self.known, aligned, frozenset(m for m, _ in self.fused))
        return plan_time(plan, self.problem.sizes, self.problem.itemsize, self.problem.target)
