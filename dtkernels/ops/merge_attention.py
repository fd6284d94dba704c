from __future__ import annotations

import torch

from .op_decorator import only_tensors, operator_called
from .option_checks import check_floating


def merge_attention(a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention of the same queries over two sets of keys into that over both: a step of ring attention (Liu et al., 2023).

    ``a, lse_a`` and ``b, lse_b`` are results of ``attention(..., return_lse=True)``: a and b (..., N), lse_a and lse_b (...). Returns such a
    pair: (a exp(lse_a) + b exp(lse_b)) / (exp(lse_a) + exp(lse_b)) in the promoted dtype of a and b, and
    log(exp(lse_a) + exp(lse_b)). A query that sees no key of one set, whose logsumexp is -inf there, takes the other's result.
    Differentiable in all four. A sink belongs to one of the two sets only. Raises ValueError where shapes disagree.

    >>> merge_attention(torch.ones(2, 4), torch.zeros(2), torch.zeros(2, 4), torch.zeros(2))[0][0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    from .attention_forms import merge

    only_tensors("merge_attention", a=a, lse_a=lse_a, b=b, lse_b=lse_b)
    if a.shape != b.shape or not lse_a.shape == lse_b.shape == a.shape[:-1]:
        found = ", ".join(str(tuple(t.shape)) for t in (a, lse_a, b, lse_b))
        raise ValueError(f"merge_attention: a and b (..., N), lse_a and lse_b (...); got shapes {found}")
    check_floating("merge_attention", a=a, lse_a=lse_a, b=b, lse_b=lse_b)
    result, lse = operator_called(merge.NAME)(A=a, B=b, lse_a=lse_a, lse_b=lse_b)
    return result.to(torch.promote_types(a.dtype, b.dtype)), lse
