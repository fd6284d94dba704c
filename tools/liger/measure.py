"""Measure values, times and memory of one function of Liger's and of ours, called with the same arguments."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from dtkernels.lang.errors import error_line

from .cases import LARGE, SMALL, arguments, losses
from .substitution import FUNCTIONS

DIRECTIONS = ("forward", "backward", "full")
QUANTILES = (20, 50, 80)


@dataclass
class Figure:
    """One function in one direction: ``microseconds`` at the quantiles, ``mebibytes`` above what was allocated before, or ``note`` why not."""

    function: str
    op: str
    rows: int
    dtype: str
    direction: str
    who: str
    microseconds: dict[str, float] = field(default_factory=dict)
    mebibytes: float = math.nan
    note: str = ""


def both(name: str, theirs: dict[str, type]) -> dict[str, Callable]:
    """Return the two functions of a name."""
    return {"dtkernels": FUNCTIONS[name][1], "liger": theirs[name].apply}  # type: ignore[attr-defined]


# -- values -------------------------------------------------------------------------------------------------------------


def values(function: Callable, name: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return results and gradients at small sizes, in float64."""
    given, wanted = arguments(name, SMALL, device, dtype)
    leaves = [t.detach().clone().requires_grad_(i in wanted) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for i, t in enumerate(given)]
    outputs = losses(function(*leaves))
    generator = torch.Generator(device).manual_seed(1)
    grads = [torch.randn(o.shape, generator=generator, device=device).to(o.dtype) if o.dim() else torch.ones_like(o) for o in outputs]
    asked = [leaves[i] for i in wanted]
    found = torch.autograd.grad(outputs, asked, grads, allow_unused=True)
    return [t.detach().double() for t in (*outputs, *(torch.zeros_like(a) if g is None else g for g, a in zip(found, asked)))]


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let Liger's functions run in Triton's interpreter: a number of multiprocessors for its host code, and what the interpreter lacks.

    The interpreter does not make tensors of numbers that a kernel takes, and has no functions of libdevice.
    """
    if torch.cuda.is_available():
        yield
        return
    import triton.language as tl
    from triton.runtime import autotuner, interpreter

    def converted(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return convert(value)

    convert, properties, replaced = interpreter._implicit_cvt, torch.cuda.get_device_properties, []
    functions = {"tanh": lambda x: 2 * tl.sigmoid(2 * x) - 1, "rsqrt": lambda x: tl.rsqrt(x)}
    for name, module in list(sys.modules.items()):
        for attribute, function in functions.items():
            if name.startswith("liger_kernel.ops") and attribute in vars(module):
                replaced.append((module, attribute, vars(module)[attribute]))
                setattr(module, attribute, function)
    benchmark = vars(autotuner.Autotuner)["do_bench"]
    autotuner.Autotuner.do_bench = property(lambda self: lambda call, quantiles=None: [0.0] * 3)  # type: ignore[assignment]  # there is nothing to time
    interpreter._implicit_cvt = converted
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=2, total_memory=0)  # type: ignore[assignment]
    try:
        yield
    finally:
        interpreter._implicit_cvt, torch.cuda.get_device_properties, autotuner.Autotuner.do_bench = convert, properties, benchmark
        for module, attribute, function in replaced:
            setattr(module, attribute, function)


def compared(name: str, theirs: dict[str, type], device: str, dtype: torch.dtype, tolerance: float) -> tuple[str, str]:
    """Return "same", "differs" or "not run", and the largest difference or the reason. Both are compared where both run."""
    found: dict[str, list[torch.Tensor]] = {}
    for who, function in both(name, theirs).items():
        try:
            with stand_ins():
                found[who] = values(function, name, device, dtype)
        except Exception as problem:  # what one library cannot do here is told, and the others go on
            return "not run", f"{who}: {error_line(problem, 120)}"
    if len(found["liger"]) != len(found["dtkernels"]):
        return "differs", f"{len(found['dtkernels'])} results of ours, {len(found['liger'])} of Liger's"
    away = 0.0
    for ours, other in zip(found["dtkernels"], found["liger"]):
        if ours.shape != other.shape:
            return "differs", f"shapes {tuple(ours.shape)} of ours, {tuple(other.shape)} of Liger's"
        scale = max(other.abs().max().item(), 1e-30) if other.numel() else 1.0
        away = max(away, (ours - other).abs().max().item() / scale) if not (ours - other).isnan().any() else math.inf
    return "same" if away <= tolerance else "differs", f"largest difference {away:.1e} of the largest value"


# -- times --------------------------------------------------------------------------------------------------------------


def _prepared(function: Callable, name: str, rows: int, dtype: torch.dtype, direction: str) -> Callable[[], object]:
    """Return the call to time, with arguments of its own on the GPU."""
    given, wanted = arguments(name, {**LARGE, "rows": rows}, "cuda", dtype)
    if direction == "forward":

        def forward():
            with torch.no_grad():
                return function(*given)

        return forward
    leaves = [t.detach().requires_grad_(i in wanted) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for i, t in enumerate(given)]
    asked = [leaves[i] for i in wanted]

    def full():
        outputs = losses(function(*leaves))
        return torch.autograd.grad(outputs, asked, [torch.ones_like(o) for o in outputs], allow_unused=True)

    if direction == "full":
        return full
    outputs = losses(function(*leaves))
    grads = [torch.ones_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, asked, grads, retain_graph=True, allow_unused=True)


def _peak(call: Callable[[], object]) -> float:
    """Return the memory in MiB that a call takes above what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measured(name: str, theirs: dict[str, type], rows: int, dtype: torch.dtype, direction: str, milliseconds: float, rounds: int = 3) -> list[Figure]:
    """Time both functions by turns, with a cold L2, and their memory."""
    from common import timing

    figures, running = [], {}
    for who, function in both(name, theirs).items():
        figure = Figure(name, FUNCTIONS[name][0], rows, str(dtype).removeprefix("torch."), direction, who)
        figures.append(figure)
        try:
            call = _prepared(function, name, rows, dtype, direction)
            call()
            figure.mebibytes = _peak(call)
            running[who] = call
        except Exception as problem:  # also a size that does not fit: the table says so
            torch.cuda.synchronize()
            figure.note = error_line(problem, 90)
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {who: [] for who in running}
    order = list(running)
    for _ in range(rounds):
        for who in order:
            times[who] += timing.gpu_times(running[who], milliseconds)
        order = order[1:] + order[:1]
    for figure in figures:
        if figure.who in times:
            cuts = statistics.quantiles(times[figure.who], n=100, method="inclusive")
            figure.microseconds = {f"{q}%": cuts[q - 1] for q in QUANTILES}
    running.clear()
    torch.cuda.empty_cache()
    return figures


def table(figures: list[Figure]) -> str:
    """Format one line for each function, size and direction: times at the quantiles and memory of both."""
    lines = [f"{'op':24}{'rows':>7} {'way':9}{'ours us: 20%':>13}{'50%':>10}{'80%':>10}{'Liger us: 20%':>15}{'50%':>10}{'80%':>10}{'Liger/ours':>11}{'ours MiB':>10}{'Liger':>9}"]
    for ours, other in zip(figures[::2], figures[1::2]):
        cells = [f"{f.microseconds.get(f'{q}%', math.nan):.1f}" for f in (ours, other) for q in QUANTILES]
        ratio = other.microseconds.get("50%", math.nan) / ours.microseconds.get("50%", math.nan)
        widths = (13, 10, 10, 15, 10, 10)
        lines.append(f"{ours.op:24}{ours.rows:7} {ours.direction:9}{''.join(f'{c:>{w}}' for c, w in zip(cells, widths))}{ratio:11.2f}{ours.mebibytes:10.0f}{other.mebibytes:9.0f}"
                     f"{'  ' if ours.note or other.note else ''}{'; '.join(f'{f.who}: {f.note}' for f in (ours, other) if f.note)}")  # fmt: skip
    return "\n".join(lines)
