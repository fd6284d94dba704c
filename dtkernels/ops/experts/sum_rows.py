import torch

from ..op_decorator import op


@op(A="rows (R, C)", p="index (M, J)")
def sum_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows[index].sum(1): sums of rows by index, as torch.nn.functional.embedding_bag in mode "sum", without storing what is picked.

    Shapes: rows (R, C); index (M, J), integers. The result is (M, C) in the dtype of rows, added up in float32. An index out of range adds
    nothing, or raises IndexError under DTKERNELS_CHECK=1. Differentiable in rows.

    >>> sum_rows(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[0, 2], [1, 1]]))
    tensor([[5.],
            [4.]])
    """
    return sum_rows.operator()(rows, index)
