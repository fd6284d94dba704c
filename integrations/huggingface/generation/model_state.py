"""Tell whether a model is still what its graphs were captured from, and whether it can be captured at all."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ..patching.forward_patching import plain

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class ModelState:
    """What a captured graph depends on: modules, parameters, buffers and their memory, forwards, hooks, modes, attention implementation."""

    def __init__(self, model: nn.Module):
        self.parts = _parts(model)
        groups: list[dict[str, Any]] = [group for module in model.modules() for group in _groups(module)]
        held = [(group, name, cast(torch.Tensor, tensor)) for group in groups for name, tensor in group.items() if tensor is not None]
        self.held = [(group, name, tensor, tensor.data_ptr()) for group, name, tensor in held]

    def same_memory(self) -> bool:
        """Return whether parameters and buffers are the same tensors, where they were. Cheap enough for every step."""
        return all([group.get(name) is tensor and tensor.data_ptr() == address for group, name, tensor, address in self.held])

    def same(self, model: nn.Module) -> bool:
        """Return whether all of it is the same."""
        now = _parts(model)
        return len(now) == len(self.parts) and all([a is b for a, b in zip(now, self.parts, strict=True)]) and self.same_memory()


def _groups(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return cast(Any, module)._parameters, cast(Any, module)._buffers


def _parts(model: nn.Module) -> list[Any]:
    """Return objects that are others after a change of the model."""
    parts: list[Any] = [getattr(getattr(model, "config", None), name, None) for name in ("_attn_implementation", "_experts_implementation")]
    for module in model.modules():
        own = vars(module)
        parts += [module, module.training, own.get("forward"), own.get("_old_forward"), own.get("_dtkernels_record")]
        for group in _groups(module):
            parts += group.values()
        for hooks in _HOOKS:
            parts += getattr(module, hooks).values()
    return parts


def why_not_captured(model: nn.Module) -> str | None:
    """Return why no step of a model is captured, or None."""
    devices = {p.device for p in model.parameters()}
    placed = getattr(model, "hf_device_map", None) or {}
    if len(devices) > 1 or len(set(placed.values())) > 1:
        return "its weights are on several devices"
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            return "hooks move its weights (device_map, offload)"
        if module is not model and (what := _foreign_hooks(module)):
            return f"{what} on {name}"
    if any([module.training for module in model.modules()]):
        return "training mode"
    if not all([plain(p) and not p.is_quantized for p in model.parameters()]):
        return "its weights are sharded or quantised"
    return None


def _foreign_hooks(module: nn.Module) -> str | None:
    """Return what hooks a module has besides those that transformers collects hidden states with, which a graph holds."""
    for name in _HOOKS:
        for hook in getattr(module, name).values():
            if not getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing"):
                return "hooks"
    return None


def attributes(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the attributes of every module, to see whether a forward changes some."""
    return [(module, dict(vars(module))) for module in model.modules()]


def changed_attribute(before: list[tuple[nn.Module, dict[str, Any]]]) -> str | None:
    """Return the name of an attribute that was set since, or None."""
    for module, had in before:
        now = vars(module)
        for name in now:
            if now[name] is not had.get(name, _NOTHING) and not _equal_numbers(now[name], had.get(name, _NOTHING)):
                return f"{type(module).__name__}.{name}"
    return None


def _equal_numbers(one: object, other: object) -> bool:
    return type(one) is type(other) and isinstance(one, int | float | str) and one == other


_NOTHING = object()


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of the first parameter."""
    return next((p.device for p in model.parameters()), None)
