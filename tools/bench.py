"""Time ops and their peers on this GPU: same inputs, rotated order, cold L2, every result checked against float64.

    python tools/bench.py                                        one large shape for each op, forward
    python tools/bench.py --set wide --direction all --json out.json
    python tools/bench.py --ops softmax --shapes 4096x4096,128x65536 --dtype fp32 --peers eager,liger
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch._dynamo
import torch._functorch.config

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common.baselines as peer_module  # noqa: E402
from common import (
    timing,  # noqa: E402
    workloads,  # noqa: E402
)
from common.cli_types import Parser, file_to_write, some_of, within  # noqa: E402

import dtkernels  # noqa: E402
from dtkernels.lang.errors import error_line  # noqa: E402
from dtkernels.runtime.torch_support.dtypes import DTYPE_NAMES  # noqa: E402

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
DIRECTIONS = ("forward", "backward", "both")


@dataclass
class Figure:
    """One op at one shape in one direction by one implementation.

    ``limit``: the time of a copy of the bytes that must move, or of the operations at the rate of torch's largest products,
    whichever is longer. ``fraction``: limit / time. ``error``: norm of the difference from float64 over the norm of float64,
    the largest of all outputs and gradients.
    """

    op: str
    shape: str
    dtype: str
    direction: str
    who: str
    microseconds: float
    host_microseconds: float = math.nan
    tflops: float = 0.0
    terabytes: float = 0.0
    limit: float = math.nan
    fraction: float = math.nan
    error: float | None = None
    note: str = ""


# -- one implementation -------------------------------------------------------------------------------------------------


def preparation(fn, inputs: tuple, wanted: tuple[int, ...], direction: str, grads: tuple):
    """Return a function that, run on a stream, prepares and returns the call to time."""
    if direction == "forward":

        def prepare():
            def run():
                with torch.no_grad():
                    return fn(*inputs)

            return run

        return prepare
    leaves = [t.detach().clone().requires_grad_(i in wanted) if t.is_floating_point() else t for i, t in enumerate(inputs)]
    asked = [leaves[i] for i in wanted]

    def backward():
        outputs = _tuple(fn(*leaves))
        return lambda: torch.autograd.grad(outputs, asked, _fitting(grads, outputs), retain_graph=True)

    def both():
        def run():
            outputs = _tuple(fn(*leaves))
            return torch.autograd.grad(outputs, asked, _fitting(grads, outputs))

        return run

    return backward if direction == "backward" else both


def _tuple(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def _fitting(grads: tuple, outputs: tuple) -> tuple:
    """Fit a single gradient to the outputs: some implementations return several tensors, others one joined tensor."""
    if len(outputs) == len(grads):
        return grads
    return tuple(grads[0].split([o.shape[1] for o in outputs], 1))


def results(fn, inputs: tuple, wanted: tuple[int, ...], direction: str, grads: tuple) -> list[torch.Tensor]:
    """Return what is checked: the outputs, or the gradients."""
    if direction == "forward":
        with torch.no_grad():
            outputs = _tuple(fn(*inputs))
        return [outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)]
    return list(preparation(fn, inputs, wanted, "both", grads)()())


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the truth; NaN propagates."""
    return ((got.double() - truth).norm() / truth.norm().clamp_min(1e-300)).item()


def errors(got: list[torch.Tensor], truth: list[torch.Tensor], part) -> float:
    """Return the largest error of several tensors, over the part where the truth is known."""
    return max(relative_error(*part((g, t))) if g.shape == t.shape else relative_error(part((g,))[0], t) for g, t in zip(got, truth))


# -- one workload -------------------------------------------------------------------------------------------------------


