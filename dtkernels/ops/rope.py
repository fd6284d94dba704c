import torch

from .op_decorator import only_tensors, op


@op(Q="q (B, H, S, D)", K="k (B, G, S, D)", cos="cos (B, S, D)", sin="sin (B, S, D)")
def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by position: RoPE (Su et al., RoFormer, 2021), in the half-rotated form of Hugging Face.

    Computes q * cos + rotated(q) * sin, where rotated(q) is (-q[..., D/2:], q[..., :D/2]), and the same for k. Shapes: q (B, H, S, D);
    k (B, G, S, D); cos and sin (B, S, D), (1, S, D) or (S, D); D is even. Returns both in the promoted dtype. Differentiable in all four.
    Raises ValueError where shapes disagree or D is odd.

    >>> q, k = rope(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), torch.zeros(2, 4), torch.ones(2, 4))
    >>> q[0, 0, 0]
    tensor([-1., -1.,  1.,  1.])
    """
    only_tensors("rope", q=q, k=k, cos=cos, sin=sin)
    if not q.dim() == k.dim() == 4 or cos.dim() not in (2, 3) or cos.shape != sin.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, cos, sin))
        raise ValueError(f"rope: q and k have 4 dimensions, cos and sin one shape of 2 or 3; got shapes {shapes}")
    if q.shape[-1] % 2:
        raise ValueError(f"rope: the last dimension is even; got shape {tuple(q.shape)}")
    if cos.dim() == 2 or cos.shape[0] == 1:
        if cos.shape[-2:] != q.shape[-2:]:
            raise ValueError(f"rope: q is {tuple(q.shape)}, cos is {tuple(cos.shape)}; allowed: q (B, H, S, D), cos (S, D), (1, S, D) or (B, S, D)")
        cos, sin = (t.expand(q.shape[0], *t.shape[-2:]) for t in (cos, sin))
    return rope.operator()(q, k, cos, sin)
