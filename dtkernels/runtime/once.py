"""Gradients that have no derivative of their own say so when one is asked for."""

from __future__ import annotations

import torch


def without_derivative(op: str, results: tuple, given: tuple) -> tuple:
    """``results``, gradients made from the tensors ``given``; differentiating them raises one line instead of giving 0.

    Costs nothing unless the graph of the gradients is being recorded (create_graph).
    """
    wanted = [i for i, r in enumerate(results) if r is not None]
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    if not torch.is_grad_enabled() or not wanted or not any(t.requires_grad for t in tensors):
        return results
    marked = _Final.apply(op, len(wanted), *(results[i] for i in wanted), *tensors)
    found = dict(zip(wanted, marked))
    return tuple(found.get(i) for i in range(len(results)))


class _Final(torch.autograd.Function):
    """The identity on its first ``count`` tensors, tied to the rest; its backward refuses."""

    @staticmethod
    def forward(ctx, op: str, count: int, *tensors: torch.Tensor):
        ctx.op = op
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(f"{ctx.op}: a gradient has no derivative; allowed: backward without create_graph")
