import torch

from .op_decorator import op


@op(A="x (..., C)", w="weight (C)", b="bias (C)")
def layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, with mean and variance over the last dimension (Ba et al., 2016).

    Shapes: x (..., C); weight and bias (C,). eps: a number or a one-element tensor. Computed in float32; returns the shape of x in the
    promoted dtype. Differentiable in all four. Raises ValueError where C does not agree.

    >>> layernorm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2))
    tensor([[-1.0000,  1.0000]])
    """
    return layernorm.operator()(x, weight, bias, eps)
