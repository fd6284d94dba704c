import torch

from ..op_decorator import only_tensors, op
from ..option_checks import check_integer


@op(A="x (N, G, C / G, S)", w="weight (G, C / G)", z="bias (G, C / G)")
def groupnorm(x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, mean and variance of each group of channels (Wu and He, 2018), as torch's group_norm.

    Shapes: x (N, C, ...); weight, bias (C,); groups divides C. Computed in float32; returns the shape of x in the promoted dtype.
    Differentiable in x, weight, bias and eps. Raises ValueError where shapes disagree, TypeError where an argument is not a tensor.

    >>> groupnorm(torch.tensor([[1.0, 3.0]]), 1, torch.ones(2), torch.zeros(2))
    tensor([[-1.0000,  1.0000]])
    """
    only_tensors("groupnorm", x=x, weight=weight, bias=bias)
    if x.dim() < 2 or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        got = ", ".join(str(tuple(t.shape)) for t in (x, weight, bias))
        raise ValueError(f"groupnorm: x is (N, C, ...), weight and bias (C,); got shapes {got}")
    check_integer("groupnorm", "groups", groups, 1)
    if x.shape[1] % groups:
        raise ValueError(f"groupnorm: groups divides the {x.shape[1]} channels; got {groups}")
    each = x.shape[1] // groups
    pixels = x[0, 0].numel() if x.shape[0] and x.shape[1] else 0
    parts = x.reshape(x.shape[0], groups, each, pixels)
    return groupnorm.operator()(parts, weight.reshape(groups, each), bias.reshape(groups, each), eps).reshape(x.shape)
