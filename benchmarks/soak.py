"""Does a long run stay as fast and as small as it began? Calls of changing sizes in one process; time, memory and caches by tenths.

    python benchmarks/soak.py --calls 10000000 --seconds 900            on the GPU, if there is one
    python benchmarks/soak.py --device stand-in --calls 300000          the host's work for an H200 without one: launches do nothing
    python benchmarks/soak.py --processes 2 --calls 200000              two processes on one GPU at once, both checked

Nine calls of ten take one of a few sizes of each op, the tenth any number of rows (of queries, of positions). One of ten has a gradient. One of a
thousand is compared with torch. Exit status 1 if a result is wrong, or if time or memory grew: bounds below.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(p) for p in (ROOT, ROOT / "tools", ROOT / "tests") if str(p) not in sys.path]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from common.cli_types import Parser, at_least, file_to_write, some_of, within  # noqa: E402

import dtkernels  # noqa: E402
from dtkernels.runtime.bounded_cache import BoundedCache  # noqa: E402

DEVICES = ("cuda", "cpu", "stand-in")
HOT = 24  #: sizes of each op that come again and again
FRESH = 0.1  #: the part of the calls that draw another number of rows
GRADIENTS = 0.1  #: the part of the calls that go backward too
BATCH = 500  #: calls between two looks at the clock
CHECKED = 1000  #: one call of so many is compared with torch
SLOWER = 1.25  #: the most that the last three tenths may take over the second to the fourth, medians of batches
GROWTH = 32.0  #: MiB that the process, and torch's tensors, may grow in the second half
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  #: norm of the difference over the norm of torch's result
ON_CPU = 16  #: on the CPU, where a call computes at once, the numbers of rows are divided by it

# -- the calls ----------------------------------------------------------------------------------------------------------


class Data:
    """Arguments of any size, as views of one tensor of random numbers: a call allocates its results only."""

    def __init__(self, device: str, dtype: torch.dtype, largest: int):
        self.flat = torch.randn(largest + 64 * 1024, generator=torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)
        self.targets = torch.arange(8192, device=device)

    def __call__(self, *shape: int, slot: int = 0) -> torch.Tensor:
        start = 4096 * slot
        return self.flat[start : start + math.prod(shape)].view(shape)


@dataclass(frozen=True)
class Kind:
    """An op: our call and torch's, and the arguments of a size: a number of rows up to ``rows``, which calls change, and widths, which
    models fix. ``wanted``: the arguments with gradients.
    """

    ours: Callable
    eager: Callable
    rows: int
    widths: tuple[tuple[int, ...], ...]
    arguments: Callable[..., tuple]
    wanted: tuple[int, ...] = (0,)


def _attention(d: Data, length: int, batch: int, heads: int) -> tuple:
    return tuple(d(batch, heads, length, 64, slot=i) for i in range(3))


def _classes(d: Data, rows: int, classes: int) -> tuple:
    return d(rows, classes), d.targets[:rows] % classes


def _scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * w + x


ROWS = ((64,), (768,), (1000,), (4096,))
KINDS: dict[str, Kind] = {
    "relu": Kind(dtkernels.ops.relu, torch.relu, 1024, ROWS, lambda d, r, c: (d(r, c),)),
    "softmax": Kind(dtkernels.ops.softmax, lambda x: torch.softmax(x, -1), 1024, ROWS, lambda d, r, c: (d(r, c),)),
    "dyt": Kind(dtkernels.ops.dyt, lambda x, a, w, b: torch.tanh(a * x) * w + b, 1024, ROWS, lambda d, r, c: (d(r, c), d(1, slot=1), d(c, slot=2), d(c, slot=3)), (0, 2, 3)),
    "rmsnorm": Kind(dtkernels.ops.rmsnorm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), 1024, ROWS, lambda d, r, c: (d(r, c), d(c, slot=1)), (0, 1)),
    "swiglu": Kind(dtkernels.ops.swiglu, lambda a, b: F.silu(a) * b, 1024, ROWS, lambda d, r, c: (d(r, c), d(r, c, slot=1)), (0, 1)),
    "mmsigmoid": Kind(dtkernels.ops.mmsigmoid, lambda a, b: torch.sigmoid(a @ b), 512, ((512, 512), (1000, 256)), lambda d, m, n, k: (d(m, k), d(k, n, slot=1)), (0, 1)),
    "two_mm": Kind(dtkernels.ops.two_mm, lambda a, b, c: (a @ b) @ c, 512, ((512, 512, 16), (256, 1000, 64)),
                   lambda d, m, n, k, r: (d(m, k), d(k, r, slot=1), d(r, n, slot=2)), (0, 1, 2)),
    "attention": Kind(dtkernels.ops.attention, F.scaled_dot_product_attention, 512, ((1, 8), (4, 2)), _attention, (0, 1, 2)),
    "fused": Kind(dtkernels.fuse(_scaled), _scaled, 1024, ROWS, lambda d, r, c: (d(r, c), d(c, slot=1)), (0, 1)),
    "cross_entropy": Kind(dtkernels.ops.cross_entropy, lambda x, t: F.cross_entropy(x.float(), t), 1024, ROWS, _classes),
}  # fmt: skip


@dataclass
class Call:
    """One call: an op at a size, perhaps with gradients."""

    op: str
    size: tuple[int, ...]
    arguments: tuple
    gradient: bool

    def __call__(self, eager: bool = False) -> list[torch.Tensor]:
        """Return the result, then the gradients."""
        kind = KINDS[self.op]
        run = kind.eager if eager else kind.ours
        if not self.gradient:
            return [run(*self.arguments)]
        leaves = [t.detach().requires_grad_(i in kind.wanted) for i, t in enumerate(self.arguments)]
        out = run(*leaves)
        return [out.detach(), *torch.autograd.grad(out, [leaves[i] for i in kind.wanted], torch.ones_like(out))]

    def wrong(self, dtype: torch.dtype) -> str:
        """Return how the results differ from torch's, or ""."""
        for name, got, right in zip(("result", *(f"gradient {i}" for i in KINDS[self.op].wanted)), self(), self(eager=True)):
            error = ((got.float() - right.float()).norm() / right.float().norm().clamp_min(1e-3)).item()
            if not error <= TOLERANCE[dtype]:
                return f"{self.op} {'x'.join(map(str, self.size))}: {name} off by {error:.1e} of its norm"
        return ""


