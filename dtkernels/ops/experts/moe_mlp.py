from __future__ import annotations

import torch

from ...runtime.torch_support.dtypes import INTEGER_DTYPES
from ..op_decorator import as_rows, only_tensors
from ..option_checks import check_floating
from .grouped_linear import grouped_linear
from .grouped_swiglu import grouped_swiglu
from .rows_by_expert import sort_by_expert


def moe_mlp(
    hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """The gated MLPs of a mixture of experts: for each token the sum over its choices j of weight[j] * mlp(expert[j]), with
    mlp(e) = (silu(x @ gate[e]^T) * (x @ up[e]^T)) @ down[e]^T.

    Shapes: hidden (..., H); gate and up (E, I, H); down (E, H, I); expert (..., J), integers; weight (..., J). The result has the shape and
    dtype of hidden. Choices are sorted by expert on the device, so that no call waits for it; then a block of rows reads the matrices of one
    or two experts (grouped_swiglu, grouped_linear). An expert out of range, as of a token that is dropped, adds nothing. Differentiable in hidden,
    the matrices and weight, bitwise reproducible. Raises ValueError where shapes disagree, TypeError where an argument is not a tensor or
    expert holds no integers. The mixture is that of Shazeer et al., Outrageously Large Neural Networks, 2017.

    >>> moe_mlp(torch.ones(2, 3), torch.ones(4, 5, 3), torch.ones(4, 5, 3), torch.zeros(4, 3, 5), torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2))
    tensor([[0., 0., 0.],
            [0., 0., 0.]])
    """
    only_tensors("moe_mlp", hidden=hidden, gate=gate, up=up, down=down, expert=expert, weight=weight)
    _check_shapes(hidden, gate, up, down, expert, weight)
    check_floating("moe_mlp", hidden=hidden, gate=gate, up=up, down=down, weight=weight)
    rows = sort_by_expert(expert)
    inner = grouped_swiglu(rows.pick(as_rows(hidden)), gate, up, rows.of_choices(weight).to(hidden.dtype), rows.expert)
    return rows.sum(grouped_linear(inner, down, rows.expert)).reshape(hidden.shape)


def _check_shapes(hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError or TypeError, one line, for tensors that are no mixture of experts."""
    if expert.dtype not in INTEGER_DTYPES:
        raise TypeError(f"moe_mlp: expert is {expert.dtype}; allowed: int32, int64, int8 or uint8")
    sizes = gate.shape[1:2] + hidden.shape[-1:]
    shapes = gate.dim() == 3 and gate.shape == up.shape == (gate.shape[0], *sizes) and down.shape == (gate.shape[0], *sizes[::-1])
    if not (shapes and expert.dim() == hidden.dim() > 0 and expert.shape == weight.shape and expert.shape[:-1] == hidden.shape[:-1]):
        found = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("hidden", hidden), ("gate", gate), ("up", up), ("down", down), ("expert", expert), ("weight", weight)))
        raise ValueError(f"moe_mlp: shapes are hidden (..., H), gate and up (E, I, H), down (E, H, I), expert and weight (..., J); found {found}")


__all__ = ["moe_mlp"]
