"""Judge the choice among schedules by the stored measurements, without a GPU.

python benchmarks/choice_regret.py                     every op of the H200's table
python benchmarks/choice_regret.py --ops softmax       some ops
python benchmarks/choice_regret.py --alone             no row is evidence: the cost model by itself
python benchmarks/choice_regret.py --untuned           an H100 as if it had no table: by the H200's rows, judged by the times of its own table
python benchmarks/choice_regret.py --default           the default schedule competes with distant rows, where its kernel was measured at the hidden size

For every kernel of every kind of call and every size at which it was measured, that size is hidden. The rows are those of a table of
the other sizes: at each, the fastest schedule among those that were measured at the hidden size too. The regret is the time of the
schedule chosen over the best of them at the hidden size.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from common.cli_types import Parser  # noqa: E402
from sampling.distance_ranking import reach  # noqa: E402
from sampling.programs import PREFIX, register_programs  # noqa: E402

from dtkernels.autoschedule.cost.coefficients import rates_of  # noqa: E402
from dtkernels.autoschedule.cost.kernel_plan import plans  # noqa: E402
from dtkernels.autoschedule.cost.outline import Known  # noqa: E402
from dtkernels.autoschedule.cost.predicted_time import kernel_time, rates_for  # noqa: E402
from dtkernels.autoschedule.default_schedule import default_schedule  # noqa: E402
from dtkernels.codegen.target import TARGETS, Target  # noqa: E402
from dtkernels.runtime.select.evidence import DOUBT, ITEMSIZE, TimeModel, predictions, weight  # noqa: E402
from dtkernels.runtime.select.row_ranking import FAR, distance, whole_labels  # noqa: E402
from dtkernels.runtime.select.schedule_selection import COMPILED  # noqa: E402
from dtkernels.runtime.tables.table import Row  # noqa: E402
from dtkernels.tuning.records.measurement_store import MeasurementMatrix, read_matrices  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, variants_of  # noqa: E402
from dtkernels.tuning.search.candidates import KernelCandidate, split_by_kernel  # noqa: E402

STORED = ROOT / "schedule_tables" / "nvidia_h200" / "measurements.safetensors"
UNTUNED = ROOT / "schedule_tables" / "nvidia_h100" / "measurements.safetensors"
GOOD = 1.1  #: a row's schedule takes at most this over the best of its size


@dataclass
class Kernel:
    """The times of one kernel: size -> schedule -> microseconds."""

    kind: CallKind
    root: str
    fused: str
    known: Known
    sizes: list[dict[str, int]]
    times: dict[int, dict[str, float]]
    elsewhere: Kernel | None = None  #: the same kernel on the GPU whose rows are taken

    def rows(self, hidden: int) -> list[Row]:
        """Return the table of the other sizes."""
        found, of = [], self.elsewhere or self
        for i, times in of.times.items():
            common = [s for s in times if s in self.times[hidden] and times[s] <= GOOD * min(times.values()) and _fits(s, of.sizes[i], self.sizes[hidden])]
            if (i != hidden or self.elsewhere) and common:
                best = min(common, key=times.__getitem__)
                found.append(Row(self.kind.op, self.kind.direction, self.kind.dtype, of.sizes[i], best, "", microseconds=times[best], by={"multiprocessors": 132}))
        return found


def _fits(schedule: str, own: dict[str, int], there: dict[str, int]) -> bool:
    return all((own[x] - 1).bit_length() == (there[x] - 1).bit_length() for x in whole_labels(schedule) if x in own)


class OneKernel:
    """The cost model of a single kernel of a schedule; in place of ``TimeModel``. Rows were measured on ``measured``."""

    def __init__(self, kernel: Kernel, target: Target, measured: Target):
        self.kernel, self.target, self.measured = kernel, target, measured

    def at(self, schedule: str, sizes: tuple[tuple[str, int], ...], dtype: str) -> float:
        """Return the predicted microseconds."""
        return self._on(self.target, schedule, sizes, dtype)

    def _on(self, target: Target, schedule: str, sizes: tuple[tuple[str, int], ...], dtype: str) -> float:
        rates, total = rates_of(target.arch), 0.0
        for plan in plans(schedule, self.kernel.known):
            if self.kernel.root in ("*", plan.config.func):
                work = plan.at(dict(sizes), ITEMSIZE[dtype], target, rates[0].live)
                total += kernel_time(work, plan.config, rates_for(work, rates), target)
        return total

    def loops_alike(self, schedule: str, row: Row, sizes: tuple[tuple[str, int], ...]) -> bool:
        """Return whether the kernels of ``schedule`` loop at both sizes, or at neither."""
        return TimeModel(self.kernel.known, self.target, self.measured).loops_alike(schedule, row, sizes)

    def ratio(self, schedule: str, row: Row) -> float:
        """Return the logarithm of the row's time over the predicted one."""
        return math.log(row.microseconds / self._on(self.measured, schedule, tuple(row.sizes.items()), row.dtype))  # type: ignore[operator]


def kernels(matrices: list[MeasurementMatrix], ops: list[str]) -> Iterator[Kernel]:
    """Yield the kernels that were measured."""
    for m in matrices:
        op, direction, dtype, params, wanted, saved, kept = m.kind
        if ops and op not in ops or np.isnan(m.cold).all():
            continue
        if op.startswith(PREFIX):
            register_programs([op.removeprefix(PREFIX)])
        kind = CallKind(op, direction, dtype, params, wanted, saved, kept)
        known = variants_of(kind)[1].dispatch.known_outline
        sizes = [{label: n for label, n in w.items() if label != "held_out"} for w in m.about["works"]]
        found: dict[tuple[str, str], Kernel] = {}
        for i, j in zip(*np.nonzero(~np.isnan(m.cold))):
            plan = KernelCandidate.read(m.about["schedules"][j])
            own = found.setdefault((plan.fused, plan.root), Kernel(kind, plan.root, plan.fused, known, sizes, {}))
            own.times.setdefault(int(i), {})[f"{plan.fused}\n{plan.tiles}"] = float(m.cold[i, j])
        yield from found.values()


