"""Measure host overhead: eager calls with and without gradients, the first call of a process, and the import.

    python tools/bench_host_overhead.py                      everything, compared with torch's own ops
    python tools/bench_host_overhead.py --json out.json      also write the figures as JSON
    python tools/bench_host_overhead.py --first softmax      the first calls of one op in milliseconds, each in a fresh process

Calls run in bursts that the GPU keeps up with. Our bursts and torch's alternate, so that both meet the same machine load. A figure is
the median burst time divided by its calls. Before a first call torch computes a gradient of its own, because its first one is slow.
DTKERNELS_TABLES names the tables as usual. Without a prebuilt kernel the first call compiles, and its line says so.
Python should be able to write bytecode beside the modules, as in an installation by pip: else each process compiles their source.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from functools import partial

import torch
from common.cli_types import Parser, file_to_write
from common.timing import write_figures

ROUNDS, BURST = 60, 100
ROWS, COLUMNS = 256, 2048
FIRST = """
import sys, time, torch
x = torch.randn({rows}, {columns}, device="cuda").bfloat16().requires_grad_({gradients})
w = torch.ones(2, 2, device="cuda", requires_grad=True)
torch.autograd.grad(torch.softmax(w, -1), w, w.detach())
torch.cuda.synchronize()
begin = time.perf_counter()
import dtkernels
imported = time.perf_counter()
def call(x):
    y = dtkernels.ops.{op}(x)
    if {gradients}:
        torch.autograd.grad(y, x, y.detach())
call(x)
called = time.perf_counter()
torch.cuda.synchronize()
call(x)
known = time.perf_counter()
call(x[: {rows} // 2])
other = time.perf_counter()
print((imported - begin) * 1e3, (called - imported) * 1e3, (other - known) * 1e3, "triton" in sys.modules)
"""


def microseconds(*calls) -> list[float]:
    """Return the median host time of each call, in alternating bursts; the GPU catches up before each burst."""
    for call in calls:
        for _ in range(BURST):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, found in zip(calls, times):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(BURST):
                call()
            found.append((time.perf_counter() - begin) / BURST * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(found) for found in times]


def calls(dtype: torch.dtype):
    """Return name -> (ours, torch's, inputs)."""
    import dtkernels.ops as ops

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)

    x, wide = random(ROWS, COLUMNS), random(1024, 4096)
    weights = [random(1), random(COLUMNS), random(COLUMNS)]
    many = [random(1), random(4096), random(4096)]
    eager = {"relu": torch.relu, "softmax": lambda x: torch.softmax(x, -1), "dyt": lambda x, a, w, b: torch.tanh(a * x) * w + b}
    found = {name: (getattr(ops, name), eager[name], (x, *(weights if name == "dyt" else []))) for name in eager}
    trained = {name: (getattr(ops, name), eager[name], (wide, *(many if name == "dyt" else []))) for name in eager}
    return found, trained


def both_ways(call, inputs):
    """Return forward and backward as one call."""
    inputs = [t.clone().requires_grad_() for t in inputs]
    grad = torch.ones_like(call(*inputs))

    def run():
        torch.autograd.grad(call(*inputs), inputs, grad)

    return run


def eager_calls(dtype: torch.dtype) -> list[dict]:
    """Measure repeated calls."""
    found, trained = calls(dtype)
    figures = []
    x = found["relu"][2][0]
    with torch.no_grad():
        for name, (ours, theirs, inputs) in found.items():
            *pair, base = microseconds(partial(ours, *inputs), partial(theirs, *inputs), partial(torch.relu, x))
            figures.append({"what": f"{name} forward", "us": pair[0], "torch_us": pair[1], "relu_us": base})
            show(figures[-1])
    for name, (ours, theirs, inputs) in trained.items():
        pair = microseconds(both_ways(ours, inputs), both_ways(theirs, inputs))
        figures.append({"what": f"{name} forward + backward 1024x4096", "us": pair[0], "torch_us": pair[1], "relu_us": base})
        show(figures[-1])
    return figures


def show(figure: dict) -> None:
    """Format one line."""
    print(
        "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" if k == "what" else f"{k} {v}" for k, v in figure.items()), flush=True
    )


def first_call(op: str, gradients: bool, runs: int = 5) -> dict:
    """Return the median over fresh processes; with ``gradients``, of a forward and its backward."""
    what, found = f"first {op}{' forward + backward' if gradients else ''}", []
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(runs):
        command = [sys.executable, "-c", FIRST.format(op=op, rows=ROWS, columns=COLUMNS, gradients=gradients)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            return {"what": what, "failed": (done.stderr.strip().splitlines() or ["?"])[-1]}
        *times, triton = done.stdout.split()
        found.append([float(t) for t in times] + [triton == "True"])
    medians = [statistics.median(column) for column in list(zip(*found))[:3]]
    return {
        "what": what,
        "import_ms": medians[0],
        "first_ms": medians[1],
        "other_shape_ms": medians[2],
        "triton": any(f[3] for f in found),
    }


def main(argv: list[str] | None = None) -> int:
    parser = Parser("bench_host_overhead", __doc__)
    parser.add_argument("--json", type=file_to_write, help="write the figures here")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--first", choices=("softmax", "relu"), help="only the first call of this op in a fresh process")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_host_overhead: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    figures = [] if options.first else eager_calls(getattr(torch, options.dtype))
    for op in [options.first] if options.first else ["softmax", "relu"]:
        for gradients in (False, True):
            figures.append(first_call(op, gradients))
            show(figures[-1])
    if options.json:
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
