"""Patch layers that add to a residual stream and norm the sum: one kernel for both, forward and backward.

The instance gets the forward of its class with a call in place of the two statements (see sum_statements.py). Where a layer returns a sum
that the next layer's norm reads first, that norm is computed with the sum too, without gradients: with them, a checkpoint of the layer
would have to keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn

from dtkernels.runtime.build.toolchain import may_compile
from dtkernels.runtime.torch_support.dtypes import KERNEL_DTYPES

from ..layers.norm_forms import eps_of
from ..layers.norms import rmsnorm_form, rmsnorm_forward, unsupported_norm
from ..patching.call_stats import CallRecord
from ..patching.forward_copies import Globals, copied, layers_of, redecorated
from ..patching.forward_patching import hooked, plain, replace_forward, taken
from ..patching.normed_sums import hang, may_hang
from ..patching.report import PatchReport
from .sum_statements import JOINED, LAST, first_norm, norm_behind, rewritten

OP = "add_rmsnorm"
_Form = tuple[str, int]  # the attribute that holds eps, and the number added to the weight


class Rewritten:
    """The forward of a class with its sums joined to the norms ``names``; ``function`` is the new forward."""

    def __init__(self, cls: type[nn.Module], names: frozenset[str]):
        self.cls, self.names, self.forward = cls, names, cls.forward
        *decorators, forward = layers_of(cls.forward)
        found = rewritten(forward, names)
        assert found is not None, "joined_forward checks that"
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
        scope = Globals({JOINED: add_and_norm, LAST: add_last}, forward.__globals__)
        made = copied(forward, scope, tuple(cells[n] for n in found.code.co_freevars), found.code)
        self.function = redecorated(decorators, made)

    def __reduce__(self):
        return joined_forward, (self.cls, self.names)  # functions with globals of their own cannot be pickled: they are made anew


class PlannedNorm:
    """A norm as it was found: the module, the forward of its class, and its form. None for a form: it has another forward by now."""

    def __init__(self, norm: nn.Module, form: _Form | None):
        self.norm, self.form, self.forward = norm, form, type(norm).forward

    def __reduce__(self):
        return PlannedNorm, (self.norm, self.form if self.is_still(self.norm) else None)  # a function may be one that cannot be pickled

    def is_still(self, norm: object) -> bool:
        """Return whether the module is this one and computes what it did."""
        return norm is self.norm and type(self.norm).forward is self.forward and self.form is not None


@cache
def _joined_forward(cls: type[nn.Module], names: frozenset[str], forward: object) -> Rewritten | None:
    layers = layers_of(forward)
    return Rewritten(cls, names) if layers and rewritten(layers[-1], names) is not None else None


def joined_forward(cls: type[nn.Module], names: frozenset[str]) -> Rewritten | None:
    """Return the forward of a class with its sums joined to norms; None if it has none."""
    return _joined_forward(cast(Any, cls), names, cls.forward)


def residual_forward(
    record: CallRecord, module: nn.Module, joined: Rewritten | None, planned: dict[str, PlannedNorm], following: PlannedNorm | None, *args, **kwargs
):
    """Run the module's own forward with sums and their norms by the op; arguments and result as before.

    ``joined`` is None in a copy that was read from a file where the class has no source.
    """
    cls = type(module)
    if torch.compiler.is_compiling():
        return cls.forward(module, *args, **kwargs)
    now = joined
    if joined is not None and cls.forward is not joined.forward:  # FSDP2 makes a subclass, whose decorator of checkpoints is another one
        now = joined_forward(cls, joined.names) if layers_of(cls.forward)[-1:] == layers_of(joined.forward)[-1:] else None
    if now is None:
        record.count("its class has another forward now")
        return cls.forward(module, *args, **kwargs)
    return now.function(module, *args, **kwargs)


def _plan(module: nn.Module) -> tuple[CallRecord | None, dict[str, PlannedNorm], PlannedNorm | None]:
    """Return what `apply_to` found for a module. A checkpoint runs the new forward again, also after an undo."""
    own = vars(module)
    for slot in ("forward", "_old_forward"):
        held = own.get(slot)
        if isinstance(held, partial) and held.func is residual_forward:
            return held.args[0], held.args[3], held.args[4]
    return None, {}, None


def add_and_norm(module: nn.Module, name: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Return (norm(a + b), a + b) for the child ``name``."""
    record, planned, _ = _plan(module)
    plan, reason = planned.get(name), None
    if record is not None:
        reason = "another norm than when it was patched" if plan is None or not plan.is_still(module._modules.get(name)) else _why_apart(plan.norm, a, b)
        record.count(reason, a)
    if record is None or plan is None or reason is not None:
        total = a + b
        return getattr(module, name)(total), total
    return _by_op(plan, a, b)


