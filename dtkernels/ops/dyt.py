import torch

from .op_decorator import op


@op(A="x (..., C)", w="weight (C)", b="bias (C)")
def dyt(x: torch.Tensor, alpha: torch.Tensor | float, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return tanh(alpha * x) * weight + bias: dynamic tanh (Zhu et al., Transformers without Normalization, 2025).

    Shapes: x (..., C); weight and bias (C,). alpha: a number, or a one-element tensor that is read on the device. Returns the shape of x in
    the promoted dtype. Differentiable in all four. Raises ValueError where C does not agree.

    >>> dyt(torch.zeros(2, 3), 0.5, torch.ones(3), torch.zeros(3)).shape
    torch.Size([2, 3])
    """
    return dyt.operator()(x, weight, bias, alpha)
