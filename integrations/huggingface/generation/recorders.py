"""Record a function's kernels as a CUDA graph, after warm-ups on another stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """What records steps on one kind of device."""

    def warm_up(self, device: torch.device, function: Callable[[], Any]) -> Any:
        """Run a function where captures will run; return its result."""

    def read_by_caller(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        """Note that the caller's stream reads tensors which a warm-up made."""

    def capture(self, device: torch.device, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record a function. Return what repeats its kernels, and its result, whose tensors each repetition writes."""

    def wait(self, device: torch.device, stream: Any) -> Any:
        """Have the current stream wait for ``stream``, if that is another; return the current one."""


class CudaRecorder:
    """Record CUDA graphs. Other threads may use the device meanwhile."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        return self._streams.setdefault(device, torch.cuda.Stream(device))

    def warm_up(self, device: torch.device, function: Callable[[], Any]) -> Any:
        """Run a function on a stream beside the current one, which waits for it."""
        current, beside = torch.cuda.current_stream(device), self._stream(device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            result = function()
        current.wait_stream(beside)
        return result

    def read_by_caller(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        """Keep the memory of tensors until the current stream has read them."""
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(device))

    def capture(self, device: torch.device, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture a function; its intermediate tensors get a memory pool of their own."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=self._stream(device), capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result

    def wait(self, device: torch.device, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
        """Have the current stream wait for the one that used a graph before."""
        current = torch.cuda.current_stream(device)
        if stream is not None and stream != current:
            current.wait_stream(stream)
        return current


_RECORDERS: dict[str, Recorder] = {"cuda": CudaRecorder()}


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records steps on a device, or None where there are no graphs."""
    if device.type == "cuda" and torch.version.cuda is None:
        return None  # HIP's graphs are not tested
    return _RECORDERS.get(device.type)
