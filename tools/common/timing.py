"""Measure time on the GPU, time on the host, and the rates of copies and products."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch

from dtkernels.lang.errors import error_line


@lru_cache(maxsize=1)
def _flush() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


class Replay:
    """A captured call. It keeps alive what the call reads: a backward's graph has only the addresses of what its forward saved."""

    def __init__(self, graph: torch.cuda.CUDAGraph, fn: Callable[[], object], results: object):
        self.graph, self.fn, self.results = graph, fn, results

    def __call__(self) -> None:
        self.graph.replay()


def captured(prepare: Callable[[], Callable[[], object]]) -> tuple[Callable[[], object], bool]:
    """Capture ``prepare()``'s call as a CUDA graph, to exclude host time. Returns (call, whether it was captured).

    ``prepare`` runs on the stream of the capture, so that a backward finds its forward there. A call that waits for the GPU
    (``.item()``, sizes that depend on the data) is not captured and is returned as it is. A capture that fails later leaves
    nothing behind. Raises what the call raises without a graph.
    """
    stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(before)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    begun = False
    try:
        with torch.cuda.stream(stream):
            fn = prepare()
            for _ in range(2):
                fn()
            _without_waiting(fn)
        torch.cuda.synchronize()
        begun = True
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            results = fn()
        return Replay(graph, fn, results), True
    except Exception:  # an error of the call itself shows again below
        torch.cuda.set_stream(before)  # torch.cuda.graph's context stays entered if the capture cannot end
        torch.cuda.synchronize()
        if begun:
            _abandon(graph, pool)
    fn = prepare()
    fn()
    return fn, False


def _without_waiting(fn: Callable[[], object]) -> None:
    """Call ``fn``. Raises RuntimeError if it waits for the GPU, which would break a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


_abandoned: list[torch.cuda.CUDAGraph] = []  #: kept alive: torch's allocator may ask them which streams they capture


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Clean up after a failed capture: memory is still taken from its pool, and the generator still captures.

    A clone with the same seed and offset replaces the generator, because the old one refuses every draw (torch 2.11 ends its
    capture only together with the graph's).
    """
    _abandoned.append(graph)
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # the capture had ended, and something later failed
        pass
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


def gpu_time(fn: Callable[[], object], milliseconds: float = 30.0) -> float:
    """Return the median time of ``fn`` in microseconds by CUDA events; L2 is overwritten before each call."""
    return statistics.median(gpu_times(fn, milliseconds))


def gpu_times(fn: Callable[[], object], milliseconds: float = 30.0) -> list[float]:
    """Return the times of several calls of ``fn`` in microseconds by CUDA events; L2 is overwritten before each call."""
    flush = _flush()
    fn()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    count = max(5, min(100, int(milliseconds / max(start.elapsed_time(end), 1e-3))))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, finish in pairs:
        flush.zero_()
        begin.record()
        fn()
        finish.record()
    torch.cuda.synchronize()
    return [b.elapsed_time(e) * 1e3 for b, e in pairs]


def interleaved_times(running: dict[str, Callable[[], object]], milliseconds: float = 30.0, rounds: int = 3) -> dict[str, float]:
    """Return the median GPU time of each in microseconds, over several rounds that each begin with another one."""
    times: dict[str, list[float]] = {who: [] for who in running}
    order = list(running)
    for _ in range(rounds):
        for who in order:
            times[who].append(gpu_time(running[who], milliseconds))
        order = order[1:] + order[:1]
    return {who: statistics.median(t) for who, t in times.items()}


def times_by_turns(prepared: dict[str, Callable[[], Callable[[], Callable[[], object]]]], milliseconds: float = 15.0) -> tuple[dict[str, float], dict[str, str]]:
    """Return (median GPU time of each in microseconds, notes on those that fail or cannot be captured); ``prepared`` makes what ``captured`` takes."""
    running, notes = {}, {}
    for who, make in prepared.items():
        try:
            running[who], whole = captured(make())
            if not whole:
                notes[f"{who}_note"] = "not captured: host time is in it"
        except torch.AcceleratorError:
            raise
        except Exception as error:
            notes[f"{who}_note"] = error_line(error, 300)
    return interleaved_times(running, milliseconds), notes


def host_time(fn: Callable[[], object], calls: int = 30, rounds: int = 5) -> float:
    """Return the median host time of one call in microseconds; the GPU catches up between rounds."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


@lru_cache(maxsize=256)
def copy_time(moved: int) -> float:
    """Return the microseconds of a copy that reads and writes ``moved`` bytes in total."""
    x = torch.randint(-128, 127, (max(16, int(moved) // 2),), dtype=torch.int8, device="cuda")
    y = torch.empty_like(x)
    replay, _ = captured(lambda: lambda: y.copy_(x))
    return gpu_time(replay)


def _product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: a @ b


@lru_cache(maxsize=4)
def product_rate(dtype: torch.dtype) -> float:
    """Return the operations per second of torch's largest products on this GPU."""
    best = 0.0
    for n in (4096, 8192):
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        replay, _ = captured(partial(_product, a, b))
        best = max(best, 2.0 * n**3 / (gpu_time(replay) * 1e-6))
    return best


def write_figures(path: Path, figures: list[dict]) -> None:
    """Write figures as JSON, with their GPU, torch version and command."""
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    path.write_text(json.dumps({**head, "figures": figures}, indent=1))
