import torch

from .op_decorator import only_tensors, op


@op(A="x (..., C)", w="weight (C)")
def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, *, offset: int = 0) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (weight + offset), with the mean over the last dimension (Zhang and Sennrich, 2019).

    Shapes: x (..., C); weight (C,), or None for a factor of 1, whatever offset is. eps: a number or a one-element tensor. offset: 1 for models that store the weight minus 1. Computed in
    float32; returns the shape of x in the promoted dtype. Differentiable in x, weight and eps. Raises ValueError where C does not agree.

    >>> rmsnorm(torch.tensor([[3.0, -3.0]]), torch.ones(2))
    tensor([[ 1.0000, -1.0000]])
    """
    if weight is None:
        only_tensors("rmsnorm", x=x)
        weight, offset = x.new_ones(x.shape[-1:]), 0
    return rmsnorm.operator()(x, weight, eps, offset=offset)
