import torch

from ..op_decorator import only_tensors, op
from ..option_checks import as_flag


@op(Q="q (B, H, S, D)", K="k (B, G, S, D)", cos="cos (B, S, R)", sin="sin (B, S, R)")
def partial_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R elements of each head by position, and keep the others: RoPE (Su et al., RoFormer, 2021), as GPT-NeoX and GPT-J use it.

    Element i goes with i + R / 2, or with interleaved element 2i with 2i + 1. cos and sin have one number for each of the R elements. Shapes:
    q (B, H, S, D); k (B, G, S, D); cos and sin (B, S, R), (1, S, R) or (S, R); R is even, at most D. Returns both in the promoted dtype.
    Differentiable in q and k, and in cos and sin. Raises ValueError where shapes disagree, TypeError where an argument is not a tensor.

    >>> q, k = partial_rope(*torch.ones(2, 1, 1, 2, 4), torch.zeros(2, 2), torch.ones(2, 2))
    >>> q[0, 0, 0]
    tensor([-1.,  1.,  1.,  1.])
    """
    only_tensors("partial_rope", q=q, k=k, cos=cos, sin=sin)
    fits = q.dim() == k.dim() == 4 and cos.dim() in (2, 3) and cos.shape == sin.shape and q.shape[::2] == k.shape[::2] and q.shape[-1] == k.shape[-1]
    if not fits or cos.shape[-2] != q.shape[2] or cos.dim() == 3 and cos.shape[0] not in (1, q.shape[0]):
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, cos, sin))
        raise ValueError(f"partial_rope: q is (B, H, S, D), k (B, G, S, D), cos and sin (B, S, R), (1, S, R) or (S, R); got shapes {shapes}")
    size = cos.shape[-1]
    if size % 2 or size > q.shape[-1]:
        raise ValueError(f"partial_rope: R is even and at most D; got R {size} and D {q.shape[-1]}")
    cos, sin = (t.expand(q.shape[0], *t.shape[-2:]) for t in (cos, sin))
    return partial_rope.operator()(Q=q, K=k, cos=cos, sin=sin, interleaved=as_flag("partial_rope", "interleaved", interleaved))