def bench(work: workloads.Workload, names: list[str], direction: str, dtype: torch.dtype, host: bool) -> list[Figure]:
    """Time every implementation of one workload in one direction, in rotation over several rounds."""
    torch.manual_seed(time.time_ns() % 2**31)  # fresh data in every run
    inputs = work.make()
    with torch.no_grad():
        grads = tuple(torch.randn_like(o) for o in _tuple(work.eager(*work.part(inputs))))
        if work.part(inputs)[0].shape != inputs[0].shape:
            grads = (torch.randn_like(inputs[0]),)
    wanted = work.differentiable
    double = tuple(t.double() if t.is_floating_point() else t for t in work.part(inputs))
    truth = results(work.eager, double, wanted, direction, tuple(g.double() for g in work.part(grads)))
    found, missing = peer_module.implementations(work, names)
    about = (work.op, work.shape, work.dtype, direction)
    figures = [Figure(*about, who, math.nan, note=why) for who, why in missing.items()]
    running, made = {}, {}
    for who, fn in found.items():
        try:
            own = tuple(t.clone() for t in inputs)  # a peer may write to its inputs
            error = None if who in peer_module.REFERENCES else errors(results(fn, own, wanted, direction, grads), truth, work.part)
            own = tuple(t.clone() for t in inputs)
            prepare = preparation(fn, own, wanted, direction, grads)
            call, in_graph = timing.captured(prepare)
            running[who], made[who] = call, (error, prepare, "" if in_graph else "not captured: host time is in it")
        except Exception as problem:  # a peer that cannot run this shape is reported, not hidden
            torch.cuda.synchronize()
            figures.append(Figure(*about, who, math.nan, note=error_line(problem, 90)))
    times = timing.interleaved_times(running)
    moved, flops = (sum(v) if direction == "both" else v[DIRECTIONS.index(direction)] for v in (work.bytes, work.flops))
    limit = max(timing.copy_time(int(moved)), flops / timing.product_rate(dtype) * 1e6 if flops else 0.0)
    for who, (error, prepare, note) in made.items():
        us = times[who]
        on_host = timing.host_time(prepare(), calls=max(3, min(30, int(20000 / us)))) if host else math.nan
        figures.append(Figure(*about, who, us, on_host, flops / us / 1e6, moved / us / 1e6, limit, limit / us, error, note))
    return figures


# -- output -------------------------------------------------------------------------------------------------------------


def table(figures: list[Figure]) -> str:
    """Format one line for each figure, best first within each shape; then a comparison of ours with the best peer."""
    lines = [f"{'op':14}{'shape':28}{'dtype':9}{'way':9}{'who':13}{'us':>9}{'host us':>9}{'TF/s':>6}{'TB/s':>6}{'of limit':>9}{'rel.err':>9}"]
    for group in grouped(figures).values():
        for f in sorted(group, key=lambda f: (math.isnan(f.microseconds), f.microseconds)):
            error = "" if f.error is None else f"{f.error:.1e}"
            lines.append(f"{f.op:14}{f.shape:28}{f.dtype:9}{f.direction:9}{f.who:13}{f.microseconds:9.1f}{f.host_microseconds:9.1f}{f.tflops:6.0f}{f.terabytes:6.2f}"
                         f"{f.fraction:9.2f}{error:>9}  {f.note}")  # fmt: skip
    return "\n".join(lines)


def summary(figures: list[Figure]) -> str:
    """Compare ours with the best peer at each shape, with the geometric mean for each op."""
    lines = [f"{'op':14}{'shape':28}{'dtype':9}{'way':9}{'ours us':>9}{'best peer':>22}{'peer/ours':>10}{'of limit':>9}{'error/eager':>12}"]
    ratios: dict[tuple[str, str], list[float]] = {}
    for group in grouped(figures).values():
        ours = next((f for f in group if f.who == "dtkernels"), None)
        rest = [f for f in group if f.who not in ("dtkernels", *peer_module.REFERENCES) and not math.isnan(f.microseconds)]
        if ours is None or math.isnan(ours.microseconds) or not rest:
            lines.append(f"{group[0].op:14}{group[0].shape:28}{group[0].dtype:9}{group[0].direction:9} nothing to compare: {ours.note if ours else 'no run of ours'}")
            continue
        best = min(rest, key=lambda f: f.microseconds)
        eager = next((f for f in rest if f.who == "eager" and f.error), None)
        ratio = best.microseconds / ours.microseconds
        ratios.setdefault((ours.op, ours.direction), []).append(ratio)
        error = f"{ours.error / eager.error:.2f}" if eager and eager.error and ours.error is not None else ""
        lines.append(f"{ours.op:14}{ours.shape:28}{ours.dtype:9}{ours.direction:9}{ours.microseconds:9.1f}{f'{best.who} {best.microseconds:.1f}':>22}{ratio:10.2f}"
                     f"{ours.fraction:9.2f}{error:>12}")  # fmt: skip
    lines += [f"{op:14}{'geometric mean':28}{'':9}{way:9}{'':31}{math.exp(statistics.fmean(map(math.log, r))):10.2f}" for (op, way), r in ratios.items()]
    return "\n".join(lines)


