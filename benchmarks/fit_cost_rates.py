"""Fit the rates of the cost model to stored measurements, without a GPU, and print them for ``autoschedule/cost/coefficients.py``.

python benchmarks/fit_cost_rates.py                        from the tables of the H200 and the H100; needs scipy, takes minutes
python benchmarks/fit_cost_rates.py --more FILE.safetensors  times of tools/tune.py or candidate_trials.py besides; may be repeated
python benchmarks/fit_cost_rates.py --trials FILE.json     times of more schedules besides: {"sizes": [{label: extent, "trials": [[schedule, us, ...]]}]}
python benchmarks/fit_cost_rates.py --programs FILE.json   times of programs besides: {"gpu": name, "places": [{"algorithm": text, "sizes", "trials": as above}]}
python benchmarks/fit_cost_rates.py --without mmsigmoid    leave ops out, to judge the model on them

What is fitted is the order of the schedules at each size, fast ones first of all, and by half the size's mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from choice_regret import STORED, kernels

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.cost.coefficients import PRODUCTS, Rates, RatesOfKinds, rates_of
from dtkernels.autoschedule.cost.kernel_config import KernelConfig
from dtkernels.autoschedule.cost.kernel_plan import plans
from dtkernels.autoschedule.cost.outline import Known, Outline
from dtkernels.autoschedule.cost.predicted_time import kernel_time, rates_for
from dtkernels.autoschedule.cost.work import Work
from dtkernels.codegen.target import TARGETS, Target
from dtkernels.lang.parser import parse
from dtkernels.runtime.select.evidence import ITEMSIZE
from dtkernels.tuning.records.measurement_store import read_matrices
from dtkernels.tuning.records.problems import CallKind, variants_of

OF_PRODUCTS = ("step", "alone", "rate", "wide_rate", "few_rows", "few_columns", "old_units", "few_warps", "crowded", "specialized", "beside", "doubled", "lone", "parted",
               "paired", "pipelined", "serial", "several", "many", "restart", "next_block", "overlapped", "concurrent", "half")  # fmt: skip
NEVER = 1e8  #: amounts a microsecond from which on a rate costs nothing: its kind does not have it
KEPT = ("live", "ordinary_rate")  #: the first decides how many programs run at once, which is counted once; of the second there are few times
#: rates that may not leave these ranges; others may change by a factor of 20
BOUNDS = {
    "sharp": (1.3, 6), "rounds": (1.5, 8), "pipelined": (1.5, 12), "inner": (1, 8), "overlap": (0.01, 1), "exposed": (0.01, 2), "beside": (0.02, 3), "specialized": (0.4, 1.5),
    "old_units": (0.8, 6), "few_warps": (1, 12), "crowded": (1, 4), "narrow": (1, 10), "ragged": (1, 4), "alone": (0.1, 4), "launch": (1.5, 4.5),
    "start": (0.3, 3), "latency": (0.1, 2), "sync": (1e-5, 0.05), "spills": (0.3, 40), "flying": (2e4, 4e6), "bandwidth": (3.3e6, 4.8e6),
    "strip": (1.0, 128), "gather": (0.001, 1.0), "refilled": (1.0, 2.0), "quartered": (1.0, 2.0), "tall": (1.0, 1.4), "low": (1.0, 1.6),
    "doubled": (1.0, 1.6), "lone": (1.0, 1.6), "parted": (1.0, 2.0), "paired": (1.0, 2.0), "passed": (0.5, 4.0), "serial": (0.05, 40),
    "rate": (5e6, 8e6), "l2_rate": (2.5e4, 1.2e5), "special": (2e4, 3e5), "plain": (5e4, 1e6),
}  # fmt: skip
H200, H100 = TARGETS["h200"], TARGETS["h100"]


class Sample(NamedTuple):
    """One measured time, and what its kernels do."""

    place: tuple  #: times of one place are compared
    work: list[tuple[Work, KernelConfig]]
    microseconds: float
    target: Target


def stored(path: Path, without: list[str]) -> Iterator[Sample]:
    """Yield the times of a file of measurements of one of NVIDIA's H200s or H100s."""
    by, matrices = read_matrices(path)
    target = H200 if "H200" in (by.get("gpu") or by["name"]) else H100
    for n, kernel in enumerate(kernels(matrices, [])):
        if kernel.kind.op in without:
            continue
        for i, times in kernel.times.items():
            for schedule, us in times.items():
                used = [p for p in plans(schedule, kernel.known) if kernel.root in ("*", p.config.func)]
                if any(p.config.split for p in used) and any(size % 16 == 8 for size in kernel.sizes[i].values()):
                    continue  # measured when split products had narrow loads there
                itemsize = ITEMSIZE[kernel.kind.dtype]
                yield Sample((str(path), n, i), [(p.at(kernel.sizes[i], itemsize, target, PRODUCTS.live), p.config) for p in used], us, target)


