"""Patch models so that `generate` decodes with CUDA graphs: ``apply_to(model, graphs=True)``.

The model's forward replays a graph for a step of one token with a static cache. `generate` makes such a cache where the caller asks for none.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ..layers.loss import written_loss_forward
from ..patching.call_stats import CallRecord
from ..patching.forward_patching import InPlaceOf, hooks_of_all, in_autocast, replace_forward, slot_of, taken, transformed
from ..patching.report import SKIPPED, PatchReport
from .decode_graphs import WARMING, DecodeGraphs
from .model_state import device_of
from .recorders import recorder_for
from .static_cache import cache_in, why_not_static

OP = "graphs"
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_STATIC = ("static", "hybrid", "hybrid_chunked", "sliding_window")
_PREVIOUS = "_previous_max_cache_length"  # transformers makes no cache shorter than the longest before


@dataclass
class GraphRecord(CallRecord):
    """The steps of one token of one model: those that a graph computed, warm-ups, and those of the model's own forward, with the reasons.

    A warm-up runs the model's forward before its capture, twice for each graph. It is no fallback.
    """

    warm_ups: int = 0

    def count(self, fallback: str | None, x: torch.Tensor | None = None) -> None:
        """Count one step; ``fallback`` is the reason why no graph computed it, or WARMING."""
        warms = fallback == WARMING
        super().count(None if warms else fallback, x)
        self.warm_ups += warms

    @property
    def paths(self) -> dict[str, int]:
        """Return steps by path: "graph", "warm-up", "own path"."""
        own = self.fallbacks.total()
        return {"graph": self.calls - self.warm_ups - own, "warm-up": self.warm_ups, "own path": own}


class _Generate(InPlaceOf):
    method = "generate"


def graph_forward(record: GraphRecord, graphs: DecodeGraphs, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute the forward of ``model``; a step of one token replays a graph where that is possible."""
    forward = record.before or partial(type(model).forward, model)  # with a patched loss
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    cache = cache_in(kwargs)
    if cache is None or not _one_token(args, kwargs):
        return forward(*args, **kwargs)
    device = device_of(model)
    reason = "arguments without names" if args else _why_not(model, device, cache)
    if reason is not None or device is None or (recorder := recorder_for(device)) is None:
        record.count(reason)
        return forward(*args, **kwargs)
    outputs, reason = graphs.step(model, forward, kwargs, cache, device, recorder)
    record.count(reason)
    return outputs


def _one_token(args: tuple, kwargs: dict[str, Any]) -> bool:
    given = args[0] if args else kwargs.get("input_ids")
    return isinstance(given, torch.Tensor) and given.dim() == 2 and given.shape[1] == 1


def _why_not(model: nn.Module, device: torch.device | None, cache: Any) -> str | None:
    """Return why a step takes the model's own path; what depends on the model alone, graphs keep."""
    if torch.is_grad_enabled() and device is not None and recorder_for(device) is not None:
        return "gradients are on"
    return _why_no_step(model, device) or why_not_static(cache)


def _why_no_step(model: nn.Module, device: torch.device | None) -> str | None:
    """Return why no step can be a graph where it is called, whatever its cache; generate switches gradients off by itself."""
    if device is None or recorder_for(device) is None:
        return _no_graphs(device)
    if model.training:
        return "training mode"
    if in_autocast(device.type):
        return "autocast"
    if (reason := transformed() or hooks_of_all()) is not None:
        return reason
    if torch._C._len_torch_dispatch_stack() or device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "another graph, or a torch dispatch mode, records the step"
    return None


def _no_graphs(device: torch.device | None) -> str:
    return f"no CUDA graphs on {'a CPU' if device is None or device.type == 'cpu' else device.type}"


