"""Evaluate stored measurements for each kind of call: every schedule's time, the best, the peers', and the dispatched schedule's."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from dtkernels.lang import expr as ex
from dtkernels.lang.errors import DTError
from dtkernels.runtime.aot_build import meta_tensors
from dtkernels.runtime.tables.table import Row, read_rows
from dtkernels.tuning.records.journal import HALF
from dtkernels.tuning.records.measurement_store import read_matrices
from dtkernels.tuning.records.problems import CallKind, TuningProblem, variants_of
from dtkernels.tuning.search.candidates import split_by_kernel
from dtkernels.tuning.search.portfolio import Regret, dispatched, summary

from .benchmark_runs import Benchmarks, read_runs

COMPETITIVE = 1.05  #: a schedule within 5% of the best peer, or of the best schedule if no peer was timed, is competitive
WHOLE = "*"  #: stands for all kernels of a schedule, timed together
MOST = 4000  #: number of sums of kernel times for a distribution


@dataclass
class Size:
    """One size of one kind of call. Times are in microseconds with a cold cache."""

    work: TuningProblem
    times: np.ndarray  #: of whole schedules, sorted; a sample if there are very many
    schedules: int  #: how many schedules there are
    peers: dict[str, float] = field(default_factory=dict)
    runs: float | None = None  #: of the dispatched schedule
    bytes: float = 0.0  #: read and written at least
    flops: float = 0.0

    @property
    def best(self) -> float:
        """Return the fastest whole schedule's time, at most that of the dispatched schedule."""
        return min(float(self.times[0]), self.runs or math.inf)

    @property
    def bar(self) -> float:
        """Return the best peer's time, else that of the best schedule."""
        return min(self.peers.values(), default=self.best)

    @property
    def competitive(self) -> int:
        """Return how many schedules are within 5% of ``bar``."""
        return round(float((self.times <= COMPETITIVE * self.bar).mean()) * self.schedules)

    @property
    def regret(self) -> float | None:
        return self.runs / self.best if self.runs else None

    def title(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.work.sizes)


@dataclass
class Kind:
    """One kind of call with its sizes."""

    group: CallKind
    sizes: list[Size]

    def title(self) -> str:
        return self.group.title()


@dataclass
class Study:
    """Everything the report shows."""

    by: dict
    kinds: list[Kind]
    bandwidth: float
    benchmarks: Benchmarks
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")  #: the dtypes shown

    def show(self, dtypes: tuple[str, ...]) -> None:
        """Keep only calls of these dtypes."""
        self.dtypes = dtypes
        self.kinds = [k for k in self.kinds if k.group.dtype in dtypes]

    def regrets(self, held_out: bool) -> dict[str, Regret]:
        """Return regrets by op, of held-out sizes or of the others."""
        found: dict[str, list[float]] = {}
        for kind in self.kinds:
            found.setdefault(kind.group.op, []).extend(s.regret for s in kind.sizes if s.regret and s.work.held_out == held_out)
        return {op: summary(r) for op, r in found.items() if r}


def read(folder: Path, benches: list[Path]) -> Study:
    """Read one table's folder. Raises OSError, and ValueError if a file is malformed."""
    by, matrices = read_matrices(folder / "measurements.safetensors")
    benchmarks = read_runs(benches)
    kinds: list[Kind] = []
    rows: dict[str, list[Row]] = {}
    for matrix in matrices:
        group = CallKind(*matrix.kind)
        rows[group.op] = rows[group.op] if group.op in rows else _rows(folder, group.op)
        kind = _kind(group, matrix.about, matrix.cold, rows[group.op], benchmarks)
        kinds += [kind] if kind.sizes else []
    kinds.sort(key=lambda k: (k.group.op, k.group.direction != "forward", k.group.dtype, k.group.params, k.group.saved))
    return Study(by, kinds, _bandwidth(folder), benchmarks)


def _bandwidth(folder: Path) -> float:
    text = (folder / "gpu.yaml").read_text() if (folder / "gpu.yaml").exists() else ""
    found = re.search(r"bandwidth: *([\d.eE+]+)", text)
    return float(found[1]) if found else 0.0


def _rows(folder: Path, op: str) -> list[Row]:
    path = folder / f"{Path(op).stem}.yaml"
    return list(read_rows(path.read_text(), str(path))) if path.exists() else []


def _kind(group: CallKind, told: dict, matrix: np.ndarray, rows: list[Row], benchmarks: Benchmarks) -> Kind:
    sizes = []
    needed = _needed(told["schedules"])
    for told_size, times in zip(told["works"], matrix):
        extents = {k: v for k, v in told_size.items() if k != "held_out"}
        work = TuningProblem(group, tuple(extents.items()), told_size["held_out"])
        plans = {p: float(t) for p, t in zip(told["schedules"], times) if math.isfinite(t)}
        found, count = _whole(plans, needed)
        if count:
            call = benchmarks.at(group.op, group.direction, group.dtype, group.params, work.sizes)
            size = Size(work, np.sort(found), count, call.peers if call else {})
            size.bytes, size.flops = _costs(work)
            size.runs = _runs(rows, work, plans)
            sizes.append(size)
    return Kind(group, sizes)


