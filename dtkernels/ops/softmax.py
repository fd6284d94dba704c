import torch

from .public import op


@op(A="x (..., Y)")
def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x[..., y]) / sum over y of exp(x[..., y]): softmax over the last dimension, at any magnitude of x.

    x: (..., Y), float32, float16 or bfloat16 (other floating types run the reference). Returns the same shape and
    dtype. A row of -inf gives NaN, as torch.softmax does.

    >>> softmax(torch.zeros(1, 4))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return softmax.operator()(x)
