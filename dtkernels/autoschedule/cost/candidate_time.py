"""Predict the time of one kernel's candidates before they are part of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .coefficients import rates_of
from .kernel_config import FusedFunc, KernelConfig
from .kernel_plan import KernelPlan
from .predicted_time import kernel_time, rates_for

if TYPE_CHECKING:
    from ..problem import SchedulingProblem


class CandidateTime:
    """The kernel that computes ``members``, the first of which is ``root``, at the sizes of a problem.

    ``placed``: the Func and the loop that a member is fused into; the innermost loop of ``root`` where that is not said.
    """

    def __init__(self, problem: SchedulingProblem, root: str, members: Sequence[str], placed: Mapping[str, tuple[str, str]] | None = None):
        self.problem, self.root, self.members = problem, root, list(members)
        self.known = problem.known
        reduced = self.known.funcs[root].reduced
        self.plans: dict[tuple, KernelPlan] = {}  #: by what does not depend on sizes
        inner = (root, reduced[-1] if reduced else "")
        self.fused = tuple(FusedFunc(m, *(placed or {}).get(m, inner)) for m in members if m != root)

    @property
    def launch(self) -> float:
        """Return the predicted time of a kernel that moves nothing."""
        rates = rates_of(self.problem.target.arch).rows
        return rates.launch + rates.start

    @property
    def chained(self) -> bool:
        """Return whether a product is an operand of another, by the plans that were timed."""
        return any(plan.chained for plan in self.plans.values())

    def microseconds(self, config: KernelConfig) -> float:
        """Return the predicted time of the kernel by ``config``, with the copies that it asks for."""
        whole = replace(config, fused=self.fused)
        form = KernelPlan.form(config)
        plan = self.plans.get(form)
        if plan is None:
            plan = self.plans[form] = KernelPlan(whole, self.known, frozenset(config.aligns), frozenset(f.func for f in self.fused))
        else:
            plan = plan.resized(whole)
        rates, target = rates_of(self.problem.target.arch), self.problem.target
        work = plan.at(self.problem.sizes, self.problem.itemsize, target, rates.products.live)
        return kernel_time(work, config, rates_for(work, rates), target)