def _split(plan: str) -> tuple[str, str, str]:
    """Return (what is fused, the kernel, its statements); the kernel is ``*`` if all kernels were timed together."""
    fused, _, rest = plan.partition(HALF)
    return fused, *rest.partition("\n")[::2]


def _needed(plans: list[str]) -> dict[str, set[str]]:
    """Return the kernels of each way to fuse."""
    needed: dict[str, set[str]] = {}
    for plan in plans:
        fused, root, _ = _split(plan)
        needed.setdefault(fused, set()).update({root} - {WHOLE})
    return needed


def _whole(plans: dict[str, float], needed: dict[str, set[str]]) -> tuple[np.ndarray, int]:
    """Return times of whole schedules, and how many there are.

    A schedule whose kernels were timed together has that time. Any other has the sum of its kernels' times: one plan for each
    kernel of a way to fuse.
    """
    parts: dict[str, dict[str, list[tuple[float, int]]]] = {}
    together: dict[str, dict[int, float]] = {}
    for plan, time in plans.items():
        fused, root, statements = _split(plan)
        if root == WHOLE:
            together.setdefault(fused, {})[_identity(statements)] = time
        else:
            parts.setdefault(fused, {}).setdefault(root, []).append((time, _identity(statements)))
    found, count = [np.array([t for times in together.values() for t in times.values()])], 0
    for fused in dict.fromkeys([*parts, *together]):
        timed = together.get(fused, {})
        lists = [sorted(t) for t in parts.get(fused, {}).values()]
        if not lists or set(parts[fused]) != needed[fused]:
            count += len(timed)
            continue
        here = math.prod(map(len, lists))
        times, names = _sums([_thinned(t, len(lists)) if here > MOST else t for t in lists])
        kept = ~np.isin(names, np.array(list(timed), np.uint64))
        found.append(times[kept])
        # If only a sample of the sums is drawn, schedules timed together are assumed to be among them.
        count += here if here > MOST else int(kept.sum()) + len(timed)
    return np.concatenate(found), count


@cache
def _identity(statements: str) -> int:
    """Return a number for a set of statements; the number of several kernels is the sum of theirs."""
    lines = (line for line in statements.split("\n") if line)
    return sum(int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "little") for line in lines) % 2**64


def _thinned(times: list[tuple[float, int]], kernels: int) -> list[tuple[float, int]]:
    """Return a sorted sample of one kernel's times with the first and the last, small enough for about ``MOST`` sums."""
    wanted = min(len(times), max(2, int(MOST ** (1 / kernels))))
    return [times[round(i)] for i in np.linspace(0, len(times) - 1, wanted)]


def _sums(lists: list[list[tuple[float, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (times, identities) of every choice of one entry from each list."""
    times, names = np.zeros(1), np.zeros(1, np.uint64)
    for entries in lists:
        times = np.add.outer(times, np.array([t for t, _ in entries])).ravel()
        names = np.add.outer(names, np.array([n for _, n in entries], np.uint64)).ravel()
    return times, names


def _runs(rows: list[Row], work: TuningProblem, plans: dict[str, float]) -> float | None:
    """Return the measured time of the schedule in the table's row for this size, or None."""
    row = dispatched(rows, work)
    if row is None:
        return None
    _, variant = variants_of(work.group)
    try:
        made = split_by_kernel(variant.algorithm, variant.outputs, row.schedule)
    except DTError:
        return None
    if made.text() in plans:
        return plans[made.text()]
    parts = [plans.get(p.text()) for p in made.plans]
    return None if None in parts else float(sum(parts))  # type: ignore[arg-type]


def _costs(work: TuningProblem) -> tuple[float, float]:
    """Return (bytes of all inputs and outputs once, operations of the matrix products)."""
    forward, variant = variants_of(work.group)
    a, extents = variant.algorithm, work.extents
    tensors = meta_tensors(forward, variant, extents, work.group.torch_dtype)
    moved = sum(t.numel() * t.element_size() for t in tensors.values())
    moved += sum(math.prod(extents[label] for label in a[o].labels) * work.group.itemsize for o in variant.outputs)
    flops = 0.0
    for d in a.definitions:
        for n in d.expr.walk():
            if isinstance(n, ex.Dot):
                labels = ex.free_labels(n.left) | ex.free_labels(n.right) | set(n.labels)
                flops += 2.0 * math.prod(extents[label] for label in labels)
    causal = dict(work.group.params).get("causal")
    return float(moved), flops / 2 if causal else flops
