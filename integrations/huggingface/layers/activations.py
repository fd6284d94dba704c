"""Patch nn.ReLU and nn.Softmax modules, and those that square a ReLU: the instance's `forward` calls the op."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import in_autocast, in_memory_order_of_input, replace_forward, taken, unsupported
from ..patching.numeric_probe import output_of, rows, same, stand_in, takes_one_tensor
from ..patching.report import PatchReport


def relu_forward(record: CallRecord, module: nn.ReLU, input: torch.Tensor) -> torch.Tensor:
    """Compute max(x, 0); unsupported tensors go to torch."""
    reason = unsupported(input) or ("inplace=True by now" if module.inplace else None)
    record.count(reason, input)
    if reason is not None:
        return F.relu(input, module.inplace)
    from dtkernels import ops

    return in_memory_order_of_input(ops.relu, input)


def softmax_forward(record: CallRecord, module: nn.Softmax, input: torch.Tensor) -> torch.Tensor:
    """Compute exp(x) / sum(exp(x)) over the last dimension; other dimensions and unsupported tensors go to torch."""
    reason, dim = unsupported(input), module.dim
    if reason is None and dim not in (-1, input.dim() - 1):
        reason = "softmax over a dimension that is not the last"
    if reason is None and input.device.type != "cuda" and input.dtype != torch.float32 and in_autocast(input.device.type):
        reason = "autocast of a 16-bit input"  # on a GPU it returns float32, as the op does
    record.count(reason, input)
    if reason is not None:
        return F.softmax(input, dim)
    from dtkernels import ops

    return ops.softmax(input)


def patch_relu(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.ReLU of `model` whose input nobody else can observe."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):
            # An in-place ReLU also changes its input, which a residual branch may read; the op writes a new tensor.
            reason = "inplace=True: others may read the tensor it overwrites" if module.inplace else None
            reason = reason or taken(module, nn.ReLU)
            replace_forward(name, module, "relu", partial(relu_forward, CallRecord(), module), reason, report)


def patch_softmax(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.Softmax of `model` that may run over the last dimension."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Softmax):
            reason = None if isinstance(module.dim, int) else "dim=None leaves the dimension to torch"
            reason = reason or taken(module, nn.Softmax)
            replace_forward(name, module, "softmax", partial(softmax_forward, CallRecord(), module), reason, report)


def relu_squared_forward(record: CallRecord, module: nn.Module, *args, **kwargs) -> torch.Tensor:
    """Compute max(x, 0)^2; other calls than with one tensor, and unsupported tensors, take the module's own forward."""
    alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
    reason = unsupported(args[0]) if alone else "arguments other than one tensor"
    record.count(reason, args[0] if alone else None)
    if reason is not None or torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    from dtkernels import ops

    return in_memory_order_of_input(ops.relu_squared, args[0])


def patch_relu_squared(model: nn.Module, report: PatchReport) -> None:
    """Patch every module of `model` without weights that squares max(x, 0)."""
    for name, module in model.named_modules():
        if _squares_relu(module):
            forward = partial(relu_squared_forward, CallRecord(), module)
            replace_forward(name, module, "relu_squared", forward, taken(module, type(module)), report)


def _squares_relu(module: nn.Module) -> bool:
    """Return whether a module without parts of its own computes max(x, 0)^2 and changes nothing but its result."""
    parts = [value for part in (module._parameters, module._buffers, module._modules) for value in part.values()]
    forward = inspect.unwrap(type(module).forward)
    if parts or not inspect.isfunction(forward) or "relu" not in forward.__code__.co_names or not takes_one_tensor(type(module)):
        return False
    x = rows(8)
    results = [output_of(type(module).forward, stand_in(module, training=training), x) for training in (False, True)]
    return torch.equal(x, rows(8)) and all(same(result, x.clamp(min=0).square()) for result in results)
