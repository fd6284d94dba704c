"""Attention with every option, written out in plain torch: the truth for the op, in float64."""

from __future__ import annotations

import math

import torch

#: id -> options; MASK, FLAGS, BIAS and SINKS stand for tensors that ``inputs`` makes
MASK, FLAGS, BIAS, SINKS = "mask", "flags", "bias", "sinks"
OPTIONS = {
    "window to the left": {"causal": True, "window": (9, 0)},
    "window to both sides": {"window": (5, 8)},
    "window to the right": {"window": (None, 4)},
    "window far ahead": {"window": (3, 3), "offset": 1000},
    "queries before the first key": {"window": (4, None), "offset": -3},
    "chunk of a prefill": {"causal": True, "offset": 16},
    "offset on the device": {"causal": True, "window": (20, 0), "offset": torch.tensor([16])},
    "softcap": {"softcap": 2.0, "causal": True},
    "sinks": {"sinks": SINKS},
    "sinks and a window": {"sinks": SINKS, "causal": True, "window": (6, 0)},
    "flags of keys": {"mask": FLAGS},
    "flags of keys, causal": {"mask": FLAGS, "causal": True, "sinks": SINKS},
    "flags of keys and a window": {"mask": FLAGS, "window": (12, 5), "offset": 4, "softcap": 3.0},
    "everything with a mask": {"sinks": SINKS, "softcap": 3.0, "mask": MASK, "window": (30, 30), "scale": 0.3},
    "everything with a bias": {"sinks": SINKS, "softcap": 3.0, "mask": BIAS, "causal": True, "offset": 16},
}


def inputs(shape: tuple[int, ...], options: dict, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, object]:
    """Arguments of one call; shape: batch, query heads, key heads, queries, keys, width, width of values."""
    batch, heads, groups, queries, keys, depth, values = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    given = {"q": normal(batch, heads, queries, depth), "k": normal(batch, groups, keys, depth), "v": normal(batch, groups, keys, values), **options}
    if given.get("mask") is MASK:
        given["mask"] = (torch.rand((batch, 1, queries, keys), generator=generator) > 0.5).to(device)
        given["mask"][:, :, queries // 2] = False  # one query that sees nothing
    if given.get("mask") is FLAGS:
        given["mask"] = (torch.rand((batch, 1, 1, keys), generator=generator) > 0.5).to(device)
        given["mask"][0] = False  # queries that see nothing
    if given.get("mask") is BIAS:
        given["mask"] = normal(queries, keys)
    if given.get("sinks") is SINKS:
        given["sinks"] = normal(heads)
    if isinstance(given.get("offset"), torch.Tensor):
        given["offset"] = given["offset"].to(device)
    return given


def truth(q, k, v, mask=None, *, causal=False, scale=None, window=None, offset=0, softcap=None, sinks=None) -> torch.Tensor:
    """The whole matrix of scores, its softmax, its product with v."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    place = torch.arange(queries, device=q.device)[:, None] + int(offset)
    key = torch.arange(keys, device=q.device)[None]
    left, right = window or (None, None)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    for asked, condition in ((causal, key <= place), (left is not None, key >= place - (left or 0)), (right is not None, key <= place + (right or 0))):
        seen &= condition if asked else True
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.where(scores.amax(-1, keepdim=True) == -math.inf, 0.0, scores.softmax(-1))
    return weights[..., :keys] @ v
