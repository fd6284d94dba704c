import torch

from .op_decorator import op


@op(A="gate (...)", B="up (...)")
def geglu(gate: torch.Tensor, up: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """gelu(gate) * up, element by element (Shazeer, GLU Variants Improve Transformer, 2020).

    gate, up: one shape; halves of one packed tensor (``packed.chunk(2, -1)``) need no copy. exact: gelu by the error
    function; else by tanh, as ``torch.nn.functional.gelu(gate, approximate="tanh")``. Computed in float32, returned in the
    promoted dtype. Differentiable in both. Raises ValueError where the shapes disagree.

    >>> geglu(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    tensor([0.0000, 1.6824])
    """
    return geglu.operator()(gate, up, exact=exact)
