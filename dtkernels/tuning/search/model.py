"""Predict candidates during a run: the cost model with its rates refitted to what was measured, and what the model misses at one kernel.

The rates are fitted by Gauss-Newton steps in logarithms, held near the shipped ones. What is left at one size is interpolated by a
Gaussian process over the schedules' choices, as in Bayesian optimization (Jones, Schonlau, Welch 1998: efficient global optimization).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...autoschedule.cost.coefficients import Rates, RatesOfKinds, rates_of
from ...autoschedule.cost.kernel_plan import KernelPlan, plans
from ...autoschedule.cost.outline import Known
from ...autoschedule.cost.predicted_time import kernel_time, rates_for
from ...codegen.target import Target
from .candidates import KernelCandidate
from .space import Tiling

HELD = 0.4  #: how far a rate's logarithm may go from the shipped one, as a standard deviation
DOUBT, NOISE = 0.15, 0.02  #: errors in logarithms: of the model, and of a measurement
NEAR = 2.0  #: distance of two schedules, in doublings and choices, at which they tell little of one another
MOST = 400  #: samples that a fit takes, the fastest of their sizes


@dataclass(frozen=True)
class Sample:
    """A measured kernel: the plan of it, its sizes, and its time over the best of its size."""

    plan: KernelPlan
    sizes: tuple[tuple[str, int], ...]
    itemsize: int
    microseconds: float
    best: float


def kernel_plans(schedule: str, root: str, known: Known) -> tuple[KernelPlan, ...]:
    """Return the plans of the kernel of ``root`` in a schedule, which may state nothing of it."""
    found = tuple(p for p in plans(schedule, known) if p.config.func == root)
    return found or tuple(p for p in plans(f"{schedule} {root}.num_warps(4);", known) if p.config.func == root)


def predicted(found: Sequence[KernelPlan], sizes: dict[str, int], itemsize: int, target: Target, rates: RatesOfKinds) -> float:
    """Return the microseconds of some kernels by the cost model with these rates."""
    return sum(_at(p, sizes, itemsize, target, rates) for p in found)


def _at(plan: KernelPlan, sizes: dict[str, int], itemsize: int, target: Target, rates: RatesOfKinds) -> float:
    work = plan.at(sizes, itemsize, target, rates[0].live)
    return kernel_time(work, plan.config, rates_for(work, rates), target)


# -- the rates -----------------------------------------------------------------------------------------------------------


def refitted(samples: Sequence[Sample], target: Target, steps: int = 3) -> RatesOfKinds:
    """Fit the rates of ``target`` to measured kernels; those that no sample depends on stay."""
    shipped = rates_of(target.arch)
    found = []
    for rates in shipped:
        own = sorted((s for s in samples if _rates_at(s, target, shipped) is rates), key=lambda s: s.microseconds / s.best)[:MOST]
        found.append(_fit(own, rates, target, steps) if len(own) >= 8 else rates)
    return RatesOfKinds(*found)


def _rates_at(s: Sample, target: Target, shipped: RatesOfKinds) -> Rates:
    """Return the shipped rates of a kernel's kind."""
    return rates_for(s.plan.at(dict(s.sizes), s.itemsize, target, shipped.products.live), shipped)


def _fit(samples: list[Sample], rates: Rates, target: Target, steps: int) -> Rates:
    works = [s.plan.at(dict(s.sizes), s.itemsize, target, rates.live) for s in samples]
    measured = np.log([s.microseconds for s in samples])
    weight = np.sqrt([s.best / s.microseconds for s in samples]) / DOUBT  # fast ones count most: among them the choice is made
    names = [n for n in Rates._fields if n != "live"]

    def logs(x: np.ndarray) -> np.ndarray:
        tried = rates._replace(**{n: getattr(rates, n) * math.exp(v) for n, v in zip(names, x)})
        return np.log([kernel_time(w, s.plan.config, tried, target) for w, s in zip(works, samples)])

    x, now = np.zeros(len(names)), logs(np.zeros(len(names)))
    for _ in range(steps):
        slopes = np.stack([(logs(x + 0.05 * np.eye(len(names))[i]) - now) / 0.05 for i in range(len(names))], axis=1)
        if not np.isfinite(slopes).all():
            break
        rows = np.concatenate([slopes * weight[:, None], np.eye(len(names)) / HELD])
        wanted = np.concatenate([(measured - now) * weight, -x / HELD])
        step = np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], -0.5, 0.5)
        ahead = logs(x + step)
        if not np.isfinite(ahead).all() or ((measured - ahead) ** 2 * weight**2).sum() >= ((measured - now) ** 2 * weight**2).sum():
            break
        x, now = x + step, ahead
    return rates._replace(**{n: getattr(rates, n) * math.exp(v) for n, v in zip(names, x)})


