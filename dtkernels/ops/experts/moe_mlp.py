from __future__ import annotations

import torch

from ..norms.embedding import embedding
from ..op_decorator import only_tensors
from .grouped_mm import grouped_mm
from .grouped_swiglu import grouped_swiglu
from .sum_rows import sum_rows


class _Rows(torch.autograd.Function):
    """Rows by index where each row of the one side belongs to one row of the other: the gradient of picking sums, that of summing picks."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return embedding(rows, index) if index.dim() == 1 else sum_rows(rows, index)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[override]
        index, inverse = ctx.saved_tensors
        return _Rows.apply(gradient, inverse, index), None, None


def moe_mlp(
    hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """The gated MLPs of a mixture of experts: for each token the sum over its choices j of weight[j] * mlp(expert[j]), with
    mlp(e) = (silu(x @ gate[e]^T) * (x @ up[e]^T)) @ down[e]^T.

    Shapes: hidden (..., H); gate and up (E, I, H); down (E, H, I); expert (..., J), integers; weight (..., J). The result has the shape and
    dtype of hidden. Choices are sorted by expert on the device, so that no call waits for it; then a block of rows reads the matrices of one
    or two experts (grouped_swiglu, grouped_mm). An expert out of range, as of a token that is dropped, adds nothing. Differentiable in hidden,
    the matrices and weight, bitwise reproducible. Raises ValueError where shapes disagree, TypeError where an argument is not a tensor or
    expert holds no integers. The mixture is that of Shazeer et al., Outrageously Large Neural Networks, 2017.

    >>> moe_mlp(torch.ones(2, 3), torch.ones(4, 5, 3), torch.ones(4, 5, 3), torch.zeros(4, 3, 5), torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2))
    tensor([[0., 0., 0.],
            [0., 0., 0.]])
    """
    only_tensors("moe_mlp", hidden=hidden, gate=gate, up=up, down=down, expert=expert, weight=weight)
    _check_shapes(hidden, gate, up, down, expert, weight)
    tokens, choices = hidden.reshape(-1, hidden.shape[-1]), expert.reshape(-1)
    order = torch.argsort(choices, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device)).reshape(-1, expert.shape[-1])
    token, sorted_expert = order // max(expert.shape[-1], 1), choices.gather(0, order)
    rows = _Rows.apply(tokens, token, place)
    inner = grouped_swiglu(rows, gate, up, weight.reshape(-1).gather(0, order).to(hidden.dtype), sorted_expert)
    return _Rows.apply(grouped_mm(inner, down.transpose(1, 2), sorted_expert), place, token).reshape(hidden.shape)


def _check_shapes(hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError or TypeError, one line, for tensors that are no mixture of experts."""
    if expert.is_floating_point() or expert.is_complex() or expert.dtype == torch.bool:
        raise TypeError(f"moe_mlp: expert is {expert.dtype}; allowed: integers")
    sizes = gate.shape[1:2] + hidden.shape[-1:]
    shapes = gate.dim() == 3 and gate.shape == up.shape == (gate.shape[0], *sizes) and down.shape == (gate.shape[0], *sizes[::-1])
    if not (shapes and expert.dim() == hidden.dim() > 0 and expert.shape == weight.shape and expert.shape[:-1] == hidden.shape[:-1]):
        found = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("hidden", hidden), ("gate", gate), ("up", up), ("down", down), ("expert", expert), ("weight", weight)))
        raise ValueError(f"moe_mlp: shapes are hidden (..., H), gate and up (E, I, H), down (E, H, I), expert and weight (..., J); found {found}")


__all__ = ["moe_mlp"]