def calls(ops: tuple[str, ...], seed: int, data: Data, divisor: int) -> Iterator[Call]:
    """Yield calls without end, the same for a seed."""
    draw = random.Random(f"soak {seed}")

    def size(op: str) -> tuple[int, ...]:
        kind = KINDS[op]
        return draw.randint(1, kind.rows // divisor), *draw.choice(kind.widths)

    hot = {op: [size(op) for _ in range(HOT)] for op in ops}
    while True:
        op = draw.choice(ops)
        shape = size(op) if draw.random() < FRESH else draw.choice(hot[op])
        yield Call(op, shape, KINDS[op].arguments(data, *shape), draw.random() < GRADIENTS)


# -- what a process holds -----------------------------------------------------------------------------------------------


@dataclass
class Tenth:
    """What was measured in one tenth. Memory in MiB at its end; ``microseconds``: of the host, a call, the median of batches."""

    calls: int
    microseconds: float
    resident: float
    tensors: float
    reserved: float
    objects: int
    cached: int
    largest_cache: int
    other_caches: int


def resident() -> float:
    """Return the MiB of this process in memory, without what is free and the allocator keeps: it grows for a long time by being cut up."""
    with contextlib.suppress(OSError, AttributeError):  # a C library that is not glibc
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def look(done: int, times: list[float]) -> Tenth:
    """Measure memory and caches."""
    gc.collect()
    found = gc.get_objects()
    bounded = [len(o) for o in found if type(o) is BoundedCache]
    ours = [o for o in found if type(o) is functools._lru_cache_wrapper and str(getattr(o, "__module__", "")).startswith("dtkernels")]
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    tensors, reserved = (torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20) if on_gpu else (_tensors(found), 0.0)
    return Tenth(done, statistics.median(times) * 1e6, resident(), tensors, reserved, len(found), sum(bounded), max(bounded, default=0), sum(o.cache_info().currsize for o in ours))


def _tensors(found: list) -> float:
    """Return the MiB of the tensors on the CPU that Python knows, each memory once."""
    known = {}
    for o in found:
        if type(o) in (torch.Tensor, torch.nn.Parameter) and o.device.type == "cpu" and o.layout == torch.strided:
            storage = o.untyped_storage()
            known[storage.data_ptr()] = storage.nbytes()
    return sum(known.values()) / 2**20


def soak(options: argparse.Namespace, dtype: torch.dtype, data: Data) -> tuple[list[Tenth], list[str]]:
    """Call until the calls or the seconds are used up; return the tenths and what was wrong."""
    stream = calls(options.ops, options.seed, data, ON_CPU if options.device == "cpu" else 1)
    batch = max(1, min(BATCH, options.calls // 100))
    tenths, wrong, times, done, counted = list[Tenth](), list[str](), list[float](), 0, 0
    begin = time.monotonic()
    while len(tenths) < 10:
        todo = [next(stream) for _ in range(batch)]
        start = time.perf_counter()
        for call in todo:
            call()
        times.append((time.perf_counter() - start) / batch)
        if options.device == "cuda":
            torch.cuda.synchronize()
        done += batch
        if done // CHECKED > (done - batch) // CHECKED and options.device != "stand-in":
            wrong += [why for why in [todo[-1].wrong(dtype)] if why]
        progress = max(done / options.calls, (time.monotonic() - begin) / options.seconds)
        if progress >= (len(tenths) + 1) / 10:
            tenths.append(look(done - counted, times))
            print(line(len(tenths), tenths[-1]), flush=True)
            times, counted = [], done
    return tenths, wrong


# -- output -------------------------------------------------------------------------------------------------------------


HEAD = f"{'tenth':>5}{'calls':>10}{'us a call':>11}{'process MiB':>13}{'tensors MiB':>13}{'reserved MiB':>14}{'objects':>10}{'cached':>9}{'largest':>9}{'lru':>8}"


def line(number: int, t: Tenth) -> str:
    """Format one tenth."""
    return (f"{number:5}{t.calls:10}{t.microseconds:11.1f}{t.resident:13.1f}{t.tensors:13.1f}{t.reserved:14.1f}{t.objects:10}{t.cached:9}"
            f"{t.largest_cache:9}{t.other_caches:8}")  # fmt: skip


def grown(tenths: list[Tenth]) -> list[str]:
    """Say what grew by more than its bound."""
    early, late = (statistics.median(t.microseconds for t in part) for part in (tenths[1:4], tenths[7:]))
    found = [f"a call took {late:.1f} us in the last three tenths, {early:.1f} in the second to the fourth: more than {SLOWER} times"] if late > SLOWER * early else []
    for name, words in (("resident", "the process"), ("tensors", "its tensors"), ("reserved", "torch's reserved memory")):
        half, end = getattr(tenths[4], name), getattr(tenths[-1], name)
        if end - half > GROWTH:
            found.append(f"{words} grew from {half:.0f} to {end:.0f} MiB in the second half: more than {GROWTH:g} MiB")
    return found


def together(options: argparse.Namespace, argv: list[str]) -> int:
    """Run several processes at once, each with its own seed; 1 if one of them failed."""
    command = [sys.executable, str(Path(__file__).resolve()), *argv, "--processes", "1"]
    running = [subprocess.Popen([*command, "--seed", str(options.seed + i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(options.processes)]
    for i, process in enumerate(running):
        print(f"process {i + 1}, seed {options.seed + i}\n{process.communicate()[0]}", flush=True)
    print(f"exit statuses: {', '.join(str(p.returncode) for p in running)}")
    return int(any(p.returncode for p in running))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("soak", __doc__)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--calls", type=at_least(1000), default=10_000_000)
    parser.add_argument("--seconds", type=within(0), default=900.0, help="stop after so long; tenths are of whichever ends first")
    parser.add_argument("--device", choices=DEVICES, default=usual, help="cpu: the torch reference; stand-in: dispatch as on an H200, with launches that do nothing")
    parser.add_argument("--ops", type=some_of(tuple(KINDS)), default=tuple(KINDS), help=f"comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--processes", type=at_least(1), default=1, metavar="N", help="run N at once")
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--json", type=file_to_write)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the soak."""
    argv = sys.argv[1:] if argv is None else argv
    options = _options(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("soak: no GPU: torch.cuda.is_available() is False; --device cpu or stand-in needs none", file=sys.stderr)
        return 2
    if options.processes > 1:
        return together(options, argv)
    dtype, device = (torch.bfloat16, "cuda") if options.device == "cuda" else (torch.float32 if options.device == "cpu" else torch.bfloat16, "cpu")
    data = Data(device, dtype, 1024 * 4096 + 4096 * 8)
    if options.device == "stand-in":
        import stand_in_driver

        stand_in_driver.use()
    print(HEAD, flush=True)
    tenths, wrong = soak(options, dtype, data)
    failures = [*wrong, *grown(tenths)]
    paths = {op: {k: n for k, n in kinds.items() if n} for op, kinds in dtkernels.paths().items()}
    if options.json:
        options.json.write_text(json.dumps({"command": " ".join(sys.argv), "tenths": [asdict(t) for t in tenths], "failures": failures, "paths": paths}, indent=1) + "\n")
    checked = "nothing was compared" if options.device == "stand-in" else f"{len(wrong)} of about {sum(t.calls for t in tenths) // CHECKED} compared are wrong"
    print(f"{sum(t.calls for t in tenths)} calls; {checked}; paths {paths}")
    print("\n".join(f"FAILED: {why}" for why in failures) or "time and memory are flat")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
