"""Lay out one tensor and its tables of cosines and sines for the specs of rotary embeddings, whose heads are dimension 1 or 3."""

from __future__ import annotations

import torch

from ..op_decorator import only_tensors
from ..option_checks import check_integer


def in_layout(name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x as (B, H, S, 1, D) or (B, 1, S, H, D), and the tables as (B, S, R). Raises TypeError and ValueError, naming the op."""
    only_tensors(name, x=x, cos=cos, sin=sin)
    check_integer(name, "heads", heads, 1, 2)
    fits = x.dim() == 4 and cos.dim() in (2, 3) and cos.shape == sin.shape and cos.shape[-2] == x.shape[3 - heads]
    if not fits or cos.dim() == 3 and cos.shape[0] not in (1, x.shape[0]):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, cos, sin))
        wanted = "(B, H, S, D)" if heads == 1 else "(B, S, H, D)"
        raise ValueError(f"{name}: x is {wanted}, cos and sin (B, S, R), (1, S, R) or (S, R); got shapes {shapes}")
    cos, sin = (t.expand(x.shape[0], *t.shape[-2:]) for t in (cos, sin))
    return x.unsqueeze(3 if heads == 1 else 1), cos, sin
