import torch

from ..op_decorator import op
from ..option_checks import as_flag
from .layout import in_layout


@op(X="x (B, H, S, 1, 2, D / 2)", cos="cos (B, S, D / 2)", sin="sin (B, S, D / 2)")
def rotary_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, heads: int = 1) -> torch.Tensor:
    """Rotate the pairs of each head of one tensor by position: RoPE (Su et al., RoFormer, 2021) by tables with one number for each pair.

    y[i] = a[i] cos[i] - b[i] sin[i] and y[i + D / 2] = b[i] cos[i] + a[i] sin[i], where a and b are the halves of a head, or with
    interleaved its even and its odd elements: the result has halves in both cases, as in DeepSeek V3. Shapes: x (B, H, S, D), or
    (B, S, H, D) with heads=2; cos and sin (B, S, D / 2), (1, S, D / 2) or (S, D / 2). Computed in float32; returns the shape and dtype of x,
    whatever dtype the tables have. Differentiable in all three. Raises ValueError where shapes disagree, TypeError where an argument is not
    a tensor.

    >>> rotary_pairs(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4), torch.zeros(1, 2), torch.ones(1, 2), interleaved=True)
    tensor([[[[-2., -4.,  1.,  3.]]]])
    """
    laid, cos, sin = in_layout("rotary_pairs", x, cos, sin, heads)
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise ValueError(f"rotary_pairs: cos and sin have D / 2 numbers for a token; got {cos.shape[-1]} and D {x.shape[-1]}")
    pairs = laid.unflatten(-1, (-1, 2)).transpose(-1, -2) if as_flag("rotary_pairs", "interleaved", interleaved) else laid.unflatten(-1, (2, -1))
    return rotary_pairs.operator()(X=pairs, cos=cos, sin=sin).reshape(x.shape)
