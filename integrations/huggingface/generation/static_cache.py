"""Read and rebind the memory of a static cache of transformers, whichever cache a graph was captured with."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from .static_arguments import NotCapturableError

_LAYERS = ("StaticLayer", "StaticSlidingWindowLayer", "SlidingWindowLayer", "ChunkedSlidingLayer")


def cache_in(kwargs: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a forward, or None."""
    return next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)


def why_not_static(cache: Any) -> str | None:
    """Return why a cache is not one that graphs read, or None."""
    layers = getattr(cache, "layers", None)
    if not layers:
        return f"a cache of class {type(cache).__name__}"
    if getattr(cache, "offloading", False):
        return "a cache that is offloaded"
    other = next((layer for layer in layers if type(layer).__name__ not in _LAYERS), None)
    if other is not None:
        return f"a cache with layers of class {type(other).__name__}"
    return None if all([getattr(layer, "is_initialized", True) for layer in layers]) else "an empty cache"


def tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer of a cache."""
    return {name: held for name, held in vars(layer).items() if isinstance(held, torch.Tensor)}


def signature(cache: Any) -> Hashable:
    """Return what the kernels of a step depend on: sizes and dtypes, and whether a window is full."""
    parts: list[Hashable] = []
    for layer in cache.layers:
        full = [held >= layer.max_cache_len for name, held in vars(layer).items() if _counts(name, held)]
        parts.append((type(layer), tuple(full), tuple([(name, t.shape, t.dtype, t.device) for name, t in tensors_of(layer).items()])))
    return tuple(parts)


def windows_fill(cache: Any) -> bool:
    """Return whether Python counts the tokens in a window that is not full. Once it is, a query's place among its keys stays the same."""
    return any([_counts(name, held) and held < layer.max_cache_len for layer in cache.layers for name, held in vars(layer).items()])


def _counts(name: str, held: object) -> bool:
    return type(held) is int and name.startswith("cumulative_length")


class StaticMemory:
    """The tensors that graphs read keys and values from, and the cache that has them now."""

    def __init__(self, cache: Any):
        self.layers = [tensors_of(layer) for layer in cache.layers]
        self.owner = weakref.ref(cache)

    def free_for(self, cache: Any) -> bool:
        """Return whether no other living cache uses this memory."""
        owner = self.owner()
        return owner is None or owner is cache or not any([vars(layer).get(name) is t for layer, held in zip(owner.layers, self.layers, strict=False) for name, t in held.items()])

    def take(self, cache: Any) -> None:
        """Have a cache use this memory; its own contents move into it."""
        for layer, held in zip(cache.layers, self.layers, strict=True):
            own = vars(layer)
            for name, tensor in held.items():
                if own[name] is not tensor:
                    tensor.copy_(own[name])
                    own[name] = tensor
        self.owner = weakref.ref(cache)


class Counters:
    """What Python counts in a cache, which a graph does not repeat: attributes that a step changes."""

    def __init__(self, cache: Any):
        self.before = [dict(vars(layer)) for layer in cache.layers]

    def restore(self, cache: Any) -> None:
        """Put the attributes back, after a capture that failed."""
        for layer, before in zip(cache.layers, self.before, strict=True):
            vars(layer).clear()
            vars(layer).update(before)

    def steps(self, cache: Any) -> list[dict[str, int]]:
        """Return by how much numbers have changed in each layer. Raises NotCapturableError if anything else has."""
        found = []
        for layer, before in zip(cache.layers, self.before, strict=True):
            now = vars(layer)
            changed = [name for name in {**before, **now} if _differ(now.get(name, self), before.get(name, self))]
            if any([not _counts(name, now.get(name)) or type(before.get(name)) is not int for name in changed]):
                raise NotCapturableError(f"a step changes {type(layer).__name__}.{changed[0]}")
            found.append({name: now[name] - before[name] for name in changed})
        return found


def _differ(one: object, other: object) -> bool:
    return one is not other and not (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def advance(cache: Any, steps: list[dict[str, int]]) -> None:
    """Count a step that a graph repeated."""
    for layer, changed in zip(cache.layers, steps, strict=True):
        for name, by in changed.items():
            vars(layer)[name] += by
