import torch

from ..op_decorator import op


@op(A="x (..., C)", w="weight (3)", z="bias (1)")
def polynorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return weight[0] * n(x^3) + weight[1] * n(x^2) + weight[2] * n(x) + bias, with n(v) = v / sqrt(mean(v^2) + eps) (Zhuo et al., PolyCom, 2024).

    Shapes: x (..., C); weight (3,); bias (1,). Computed in float32; returns the shape of x in the promoted dtype. Differentiable in x,
    weight, bias and eps. Raises ValueError where shapes disagree.

    >>> polynorm(torch.tensor([[2.0, -2.0]]), torch.ones(3), torch.zeros(1))
    tensor([[ 3.0000, -1.0000]])
    """
    for name, tensor, size in (("weight", weight, 3), ("bias", bias, 1)):
        if isinstance(tensor, torch.Tensor) and tensor.shape != (size,):
            raise ValueError(f"polynorm: {name} is ({size},); got shape {tuple(tensor.shape)}")
    return polynorm.operator()(x, weight, bias, eps)
