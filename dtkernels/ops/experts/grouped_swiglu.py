import torch

from ..op_decorator import op


@op(X="x (M, K)", G="gate (E, N, K)", U="up (E, N, K)", w="scale (M,)", e="expert (M,)")
def grouped_swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Return scale * silu(x @ gate[e]^T) * (x @ up[e]^T) with e = expert[m] for row m: both projections in one kernel.

    Shapes: x (M, K); gate and up (E, N, K); scale (M,); expert (M,), integers. The result is (M, N), in the promoted dtype. Sums are added up
    in float32. Right for rows in any order, fast where rows of one expert lie together. An expert out of range gives a row of zeros, or
    raises IndexError under DTKERNELS_CHECK=1. Differentiable in all but expert. The unit is that of Shazeer, GLU Variants Improve
    Transformer, 2020.

    >>> grouped_swiglu(torch.zeros(2, 3), torch.ones(1, 4, 3), torch.ones(1, 4, 3), torch.ones(2), torch.tensor([0, 0])).shape
    torch.Size([2, 4])
    """
    return grouped_swiglu.operator()(x, gate, up, scale, expert)
