"""Read the forms of a last layer: nn.Linear, with LoRA of PEFT, sharded by tensor parallelism along the vocabulary, gathered by FSDP2."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..patching.forward_patching import hooks_of_all, in_autocast, plain, runs_besides_forward, simple_linear, slot_of, unsupported

SHARDED = "its weight is quantised or sharded"
FREED = "its weight is freed after its forward; allowed: fully_shard(..., reshard_after_forward=False)"


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter: it adds scale * inner outer^T to the logits."""

    inner: torch.Tensor
    outer: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Parts:
    """Logits as outer * tanh(scale * (hidden weight^T + bias)), without tanh if ``outer`` is None, and the ``steps`` that lead there.

    adapters  what LoRA adds to hidden weight^T + bias
    forward   the layer's own forward, where it has one: the logits are made by it
    layout    of logits that are a DTensor until they are made local: "cut" along the vocabulary, or "whole"; "" for tensors of torch's own class
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float = 1.0
    outer: float | None = None
    steps: tuple[tuple[Callable, tuple, dict], ...] = ()
    adapters: tuple[Adapter, ...] = ()
    forward: Callable | None = None
    layout: str = ""

    def logits(self, this: object) -> torch.Tensor:
        """Compute the logits as the model's own code would have. ``this`` stands for them in the steps."""
        if self.weight.numel() and not isinstance(self.weight, _dtensor()) and not self.weight.untyped_storage().size():
            raise RuntimeError("outputs.logits: the weight of the last layer was freed after its forward; allowed: logits that are read inside it, or reshard_after_forward=False")
        if self.forward is not None:
            result = self.forward(self.hidden)
        else:
            result = F.linear(self.hidden, self.weight, self.bias)
            for a in self.adapters:
                result = result + F.linear(a.inner, a.outer) * a.scale
            result = result.to(self.hidden.dtype) if self.adapters else result
        for function, args, kwargs in self.steps:
            result = function(*[result if arg is this else arg for arg in args], **kwargs)
        return result

    def low_rank(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the adapters as one product, in the dtype of the hidden states."""
        if not self.adapters:
            return None
        inner, outer = [a.inner * a.scale for a in self.adapters], [a.outer for a in self.adapters]
        return torch.cat(inner, -1).to(self.hidden.dtype), torch.cat(outer, 1).to(self.hidden.dtype)


def why_skipped(module: nn.Module) -> str | None:
    """Return why this last layer is not patched, or None. What may change until a call, such as where the weight is, is asked there."""
    if _lora_layer(module):
        from ...peft.lora import other_kind

        foreign = vars(module).get(slot_of(module)) is not None and not _replaced_by_us(module)
        return "its forward was already replaced by somebody else" if foreign else other_kind(module)
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not getattr(module, "parametrizations", None):
        return _why_not_run(module)
    return simple_linear(module)


def _why_not_run(module: nn.Linear) -> str | None:
    """Return why a call of this layer runs more than the product, or None."""
    sharded = isinstance(module.weight, _dtensor())
    if sharded and "forward" in vars(module) and not _replaced_by_us(module):
        return None if _gathers(_nonlocal(vars(module)["forward"], "self")) else "its forward of tensor parallelism does not gather the logits"
    hooks = [hook for kind in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks) for hook in kind.values()]
    if hooks and all(_of_torch(hook) for hook in hooks):
        return FREED if _fsdp(module) and not _keeps_weight(module) else None
    if (more := runs_besides_forward(module)) is not None and not (_replaced_by_us(module) and not hooks):
        return f"its nn.Linear has {more}"
    return None if sharded or plain(module.weight) else "its weight is parametrised, quantised or sharded"


def parts_of(module: nn.Module, input: torch.Tensor, original: Callable | None) -> Parts | str:
    """Return the parts of a call's logits, or why it takes the layer's own path."""
    if (reason := _hooks_of_backward(module)) is not None:
        return reason
    if _lora_layer(module):
        return _of_lora(module, input)
    assert isinstance(module, nn.Linear)
    if isinstance(module.weight, _dtensor()):
        return _of_shards(module, input, original)
    if (reason := unsupported(input)) is not None:
        return reason
    if not plain(module.weight) or module.weight.shape != (module.out_features, module.in_features):
        return SHARDED
    if _fsdp(module) and not _keeps_weight(module):
        return FREED
    return _differing(module.weight, input) or _plain_parts(input, module.weight, module.bias)


def _hooks_of_backward(module: nn.Module) -> str | None:
    """Return which hooks need the gradient of logits, or may: torch cannot set them up on logits that are not made."""
    own = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return hooks_of_all() or ("backward hooks on the last layer" if own and not all(_of_torch(hook) for hook in own) else None)


def _differing(weight: torch.Tensor, input: torch.Tensor) -> str | None:
    if weight.dtype != input.dtype and not in_autocast(input.device.type):
        return "hidden states and weight of different dtypes"
    return "a single vector" if input.dim() < 2 else None


def _plain_parts(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Parts:
    """Return the parts of a plain product, in the dtype of autocast."""
    device = hidden.device.type
    if not in_autocast(device):
        return Parts(hidden, weight, bias)
    dtype = torch.get_autocast_dtype(device)
    return Parts(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _of_shards(module: nn.Linear, input: torch.Tensor, original: Callable | None) -> Parts | str:
    """A weight that is a DTensor. Hidden states are one too under torch's parallelize_module, not under transformers' tp_plan."""
    weight: Any = module.weight
    if weight.device_mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        return "its weight is sharded, but not along the vocabulary of one mesh dimension"
    if (reason := unsupported(input.to_local() if isinstance(input, _dtensor()) else input) or _differing(weight, input)) is not None:
        return reason
    if isinstance(input, _dtensor()):
        hooks = list(module._forward_hooks.values())
        if len(hooks) != 1 or not _gathers_local(_nonlocal(hooks[0], "output_fn")) or original is not None:
            return "its hooks do not gather the logits"
        return replace(_plain_parts(input, weight, module.bias), layout="cut")
    if original is None or not _gathers(_nonlocal(original, "self")):
        return SHARDED
    return replace(_plain_parts(input, weight, module.bias), forward=original)


def _of_lora(module: Any, input: torch.Tensor) -> Parts | str:
    from ...peft.lora import active, why_not_added

    base = module.get_base_layer()
    if not isinstance(base, nn.Linear) or simple_linear(base) is not None:
        return simple_linear(base) or SHARDED
    names = active(module)
    reason = unsupported(input) or _differing(base.weight, input) or why_not_added(module, names)
    if reason is not None:
        return reason
    parts, adapters = _plain_parts(input, base.weight, base.bias), []
    for name in names:
        inner, outer = module.lora_A[name].weight, module.lora_B[name].weight
        dropped = module.lora_dropout[name](input if in_autocast(input.device.type) else input.to(inner.dtype))
        adapters.append(Adapter(F.linear(dropped, inner), outer, float(module.scaling[name])))
    return replace(parts, adapters=tuple(adapters))


def learns(module: nn.Module, input: torch.Tensor) -> bool:
    """Return whether a call is one of training: something that it multiplies requires a gradient."""
    return module.training and torch.is_grad_enabled() and (input.requires_grad or any(p.requires_grad for p in module.parameters()))


def _dtensor() -> Any:
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def _lora_layer(module: nn.Module) -> bool:
    layers = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and isinstance(module, layers.LoraLayer)


def _fsdp(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _keeps_weight(module: Any) -> bool:
    """Return whether FSDP2 leaves the gathered weight in place until backward."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return all(group is not None and getattr(group, "post_forward_mesh_info", group) is None for group in groups)


def _of_torch(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")


def _replaced_by_us(module: nn.Module) -> bool:
    forward = getattr(vars(module).get("forward"), "func", None)
    return forward is not None and (getattr(forward, "__module__", "") or "").startswith("dtkernels.")


def _nonlocal(function: Any, name: str) -> Any:
    try:
        return inspect.getclosurevars(function).nonlocals.get(name)
    except TypeError:
        return None


def _gathers(style: Any) -> bool:
    """Return whether a style of transformers' tensor parallelism cuts the weight along the vocabulary and gathers the logits as a plain tensor."""
    layout = getattr(style, "output_layouts", None)
    return type(style).__name__ == "ColwiseParallel" and type(layout).__name__ == "Replicate" and style.use_local_output is True


def _gathers_local(output: Any) -> bool:
    """Return whether the output function of torch's ColwiseParallel gathers the logits as a plain tensor."""
    function: Any = getattr(output, "func", None)
    args: tuple = getattr(output, "args", ())
    if getattr(function, "__qualname__", "") != "ColwiseParallel._prepare_output_fn" or len(args) != 2:
        return False
    return [type(layout).__name__ for layout in args[0]] == ["Replicate"] and args[1] is True
