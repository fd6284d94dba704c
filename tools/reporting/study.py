"""What stored measurements say of each kind of call: every schedule's time, the best, the peers', what a call would run."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from asked import read_figures
from tuning.choosing import Regret, dispatched, summary
from tuning.journal import HALF
from tuning.matrix import read_matrices
from tuning.plans import cut
from tuning.works import Group, Work, variants_of

from dtkernels.lang import expr as ex
from dtkernels.lang.errors import DTError
from dtkernels.runtime.prebuild import meta_tensors
from dtkernels.runtime.table import Row, read_rows

COMPETITIVE = 1.05  #: a schedule within 5% of the best peer is competitive; where no peer was timed, of the best schedule
MOST = 4000  #: sums of kernels' times that a distribution is drawn from


@dataclass
class Size:
    """One size of one kind of call. Times are microseconds with a cold cache."""

    work: Work
    times: np.ndarray  #: of whole schedules, sorted; a sample of them where there are very many
    schedules: int  #: how many those are
    peers: dict[str, float] = field(default_factory=dict)
    runs: float | None = None  #: of the schedule that a call takes
    bytes: float = 0.0  #: read and written at least
    flops: float = 0.0

    @property
    def best(self) -> float:
        return float(self.times[0])

    @property
    def bar(self) -> float:
        """The best peer's time, else that of the best schedule."""
        return min(self.peers.values(), default=self.best)

    @property
    def competitive(self) -> int:
        """How many schedules are within 5% of ``bar``."""
        return round(float((self.times <= COMPETITIVE * self.bar).mean()) * self.schedules)

    @property
    def regret(self) -> float | None:
        return self.runs / min(self.best, self.runs) if self.runs else None

    def title(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.work.sizes)


@dataclass
class Kind:
    """One kind of call with its sizes."""

    group: Group
    sizes: list[Size]

    def title(self) -> str:
        return self.group.title()


@dataclass
class Study:
    """Everything the report shows."""

    by: dict
    kinds: list[Kind]
    bandwidth: float
    benches: list[dict]

    def regrets(self, held_out: bool) -> dict[str, Regret]:
        """By op, of sizes that were held out of the choice or of those that were not."""
        found: dict[str, list[float]] = {}
        for kind in self.kinds:
            found.setdefault(kind.group.op, []).extend(s.regret for s in kind.sizes if s.regret and s.work.held_out == held_out)
        return {op: summary(r) for op, r in found.items() if r}


def read(folder: Path, benches: list[Path]) -> Study:
    """The study of one table's folder. Raises OSError, and ValueError where a file is not what it should be."""
    by, matrices = read_matrices(folder / "measurements.safetensors")
    raw = [read_figures(path) for path in benches]
    peers = _peers(raw)
    kinds = []
    for matrix in matrices:
        group = Group(*matrix.kind)
        kind = _kind(group, matrix.about, matrix.cold, _rows(folder, group), peers)
        kinds += [kind] if kind.sizes else []
    kinds.sort(key=lambda k: (k.group.op, k.group.direction != "forward", k.group.dtype, k.group.params, k.group.saved))
    bandwidth = max((f["bytes_per_second"] for b in raw for f in [b] if "bytes_per_second" in b), default=_bandwidth(folder))
    return Study(by, kinds, bandwidth, raw)


def _bandwidth(folder: Path) -> float:
    text = (folder / "gpu.yaml").read_text() if (folder / "gpu.yaml").exists() else ""
    found = re.search(r"bandwidth: *([\d.eE+]+)", text)
    return float(found[1]) if found else 0.0


def _rows(folder: Path, group: Group) -> list[Row]:
    path = folder / f"{Path(group.op).stem}.yaml"
    return list(read_rows(path.read_text(), str(path))) if path.exists() else []


def _kind(group: Group, told: dict, matrix: np.ndarray, rows: list[Row], peers: dict) -> Kind:
    sizes = []
    needed = _needed(told["schedules"])
    for told_size, times in zip(told["works"], matrix):
        extents = {k: v for k, v in told_size.items() if k != "held_out"}
        work = Work(group, tuple(extents.items()), told_size["held_out"])
        plans = {p: float(t) for p, t in zip(told["schedules"], times) if math.isfinite(t)}
        found, count = _whole(plans, needed)
        if count:
            size = Size(work, np.sort(found), count, _peers_at(peers, work))
            size.bytes, size.flops = _costs(work)
            size.runs = _runs(rows, work, plans)
            sizes.append(size)
    return Kind(group, sizes)


def _split(plan: str) -> tuple[str, str]:
    fused, _, rest = plan.partition(HALF)
    return fused, rest.partition("\n")[0]


def _needed(plans: list[str]) -> dict[str, set[str]]:
    """The kernels of each way to fuse; ``*`` stands for all of them timed together."""
    needed: dict[str, set[str]] = {}
    for plan in plans:
        fused, root = _split(plan)
        needed.setdefault(fused, set()).update({root} - {"*"})
    return needed