def graph_generate(record: GraphRecord, graphs: DecodeGraphs, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate as ``model`` does, with a static cache and without torch.compile where the caller asks for neither.

    Where no step can be a graph the cache stays what it is: under autocast, static caches of transformers 5.17 refuse keys and values of two dtypes.
    """
    original = partial(type(model).generate, model)
    more = {} if _why_no_step(model, device_of(model)) is not None else _static(model, args, kwargs)
    if not more:
        return original(*args, **kwargs)
    had = vars(model).get(_PREVIOUS)
    vars(model).pop(_PREVIOUS, None)
    try:
        return original(*args, **{**kwargs, **more})
    finally:
        vars(model).pop(_PREVIOUS, None)
        if had is not None:
            setattr(model, _PREVIOUS, had)


def _static(model: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that give a generation a static cache; none if the caller asks for something that excludes it."""
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    own = model.generation_config
    config = copy.copy(given if given is not None else own)
    for name, value in kwargs.items():
        if hasattr(config, name):
            setattr(config, name, value)

    def asked(name: str) -> Any:
        value = getattr(config, name, None)
        return getattr(own, name, None) if value is None else value

    others = [asked("compile_config"), cache_in(kwargs), kwargs.get("custom_generate"), kwargs.get("assistant_model"), asked("dola_layers")]
    kind = asked("cache_implementation")
    if len(args) > 2 or asked("use_cache") is False or any([other is not None for other in others]) or kind not in (None, *_STATIC):
        return {}
    if str(getattr(config.get_generation_mode(None), "value", "")) not in _MODES:
        return {}
    more = {"cache_implementation": kind or "static", "disable_compile": True}
    length = _length(args, kwargs, asked("max_new_tokens"), asked("max_length"))
    if length is not None and hasattr(config, "max_cache_len"):
        more["max_cache_len"] = max(bucket(length), asked("max_cache_len") or 0)
    return more


def _length(args: tuple, kwargs: dict[str, Any], new: int | None, longest: int | None) -> int | None:
    """Return how many tokens the cache has to hold, or None if that is not known yet."""
    prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if new is None:
        return longest
    tokens = [t.shape[1] for t in (prompt, kwargs.get("inputs_embeds")) if isinstance(t, torch.Tensor) and t.dim() > 1]
    return sum(tokens) + new if tokens else None


def bucket(length: int) -> int:
    """Round a cache's length up, by an eighth at most beyond 512: prompts of similar lengths share a graph."""
    step = max(64, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def patch_graphs(model: nn.Module, report: PatchReport) -> None:
    """Patch `forward` and `generate` of every model of transformers inside ``model`` that generates."""
    found = [(name, module) for name, module in model.named_modules() if callable(getattr(module, "generate", None)) and hasattr(module, "prepare_inputs_for_generation")]
    own = [(name, module) for name, module in found if "generation_config" in dir(module) and "peft" not in type(module).__module__]
    if not own:
        report.add("", OP, SKIPPED, "no model of transformers that generates")
    for name, module in own:
        current = vars(module).get(slot_of(module))
        ours_below = isinstance(current, partial) and current.func is written_loss_forward
        record, graphs = GraphRecord(), DecodeGraphs()
        forward = InPlaceOf(graph_forward, record, graphs, module)
        replace_forward(name, module, OP, forward, _why_never(module) or (None if ours_below else taken(module, type(module))), report)
        if report.rows[-1].record is not record:  # skipped, patched before, or a dry run
            continue
        generate = _Generate(graph_generate, record, graphs, module)
        report.on_undo(partial(_restore_generate, weakref.ref(module), generate, graphs))
        vars(module)["generate"] = generate


def _why_never(model: nn.Module) -> str | None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "an encoder and a decoder: the cache of two parts is not supported"
    cls = cast(Any, type(model))
    if not getattr(cls, "_can_compile_fullgraph", getattr(cls, "_supports_static_cache", False)):
        return f"{cls.__name__} does not support static caches"
    return "its generate was already replaced by somebody else" if "generate" in vars(model) else None


def _restore_generate(ref: weakref.ref, generate: Callable, graphs: DecodeGraphs) -> None:
    graphs.clear()
    module = ref()
    if module is not None and vars(module).get("generate") is generate:
        del vars(module)["generate"]  # the module had none: see _why_never
