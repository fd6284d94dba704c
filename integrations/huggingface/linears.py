"""nn.Sequential modules in which linear layers follow each other, or a sigmoid: two products, or product and sigmoid, as one op.

A gate that a forward computes by a function, `torch.sigmoid(self.gate(x))`, is left alone. The layer is called before the
function is, and by then its product is in memory; to change the call of the function would be to change torch for everybody
or to rewrite somebody else's forward. `dtkernels.ops.gate` is there for whoever owns that forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .forwards import in_autocast, replace_forward, simple_linear, taken, unsupported_rows
from .record import CallRecord
from .report import PatchReport

NARROW = 128  #: widest intermediate that two chained products keep on the chip


def sequential_forward(record: CallRecord, module: nn.Sequential, joins: Callable, joined: Callable, input: torch.Tensor) -> torch.Tensor:
    """The children of `module` in turn, pairs that `joins` computed by `joined`."""
    children, i = list(module), 0
    while i < len(children):
        pair = children[i : i + 2]
        if len(pair) < 2 or not joins(*pair):
            input, i = children[i](input), i + 1
            continue
        reason = unsupported_rows(input) or ("autocast" if in_autocast(input.device.type) else None)
        reason = reason or _special(*pair)
        record.count(reason)
        input = pair[1](pair[0](input)) if reason is not None else joined(*pair, input)
        i += 2
    return input


def is_chain(first: nn.Module, second: nn.Module) -> bool:
    """Two linear layers, nothing between them, not even a bias, and narrow in the middle."""
    both = type(first) is type(second) is nn.Linear and first.bias is None
    return both and first.out_features == second.in_features <= min(NARROW, first.in_features, second.out_features)


def is_gate(first: nn.Module, second: nn.Module) -> bool:
    """A linear layer and its sigmoid."""
    return type(first) is nn.Linear and type(second) is nn.Sigmoid


def chain(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """(x @ A) @ B + bias."""
    from dtkernels import ops

    y = ops.two_mm(x, first.weight.t(), second.weight.t())
    return y if second.bias is None else y + second.bias


def gate(first: nn.Linear, _: nn.Sigmoid, x: torch.Tensor) -> torch.Tensor:
    """sigmoid(x @ A + bias)."""
    from dtkernels import ops

    return ops.gate(x, first.weight, first.bias)


def patch_chains(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.Sequential of `model` that holds two linear layers in a row with a narrow middle."""
    _patch(model, "two_mm", is_chain, chain, report)


def patch_gates(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.Sequential of `model` that holds a linear layer and its sigmoid."""
    _patch(model, "gate", is_gate, gate, report)


def _special(*layers: nn.Module) -> str | None:
    """Why a linear layer among `layers` must be called itself; None if none must."""
    return next((why for layer in layers if isinstance(layer, nn.Linear) and (why := simple_linear(layer)) is not None), None)


def _patch(model: nn.Module, op: str, joins: Callable, joined: Callable, report: PatchReport) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential) and (pairs := [p for p in zip(list(module), list(module)[1:]) if joins(*p)]):
            reason = taken(module, nn.Sequential)
            reason = reason or _special(*(layer for pair in pairs for layer in pair))
            forward = partial(sequential_forward, CallRecord(), module, joins, joined)
            replace_forward(name, module, op, forward, reason, report)
