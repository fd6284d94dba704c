import torch

from ..op_decorator import op


@op(A="a (M, K)", W="weight (E, K, N)", e="expert (M,)")
def grouped_mm(a: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Return a[m] @ weight[expert[m]] for each row m: a product with one of several matrices, as torch._grouped_mm without offsets.

    Shapes: a (M, K); weight (E, K, N), of any strides; expert (M,), integers. The result is (M, N), in the promoted dtype of a and weight.
    Sums are added up in float32. Right for rows in any order, fast where rows of one expert lie together: a block of rows then reads the
    matrices of one or two experts. An expert out of range gives a row of zeros, or raises IndexError under DTKERNELS_CHECK=1. Differentiable
    in a and weight.

    >>> grouped_mm(torch.ones(2, 3), torch.arange(2.0).reshape(2, 1, 1).expand(2, 3, 1), torch.tensor([0, 1]))
    tensor([[0.],
            [3.]])
    """
    return grouped_mm.operator()(a, weight, expert)
