"""Raise a clear error for unsupported derivatives: double backward, forward mode, torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import forward_ad


def refuse_forward_mode(op: str, values: Iterable[object]) -> None:
    """Raise NotImplementedError, one line, where a value carries a tangent, which would be lost."""
    if forward_ad._current_level < 0:
        return
    for v in values:
        if isinstance(v, torch.Tensor) and forward_ad.unpack_dual(v).tangent is not None:
            raise NotImplementedError(f"{op}: forward-mode differentiation is not supported; allowed: backward")


def without_derivative(op: str, results: tuple, given: tuple) -> tuple:
    """Return the gradients ``results`` of the tensors ``given``; differentiating them raises one line instead of giving 0.

    Costs nothing unless the graph of the gradients is recorded (create_graph).
    """
    wanted = [i for i, r in enumerate(results) if r is not None]
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    if not torch.is_grad_enabled() or not wanted or not any(t.requires_grad for t in tensors):
        return results
    marked = _Final.apply(op, len(wanted), *(results[i] for i in wanted), *tensors)
    found = dict(zip(wanted, marked))
    return tuple(found.get(i) for i in range(len(results)))


def without_backward(op: str, make: Callable[[], object], values: Iterable[object]):
    """Return ``make()``; differentiating the result with respect to ``values`` raises one line instead of losing a gradient."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    refuse_forward_mode(op, tensors)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{op}: torch.func is not supported by a compiled program; allowed: an op, dtkernels.register(...), and its gradient"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _Forward.apply(op, make, *tensors)
    return make()


class _Forward(torch.autograd.Function):
    """Run ``make``; the backward raises."""

    @staticmethod
    def forward(ctx, op: str, make: Callable[[], object], *tensors: torch.Tensor):
        ctx.op = op
        return make()

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(f"{ctx.op}: a compiled program has no gradient; allowed: an op, dtkernels.register(...)")


class _Final(torch.autograd.Function):
    """Return the first ``count`` tensors unchanged; the backward raises."""

    @staticmethod
    def forward(op: str, count: int, *tensors: torch.Tensor):
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(f"{ctx.op}: a gradient has no derivative; allowed: backward without create_graph")
