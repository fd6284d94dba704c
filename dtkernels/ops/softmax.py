import torch

from .op_decorator import only_tensors, op
from .option_checks import check_integer


@op(A="x (..., Y)")
def softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return exp(x[..., y]) / sum over y of exp(x[..., y]): softmax over the last dimension, without overflow.

    x: (..., Y); float32, float16 or bfloat16 (other floating-point types run the reference). dim: the dimension, by default the last. dtype:
    convert x to it first. Returns the same shape and dtype. A row of -inf gives NaN, as in torch.softmax. Differentiable. Raises
    ValueError where dim is out of range.

    >>> softmax(torch.zeros(1, 4))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    if dim == -1 and dtype is None:
        return softmax.operator()(x)
    return _softmax_along_dim(x, dim, dtype)


def _softmax_along_dim(x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Compute softmax over any dimension."""
    only_tensors("softmax", x=x)
    rank = max(x.dim(), 1)
    check_integer("softmax", "dim", dim, -rank, rank - 1)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"softmax: dtype is {dtype!r}; allowed: a floating-point torch.dtype, or None")
    x = x if dtype is None else x.to(dtype)
    if dim in (-1, rank - 1):
        return softmax.operator()(x)
    return softmax.operator()(x.movedim(dim, -1)).movedim(-1, dim)
