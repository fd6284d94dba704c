import torch

from .op_decorator import op


@op(X="x (..., M, K)", W="weight (N, K)", bias="bias (N)", T="times (..., M, N)")
def gate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, times: torch.Tensor | None = None) -> torch.Tensor:
    """Return sigmoid(x @ weight.T + bias) * times, in one kernel; the product is accumulated in float32.

    Shapes: x (..., M, K); weight (N, K); bias (N,) or None; times (..., M, N) or None. Returns (..., M, N) in the promoted dtype. float32
    products follow torch's TF32 setting. Differentiable in all four. Raises ValueError where K, M or N does not agree.

    >>> gate(torch.zeros(2, 3), torch.zeros(1, 3))
    tensor([[0.5000],
            [0.5000]])
    """
    given = {name: tensor for name, tensor in (("bias", bias), ("T", times)) if tensor is not None}
    return gate.operator()(x, weight, biased=bias is not None, gates=times is not None, **given)