def add_last(module: nn.Module, a: Any, b: Any) -> Any:
    """Return a + b; where no gradients are recorded, with what the next norm will ask for."""
    record, _, following = _plan(module)
    if record is None or following is None or not isinstance(a, torch.Tensor) or not may_hang(a):
        return a + b
    norm = following.norm
    held = vars(norm).get("forward")
    if not (isinstance(held, partial) and held.func is rmsnorm_forward):
        return a + b  # it would compute the norm again
    reason = _why_apart(norm, a, b) if following.is_still(norm) else "another norm than when it was patched"
    record.count(reason, a)
    if reason is not None:
        return a + b
    normed, total = _by_op(following, a, b)
    if may_hang(total):
        hang(total, norm, normed)
    return total


def _by_op(plan: PlannedNorm, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from dtkernels import ops

    norm, (eps, offset) = cast(Any, plan.norm), cast(_Form, plan.form)
    return ops.add_rmsnorm(a, b, norm.weight, eps_of(norm, eps), offset=offset)


def _why_apart(norm: Any, a: Any, b: Any) -> str | None:
    """Return why a sum and its norm are computed one after the other, or None."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return "a sum of other things than tensors"
    if not isinstance(getattr(norm, "weight", None), torch.Tensor):
        return "its norm has no weight now"
    wide, narrow = (a, b) if a.dtype == norm.weight.dtype else (b, a)  # autocast computes one of them in 16 bits
    if (reason := unsupported_norm(norm.weight, (wide,), {})) is not None:
        return reason
    if a.is_cuda and not may_compile():  # the norm alone has prebuilt kernels
        return "its kernel is not prebuilt, and no compiler is found"
    fits = narrow.dtype in KERNEL_DTYPES and torch.promote_types(narrow.dtype, wide.dtype) == wide.dtype
    if not plain(narrow) or a.shape != b.shape or not fits or a.device != b.device:
        return "a sum of tensors that differ in shape, dtype, device or class"
    if not (a.is_contiguous() and b.is_contiguous()):
        return "a sum of tensors that are not contiguous"
    held = vars(norm).get("forward")
    if hasattr(norm, "_hf_hook") or held is not None and not (isinstance(held, partial) and held.func is rmsnorm_forward):
        return "its norm has a forward of its own"
    hooks = hooked(norm)
    return "hooks on its norm" if hooks == "hooks" else hooks


def patch_residuals(model: nn.Module, report: PatchReport) -> None:
    """Patch every module of ``model`` that norms a sum by a child that is an RMSNorm, found in the source of its class."""
    forms: dict[nn.Module, _Form | None] = {}

    def form_of(norm: nn.Module) -> _Form | None:
        if norm not in forms:
            forms[norm] = rmsnorm_form(norm)
        return forms[norm]

    following = {layer: norm for layer, norm in _next_norms(model)}
    for name, module in model.named_modules():
        cls = type(module)
        layers = layers_of(cls.forward)
        found = _sums(layers[-1]) if layers else None
        if found is None:
            continue
        own = {n: PlannedNorm(norm, form) for n in found.norms if (norm := module._modules.get(n)) is not None and (form := form_of(norm)) is not None}
        after = following.get(module)
        then = PlannedNorm(after, form) if found.last and after is not None and (form := form_of(after)) is not None else None
        if own or then is not None:
            record = CallRecord()
            joined = cast(Rewritten, joined_forward(cls, frozenset(own)))
            forward = partial(residual_forward, record, module, joined, own, then)
            replace_forward(name, module, OP, forward, taken(module, cls), report)


@cache
def _sums(forward: Any):
    return rewritten(forward)


def _next_norms(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield (layer, the norm that reads its result first) for the layers of each list of a module."""
    for parent in model.modules():
        for name, layers in parent._modules.items():
            if not isinstance(layers, nn.ModuleList) or not len(layers):
                continue
            for layer, after in zip(layers, list(layers)[1:], strict=False):
                if (norm := _child(after, first_norm(cast(Any, type(after))))) is not None:
                    yield layer, norm
            if (norm := _child(parent, norm_behind(cast(Any, type(parent)), name))) is not None:
                yield layers[-1], norm


def _child(module: nn.Module, name: str | None) -> nn.Module | None:
    return None if name is None else module._modules.get(name)
