"""Replace a module's `forward` on the instance. `undo` restores it exactly, and accelerate's hooks keep working.

A replacement is a functools.partial of a module-level function whose first argument is the instance's CallRecord. It is not a
closure: deepcopy, pickle and torch.save of a patched model keep working.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules import module as calls

from dtkernels.runtime.path_counters import no_kernel
from dtkernels.runtime.torch_support.dtypes import KERNEL_DTYPES

from .replacements import put
from .report import ALREADY, PATCHED, SKIPPED, WOULD_PATCH, PatchReport

_CLASSES = (torch.Tensor, nn.Parameter)
_TRACED = (*_CLASSES, FakeTensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (calls._global_forward_hooks, calls._global_forward_pre_hooks, calls._global_backward_hooks, calls._global_backward_pre_hooks)
# "meta", for example, has no autocast. Evaluated at import, because torch.compile cannot trace the check.
_AUTOCAST = frozenset(d for d in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(d))


class InPlaceOf(partial):
    """A forward or another method's replacement, with a record and the module first, that has the signature of the method: trainers and `generate` read it."""

    method = "forward"

    @property
    def __signature__(self) -> inspect.Signature:
        module = next(a for a in self.args if isinstance(a, nn.Module))
        signature = inspect.signature(getattr(type(module), self.method))
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def plain(x: torch.Tensor) -> bool:
    """Return whether this is a dense tensor of torch's own class: no DTensor or other subclass, not sparse or nested. (Quantised ones differ in dtype.)

    torch.export without strict runs the code on fake tensors, which stand for those.
    """
    return type(x) in (_TRACED if torch.compiler.is_compiling() else _CLASSES) and x.layout is torch.strided and not x.is_nested


def transformed() -> str | None:
    """Return the torch transform that is active and not supported by the ops, or None."""
    if torch.compiler.is_compiling():
        return None  # compiled code is traced once, the ops included
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func, such as vmap"
    return "forward-mode differentiation" if forward_ad._current_level >= 0 else None


def unsupported(x: torch.Tensor) -> str | None:
    """Return why no kernel takes this tensor, or None."""
    if (reason := transformed()) is not None:
        return reason
    if not plain(x):
        return "a nested tensor" if type(x) in _CLASSES and x.is_nested else f"tensor type {type(x).__name__}"
    if (reason := no_kernel(x)) is not None:
        return reason
    if x.dtype not in KERNEL_DTYPES:
        return f"dtype {str(x.dtype).removeprefix('torch.')}"
    return "scalar input" if x.dim() == 0 else None


def unsupported_rows(x: torch.Tensor) -> str | None:
    """Return why no matrix product takes this tensor, (..., in), or None."""
    return unsupported(x) or ("a single vector" if x.dim() < 2 else None)


def in_autocast(device: str) -> bool:
    """Return whether autocast is on for a kind of device."""
    return device in _AUTOCAST and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context without autocast, for inputs that are cast already."""
    return torch.autocast(device, enabled=False) if in_autocast(device) else nullcontext()


def hooks_of_all() -> str | None:
    """Return a text that says so if hooks of all modules are registered, as by torch's `register_module_forward_hook`; else None."""
    return "global module hooks" if any(_GLOBAL_HOOKS) else None


def hooked(module: nn.Module) -> str | None:
    """Return which hooks a call of this instance runs, or None."""
    return "hooks" if any([getattr(module, hooks) for hooks in _HOOKS]) else hooks_of_all()


def runs_besides_forward(module: nn.Module) -> str | None:
    """Return what calling this instance runs besides the forward of its class, or None."""
    if "forward" in vars(module) or hasattr(module, "_hf_hook"):
        return "a forward of its own"
    return hooked(module)


def simple_linear(module: nn.Module) -> str | None:
    """Return why a module is not an nn.Linear whose weight may be read without calling its forward, or None."""
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is no nn.Linear"
    if type(module).forward is not nn.Linear.forward:
        return "its nn.Linear has a forward of its own"
    if (more := runs_besides_forward(module)) is not None:
        return f"its nn.Linear has {more}"
    if getattr(module, "parametrizations", None) or not plain(module.weight):
        return "its weight is parametrised, quantised or sharded"
    return None


def in_memory_order_of_input(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, last: bool = False) -> torch.Tensor:
    """Return op(x), of x's shape, with x's order of dimensions in memory, as torch's elementwise ops do.

    ``last``: the op works on the last dimension, which must stay last.
    """
    if torch.compiler.is_compiling() or x.is_contiguous() or 0 in x.stride():
        return op(x)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda i: -strides[i])
    if last and order[-1] != x.dim() - 1:
        return op(x)
    return op(x.permute(order)).permute([order.index(i) for i in range(x.dim())])


def replace_forward(name: str, module: nn.Module, op: str, forward: partial, reason: str | None, report: PatchReport) -> None:
    """Replace the module's forward and report it. If there is a `reason` not to, report that instead."""
    slot = slot_of(module)
    current = vars(module).get(slot)
    if isinstance(current, partial) and current.func is forward.func:
        report.add(name, op, ALREADY, record=current.args[0])
    elif reason is not None:
        report.add(name, op, SKIPPED, reason)
    elif report.dry_run:
        report.add(name, op, WOULD_PATCH)
    else:
        put(module, slot, forward, report)
        report.add(name, op, PATCHED, record=forward.args[0])


def taken(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Return why the forward to be replaced is not the one of torch's `cls`, or None."""
    if type(module).forward is not cls.forward:
        return f"{type(module).__name__} has a forward of its own"
    current = vars(module).get(slot_of(module))
    if current is not None and not _is_bound_class_forward(current, module):
        return "its forward was already replaced by somebody else"
    return None


def slot_of(module: nn.Module) -> str:
    """Return the attribute in which a module's own forward is replaced."""
    # accelerate's hooks put their own function in `forward` and keep the real one here
    return "_old_forward" if hasattr(module, "_hf_hook") and "_old_forward" in vars(module) else "forward"


def _is_bound_class_forward(forward: Callable, module: nn.Module) -> bool:
    return isinstance(forward, types.MethodType) and forward.__func__ is type(module).forward
