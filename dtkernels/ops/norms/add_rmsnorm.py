import torch

from ..op_decorator import op


@op(A="x (..., C)", R="residual (..., C)", w="weight (C)")
def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rmsnorm(h), h) with h = x + residual: h / sqrt(mean(h^2) + eps) * (weight + offset) (Zhang and Sennrich, 2019), in one kernel.

    Shapes: x, residual (..., C); weight (C,); both results have the shape of x in the promoted dtype. offset: 1 for models that store the
    weight minus 1. The norm is that of the sum in float32. Differentiable in x, residual, weight and eps, through both results. Raises
    ValueError where shapes disagree.

    >>> add_rmsnorm(torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, -2.0]]), torch.ones(2))
    (tensor([[ 1.0000, -1.0000]]), tensor([[ 3., -3.]]))
    """
    return add_rmsnorm.operator()(x, residual, weight, eps, offset=offset)
