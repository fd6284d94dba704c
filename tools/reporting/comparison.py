"""Compare each measured call with its best peer: the rows of the page's first table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from .benchmark_runs import BenchmarkedCall, Limit, Params
from .study import Kind, Size, Study

SAME = 1.02  #: times within 2% count as the same; runs of one call differ by as much
FAR = 1.2  #: ratios from here on get the stronger colour
DIRECTIONS = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
TRAINING = "forward for training"  #: a forward that also stores what its backward reads
BENCHMARK, TUNING = "benchmark", "tuning"


@dataclass(frozen=True)
class Comparison:
    """One call and its best peer. Times are in microseconds; None if not measured."""

    op: str
    direction: str
    dtype: str
    size: str  #: in words
    ours: float | None
    peer: float | None
    who: str
    limit: float | None  #: the least time that the GPU allows
    source: str  #: ``benchmark``: the whole call, timed in turn with its peers; ``tuning``: only its kernels

    @property
    def ratio(self) -> float | None:
        """Return the best peer's time over ours: above 1 we are faster."""
        return self.peer / self.ours if self.peer and self.ours else None

    @property
    def verdict(self) -> str:
        """Return ``faster``, ``same`` or ``slower``; empty without a peer."""
        if self.ratio is None:
            return ""
        return "faster" if self.ratio > SAME else "slower" if self.ratio < 1 / SAME else "same"

    @property
    def shade(self) -> str:
        """Return the CSS class that colours the ratio."""
        ratio = self.ratio or 1.0
        far = "much-" if max(ratio, 1 / ratio) >= FAR else ""
        return far + self.verdict

    @property
    def share(self) -> float | None:
        """Return the limit over our time; it exceeds 1 only by measurement noise."""
        return self.limit / self.ours if self.limit and self.ours else None


def comparisons(study: Study) -> list[Comparison]:
    """Return every call that was tuned or benchmarked, each once; within an op those with a peer come first."""
    limit = Limit(study.benchmarks, study.bandwidth)
    rows, used = [], set()
    for kind in study.kinds:
        for size in kind.sizes:
            call = None if kind.group.saved else _benchmarked(study, kind, size)
            if call is None or call.ours is None:
                rows.append(_tuned(kind, size, limit))
            elif id(call) not in used:
                used.add(id(call))
                rows.append(_of_benchmark(call, limit, (size.bytes, size.flops)))
    rows += [_of_benchmark(c, limit) for c in study.benchmarks.calls.values() if id(c) not in used and c.ours is not None and c.dtype in study.dtypes]
    order = {d: i for i, d in enumerate(("forward", TRAINING, "backward", DIRECTIONS["both"]))}
    return sorted(rows, key=lambda r: (r.op, r.peer is None, order.get(r.direction, 9), r.dtype))


def _benchmarked(study: Study, kind: Kind, size: Size) -> BenchmarkedCall | None:
    g = kind.group
    return study.benchmarks.at(g.op, g.direction, g.dtype, g.params, size.work.sizes)


def _tuned(kind: Kind, size: Size, limit: Limit) -> Comparison:
    g = kind.group
    words = size_in_words(g.op, size.work.extents, g.params)
    direction = TRAINING if g.saved else DIRECTIONS.get(g.direction, g.direction)
    return Comparison(Path(g.op).stem, direction, g.dtype, words, size.runs, None, "", limit.at(size.bytes, size.flops, g.itemsize), TUNING)


def _of_benchmark(call: BenchmarkedCall, limit: Limit, costs: tuple[float, float] | None = None) -> Comparison:
    """Make a row of a benchmarked call. ``costs``: bytes and operations by the algorithm if the tuner knows the call, else the benchmark's count."""
    who, peer = min(call.peers.items(), key=lambda p: p[1], default=("", None))
    extents = call.extents
    words = size_in_words(call.op, extents, call.key[3]) if extents else call.shape
    if extents and list(extents) == ["x"] and "x" in call.shape:
        words = f"{' x '.join(call.shape.split('x'))} ({words})"
    moved, flops = costs or (call.bytes, call.flops)
    least = limit.at(moved, flops, 4 if call.dtype == "fp32" else 2)
    return Comparison(call.op, DIRECTIONS.get(call.direction, call.direction), call.dtype, words, call.ours, peer, who, least, BENCHMARK)




def size_in_words(op: str, extents: dict[str, int], params: Params = ()) -> str:
    """Return the sizes in words; for an op without a format of its own, with its labels."""
    of, rest = dict(params), [f"{k} {str(v).lower()}" for k, v in params if k not in ("causal", "group")]
    e, name = extents, Path(op).stem
    rest += ["causal"] if of.get("causal") else []
    if name == "attention":
        keys = e["h"] // int(of.get("group", 1))
        heads = f"heads {e['h']}" + (f" ({keys} for keys)" if keys != e["h"] else "")
        columns = f"{e['d']} columns" + (f", {e['n']} for values" if e["n"] != e["d"] else "")
        words = [f"batch {e['b']}", heads, f"{e['m']} x {e['l']}", columns]
    elif name == "rope":
        words = [f"batch {e['b']}", f"heads {e['h']}" + (f" ({e['g']} for keys)" if e["g"] != e["h"] else ""), f"{e['s']} positions", f"{e['d']} columns"]
    elif name == "mmsigmoid":
        words = [f"{e['x']} x {e['k']} times {e['k']} x {e['y']}"]
    elif name == "two_mm":
        words = [f"{e['m']} x {e['k']} times {e['k']} x {e['l']} times {e['l']} x {e['n']}"]
    elif list(e) == ["x"]:
        words = [f"{e['x']} elements"]
    elif list(e) == ["x", "y"]:
        words = [f"{e['x']} x {e['y']}"]
    else:
        words = [f"{label} {n}" for label, n in e.items()]
    return ", ".join(words + rest)


@dataclass(frozen=True)
class Summary:
    """Counts of many comparisons; ``mean`` is the geometric mean of their ratios, NaN if there are none."""

    rows: int
    compared: int
    faster: int
    slower: int
    mean: float


def summary(rows: list[Comparison]) -> Summary:
    """Count the rows; a ratio counts once, whatever its size."""
    ratios = [r.ratio for r in rows if r.ratio]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    return Summary(len(rows), len(ratios), sum(r.verdict == "faster" for r in rows), sum(r.verdict == "slower" for r in rows), mean)
