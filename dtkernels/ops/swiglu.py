import torch

from .op_decorator import op


@op(A="gate (...)", B="up (...)")
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return gate * sigmoid(gate) * up, elementwise: silu(gate) * up (Shazeer, GLU Variants Improve Transformer, 2020).

    Shapes: gate and up have one shape, which is returned in the promoted dtype. Halves of a packed tensor (``packed.chunk(2, -1)``) need no
    copy. Computed in float32. Differentiable in both. Raises ValueError where the shapes disagree.

    >>> swiglu(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    tensor([0.0000, 1.4621])
    """
    return swiglu.operator()(gate, up)
