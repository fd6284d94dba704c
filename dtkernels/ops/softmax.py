import torch

from .op_decorator import only_tensors, op


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
    if not isinstance(dim, int):
        raise TypeError(f"softmax: dim is {dim!r}; allowed: an integer")
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"softmax: dim is {dim}; allowed: {-rank} to {rank - 1}")
    x = x if dtype is None else x.to(dtype)
    if dim in (-1, rank - 1):
        return softmax.operator()(x)
    return softmax.operator()(x.movedim(dim, -1)).movedim(-1, dim)
