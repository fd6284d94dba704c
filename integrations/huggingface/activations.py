"""nn.ReLU and nn.Softmax modules: one instance's `forward` is replaced by a function that calls the op.

The replacement is a functools.partial of a module-level function over the instance's CallRecord, and no closure:
deepcopy, pickle and torch.save of a patched model keep working.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from .record import CallRecord
from .report import ALREADY, PATCHED, SKIPPED, WOULD_PATCH, PatchReport

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CLASSES = (torch.Tensor, nn.Parameter)


def relu_forward(record: CallRecord, input: torch.Tensor) -> torch.Tensor:
    """max(x, 0); tensors that the op does not take go to torch."""
    reason = _unsupported(input)
    record.count(reason)
    if reason is not None:
        return F.relu(input)
    from dtkernels import ops

    return ops.relu(input)


def softmax_forward(record: CallRecord, dim: int, input: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum(exp(x)) over the last dimension; other dimensions, and tensors that the op does not take, go to torch."""
    reason = _unsupported(input)
    if reason is None and dim not in (-1, input.dim() - 1):
        reason = "softmax over a dimension that is not the last"
    record.count(reason)
    if reason is not None:
        return F.softmax(input, dim)
    from dtkernels import ops

    return ops.softmax(input)


def _unsupported(x: torch.Tensor) -> str | None:
    if not plain(x):
        return f"tensor type {type(x).__name__}"
    if x.dtype not in DTYPES:
        return f"dtype {str(x.dtype).removeprefix('torch.')}"
    return "scalar input" if x.dim() == 0 else None


def plain(x: torch.Tensor) -> bool:
    """A dense tensor of torch's own class: no DTensor or other subclass, not sparse. (Quantised ones differ in dtype.)"""
    return type(x) in _CLASSES and x.layout is torch.strided


def patch_relu(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.ReLU of `model` whose input nobody else can observe."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):
            # An in-place ReLU also changes its input, which a residual branch may read; the op writes a new tensor.
            reason = "inplace=True: others may read the tensor it overwrites" if module.inplace else None
            reason = reason or _taken(module, nn.ReLU)
            _patch(name, module, "relu", partial(relu_forward, CallRecord()), reason, report)


def patch_softmax(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.Softmax of `model` that may run over the last dimension."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Softmax):
            reason = None if isinstance(module.dim, int) else "dim=None leaves the dimension to torch"
            reason = reason or _taken(module, nn.Softmax)
            _patch(name, module, "softmax", partial(softmax_forward, CallRecord(), module.dim), reason, report)


def _patch(name: str, module: nn.Module, op: str, forward: partial, reason: str | None, report: PatchReport) -> None:
    slot = _slot(module)
    current = vars(module).get(slot)
    if _is_ours(current):
        report.add(name, op, ALREADY, record=current.args[0])
    elif reason is not None:
        report.add(name, op, SKIPPED, reason)
    elif report.dry_run:
        report.add(name, op, WOULD_PATCH)
    else:
        report.on_undo(partial(_restore, weakref.ref(module), slot, current, forward))
        vars(module)[slot] = forward
        report.add(name, op, PATCHED, record=forward.args[0])


def _taken(module: nn.Module, cls: type) -> str | None:
    """Why the forward that would be replaced is not the one of torch's `cls`; None if it is."""
    if type(module).forward is not cls.forward:
        return f"{type(module).__name__} has a forward of its own"
    current = vars(module).get(_slot(module))
    if current is not None and not _is_bound_class_forward(current, module):
        return "its forward was already replaced by somebody else"
    return None


def _slot(module: nn.Module) -> str:
    # accelerate's hooks put their own function in `forward` and keep the real one here
    return "_old_forward" if hasattr(module, "_hf_hook") and "_old_forward" in vars(module) else "forward"


def _is_ours(forward: Callable | None) -> bool:
    return isinstance(forward, partial) and forward.func in (relu_forward, softmax_forward)


def _is_bound_class_forward(forward: Callable, module: nn.Module) -> bool:
    return isinstance(forward, types.MethodType) and forward.__func__ is type(module).forward


def _restore(ref: weakref.ref, slot: str, original: Callable | None, forward: partial) -> None:
    """Take `forward` out again; accelerate may have moved it between the two slots since."""
    module = ref()
    if module is None:
        return
    for place in ("forward", "_old_forward"):
        if vars(module).get(place) is not forward:
            continue
        if original is not None:
            vars(module)[place] = original
        elif place == slot:
            del vars(module)[place]
        else:  # a hook came after the patch: it expects a bound method here
            vars(module)[place] = types.MethodType(type(module).forward, module)