def by_distance(kernel: Kernel, rows: list[Row], sizes: dict[str, int]) -> str:
    """Choose as dispatch did before it had a cost model."""
    pitches = kernel.known.pitches
    return min(rows, key=lambda row: (reach(row, sizes, distance(row, sizes, pitches)), row.microseconds)).schedule


def by_model(kernel: Kernel, rows: list[Row], sizes: dict[str, int], evidence: bool = True) -> str:
    """Choose as dispatch does."""
    pitches, model = kernel.known.pitches, OneKernel(kernel, TARGETS["h100" if kernel.elsewhere else "h200"], TARGETS["h200"])
    if not evidence:
        return min({row.schedule for row in rows}, key=lambda s: model.at(s, tuple(sizes.items()), kernel.kind.dtype))
    near = sorted(((distance(row, sizes, pitches), i) for i, row in enumerate(rows)))
    found = predictions([(d, rows[i]) for d, i in near], model, tuple(sizes.items()), lambda _: True)  # type: ignore[arg-type]
    return min(found, key=found.__getitem__)


def default_kernel(kernel: Kernel, sizes: dict[str, int], target: Target) -> str:
    """Return what the default schedule chooses for the kernel; "" where it fuses in another way."""
    dispatch = variants_of(kernel.kind)[1].dispatch
    text = str(default_schedule(dispatch.algorithm(), dispatch.outputs, sizes, ITEMSIZE[kernel.kind.dtype], target))
    return next((f"{p.fused}\n{p.tiles}" for p in split_by_kernel(dispatch.algorithm(), dispatch.outputs, text).plans if (p.fused, p.root) == (kernel.fused, kernel.root)), "")


def default_or(kernel: Kernel, taken: str, rows: list[Row], sizes: dict[str, int], default: str) -> str:
    """Choose between a row's schedule and the default one as dispatch does, where the row's time is corrected by its own evidence alone."""
    near, pitches = {}, kernel.known.pitches
    for row in sorted(rows, key=lambda row: distance(row, sizes, pitches)):
        near.setdefault(row.schedule, row)
    away = distance(near[taken], sizes, pitches)
    target = TARGETS["h100" if kernel.elsewhere else "h200"]
    model, asked, dtype = OneKernel(kernel, target, TARGETS["h200"]), tuple(sizes.items()), kernel.kind.dtype
    corrected = model.at(taken, asked, dtype) * math.exp(weight(away) * model.ratio(taken, near[taken]) + DOUBT * away)
    return default if away > FAR and COMPILED * model.at(default, asked, dtype) < corrected else taken


def regrets(kernel: Kernel, choose: Callable[[Kernel, list[Row], dict[str, int]], str], competes: bool = False) -> Iterator[float]:
    """Yield the regret at every size at which there is a choice. ``competes``: the default schedule is one, if it was measured."""
    target = TARGETS["h100" if kernel.elsewhere else "h200"]
    for hidden, times in kernel.times.items():
        rows, sizes = kernel.rows(hidden), kernel.sizes[hidden]
        default = default_kernel(kernel, sizes, target) if competes and rows else ""
        schedules = {row.schedule for row in rows} | ({default} & times.keys())
        if rows and len(schedules) > 1:
            taken = choose(kernel, rows, sizes)
            yield times[default_or(kernel, taken, rows, sizes, default) if default in times else taken] / min(times[s] for s in schedules)


def line(name: str, before: list[float], after: list[float]) -> str:
    """Format one line of the report."""

    def words(values: list[float]) -> str:
        mean = math.exp(sum(map(math.log, values)) / len(values))
        return f"{mean:6.3f} {float(np.median(values)):6.3f} {float(np.percentile(values, 95)):6.3f} {max(values):6.2f}"

    return f"{name:34} {len(before):5}   {words(before)}   {words(after)}"


def main() -> int:
    parser = Parser("choice_regret", __doc__)
    parser.add_argument("--ops", default="", help="names, separated by commas; all without")
    parser.add_argument("--alone", action="store_true", help="the cost model without evidence")
    parser.add_argument("--untuned", action="store_true", help="an H100 by the rows of an H200")
    parser.add_argument("--default", action="store_true", help="let the default schedule compete")
    options = parser.parse_args()
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    ops = [n for n in options.ops.split(",") if n]
    judged = list(kernels(read_matrices(STORED)[1], ops))
    if options.untuned:
        there = {(k.kind, k.root, k.fused): k for k in judged}
        judged = [replace(k, elsewhere=own) for k in kernels(read_matrices(UNTUNED)[1], ops) if (own := there.get((k.kind, k.root, k.fused)))]
    for kernel in judged:
        for name in (f"{kernel.kind.op} {kernel.kind.direction}", "all"):
            found[name][0].extend(regrets(kernel, by_distance, options.default))
            found[name][1].extend(regrets(kernel, lambda *asked: by_model(*asked, evidence=not options.alone), options.default))
    print(f"{'':34} sizes   by distance: mean, median, 95%, worst   by model: the same")
    for name, (before, after) in sorted(found.items(), key=lambda item: (item[0] == "all", item[0])):
        if before:
            print(line(name, before, after))
    return 0


if __name__ == "__main__":
    sys.exit(main())
