"""Patch mixtures that run every expert on every token, with inputs multiplied by the router's scores, most of them 0: Llama 4's.

The instance's `forward` runs the experts of the largest scores alone. Router and shared expert are called as modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import cast

import torch
from torch import nn

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import replace_forward, runs_besides_forward, taken
from ..patching.numeric_probe import output_of, rows, same, stand_in, takes_one_tensor
from ..patching.report import PatchReport
from .expert_forms import WIDTH, Form, Unit, fits, holds_experts, twin_of
from .experts import mixture, other_parts, patch_dispatched, why_not


@dataclass(frozen=True)
class DenseForm:
    """The names of a mixture's children, of the attribute with the number of experts of a token, and the form of the experts."""

    experts: str
    router: str
    shared: str
    each: str
    form: Form


def dense_mixture_forward(record: CallRecord, module: nn.Module, form: DenseForm, rest: dict[str, object], *args, **kwargs):
    """Compute shared(x) + the sum of expert(score * x) over the experts with the largest scores; x: (..., H), returns ((T, H), the router's logits).

    ``rest``: parts of the experts at the time their form was determined. Other calls take the module's own forward.
    """
    children, each = cast("dict[str, nn.Module]", module._modules), getattr(module, form.each)
    experts = children[form.experts]
    reason = "arguments other than one tensor" if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) else None
    if reason is None and (more := runs_besides_forward(experts)) is not None:
        reason = f"its {type(experts).__name__} has {more}"
    if reason is None:
        hidden = args[0].reshape(-1, args[0].shape[-1])
        reason = why_not(experts, form.form, rest, hidden)
    record.count(reason, args[0] if args else None)
    if reason is not None:
        return type(module).forward(module, *args, **kwargs)
    scores, logits = children[form.router](hidden)
    weights, index = scores.topk(each, -1)
    return children[form.shared](hidden) + mixture(experts, form.form, hidden, index, weights, before=True), logits


def patch_experts(model: nn.Module, report: PatchReport) -> None:
    """Patch the experts of `model`: in such mixtures, and where transformers' interface dispatches them."""
    found = set()
    for name, module in model.named_modules():
        if (form := dense_form_of(module)) is not None:
            experts = cast(nn.Module, module._modules[form.experts])
            found.add(id(experts))
            forward = partial(dense_mixture_forward, CallRecord(), module, form, other_parts(experts))
            replace_forward(name, module, "experts", forward, taken(module, type(module)), report)
    patch_dispatched(model, report, known=found)


def dense_form_of(module: nn.Module) -> DenseForm | None:
    """Return the form of a mixture with experts, a router and a shared expert as children, or None."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    experts = next((name for name, child in children.items() if holds_experts(child)), None)
    if experts is None or len(children) != 3 or not takes_one_tensor(type(module)) or not takes_one_tensor(type(children[experts])):
        return None
    held = {name: p for name, p in children[experts]._parameters.items() if p is not None}
    if held.keys() != {"gate_up_proj", "down_proj"} or any(next(child.parameters(), None) is not None for child in children[experts].children()):
        return None
    others = [name for name in children if name != experts]
    for router, shared in permutations(others):
        for form in _forms(experts, router, shared, module):
            if fits(form.form, held) and all(_computes(form, module, training) for training in (False, True)):
                return form
    return None


def _forms(experts: str, router: str, shared: str, module: nn.Module) -> Iterator[DenseForm]:
    plain = Form(("hidden_states",), ("gate_up_proj", "down_proj"), True, True, Unit(), True)
    counts = [name for name, value in vars(module).items() if type(value) is int and "top" in name]
    for transposed, each in ((transposed, each) for transposed in (True, False) for each in counts):
        yield DenseForm(experts, router, shared, each, replace(plain, transposed=transposed))


class _Router(nn.Module):
    """Return scores of which all but a few in a row are 0, and other numbers for logits."""

    def __init__(self, scores: torch.Tensor):
        super().__init__()
        self.scores = scores

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scores, -self.scores - 1


class _Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _computes(form: DenseForm, module: nn.Module, training: bool) -> bool:
    """Return whether a mixture's class computes what the form says, on a stand-in with small weights."""
    experts = cast(nn.Module, module._modules[form.experts])
    small, x, each = _narrow(twin_of(form.form, experts, training)), rows(WIDTH)[0], getattr(module, form.each)
    count = experts._parameters["down_proj"].shape[0]  # type: ignore[union-attr]
    if not 0 < each <= count:
        return False
    index = (torch.arange(each) + torch.arange(len(x))[:, None]) % count
    weights = torch.linspace(0.2, 0.9, index.numel(), dtype=torch.float64).reshape(index.shape)
    scores = torch.zeros(len(x), count, dtype=torch.float64).scatter_(1, index, weights)
    children = {form.experts: small, form.router: _Router(scores), form.shared: _Double()}
    found = output_of(type(module).forward, _narrow(stand_in(module, children=children, training=training)), x)
    if not isinstance(found, tuple) or len(found) != 2 or not same(found[1], -scores - 1):
        return False
    up, down = (p.detach() if form.form.transposed else p.detach().transpose(1, 2) for p in (small.gate_up_proj, small.down_proj))  # type: ignore[union-attr,operator]
    inner = torch.einsum("tjk,tjkn->tjn", x[:, None] * weights[..., None], up[index])
    return same(found[0], 2 * x + torch.einsum("tjn,tjnk->tjk", Unit().of(small, inner), down[index]).sum(1))


def _narrow(twin: nn.Module) -> nn.Module:
    """Set the attributes that hold the width of hidden states to that of the stand-in's weights."""
    for name, value in list(vars(twin).items()):
        if "hidden" in name and type(value) is int:
            vars(twin)[name] = WIDTH
    return twin
