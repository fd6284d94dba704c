import math

import torch

from .public import op


@op
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T + bias) v, row by row (Vaswani et al., 2017), in one pass over the keys (Dao et al., 2022).

    q: (..., H, M, D); k: (..., G, L, D); v: (..., G, L, N), where G divides H (grouped queries: head h uses h // (H / G));
    fewer dimensions are taken as one head. mask: boolean (True: the key is seen) or floating (added to the scores),
    broadcastable to (..., H, M, L). causal: query m sees keys l <= m, counted from the first of both. scale: 1 / sqrt(D)
    unless given. Returns (..., H, M, N). A query that sees nothing gives zeros. Raises ValueError where shapes disagree.

    >>> attention(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), torch.ones(1, 2, 5, 4)).shape
    torch.Size([1, 2, 3, 4])
    """
    if not (2 <= q.dim() == k.dim() == v.dim()):
        raise ValueError(f"attention: q, k and v have one rank, 2 or more; got shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    heads, groups = (t.shape[-3] if t.dim() > 2 else 1 for t in (q, k))
    if groups == 0 or heads % groups or (v.shape[-3] if v.dim() > 2 else 1) != groups:
        raise ValueError(f"attention: the heads of k and v divide those of q; got shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    given = {}
    if mask is not None:
        shape = (*q.shape[:-1], k.shape[-2])
        try:
            mask = mask.expand(shape)
        except RuntimeError:
            raise ValueError(f"attention: mask broadcasts to {shape}; got shape {tuple(mask.shape)}") from None
        given = {"masked": True, "mask": mask} if mask.dtype == torch.bool else {"biased": True, "bias": mask}
    if scale is None:
        scale = 1 / math.sqrt(max(q.shape[-1], 1))
    return attention.operator()(Q=q, K=k, V=v, scale=scale, group=heads // groups, causal=causal, **given)
