import torch

from .op_decorator import op


@op(A="a (..., M, K)", B="b (K, N) or (..., K, N)", broadcast=True)
def mmsigmoid(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return sigmoid(a @ b), with the product accumulated in float32.

    Shapes: a (..., M, K); b (K, N) or (..., K, N); leading dimensions broadcast. Returns (..., M, N) in the promoted dtype. float32 products
    follow torch's TF32 setting. Differentiable in both. Raises ValueError where K does not agree.

    >>> mmsigmoid(torch.zeros(2, 3), torch.zeros(3, 1))
    tensor([[0.5000],
            [0.5000]])
    """
    return mmsigmoid.operator()(a, b)
