import torch

from ..op_decorator import op


@op(W="weight (V, C)", t="index (...)")
def embedding(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return weight[index]: rows by index, as torch.nn.functional.embedding.

    Shapes: weight (V, C); index (...), integers; the result (..., C) in the dtype of weight. Differentiable in weight: rows that are taken
    several times get the sum, added up in float32, in any order unless torch.use_deterministic_algorithms(True) is set. An index out of
    range gives zeros, or raises IndexError under DTKERNELS_CHECK=1.

    >>> embedding(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1]))
    tensor([[3., 4.]])
    """
    return embedding.operator()(weight, index)
