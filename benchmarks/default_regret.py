"""Judge default schedules by the stored measurements, without a GPU.

python benchmarks/default_regret.py                       every op of the H200's table
python benchmarks/default_regret.py --ops dyt,attention --dtypes fp32 --worst 20

At every size that was measured, the default schedule is made anew. The regret of one of its kernels is the time of that kernel over
the best time of any that computes the same Funcs, which the tuner measured there. Kernels that were not measured are counted, as
"other tiles", and as "other kernels" where nothing with these Funcs was measured.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from choice_regret import STORED  # noqa: E402
from common.cli_types import Parser, at_least  # noqa: E402

from dtkernels.autoschedule.default_schedule import default_schedule  # noqa: E402
from dtkernels.codegen.target import TARGETS  # noqa: E402
from dtkernels.runtime.select.evidence import ITEMSIZE  # noqa: E402
from dtkernels.tuning.records.measurement_store import MeasurementMatrix, read_matrices  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, variants_of  # noqa: E402
from dtkernels.tuning.search.candidates import KernelCandidate, split_by_kernel  # noqa: E402


class Judged(NamedTuple):
    """One kernel of a default schedule. ``best`` is the fastest that was measured, None if it was itself not measured."""

    title: str
    sizes: dict[str, int]
    own: str
    best: str | None
    regret: float
    why: str


def judged(matrix: MeasurementMatrix) -> Iterator[Judged]:
    """Yield the kernels of the default schedule at every size of a kind of call."""
    kind = CallKind(*matrix.kind)
    dispatch = variants_of(kind)[1].dispatch
    times: dict[int, dict[KernelCandidate, float]] = defaultdict(dict)
    for i, j in zip(*np.nonzero(~np.isnan(matrix.cold))):
        times[int(i)][KernelCandidate.read(matrix.about["schedules"][j])] = float(matrix.cold[i, j])
    for i, measured in times.items():
        sizes = {label: n for label, n in matrix.about["works"][i].items() if label != "held_out"}
        text = str(default_schedule(dispatch.algorithm(), dispatch.outputs, sizes, ITEMSIZE[kind.dtype], TARGETS["h200"]))
        for plan in split_by_kernel(dispatch.algorithm(), dispatch.outputs, text).plans:
            same = {p: t for p, t in measured.items() if (p.root, p.fused) == (plan.root, plan.fused)}
            title, own = f"{kind.op} {kind.direction} {kind.dtype} {plan.root}", plan.tiles.replace("\n", " ")
            if plan in same:
                best = min(same, key=same.__getitem__)
                yield Judged(title, sizes, own, best.tiles.replace("\n", " "), same[plan] / same[best], "")
            else:
                yield Judged(title, sizes, own, None, 1.0, "other tiles" if same else "other kernels")


def main() -> int:
    parser = Parser("default_regret", __doc__)
    parser.add_argument("--ops", default="", help="names, separated by commas; all without")
    parser.add_argument("--dtypes", default="bf16,fp16,fp32", help="separated by commas")
    parser.add_argument("--worst", type=at_least(0), default=0, metavar="N", help="print the N worst kernels, with the best measured beside each")
    options = parser.parse_args()
    ops, dtypes = [n for n in options.ops.split(",") if n], options.dtypes.split(",")
    found: dict[str, list[Judged]] = defaultdict(list)
    for matrix in read_matrices(STORED)[1]:
        if (not ops or matrix.kind[0] in ops) and matrix.kind[2] in dtypes:
            for one in judged(matrix):
                found[" ".join(one.title.split()[:2])].append(one)
    print(f"{'':24} kernels   mean median    95%  worst   not measured")
    for name, kernels in sorted(found.items()):
        values = [k.regret for k in kernels if k.best is not None] or [float("nan")]
        missing = Counter(k.why for k in kernels if k.best is None)
        mean, median, most = np.exp(np.mean(np.log(values))), np.median(values), np.percentile(values, 95)
        print(f"{name:24} {len(values):7} {mean:6.3f} {median:6.3f} {most:6.3f} {max(values):6.2f}   {', '.join(f'{n} {w}' for w, n in missing.items())}")
    for k in sorted((k for own in found.values() for k in own), key=lambda k: -k.regret)[: options.worst]:
        print(f"{k.regret:.2f} {k.title} {k.sizes}\n    default: {k.own}\n    best: {k.best}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
