"""Run steps of decoding as graphs: choose, warm up, capture and replay.

The first two steps of a size run as they are, on another stream, and are watched. The third is captured. From then on a step copies its inputs
into the tensors that the graph reads, replays it, and returns copies of what it wrote. Keys and values stay where the graph reads
them: the cache of a later generation is copied there once. A cache that lives on keeps its memory; the next one gets a graph of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .model_state import ModelState, attributes, changed_attribute, why_not_captured
from .recorders import Recorder
from .static_arguments import NotCapturableError, put_together, take_apart
from .static_cache import Counters, StaticMemory, advance, signature, windows_fill
from .step_trace import Constants, StepTrace, difference

MOST = 4  #: graphs of one model, each with a cache; the one that was used longest ago goes first
WARM_UPS = 2  # first calls of kernels take other paths than later ones; the second step is compared with the third
WARMING = "a warm-up: the first steps of a size"
_MOST_KEYS = 64
MOST_NEW = 32  #: sizes in a row that are watched though none of them comes three times


@dataclass
class _Graph:
    key: Hashable
    memory: StaticMemory
    inputs: list[torch.Tensor]
    replay: Callable[[], None]
    outputs: list[torch.Tensor]
    structure: Any
    steps: list[dict[str, int]]
    constants: Constants  #: the tensors that the graph reads besides
    stream: Any = None


@dataclass
class _Warming:
    constants: Constants
    traces: list[StepTrace] = field(default_factory=list)


class DecodeGraphs:
    """The graphs of one model. A copy of it, or one read from a file, has none: graphs belong to the parameters they were captured with."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.graphs: list[_Graph] = []
        self.clear()

    def clear(self) -> None:
        """Forget all graphs, and why there are none for some steps."""
        for graph in self.graphs:
            if graph.stream is not None:
                graph.stream.synchronize()  # it may still read what is freed now
        self.graphs = []
        self.warming: dict[Hashable, _Warming] = {}
        self.refused: dict[Hashable, str] = {}
        self.state: ModelState | None = None
        self.obstacle: str | None = None
        self.new_keys = 0  # sizes that were met since the last capture

    def __reduce__(self):
        return DecodeGraphs, ()

    def step(self, model: nn.Module, forward: Callable, kwargs: dict[str, Any], cache: Any, device: torch.device, recorder: Recorder) -> tuple[Any, str | None]:
        """Compute a step. Returns its outputs, and why ``forward`` itself ran, or None if a graph did."""
        if (reason := self._changed(model, cache)) is not None:
            return forward(**kwargs), reason
        given: list[torch.Tensor] = []
        try:
            structure = take_apart(kwargs, cache, given, moving=windows_fill(cache))
        except NotCapturableError as error:
            return forward(**kwargs), f"its arguments: {error}"
        if any([t.device != device for t in given]):
            return forward(**kwargs), "inputs on another device"
        key = (structure, signature(cache), torch.is_inference_mode_enabled())
        with self.lock:
            if (reason := self.refused.get(key)) is not None:
                return forward(**kwargs), reason
            graph = self._free(key, cache)
            if graph is None:
                warming = self.warming.get(key)
                if warming is None and self.new_keys >= MOST_NEW:
                    return forward(**kwargs), "the sizes of its inputs change from step to step"
                if warming is None or len(warming.traces) < WARM_UPS:
                    return self._warm_up(key, model, forward, put_together(structure, given, cache), cache, device, recorder), self.refused.get(key, WARMING)
                try:
                    graph = self._capture(key, warming, forward, cache, given, device, recorder)
                except Exception as error:  # the kernels of this step have not run: the forward itself computes it
                    reason = str(error) if isinstance(error, NotCapturableError) else f"capture failed: {_first_line(error)}"
                    self._refuse(key, reason)
                    return forward(**kwargs), reason
            else:
                advance(cache, graph.steps)
            return self._replay(graph, given, cache, device, recorder), None

    def _changed(self, model: nn.Module, cache: Any) -> str | None:
        """Forget what was captured from a model that has changed since; return why none of its steps is captured."""
        with self.lock:
            known = self.state is not None and any([graph.memory.owner() is cache for graph in self.graphs])
            if self.state is not None and (self.state.same_memory() if known else self.state.same(model)):
                return self.obstacle
            self.clear()
            self.state, self.obstacle = ModelState(model), why_not_captured(model)
            return self.obstacle

    def _free(self, key: Hashable, cache: Any) -> _Graph | None:
        """Return a graph for a step of this cache, marked as used last."""
        alike = [graph for graph in self.graphs if graph.key == key and graph.memory.free_for(cache)]
        if not alike:
            return None
        graph = next((graph for graph in alike if graph.memory.owner() is cache), alike[-1])
        self.graphs = [other for other in self.graphs if other is not graph] + [graph]
        return graph

    def _refuse(self, key: Hashable, reason: str) -> None:
        if len(self.refused) >= _MOST_KEYS:
            self.refused.clear()
        self.refused[key] = reason
        self.warming.pop(key, None)

    def _warm_up(self, key: Hashable, model: nn.Module, forward: Callable, kwargs: dict, cache: Any, device: torch.device, recorder: Recorder) -> Any:
        if len(self.warming) >= _MOST_KEYS:
            self.warming.clear()
        if key not in self.warming:
            self.new_keys += 1
        warming = self.warming.setdefault(key, _Warming(Constants(device)))
        trace, had, counters = StepTrace(device, runs=True), attributes(model), Counters(cache)
        with warming.constants:
            outputs = recorder.warm_up(device, lambda: _watched(trace, forward, kwargs))
        warming.traces.append(trace)
        name = changed_attribute(had)
        reason = trace.obstacle or (f"its forward sets {name}" if name else None)
        try:
            counters.steps(cache)
            held: list[torch.Tensor] = []
            structure = take_apart(outputs, cache, held)
        except NotCapturableError as error:
            self._refuse(key, reason or f"its result: {error}")
            return outputs
        if reason is not None:
            self._refuse(key, reason)
        copies = [_own(tensor) for tensor in held]
        recorder.read_by_caller(device, held)
        return put_together(structure, copies, cache)

    def _capture(self, key: Hashable, warming: _Warming, forward: Callable, cache: Any, given: list[torch.Tensor], device: torch.device, recorder: Recorder) -> _Graph:
        memory = next((graph.memory for graph in self.graphs if graph.memory.owner() is cache), None)
        if memory is None:
            memory = StaticMemory(cache)
        memory.take(cache)
        inputs = [t.clone(memory_format=torch.contiguous_format) for t in given]
        kwargs = put_together(key[0], inputs, cache)  # type: ignore[index]
        trace, counters = StepTrace(device, runs=False), Counters(cache)
        try:
            with warming.constants.close():
                replay, result = recorder.capture(device, lambda: _watched(trace, forward, kwargs))
            if (reason := trace.obstacle or difference(trace, warming.traces[-1])) is not None:
                raise NotCapturableError(reason)
            outputs: list[torch.Tensor] = []
            structure, steps = take_apart(result, cache, outputs), counters.steps(cache)
        except BaseException:
            counters.restore(cache)
            raise
        graph = _Graph(key, memory, inputs, replay, outputs, structure, steps, warming.constants)
        self.warming.pop(key)
        self.new_keys = 0
        self.graphs = [*self.graphs[1 - MOST :], graph] if len(self.graphs) >= MOST else [*self.graphs, graph]
        return graph

    def _replay(self, graph: _Graph, given: list[torch.Tensor], cache: Any, device: torch.device, recorder: Recorder) -> Any:
        graph.stream = recorder.wait(device, graph.stream)
        graph.memory.take(cache)
        for static, tensor in zip(graph.inputs, given, strict=True):
            static.copy_(tensor)
        graph.replay()
        return put_together(graph.structure, [_own(tensor) for tensor in graph.outputs], cache)


def _watched(trace: StepTrace, forward: Callable, kwargs: dict) -> Any:
    with trace:
        return forward(**kwargs)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Copy what the next step overwrites, on the stream of the caller."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:120]}"