def grouped(figures: list[Figure]) -> dict[tuple, list[Figure]]:
    """Group figures by op, shape, dtype and direction."""
    groups: dict[tuple, list[Figure]] = {}
    for f in figures:
        groups.setdefault((f.op, f.shape, f.dtype, f.direction), []).append(f)
    return groups


def versions() -> dict[str, str]:
    """Return the versions of the software that the figures were measured with."""
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "dtkernels": dtkernels.__version__, "command": " ".join(sys.argv)}
    for name in ("triton", "liger_kernel"):
        try:
            module = __import__(name)
            found[name] = getattr(module, "__version__", "?")
        except ImportError:
            found[name] = "not installed"
    return found


def _works(options: argparse.Namespace) -> list[workloads.Workload]:
    if options.shapes is not None:
        if "all" in options.ops:
            raise ValueError("--shapes needs --ops")
        return [workloads.at(op, shape, DTYPES[options.dtype]) for op in options.ops for shape in options.shapes.split(",")]
    names = workloads.SETS if "all" in options.set else options.set
    found = [w for name in names for w in workloads.SETS[name]() if "all" in options.ops or w.op in options.ops]
    if not found:
        raise ValueError(f"no shapes of {', '.join(options.ops)} in {', '.join(options.set)}; allowed: --set all, or --shapes")
    return found


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench", __doc__)
    parser.add_argument("--ops", type=some_of(("all", *workloads.OPS)), default=("all",), help=f"all, or comma-separated: {', '.join(workloads.OPS)}")
    parser.add_argument("--peers", type=some_of(("all", "none", *peer_module.PEERS)), default=("all",), help=f"comma-separated, all or none: {', '.join(peer_module.PEERS)}")
    parser.add_argument("--set", type=some_of(("all", *workloads.SETS)), default=("large",), help=f"which shapes: all, or comma-separated: {', '.join(workloads.SETS)}")
    parser.add_argument("--shapes", help="instead of a set: comma-separated, as the table prints them (4096x4096, B4H32/8M1S8192D128 causal)")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="of the shapes of --shapes")
    parser.add_argument("--direction", default="forward", choices=(*DIRECTIONS, "all"))
    parser.add_argument("--no-host", action="store_true", help="leave out the time on the host")
    parser.add_argument("--seconds", type=within(0), default=math.inf, help="start no further workload after so long")
    parser.add_argument("--json", type=file_to_write, help="write every figure here, after each workload")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    names = [n for n in peer_module.PEERS if n in options.peers or "all" in options.peers]
    try:
        works = _works(options)
    except ValueError as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    torch._dynamo.config.recompile_limit = 512
    torch._functorch.config.donated_buffer = False  # its graphs run backward more than once
    figures, start = [], time.monotonic()
    for work in works:
        for direction in DIRECTIONS if options.direction == "all" else (options.direction,):
            if time.monotonic() - start > options.seconds:
                print(f"bench: out of time before {work.op} {work.shape} {direction}", file=sys.stderr)
                continue
            figures += bench(work, names, direction, getattr(torch, work.dtype), not options.no_host)
            print(summary(grouped(figures).popitem()[1]).splitlines()[1], file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps({**versions(), "figures": [asdict(f) for f in figures]}, indent=1))
    print(table(figures), summary(figures), sep="\n\n")
    print(versions())
    return 0


if __name__ == "__main__":
    sys.exit(main())
