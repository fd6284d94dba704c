import torch

from ..op_decorator import only_tensors, op


@op(Q="q (B, H, S, D)", K="k (B, G, S, D)", w="q_weight (D)", v="k_weight (D)", cos="cos (B, S, D)", sin="sin (B, S, D)")
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rope(rmsnorm(q), rmsnorm(k)): each head normed by its own weight, then rotated in halves (Qwen 3, Gemma 3).

    Shapes: q (B, H, S, D); k (B, G, S, D); q_weight, k_weight (D,); cos and sin (B, S, D), (1, S, D) or (S, D); D is even. offset: 1 for
    models that store the weight minus 1. The norm is not rounded before the rotation. Returns both in the promoted dtype. Differentiable in
    all tensors. Raises ValueError where shapes disagree, TypeError where an argument is not a tensor.

    >>> q, k = qk_norm_rope(*torch.ones(2, 1, 1, 2, 4), torch.ones(4), torch.ones(4), torch.zeros(2, 4), torch.ones(2, 4))
    >>> q[0, 0, 0]
    tensor([-1.0000, -1.0000,  1.0000,  1.0000])
    """
    only_tensors("qk_norm_rope", q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    if q.dim() != 4 or k.dim() != 4 or q.shape[-1] % 2 or cos.dim() not in (2, 3) or cos.shape != sin.shape or cos.shape[-2:] != q.shape[-2:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, cos, sin))
        raise ValueError(f"qk_norm_rope: q is (B, H, S, D) with D even, k (B, G, S, D), cos and sin (B, S, D), (1, S, D) or (S, D); got shapes {shapes}")
    if cos.dim() == 2 or cos.shape[0] == 1:
        cos, sin = (t.expand(q.shape[0], *t.shape[-2:]) for t in (cos, sin))
    return qk_norm_rope.operator()(q, k, q_weight, k_weight, cos, sin, eps, offset=offset)
