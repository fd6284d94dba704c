import torch

from .op_decorator import op


@op(Y="y (..., M, N)", X="x (..., M, K)", A="a (L, K) or (..., L, K)", B="b (N, L) or (..., N, L)", broadcast=True)
def lora(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return y + scale * (x @ a.T) @ b.T: the low-rank update of a linear layer's output (Hu et al., LoRA, 2021).

    Shapes: y (..., M, N); x (..., M, K); a (L, K); b (N, L), as nn.Linear stores its weights. a and b may have leading dimensions, and all
    leading dimensions broadcast. scale: a number or a one-element tensor. Products are accumulated in float32, and x @ a.T is rounded to
    the inputs' dtype. Returns (..., M, N) in the promoted dtype. Differentiable in all five. Raises ValueError where K, L, M or N does
    not agree.

    >>> lora(torch.zeros(1, 1), torch.ones(1, 2), torch.ones(3, 2), torch.ones(1, 3), 0.5)
    tensor([[3.]])
    """
    return lora.operator()(y, x, a, b, scale)
