"""Patch PEFT's LoRA layers over linear ones: the instance's `forward` adds each adapter with the op."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ..huggingface.patching.call_stats import CallRecord
from ..huggingface.patching.forward_patching import (
    in_autocast,
    plain,
    replace_forward,
    simple_linear,
    taken,
    unsupported_rows,
    without_autocast,
)
from ..huggingface.patching.report import PatchReport


class LoraLayer(Protocol):
    """What is read of PEFT's LoRA layer over a linear one. ``_other_kind`` and ``_why_not_plain`` check that its layers are linear."""

    active_adapters: list[str]
    disable_adapters: bool
    merged: bool
    base_layer: nn.Linear
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    lora_dropout: Mapping[str, nn.Module]
    scaling: Mapping[str, float]

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor: ...

    def get_base_layer(self) -> nn.Module: ...


class _AddedTo(torch.autograd.Function):
    """Pass through ``sum``, which was computed from ``y`` by adding to it. y's gradient is that of the sum, without a copy."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, sum: torch.Tensor) -> torch.Tensor:
        return sum.view_as(sum)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad


def lora_forward(record: CallRecord, module: LoraLayer, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Compute base(x) + scaling * lora_B(lora_A(dropout(x))), summed over the active adapters, one kernel for each product and sum.

    x: (..., in); returns (..., out) in the dtype of base(x). Merged and disabled adapters take the layer's own forward. So do
    calls that the op does not support; those are counted.
    """
    names = active(module)
    if not names:
        return type(module).forward(module, x, *args, **kwargs)
    reason = _unsupported(module, names, x, kwargs)
    record.count(reason, x)
    if reason is not None:
        return type(module).forward(module, x, *args, **kwargs)
    result = module.base_layer(x, *args, **kwargs)
    for name in names:
        result = _add(result, module.lora_dropout[name](x), module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
    return result


def active(module: LoraLayer) -> list[str]:
    """Return the adapters that a call adds to the base layer: none where they are disabled or merged into it."""
    return [] if module.disable_adapters or module.merged else [name for name in module.active_adapters if name in module.lora_A]


def why_not_added(module: LoraLayer, names: list[str]) -> str | None:
    """Return why what these adapters add is no product of two plain weights, or None."""
    if not all(plain(layer[name].weight) for name in names for layer in (module.lora_A, module.lora_B)):
        return "weights that are sharded"
    return next((why for name in names if (why := _why_not_plain(module, name)) is not None), None)


def other_kind(module: nn.Module) -> str | None:
    """Return why a LoRA layer is none over a plain linear layer, or None."""
    return _other_kind(module, sys.modules["peft.tuners.lora.layer"].Linear)  # type: ignore[arg-type]


def _add(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    from dtkernels import ops

    with without_autocast(x.device.type):
        x, a, b = (t.to(y.dtype) for t in (x, a, b))  # differs under autocast only
        added = ops.lora(y.detach(), x, a, b, float(scale))
    return _AddedTo.apply(y, added) if y.requires_grad else added


def _unsupported(module: LoraLayer, names: list[str], x: torch.Tensor, kwargs: dict) -> str | None:
    """Return why this call takes the layer's own forward, or None."""
    if any(value is not None for value in kwargs.values()):
        return ", ".join(sorted(key for key, value in kwargs.items() if value is not None))
    weights = [layer[name].weight for name in names for layer in (module.lora_A, module.lora_B)]
    if not all(plain(w) for w in weights):
        return "weights that are sharded"
    if not in_autocast(x.device.type) and any(w.dtype != x.dtype for w in (*weights, module.base_layer.weight)):
        return "adapters and layer of different dtypes"
    if any(w.device != x.device for w in weights):
        return "weights on another device"
    return unsupported_rows(x) or next((why for name in names if (why := _why_not_plain(module, name)) is not None), None)


def _why_not_plain(module: LoraLayer, name: str) -> str | None:
    """Return why an adapter is more than two plain linear layers, or None."""
    if name in getattr(module, "lora_variant", {}):
        return "a variant of LoRA such as DoRA"
    layers = module.lora_A[name], module.lora_B[name]
    if any(layer.bias is not None for layer in layers if isinstance(layer, nn.Linear)):
        return "a bias in the adapter"
    return next((why for layer in layers if (why := simple_linear(layer)) is not None), None)


def patch_lora(model: nn.Module, report: PatchReport) -> None:
    """Patch every LoRA layer of `model` that wraps a plain linear layer; report why others are skipped."""
    layers = sys.modules.get("peft.tuners.lora.layer")  # if PEFT was never imported, no module is one of its layers
    if layers is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, layers.LoraLayer):
            reason = _other_kind(module, layers.Linear) or taken(module, layers.Linear)
            replace_forward(name, module, "lora", partial(lora_forward, CallRecord(), module), reason, report)


def _other_kind(module: LoraLayer, linear: type) -> str | None:
    if type(module) is not linear:
        return f"{type(module).__module__}.{type(module).__name__} is no LoRA layer over nn.Linear"
    base = module.get_base_layer()
    weight = getattr(base, "weight", None)  # of an nn.Linear, or of GPT-2's Conv1D: the layer itself computes its product
    if not isinstance(weight, torch.Tensor) or not plain(weight) or not weight.dtype.is_floating_point:
        return f"its base layer is {type(base).__name__}, quantised or sharded"
    names = list(module.lora_A)
    special = [why for name in names if (why := _why_not_plain(module, name)) is not None]
    return special[0] if names and len(special) == len(names) else None
