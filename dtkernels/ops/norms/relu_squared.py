import torch

from ..op_decorator import op


@op(A="x (...)")
def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0)^2, element by element (So et al., Primer, 2021).

    Returns the shape and dtype of x. A NaN stays a NaN. Differentiable; the gradient is 2 * max(x, 0).

    >>> relu_squared(torch.tensor([-1.0, 3.0]))
    tensor([0., 9.])
    """
    return relu_squared.operator()(x)