def _whole(plans: dict[str, float], needed: dict[str, set[str]]) -> tuple[np.ndarray, int]:
    """Times of whole schedules: one plan for each kernel of a way to fuse, added up; and how many there are."""
    by: dict[str, dict[str, list[float]]] = {}
    for plan, time in plans.items():
        fused, root = _split(plan)
        if root != "*":
            by.setdefault(fused, {}).setdefault(root, []).append(time)
    found, count = [], 0
    for fused, roots in by.items():
        if set(roots) != needed[fused]:
            continue
        lists = [sorted(t) for t in roots.values()]
        here = math.prod(map(len, lists))
        count += here
        thinned = [
            t if here <= MOST else [t[round(i)] for i in np.linspace(0, len(t) - 1, min(len(t), max(2, int(MOST ** (1 / len(lists))))))]
            for t in lists
        ]
        found.append(np.array([sum(c) for c in itertools.product(*thinned)]))
    return (np.concatenate(found) if found else np.array([])), count


def _runs(rows: list[Row], work: Work, plans: dict[str, float]) -> float | None:
    """The time of what the table's row gives at this size, if that was measured."""
    row = dispatched(rows, work)
    if row is None:
        return None
    _, variant = variants_of(work.group)
    try:
        made = cut(variant.algorithm, variant.outputs, row.schedule)
    except DTError:
        return None
    if made.text() in plans:
        return plans[made.text()]
    parts = [plans.get(p.text()) for p in made.plans]
    return None if None in parts else float(sum(parts))  # type: ignore[arg-type]


def _costs(work: Work) -> tuple[float, float]:
    """(bytes of all inputs and outputs once, operations of the matrix products)."""
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


# -- peers ------------------------------------------------------------------------------------------------------------


def measured_on(gpu: str, folder: Path) -> list[Path]:
    """What tools/bench.py wrote of this GPU into ``folder`` or one below, but for runs of its first form, which says no direction."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("gpu") == gpu and str(data.get("command", "")).startswith("tools/bench.py "):
            found += [path] if data["figures"] and all("direction" in f for f in data["figures"]) else []
    return found


def _peers_at(peers: dict, work: Work) -> dict[str, float]:
    """Peer -> microseconds, where a size of the benchmark is this one; a backward has labels of its own beside the benchmark's."""
    g, extents = work.group, set(work.sizes)
    of_kind = peers.get((g.op, g.direction, g.dtype, g.params), {})
    return next((found for sizes, found in of_kind.items() if sizes <= extents), {})


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _peers(raw: list[dict]) -> dict[tuple, dict[frozenset, dict[str, float]]]:
    """(op, direction, dtype, params) -> sizes -> peer -> microseconds, from the output of tools/bench.py."""
    found: dict[tuple, dict[frozenset, dict[str, float]]] = {}
    for f in (f for data in raw for f in data["figures"]):
        time = f["microseconds"]
        sizes = extents_of(f["op"], f["shape"])
        if f["who"] == "dtkernels" or sizes is None or time is None or not math.isfinite(time):
            continue
        key = f["op"], f.get("direction", "forward"), _DTYPES.get(f["dtype"], f["dtype"]), params_of(f["op"], f["shape"])
        found.setdefault(key, {}).setdefault(frozenset(sizes.items()), {})[f["who"]] = time
    return found


def params_of(op: str, shape: str) -> tuple[tuple[str, int | bool], ...]:
    """The parameters of a call from the benchmark's name of a shape: those that are not the default."""
    causal = (("causal", True),) if shape.endswith("causal") else ()
    heads = re.search(r"H(\d+)/(\d+)", shape) if op == "attention" else None
    return causal + ((("group", int(heads[1]) // int(heads[2])),) if heads else ())


def extents_of(op: str, shape: str) -> dict[str, int] | None:
    """The extents of an op's labels from the benchmark's name of a shape; None where it has another form."""
    if op == "attention":
        shape = re.sub(r"/\d+", "", shape)  # the heads of keys are a parameter's
    numbers = [int(n) for n in re.findall(r"\d+", shape)]
    if op == "rope" and len(numbers) == 5:
        return dict(zip("bhgsd", numbers))
    if op == "attention" and len(numbers) == 5:
        b, h, m, s, d = numbers
        return {"b": b, "h": h, "m": m, "l": s, "d": d, "n": d}
    if op == "two_mm" and len(numbers) == 4:
        return dict(zip("mnkl", numbers))
    if op == "mmsigmoid" and len(numbers) == 3:
        return dict(zip("xyk", numbers))
    if op in ("relu", "swiglu", "geglu") and numbers:
        return {"x": math.prod(numbers)}
    if op in ("softmax", "dyt", "rmsnorm", "layernorm", "cross_entropy") and len(numbers) == 2:
        return dict(zip("xy", numbers))
    return None
