"""Patch RMSNorm modules, recognized by what they compute, and nn.LayerNorm: the instance's `forward` calls the op.

Under torch.compile the module's own forward runs, and Inductor fuses it, here and in gated_mlp.py, rope.py and loss.py.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import nn

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import in_autocast, in_memory_order_of_input, plain, replace_forward, taken, unsupported
from ..patching.normed_sums import take_normed
from ..patching.numeric_probe import normal, output_of, rows, same, stand_in, takes_one_tensor
from ..patching.report import PatchReport
from .norm_forms import Form, eps_of, form_of, norm_forward


class Norm(Protocol):
    """What is read of a module that ``rmsnorm_form`` found to be an RMSNorm."""

    weight: torch.Tensor

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor: ...


def rmsnorm_forward(record: CallRecord, module: Norm, eps: str, offset: int, *args, **kwargs) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension; `eps` names the attribute with its value.

    x: (..., C) in the dtype of the weight, which the result has too. Other calls take the module's own forward and are counted.
    """
    if args and not torch.compiler.is_compiling() and (normed := take_normed(args[0], module)) is not None:
        record.count(None, normed)
        return normed
    reason = unsupported_norm(module.weight, args, kwargs)
    record.count(reason, module.weight)
    if reason is not None or torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    from dtkernels import ops

    return in_memory_order_of_input(lambda x: ops.rmsnorm(x, module.weight, eps_of(module, eps), offset=offset), args[0], last=True)


def layernorm_forward(record: CallRecord, module: nn.LayerNorm, *args, **kwargs) -> torch.Tensor:
    """Compute (x - mean) / sqrt(var + eps) * weight + bias over the last dimension; dtypes and fallbacks as in `rmsnorm_forward`."""
    reason = _not_for_the_op(module) or unsupported_norm(module.weight, args, kwargs)
    record.count(reason, module.weight)
    if reason is not None or torch.compiler.is_compiling():
        return nn.LayerNorm.forward(module, *args, **kwargs)
    from dtkernels import ops

    if module.bias is None:
        return ops.normalize(args[0], module.weight, None, module.eps, centered=True)
    return ops.layernorm(args[0], module.weight, module.bias, module.eps)


def unsupported_norm(weight: torch.Tensor | None, args: tuple, kwargs: dict) -> str | None:
    """Return why the op does not take this call, or None."""
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
        return "arguments other than one tensor"
    x = args[0]
    if (reason := unsupported(x)) is not None:
        return reason
    if weight is None:
        return "autocast of a 16-bit input" if in_autocast(x.device.type) and x.dtype != torch.float32 else None
    if not plain(weight):
        return "a weight that is sharded or quantised"
    if x.dtype != weight.dtype:  # the result's dtype then differs from model to model
        return "input and weight of different dtypes"
    if in_autocast(x.device.type) and x.dtype != torch.float32:
        return "autocast of a 16-bit input"
    return "input and weight on different devices" if x.device != weight.device else None


def patch_rmsnorm(model: nn.Module, report: PatchReport) -> None:
    """Patch every module of `model` that computes an RMSNorm, also those without a weight, of groups, or with a gate."""
    known: dict[tuple, Form | None] = {}
    for name, module in model.named_modules():
        form = form_of(module, known)
        if (form is None or not form.gate) and (found := rmsnorm_form(module)) is not None:  # with a gate where calls may have one
            reason = None if plain(module.weight) else "its weight is quantised or sharded"
            reason = reason or taken(module, type(module))
            replace_forward(name, module, "rmsnorm", partial(rmsnorm_forward, CallRecord(), module, *found), reason, report)
        elif form is not None and not form.centered:
            _patch_form("rmsnorm", name, module, form, report)


def _patch_form(op: str, name: str, module: nn.Module, form: Form, report: PatchReport) -> None:
    plainly = all(plain(p) for p in module._parameters.values() if p is not None)
    reason = taken(module, type(module)) if plainly else "its weight is quantised or sharded"
    replace_forward(name, module, op, partial(norm_forward, CallRecord(), module, form), reason, report)


def rmsnorm_form(module: nn.Module) -> tuple[str, int] | None:
    """Return (the attribute that holds eps, the number added to the weight) if a module is an RMSNorm, else None."""
    weight = module._parameters.get("weight")
    own = [key for held in (module._parameters, module._buffers, module._modules) for key, value in held.items() if value is not None]
    if weight is None or own != ["weight"] or weight.dim() != 1 or not weight.dtype.is_floating_point or not takes_one_tensor(type(module)):
        return None
    names = [key for key, value in vars(module).items() if isinstance(value, float) and 0 < value < 0.1 or key == "eps" and value is None]
    width = weight.shape[0]
    if not names or width == 0:
        return None
    w, x = normal(width, seed=1), rows(width)
    results = [output_of(type(module).forward, stand_in(module, {"weight": w}, training=training), x) for training in (False, True)]
    for dtype in (torch.float16, torch.bfloat16):  # some return float32 for those; the op never does
        result = output_of(type(module).forward, stand_in(module, {"weight": w.to(dtype)}), x.to(dtype))
        if getattr(result, "dtype", None) != dtype:
            return None
    for eps in names:
        normed = x * (x.square().mean(-1, keepdim=True) + eps_of(module, eps, x.dtype)).rsqrt()
        for offset in (0, 1):
            if all(same(result, normed * (w + offset)) for result in results):
                return eps, offset
    return None


def patch_layernorm(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.LayerNorm of `model` that normalizes the last dimension, and modules of other classes that compute the like."""
    known: dict[tuple, Form | None] = {}
    for name, module in model.named_modules():
        own = isinstance(module, nn.LayerNorm) and type(module).forward is nn.LayerNorm.forward
        if not own and (form := form_of(module, known)) is not None and form.centered:
            _patch_form("layernorm", name, module, form, report)
        elif isinstance(module, nn.LayerNorm):
            reason = _not_for_the_op(module) or taken(module, nn.LayerNorm)
            replace_forward(name, module, "layernorm", partial(layernorm_forward, CallRecord(), module), reason, report)


def _not_for_the_op(module: nn.LayerNorm) -> str | None:
    if len(module.normalized_shape) != 1:
        return "it normalizes more than the last dimension"
    return None if all(plain(p) for p in (module.weight, module.bias) if p is not None) else "its weight is quantised or sharded"
