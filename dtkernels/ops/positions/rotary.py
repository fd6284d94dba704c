import torch

from ..op_decorator import op
from ..option_checks import as_flag
from .layout import in_layout


@op(X="x (B, H, S, 1, D)", cos="cos (B, S, R)", sin="sin (B, S, R)")
def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, paired: bool = False, heads: int = 1
) -> torch.Tensor:
    """Rotate the first R elements of each head of one tensor by position, and keep the others: RoPE (Su et al., RoFormer, 2021).

    y[i] = x[i] cos[i] - x[j] sin[i] for the first element of a pair, y[j] = x[j] cos[j] + x[i] sin[j] for the second. Element i goes with
    j = i + R / 2, or with interleaved element 2i with 2i + 1. paired: the tables have one number for each pair, R / 2 of them; with
    interleaved only (see rotary_pairs for halves). Shapes: x (B, H, S, D), or (B, S, H, D) with heads=2; cos and sin (B, S, R), (1, S, R) or
    (S, R); R is even, at most D. Computed in float32; returns the shape and dtype of x, whatever dtype the tables have. Differentiable in
    all three. Raises ValueError where shapes disagree, TypeError where an argument is not a tensor.

    >>> rotary(torch.ones(1, 1, 2, 4), torch.zeros(2, 2), torch.ones(2, 2))[0, 0, 0]
    tensor([-1.,  1.,  1.,  1.])
    """
    interleaved, paired = as_flag("rotary", "interleaved", interleaved), as_flag("rotary", "paired", paired)
    laid, cos, sin = in_layout("rotary", x, cos, sin, heads)
    if paired and not interleaved:
        raise ValueError("rotary: paired tables go with interleaved=True; allowed: rotary_pairs for halves")
    turned = cos.shape[-1] * (2 if paired else 1)
    if turned % 2 or turned > x.shape[-1]:
        raise ValueError(f"rotary: R is even and at most D; got R {turned} and D {x.shape[-1]}")
    found = rotary.operator()(X=laid, cos=cos, sin=sin, interleaved=interleaved, paired=paired)
    return found.reshape(x.shape)
