from __future__ import annotations

import torch

from ..op_decorator import op
from ..option_checks import as_flag


@op(A="a (M, K)", W="weight (E, N, K)", V="weight (E, K, N)", B="bias (E, N)", w="scale (M,)", e="expert (M,)")
def grouped_linear(
    a: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None, *, transposed: bool = False
) -> torch.Tensor:
    """Return a[m] @ weight[expert[m]]^T + scale[m] * bias[expert[m]] for each row m: torch.nn.functional.linear with one of several layers.

    Shapes: a (M, K); weight (E, N, K), or (E, K, N) if transposed; expert (M,), integers; bias (E, N), or None; scale (M,), or None for 1. The
    result is (M, N), in the promoted dtype. Sums are added up in float32. Rows and experts as for grouped_mm. Differentiable in all but expert;
    the gradient of weight lies in memory in the order of weight's dimensions. Raises ValueError where shapes disagree, and for a scale without
    a bias.

    >>> grouped_linear(torch.ones(2, 3), torch.zeros(2, 1, 3), torch.tensor([1, 0]), torch.tensor([[5.0], [7.0]]))
    tensor([[7.],
            [5.]])
    """
    if scale is not None and bias is None:
        raise ValueError("grouped_linear: scale is that of bias; allowed without bias: None")
    given: dict[str, torch.Tensor | bool] = {"V": weight, "transposed": True} if as_flag("grouped_linear", "transposed", transposed) else {"W": weight}
    if bias is not None:
        given |= {"B": bias, "biased": True}
    if scale is not None:
        given |= {"w": scale, "weighted": True}
    return grouped_linear.operator()(A=a, e=expert, **given)
