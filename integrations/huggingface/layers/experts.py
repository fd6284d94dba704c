"""Patch experts of mixtures whose weights lie in one tensor: rows sorted by expert, products by the expert of each row, no loop over experts.

transformers dispatches such modules through its experts interface (`integrations/moe.py`, since 5.0), which passes them hidden states, the
chosen experts of each token and their weights. Nothing waits for the device, so that CUDA graphs and torch.compile run it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ..patching.call_stats import CallRecord, unpatched_calls
from ..patching.forward_patching import in_autocast, plain, replace_forward, runs_besides_forward, taken, unsupported, without_autocast
from ..patching.numeric_probe import NOT_KEPT
from ..patching.report import PATCHED, WOULD_PATCH, PatchReport
from ..patching.source_inspection import OURS, package_of
from .expert_forms import KERNEL_DTYPES, Form, form_of, holds_experts, why_unknown


def experts_forward(record: CallRecord, module: nn.Module, form: Form, rest: dict[str, object], *args, **kwargs) -> torch.Tensor:
    """Compute, for each token, the sum of weight * down(act(up(x))) over its experts, in the order of its choices.

    hidden states (T, H), chosen experts (T, J), integers, and their weights (T, J); returns (T, H) in the dtype of the hidden states. ``rest``:
    the module's other parts, such as its activation, at the time its form was determined. Other calls take the module's own forward.
    """
    given = _arguments(form, args, kwargs)
    reason = "arguments other than hidden states, experts and weights" if given is None else why_not(module, form, rest, given[0]) or _why_not_choices(*given)
    record.count(reason, None if given is None else given[0])
    if reason is not None:
        return type(module).forward(module, *args, **kwargs)
    return mixture(module, form, *cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", given))


def dtkernels_experts(module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Compute a mixture for `experts_implementation="dtkernels"`; shapes as in `experts_forward`. Other calls take what transformers would."""
    form = _known_form(id(module))
    rest: dict[str, object] = {} if form is None or form.unit is None else dict(module._modules)
    reason = why_unknown(module) if form is None else why_not(module, form, rest, hidden_states) or _why_not_choices(hidden_states, top_k_index, top_k_weights)
    unpatched_calls.count(reason, hidden_states)
    if reason is not None or form is None:
        return _transformers_own(module)(module, hidden_states, top_k_index, top_k_weights)
    return mixture(module, form, hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Register `experts_implementation="dtkernels"` with transformers. Raises ImportError where it has no interface for experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("dtkernels", dtkernels_experts)


def patch_dispatched(model: nn.Module, report: PatchReport, known: set[int]) -> None:
    """Patch every module of `model` that multiplies by the weights of several experts in one tensor, except those with ``known`` ids."""
    for name, module in model.named_modules():
        if not holds_experts(module) or id(module) in known:
            continue
        form = form_of(module)
        reason = why_unknown(module) if form is None else taken(module, type(module))
        foreign = _foreign(module)
        if foreign is not None and "experts" not in report.by_name:
            reason = reason or f"{foreign}, may compute something else; patched only if experts are asked for by name"
        rest = other_parts(module) if form is not None and form.unit is not None else {}  # else the module's own function is called
        replace_forward(name, module, "experts", partial(experts_forward, CallRecord(), module, cast(Form, form), rest), reason, report)
        if foreign is not None and report.rows[-1].state in (PATCHED, WOULD_PATCH):
            report.rows[-1].reason = f"asked for by name in place of {foreign}"


def _foreign(module: nn.Module) -> str | None:
    """Return the implementation that somebody else registered and a module's config names, or None."""
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not isinstance(name, str):
        return None
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    function = cast("Mapping[str, Callable]", ALL_EXPERTS_FUNCTIONS).get(name)
    return None if function is None or package_of(function) in OURS else f"experts {name!r}, which somebody else registered"


def other_parts(module: nn.Module) -> dict[str, object]:
    """Return children, and functions among the attributes."""
    return {name: held for name, held in vars(module).items() if callable(held) and name not in NOT_KEPT} | dict(module._modules)


@torch.compiler.assume_constant_result
def _known_form(module_id: int) -> Form | None:
    """Return the form of the living module with this id: as constants, torch 2.11's compiler takes numbers, but no modules."""
    return form_of(ctypes.cast(module_id, ctypes.py_object).value)


def _transformers_own(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Return what transformers takes by default: grouped_mm where torch has it, else the class's own loop."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    own = getattr(type(module).forward, "__wrapped__", None)
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"] if own is None or hasattr(torch.nn.functional, "grouped_mm") else own


def _arguments(form: Form, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """Return hidden states, experts and weights as a call gives them; None if it gives other arguments."""
    names = form.arguments[len(args) :]
    if len(args) + len(names) != 3 or kwargs.keys() != set(names):
        return None
    found = (*args, *(kwargs[name] for name in names))
    return found if all(isinstance(x, torch.Tensor) for x in found) else None


def why_not(module: nn.Module, form: Form, rest: dict[str, object], hidden: torch.Tensor) -> str | None:
    """Return why the ops do not take these hidden states through these experts, or None."""
    if (reason := unsupported(hidden)) is not None:
        return reason
    if getattr(module, "_is_expert_parallel", False):
        return "experts that are sharded"
    for name, part in rest.items():
        if vars(module).get(name, module._modules.get(name)) is not part:
            return "another activation than when it was patched"
        if isinstance(part, nn.Module) and (more := runs_besides_forward(part)) is not None:
            return f"its {type(part).__name__} has {more}"
    held = [cast(torch.Tensor, getattr(module, name)) for name in form.parameters]
    if not all([plain(w) and w.dtype in KERNEL_DTYPES for w in held]):
        return "weights that are quantised or sharded"
    if not in_autocast(hidden.device.type) and any([w.dtype != hidden.dtype for w in held]):
        return "hidden states and weights of different dtypes"
    return "tensors on different devices" if any([w.device != hidden.device for w in held]) else None


def _why_not_choices(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> str | None:
    """Return why the ops do not take these experts and their weights, or None."""
    if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or index.shape[0] != hidden.shape[0]:
        return "hidden states (T, H) without experts (T, J) and weights (T, J)"
    if index.is_floating_point() or index.dtype == torch.bool or not plain(index):
        return "experts that are no integers"
    return unsupported(weights) or ("tensors on different devices" if not hidden.device == index.device == weights.device else None)


def mixture(module: nn.Module, form: Form, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, before: bool = False) -> torch.Tensor:
    """Compute the sum of weight * expert(x) over each token's experts; with ``before`` that of expert(weight * x)."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if in_autocast(device) else hidden.dtype
    with without_autocast(device):
        held = [getattr(module, name).to(dtype) for name in form.parameters]
        return _routed(module, form, held, hidden.to(dtype), index, weights.to(dtype), before).to(hidden.dtype)


def _routed(module: nn.Module, form: Form, held: list[torch.Tensor], hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, before: bool) -> torch.Tensor:
    """Compute the mixture from tensors of one dtype."""
    from dtkernels.ops import grouped_linear
    from dtkernels.ops.experts.rows_by_expert import sort_by_expert

    rows = sort_by_expert(index)
    x, scale = rows.pick(hidden), rows.of_choices(weights)
    if before:
        x, scale = x * scale[:, None], torch.ones_like(scale)
    up, down = held[:2]
    up_bias, down_bias = held[2:] or (None, None)
    if form.plain and not _learns(hidden, weights, up):
        inner = _both_products(x, up, scale, rows.expert, form.transposed)
    else:
        inner = _activated(module, form, grouped_linear(x, up, rows.expert, up_bias, transposed=form.transposed), scale)
    return rows.sum(grouped_linear(inner, down, rows.expert, down_bias, None if down_bias is None else scale, transposed=form.transposed))


def _learns(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any([x.requires_grad for x in tensors])


def _both_products(x: torch.Tensor, up: torch.Tensor, scale: torch.Tensor, expert: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Compute scale * silu(gate) * up in one kernel. With gradients one product is better: those of both halves then lie in one tensor."""
    from dtkernels.ops import grouped_swiglu

    gate, up = (up.transpose(1, 2) if transposed else up).chunk(2, 1)
    return grouped_swiglu(x, gate, up, scale, expert)


def _activated(module: nn.Module, form: Form, product: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return scale * act(product) for each row: by the op where it knows the unit, else by the module's own function."""
    from dtkernels.ops import packed_glu

    if form.unit is None:
        own = module._apply_gate if form.gated else module.act_fn
        return cast("Callable[[torch.Tensor], torch.Tensor]", own)(product) * scale[:, None]
    unit = form.unit
    numbers = {key: float(getattr(module, name)) for key, name in (("alpha", unit.alpha), ("limit", unit.limit)) if name is not None}
    return packed_glu(product, scale, paired=unit.paired, activation=unit.activation, offset=unit.offset, **numbers)
