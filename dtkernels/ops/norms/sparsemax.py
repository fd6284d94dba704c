import torch

from ..op_decorator import op


@op(A="x (..., C)")
def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """The point of the probability simplex that is nearest to x, row by row: max(x - tau, 0), with tau so that a row sums to 1 (Martins and Astudillo, 2016).

    The threshold tau is found by bisection of sum(max(x - tau, 0)) = 1 to 2^-24, and then from the elements above it: the result of the paper
    without sorting. Returns the shape of x (..., C) in its dtype. Differentiable.

    >>> sparsemax(torch.tensor([[0.1, 1.0, 0.6]]))
    tensor([[0.0000, 0.7000, 0.3000]])
    """
    return sparsemax.operator()(x)
