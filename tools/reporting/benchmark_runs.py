"""Read the output of tools/bench.py: for each call, our time and every peer's time from one and the same run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common.cli_types import read_figures
from embed_benchmark_tables import DTYPES, OURS, REFERENCES

ORDER = "oldest_first.txt"  #: lists a folder's runs; files that it does not name count as newer
Params = tuple[tuple[str, int | bool], ...]


@dataclass
class BenchmarkedCall:
    """One op at one shape, dtype and direction, as one run of the benchmark timed it. Times are in microseconds."""

    op: str
    shape: str  #: as the benchmark writes it
    dtype: str
    direction: str
    ours: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    bytes: float = 0.0  #: bytes that must move
    flops: float = 0.0  #: operations of the matrix products
    limit: float = 0.0  #: time of a copy of the bytes, or of the products; the longer

    @property
    def key(self) -> tuple[str, str, str, Params]:
        """Return the key of the tuner's kind of call."""
        return self.op, self.direction, self.dtype, params_of(self.op, self.shape)

    @property
    def extents(self) -> dict[str, int] | None:
        """Return the extent of each label of the op."""
        return extents_of(self.op, self.shape)


class Benchmarks:
    """All benchmarked calls. A newer run of a call replaces an older one completely, so times of two runs never mix."""

    def __init__(self, runs: Iterable[dict]):
        self.runs = list(runs)
        self.calls: dict[tuple[str, str, str, str], BenchmarkedCall] = {}
        for run in self.runs:
            for name, call in _calls(run).items():
                if call.peers or name not in self.calls:
                    self.calls[name] = call
        self._by_key: dict[tuple, list[tuple[frozenset, BenchmarkedCall]]] = {}
        for call in self.calls.values():
            if call.extents is not None:
                self._by_key.setdefault(call.key, []).append((frozenset(call.extents.items()), call))

    def at(self, op: str, direction: str, dtype: str, params: Params, sizes: Iterable[tuple[str, int]]) -> BenchmarkedCall | None:
        """Return the call of these sizes, or None if it was not benchmarked. A backward has labels of its own besides the benchmark's."""
        given = set(sizes)
        return next((call for found, call in self._by_key.get((op, direction, dtype, params), ()) if found <= given), None)


def read_runs(paths: Iterable[Path]) -> Benchmarks:
    """Read runs, oldest first. Raises OSError and ValueError."""
    return Benchmarks(read_figures(path) for path in paths)


def measured_on(gpu: str, folder: Path) -> list[Path]:
    """List the output of tools/bench.py for this GPU in ``folder`` and below, oldest first. Its first format, without directions, is left out."""
    found = []
    for path in sorted(folder.rglob("*.json"), key=_age):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("gpu") == gpu and str(data.get("command", "")).startswith("tools/bench.py "):
            found += [path] if data["figures"] and all("direction" in f for f in data["figures"]) else []
    return found


def _age(path: Path) -> tuple[Path, int, str]:
    listed = path.parent / ORDER
    names = [line for line in listed.read_text().split("\n") if line and not line.startswith("#")] if listed.exists() else []
    return path.parent, names.index(path.name) if path.name in names else len(names), path.name


def _calls(run: dict) -> dict[tuple[str, str, str, str], BenchmarkedCall]:
    found: dict[tuple[str, str, str, str], BenchmarkedCall] = {}
    for f in run["figures"]:
        time, dtype, direction = f["microseconds"], DTYPES.get(f["dtype"], f["dtype"]), f.get("direction", "forward")
        if time is None or not math.isfinite(time) or f["who"] in REFERENCES:
            continue
        call = found.setdefault((f["op"], f["shape"], dtype, direction), BenchmarkedCall(f["op"], f["shape"], dtype, direction))
        if f["who"] == OURS:
            call.ours = time
            call.bytes, call.flops = f.get("terabytes", 0.0) * time * 1e6, f.get("tflops", 0.0) * time * 1e6
            call.limit = f.get("limit", math.nan)
        else:
            call.peers[f["who"]] = time
    return found


class Limit:
    """The least time of a call: of a copy of the bytes it must move, or of its matrix products, whichever is longer.

    Both rates come from the benchmark: torch's copies of as many bytes (interpolated) and torch's largest matrix products. Without a
    benchmark, bytes are divided by ``bandwidth``, and the limit of products is unknown.
    """

    def __init__(self, benchmarks: Benchmarks, bandwidth: float):
        calls = [c for c in benchmarks.calls.values() if c.limit > 0 and c.bytes > 0]
        self.bandwidth = bandwidth
        self.product_rates: dict[int, float] = {}  #: item size -> operations a microsecond
        for c in calls:
            size = 4 if c.dtype == "fp32" else 2
            self.product_rates[size] = max(self.product_rates.get(size, 0.0), c.flops / c.limit)
        self.product_rates = {size: rate for size, rate in self.product_rates.items() if rate > 0}
        copies = sorted((c.bytes, c.limit) for c in calls if c.flops < 0.7 * c.limit * self.product_rates.get(4 if c.dtype == "fp32" else 2, math.inf))
        # Copies of odd lengths are slow. Therefore time never falls with length, and time for each byte never rises.
        self._bytes = np.array([b for b, _ in copies])
        times = np.minimum.accumulate(np.array([t for _, t in copies])[::-1])[::-1]
        self._times = self._bytes / np.maximum.accumulate(self._bytes / times)

    def copy(self, moved: float) -> float | None:
        """Return the microseconds of a copy that reads and writes ``moved`` bytes in total."""
        if len(self._bytes) == 0:
            return moved / self.bandwidth * 1e6 if self.bandwidth else None
        if moved > self._bytes[-1]:
            return float(self._times[-1] * moved / self._bytes[-1])
        return float(np.interp(math.log(max(moved, 1.0)), np.log(self._bytes), self._times))

    def at(self, moved: float, flops: float, itemsize: int) -> float | None:
        """Return the limit in microseconds; None if a rate that it needs was not measured."""
        rate, copied = self.product_rates.get(itemsize), self.copy(moved) if moved else None
        if copied is None or (flops and rate is None):
            return None
        return max(copied, flops / rate) if flops and rate else copied


# -- the benchmark's names of shapes -----------------------------------------------------------------------------------


def params_of(op: str, shape: str) -> Params:
    """Return the parameters in the benchmark's name of a shape, without defaults."""
    causal = (("causal", True),) if shape.endswith("causal") else ()
    heads = re.search(r"H(\d+)/(\d+)", shape) if op == "attention" else None
    return causal + ((("group", int(heads[1]) // int(heads[2])),) if heads else ())


def extents_of(op: str, shape: str) -> dict[str, int] | None:
    """Return the extents of an op's labels from the benchmark's name of a shape; None if it has another format."""
    if op == "attention":
        shape = re.sub(r"/\d+", "", shape)  # the number of key heads belongs to a parameter
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
