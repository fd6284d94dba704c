"""Time on the GPU, time on the host, and what memory can do: the measurements of the benchmark."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch


@lru_cache(maxsize=1)
def _flush() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


class Replay:
    """A captured call. It keeps what the call reads: a backward's graph has the addresses of what its forward saved, not a hold on it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, fn: Callable[[], object], results: object):
        self.graph, self.fn, self.results = graph, fn, results

    def __call__(self) -> None:
        self.graph.replay()


def captured(prepare: Callable[[], Callable[[], object]]) -> tuple[Callable[[], object], bool]:
    """(what ``prepare()`` gives as a CUDA graph replay, so that host time does not enter; whether it could be captured).

    ``prepare`` runs on the stream of the capture, so that a backward finds its forward there. A call that waits for the GPU
    (``.item()``, sizes that depend on the data) is not captured: it is given as it is. A capture that fails all the same leaves
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
    except Exception:  # whatever it is, it shows again below where it is the call's own
        torch.cuda.set_stream(before)  # the context of torch.cuda.graph stays entered where the capture cannot be ended
        torch.cuda.synchronize()
        if begun:
            _abandon(graph, pool)
    fn = prepare()
    fn()
    return fn, False


def _without_waiting(fn: Callable[[], object]) -> None:
    """Call ``fn``; RuntimeError where it waits for the GPU, which would break a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


_abandoned: list[torch.cuda.CUDAGraph] = []  #: kept, since torch's allocator may ask them which streams they capture


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Take back what a capture that failed leaves in torch: memory is taken from its pool still, and the generator still captures.

    A clone takes the generator's place, of the same seed and offset: the old one refuses every draw (torch 2.11, which ends its
    capture only where the graph's can be ended).
    """
    _abandoned.append(graph)
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # the capture ended, and something later failed
        pass
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


def gpu_time(fn: Callable[[], object], milliseconds: float = 30.0) -> float:
    """Median time of ``fn`` in microseconds by CUDA events, L2 overwritten before each call."""
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
    return statistics.median(b.elapsed_time(e) for b, e in pairs) * 1e3


def in_turn(running: dict[str, Callable[[], object]], milliseconds: float = 30.0, rounds: int = 3) -> dict[str, float]:
    """Median time of each on the GPU in microseconds, over several rounds, each of which another one begins."""
    times: dict[str, list[float]] = {who: [] for who in running}
    order = list(running)
    for _ in range(rounds):
        for who in order:
            times[who].append(gpu_time(running[who], milliseconds))
        order = order[1:] + order[:1]
    return {who: statistics.median(t) for who, t in times.items()}


def host_time(fn: Callable[[], object], calls: int = 30, rounds: int = 5) -> float:
    """Median time in microseconds that the host needs for one call; the GPU is left to catch up between rounds."""
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
    """Time in microseconds of a copy that reads and writes ``moved`` bytes together."""
    x = torch.randint(-128, 127, (max(16, int(moved) // 2),), dtype=torch.int8, device="cuda")
    y = torch.empty_like(x)
    replay, _ = captured(lambda: lambda: y.copy_(x))
    return gpu_time(replay)


def _product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: a @ b


@lru_cache(maxsize=4)
def product_rate(dtype: torch.dtype) -> float:
    """Operations a second of the largest products of torch on this GPU."""
    best = 0.0
    for n in (4096, 8192):
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        replay, _ = captured(partial(_product, a, b))
        best = max(best, 2.0 * n**3 / (gpu_time(replay) * 1e-6))
    return best


def write_figures(path: Path, figures: list[dict]) -> None:
    """As JSON, with the GPU, the torch and the command that they come from."""
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    path.write_text(json.dumps({**head, "figures": figures}, indent=1))