# -- what the rates miss at one kernel of one size -----------------------------------------------------------------------


class Residuals:
    """A Gaussian process over what the cost model misses: the logarithms of measured times over predicted ones."""

    def __init__(self, tried: Sequence[KernelCandidate], predictions: Sequence[float], times: Sequence[float]):
        self.best = math.log(min(times)) if times else math.inf
        off = np.log(times) - np.log(predictions) if times else np.zeros(0)
        self.mean = float(np.median(off)) if times else 0.0
        self.spread = max(DOUBT, float(np.sqrt(np.mean((off - self.mean) ** 2)))) if times else DOUBT
        self.words = list(dict.fromkeys(w for p in tried for w in features(p)))
        self.places = self._places(tried)
        covariance = self._near(self.places, self.places) + NOISE**2 * np.eye(len(off))
        self.inverse = np.linalg.inv(covariance) if times else np.zeros((0, 0))
        self.off = off - self.mean

    def _places(self, plans: Sequence[KernelCandidate]) -> np.ndarray:
        """Return the choices as rows of numbers; those that no measured candidate made count together."""
        found = [features(p) for p in plans]
        apart = [sum(abs(v) for w, v in f.items() if w not in self.words) for f in found]
        rows = [[*(f.get(w, 0.0) for w in self.words), other] for f, other in zip(found, apart)]
        return np.array(rows).reshape(len(plans), len(self.words) + 1)  # also where none was measured

    def _near(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        distance = np.abs(a[:, None, :] - b[None, :, :]).sum(axis=2)
        return np.asarray(self.spread**2 * np.exp(-distance / NEAR))

    def gains(self, plans: Sequence[KernelCandidate], predictions: Sequence[float]) -> np.ndarray:
        """Return the expected gain of each candidate over the best measured, as a part of its time."""
        if not plans:
            return np.zeros(0)
        means, spreads = self.after(plans, predictions)
        if not math.isfinite(self.best):
            return np.asarray(1.0 - (means - means.min()) * 0.01)  # nothing is measured: the order of the predictions
        ahead = self.best - means
        z = ahead / spreads
        normal = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in z])
        return np.asarray(ahead * below + spreads * normal)

    def after(self, plans: Sequence[KernelCandidate], predictions: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the standard deviation of each candidate's log time."""
        prior = np.log(predictions) + self.mean
        if not len(self.off):
            return prior, np.full(len(plans), self.spread)
        near = self._near(self._places(plans), self.places)
        variance = self.spread**2 - np.einsum("ij,jk,ik->i", near, self.inverse, near)
        return prior + near @ self.inverse @ self.off, np.sqrt(np.maximum(variance, 1e-6))


@lru_cache(maxsize=16384)
def features(plan: KernelCandidate) -> dict[str, float]:
    """Return the choices of a candidate as numbers: doublings of sizes, and 0 or 1."""
    t = Tiling.of(plan)
    found = {f"{name} {label}": math.log2(max(1, n)) for name, sizes in (("block", t.block), ("tile", t.tile), ("split", t.split)) for label, n in sizes.items()}
    grouped = next((math.log2(a.size) / 3 for a in t.order if not isinstance(a, str)), 0.0)
    found |= {"warps": math.log2(t.warps), "stages": t.stages / 2, "grouped": grouped, "persistent": float(t.persistent)}
    return found | {"descriptor": len(t.descriptor) / 3, "specialized": float(bool(t.specialized))} | {str(p): 0.5 for p in t.rest}
