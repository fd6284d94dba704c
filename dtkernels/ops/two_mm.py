import torch

from .op_decorator import op


@op(A="a (..., M, K)", B="b (K, L) or (..., K, L)", C="c (L, N) or (..., L, N)", broadcast=True)
def two_mm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return (a @ b) @ c, with products accumulated in float32 and a @ b rounded to the inputs' dtype.

    Shapes: a (..., M, K); b (K, L); c (L, N). b and c may have leading dimensions, and all leading dimensions broadcast. Returns (..., M, N)
    in the promoted dtype. Differentiable in all three. Raises ValueError where K or L does not agree.

    >>> two_mm(torch.ones(2, 3), torch.ones(3, 4), torch.ones(4, 1))
    tensor([[12.],
            [12.]])
    """
    return two_mm.operator()(a, b, c)
