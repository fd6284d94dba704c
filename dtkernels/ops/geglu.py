import torch

from .op_decorator import op


@op(A="gate (...)", B="up (...)")
def geglu(gate: torch.Tensor, up: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """Return gelu(gate) * up, elementwise (Shazeer, GLU Variants Improve Transformer, 2020).

    Shapes: gate and up have one shape, which is returned in the promoted dtype. Halves of a packed tensor (``packed.chunk(2, -1)``) need no
    copy. exact: use the error function; otherwise tanh, as ``torch.nn.functional.gelu(gate, approximate="tanh")``. Computed in float32.
    Differentiable in both. Raises ValueError where the shapes disagree.

    >>> geglu(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    tensor([0.0000, 1.6824])
    """
    return geglu.operator()(gate, up, exact=exact)