def trials(path: Path) -> Iterator[Sample]:
    """Yield the times of a file of trials of bf16 products."""
    known = variants_of(CallKind("mmsigmoid", "forward", "bf16"))[1].dispatch.known_outline
    for n, place in enumerate(json.loads(path.read_text())["sizes"]):
        sizes = {label: place[label] for label in ("x", "y", "k")}
        for schedule, us, *more in place["trials"]:
            if us and not (more and more[-1]):
                yield Sample(("trials", n), [(p.at(sizes, 2, H200, PRODUCTS.live), p.config) for p in plans(schedule, known)], us, H200)


def programs(path: Path) -> Iterator[Sample]:
    """Yield the times of a file of trials of bf16 programs, whose result is ``out``."""
    read = json.loads(path.read_text())
    target = TARGETS[read["gpu"]]
    for n, place in enumerate(read["places"]):
        known = Known(Outline.of(prepare_algorithm(parse(place["algorithm"]).algorithm, ("out",))), ("out",))
        for schedule, us in place["trials"]:
            yield Sample((str(path), n), [(p.at(place["sizes"], 2, target, PRODUCTS.live), p.config) for p in plans(schedule, known)], us, target)


def fitted(rates: Rates, samples: list[Sample], names: list[str], steps: int) -> Rates:
    """Return ``rates`` with those of ``names`` fitted."""
    from scipy.optimize import least_squares

    places = {place: i for i, place in enumerate(dict.fromkeys(s.place for s in samples))}
    of, measured = np.array([places[s.place] for s in samples]), np.log([s.microseconds for s in samples])
    best = np.full(len(places), np.inf)
    np.minimum.at(best, of, measured)
    weight = np.exp(0.7 * (best[of] - measured))
    share, few = np.bincount(of, weight), 1 / np.sqrt(np.maximum(np.bincount(of)[of], 4) / 4)

    def made(x: np.ndarray) -> Rates:
        return rates._replace(**dict(zip(names, np.exp(x).tolist())))

    def residuals(x: np.ndarray) -> np.ndarray:
        tried = made(x)
        off = measured - np.log([sum(kernel_time(w, k, tried, s.target) for w, k in s.work) for s in samples])
        mean = np.bincount(of, weight * off) / share
        return np.concatenate([(off - mean[of]) * weight * few, 0.5 * mean])

    start = np.log([getattr(rates, name) for name in names])
    low, high = (np.array([np.log(BOUNDS[n][i]) if n in BOUNDS else s + d for n, s in zip(names, start)]) for i, d in ((0, -3.0), (1, 3.0)))
    found = least_squares(residuals, np.clip(start, low + 1e-3, high - 1e-3), bounds=(low, high), loss="soft_l1", f_scale=0.15, max_nfev=steps, diff_step=0.03)
    return made(found.x)


def main() -> int:
    from common.cli_types import Parser, some_of

    parser = Parser("fit_cost_rates", __doc__)
    parser.add_argument("--trials", help="a file of more times")
    parser.add_argument("--programs", action="append", default=[], metavar="FILE", help="times of programs")
    parser.add_argument("--more", action="append", default=[], metavar="FILE", help="measurements.safetensors of a run, or what candidate_trials.py wrote")
    parser.add_argument("--without", default="", help="ops to leave out, separated by commas")
    parser.add_argument("--kinds", type=some_of(RatesOfKinds._fields), default=RatesOfKinds._fields, help="comma-separated: what to fit of products, rows, streams")
    parser.add_argument("--launch", type=float, metavar="US", help="microseconds of a kernel that does nothing, to be taken and not fitted")
    parser.add_argument("--steps", type=int, default=10, help="of the optimizer")
    options = parser.parse_args()
    without = options.without.split(",")
    files = (STORED, STORED.parents[1] / "nvidia_h100" / STORED.name, *map(Path, options.more))
    samples = [s for path in files for s in stored(path, without)]
    samples += trials(Path(options.trials)) if options.trials else ()
    samples += [s for path in options.programs for s in programs(Path(path))]
    common = [name for name in Rates._fields if name not in OF_PRODUCTS and name not in KEPT]
    shipped = rates_of(90)
    for kind, rates in zip(shipped._fields, shipped):
        if kind not in options.kinds:
            continue
        own = [s for s in samples if s.work and all(rates_for(w, shipped) is rates for w, _ in s.work)]
        names = [n for n in ([*common, *OF_PRODUCTS] if kind in ("products", "chains") else [*common, "step"]) if 0 < getattr(rates, n) < NEVER]
        if options.launch is not None:
            rates, names = rates._replace(launch=options.launch), [n for n in names if n != "launch"]
        found = fitted(rates, own, names, options.steps)
        said = ", ".join(f"{n}={float(format(v, '.3g')):.10g}" for n, v in found._asdict().items() if n in (*names, "launch"))
        print(f"{kind.upper()} = Rates({said})  # {len(own)} times", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
