"""Patch nn.Sequential modules: two linear layers with a narrow intermediate, or a linear layer and a sigmoid, become one op.

A gate that a forward computes by a function, `torch.sigmoid(self.gate(x))`, is left alone. The layer runs before the function
does, so its product is in memory by then. Changing the function call would change torch for everybody, or rewrite a foreign
forward. Authors of such a forward can call `dtkernels.ops.gate`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import in_autocast, runs_besides_forward, simple_linear, slot_of, taken, unsupported_rows
from ..patching.replacements import FORWARDS, Noted, place, take_out
from ..patching.report import ALREADY, PATCHED, SKIPPED, WOULD_PATCH, PatchReport

Way = tuple[CallRecord, Callable, Callable]  #: what counts its calls, which pairs of layers it joins, and what computes them
NARROW = 128  #: widest intermediate of two chained products that stays on the chip


class Ways(dict[str, Way], Noted):
    """op -> way, of a forward that runs pairs by several ops."""


def sequential_forward(ways: Ways, module: nn.Sequential, input: torch.Tensor) -> torch.Tensor:
    """Run the children of `module` in order; pairs that one of the ways joins run as its op."""
    children, i = list(module), 0
    while i < len(children):
        pair = children[i : i + 2]
        way = next((way for way in ways.values() if len(pair) == 2 and way[1](*pair)), None)
        if way is None:
            input, i = children[i](input), i + 1
            continue
        record, _, joined = way
        reason = unsupported_rows(input) or ("autocast" if in_autocast(input.device.type) else None)
        reason = reason or _why_not_plain(*pair)
        record.count(reason, input)
        input = pair[1](pair[0](input)) if reason is not None else joined(*pair, input)
        i += 2
    return input


def is_chain(first: nn.Module, second: nn.Module) -> bool:
    """Return whether these are two linear layers, the first without bias, with a narrow intermediate."""
    if type(first) is not nn.Linear or type(second) is not nn.Linear or first.bias is not None:
        return False
    return first.out_features == second.in_features <= min(NARROW, first.in_features, second.out_features)


def is_gate(first: nn.Module, second: nn.Module) -> bool:
    """Return whether these are a linear layer and its sigmoid."""
    return type(first) is nn.Linear and type(second) is nn.Sigmoid


def chain(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Compute (x @ A) @ B + bias."""
    from dtkernels import ops

    y = ops.two_mm(x, first.weight.t(), second.weight.t())
    return y if second.bias is None else y + second.bias


def gate(first: nn.Linear, _: nn.Sigmoid, x: torch.Tensor) -> torch.Tensor:
    """Compute sigmoid(x @ A + bias)."""
    from dtkernels import ops

    return ops.gate(x, first.weight, first.bias)


def patch_chains(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.Sequential of `model` that holds two linear layers in a row with a narrow middle."""
    _patch(model, "two_mm", is_chain, chain, report)


def patch_gates(model: nn.Module, report: PatchReport) -> None:
    """Patch every nn.Sequential of `model` that holds a linear layer and its sigmoid."""
    _patch(model, "gate", is_gate, gate, report)


def _why_not_plain(*layers: nn.Module) -> str | None:
    """Return why one of `layers`, linear ones and sigmoids, must be called itself, or None."""
    return next((why for layer in layers if (why := _watched(layer)) is not None), None)


def _watched(layer: nn.Module) -> str | None:
    if isinstance(layer, nn.Linear):
        return simple_linear(layer)
    more = runs_besides_forward(layer)
    return None if more is None else f"its nn.Sigmoid has {more}"


def _patch(model: nn.Module, op: str, joins: Callable, joined: Callable, report: PatchReport) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential) and (pairs := [p for p in zip(list(module), list(module)[1:]) if joins(*p)]):
            ways = _ways(vars(module).get(slot_of(module)))
            reason = taken(module, nn.Sequential) if ways is None else None
            reason = reason or _why_not_plain(*(layer for pair in pairs for layer in pair))
            if ways is not None and op in ways:
                report.add(name, op, ALREADY, record=ways[op][0])
            elif reason is not None:
                report.add(name, op, SKIPPED, reason)
            elif report.dry_run:
                report.add(name, op, WOULD_PATCH)
            else:
                report.add(name, op, PATCHED, record=_add_way(module, op, joins, joined, report))


def _add_way(module: nn.Sequential, op: str, joins: Callable, joined: Callable, report: PatchReport) -> CallRecord:
    """Add a way to the module's forward, which another op may have replaced already; return the way's record."""
    slot, record = slot_of(module), CallRecord()
    ways = _ways(vars(module).get(slot))
    if ways is None:
        ways = Ways()
        place(module, slot, partial(sequential_forward, ways, module))
    report.on_undo(partial(_remove_way, weakref.ref(module), ways, op))
    ways[op] = record, joins, joined
    return record


def _remove_way(ref: weakref.ref, ways: Ways, op: str) -> None:
    """Remove a way again, and the replaced forward with the last one."""
    del ways[op]
    if not ways:
        take_out(ref, FORWARDS, ways)


def _ways(forward: object) -> Ways | None:
    """Return the ways of a forward that this file installed; None for any other."""
    return forward.args[0] if isinstance(forward, partial) and forward.func is sequential_forward else None
