"""Time ops against their peers on this GPU: same inputs, rotated order, cold L2, every output checked against float64.

    python tools/bench.py --ops softmax,attention --json out.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import peers as peer_module  # noqa: E402
import workloads  # noqa: E402

import dtkernels  # noqa: E402

ROUNDS = 5


@dataclass
class Figure:
    """One op at one shape by one implementation."""

    op: str
    shape: str
    dtype: str
    who: str
    microseconds: float
    tflops: float
    terabytes: float
    error: float | None
    note: str = ""


def gpu_time(fn, flush: torch.Tensor, milliseconds: float = 40.0) -> float:
    """Median time of ``fn`` in microseconds by CUDA events, L2 emptied before each call."""
    fn()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    count = max(5, min(200, int(milliseconds / max(start.elapsed_time(end), 1e-3))))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, finish in pairs:
        flush.zero_()
        begin.record()
        fn()
        finish.record()
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in pairs) * 1e3


def captured(fn):
    """``fn`` as a CUDA graph replay, so that host time does not enter; ``fn`` itself where it cannot be captured."""
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                fn()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        return fn


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN stays."""
    wanted = wanted.double()
    return ((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300)).item()


def bench(work: workloads.Work, names: list[str], flush: torch.Tensor) -> list[Figure]:
    """Every implementation of one workload, timed in turn over several rounds."""
    inputs = work.make()
    truth = work.truth(*inputs) if work.truth else None
    running, figures = {}, []
    for who, fn in peer_module.implementations(work, names).items():
        try:
            got = fn(*inputs)
            error = None if truth is None else relative_error(got, truth)
            running[who] = (captured(lambda fn=fn: fn(*inputs)), error)
        except Exception as problem:  # a peer that cannot run this shape is reported, not hidden
            figures.append(Figure(work.op, work.shape, work.dtype, who, math.nan, 0, 0, None, f"{type(problem).__name__}: {str(problem).splitlines()[0][:80]}"))
    times = {who: [] for who in running}
    order = list(running)
    for _ in range(ROUNDS):
        for who in order:
            times[who].append(gpu_time(running[who][0], flush))
        order = order[1:] + order[:1]
    for who, (_, error) in running.items():
        us = statistics.median(times[who])
        figures.append(Figure(work.op, work.shape, work.dtype, who, us, work.flops / us / 1e6, work.bytes / us / 1e6, error))
    return figures


def table(figures: list[Figure]) -> str:
    """One line a figure, best first inside each shape."""
    lines = [f"{'op':14}{'shape':34}{'who':16}{'us':>10}{'TF/s':>8}{'TB/s':>7}{'rel.err':>10}"]
    groups: dict[tuple[str, str], list[Figure]] = {}
    for f in figures:
        groups.setdefault((f.op, f.shape), []).append(f)
    for group in groups.values():
        for f in sorted(group, key=lambda f: (math.isnan(f.microseconds), f.microseconds)):
            error = "" if f.error is None else f"{f.error:.1e}"
            lines.append(f"{f.op:14}{f.shape:34}{f.who:16}{f.microseconds:10.1f}{f.tflops:8.0f}{f.terabytes:7.2f}{error:>10}  {f.note}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="all", help="comma-separated ops, or all")
    parser.add_argument("--peers", default="eager,compile", help=f"comma-separated: {', '.join(peer_module.PEERS)}")
    parser.add_argument("--set", default="large", choices=sorted(workloads.SETS), help="which shapes")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    wanted = None if options.ops == "all" else options.ops.split(",")
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    figures = []
    for work in workloads.SETS[options.set]():
        if wanted is None or work.op in wanted:
            figures += bench(work, options.peers.split(","), flush)
            print(table(figures[-len(figures) :]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(figures))
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "dtkernels": dtkernels.__version__, "command": " ".join(sys.argv)}
    if options.json:
        options.json.write_text(json.dumps({**versions, "figures": [asdict(f) for f in figures]}, indent=1))
    print(versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
