import torch

from ..op_decorator import only_tensors, op
from ..option_checks import check_range
from ..reductions import check_reduction, check_shapes, reduced


@op(A="x (..., C)", B="y (..., C)")
def cosine_distance(x: torch.Tensor, y: torch.Tensor, *, eps: float = 1e-8, reduction: str = "mean") -> torch.Tensor:
    """Return 1 - sum(x * y) / (max(|x|, eps) * max(|y|, eps)) along the last dimension, as 1 - torch.nn.functional.cosine_similarity.

    Shapes: x, y (..., C); the result is float32: of shape (...) with reduction "none", else the sum or the mean over the rows.
    Differentiable in both. Raises ValueError where shapes disagree or the reduction is not known, TypeError where an argument is not a tensor.

    >>> cosine_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
    tensor(1.)
    """
    only_tensors("cosine_distance", x=x, y=y)
    check_shapes("cosine_distance", "(..., C)", x=x, y=y)
    check_reduction("cosine_distance", reduction)
    check_range("cosine_distance", "eps", eps, 0, float("inf"))
    return reduced(cosine_distance.operator()(x, y, eps * eps), reduction)
