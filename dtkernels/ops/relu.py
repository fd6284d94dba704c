import torch

from .op_decorator import op


@op(A="x (...)")
def relu(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0), elementwise.

    x: any shape; float32, float16 or bfloat16 (other floating-point types run the reference). Returns the same shape and dtype. NaN stays
    NaN, and the gradient at 0 is 0. Differentiable.

    >>> relu(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    return relu.operator()(x)
