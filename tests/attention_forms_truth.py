"""Attention over any set of pairs of a query and a key, in float64, and random layouts of sequences, segments and pages."""

from __future__ import annotations

import math

import torch


def truth(q, k, v, seen, *, scale=None, softcap=None, sinks=None):
    """(result, logsumexp) of tensors (..., heads, length, width); ``seen`` broadcasts to the scores."""
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    every = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    if every.shape[-1] == 0:
        return scores @ v, scores.sum(-1) - math.inf
    largest = every.amax(-1, keepdim=True)
    shift = torch.where(largest > -math.inf, largest, 0.0).detach()
    total = torch.exp(every - shift).sum(-1, keepdim=True)
    result = torch.exp(scores - shift) @ v / torch.where(total == 0, 1.0, total)
    return result, (total.log() + shift)[..., 0]


def visible(place: torch.Tensor, keys: torch.Tensor, causal=False, window=None) -> torch.Tensor:
    """Which of ``keys`` queries at ``place`` see."""
    left, right = window or (None, None)
    right = 0 if causal else right
    seen = torch.ones(place.shape[0], keys.shape[0], dtype=torch.bool)
    seen &= keys >= place[:, None] - left if left is not None else True
    return seen & (keys <= place[:, None] + right if right is not None else True)


def seen_by(lengths: list[int], queries: int, keys: int, **reach) -> torch.Tensor:
    """Which keys of a cache the queries of each entry see; the last query is at the last of its ``lengths``."""
    valid = torch.arange(keys)
    return torch.stack([visible(torch.arange(queries) + n - queries, valid, **reach) & (valid < n) for n in lengths])[:, None]


def packed_pairs(lengths_q: list[int], lengths_k: list[int], causal=False, window=None) -> torch.Tensor:
    """Which keys each query of packed sequences sees; the last query of a sequence is at its last key."""
    blocks = [visible(torch.arange(q) + k - q, torch.arange(k), causal, window) for q, k in zip(lengths_q, lengths_k)]
    return torch.block_diag(*blocks).bool()


def cumulative(lengths: list[int], dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def same(found, wanted, leaves, exact, atol=5e-6, seed=1) -> None:
    """Results, and gradients through all of them, agree; infinite logsumexps have no gradient."""
    generator = torch.Generator().manual_seed(seed)
    adjoints = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in wanted]
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f.double(), w, atol=atol, rtol=1e-5)
    if not leaves:
        return
    got = torch.autograd.grad(found, leaves, [a.to(f.dtype).where(w.isfinite(), torch.zeros((), dtype=f.dtype)) for a, w, f in zip(adjoints, wanted, found)])
    right = torch.autograd.grad([w.where(w.isfinite(), 0.0) for w in wanted], exact, [a.where(w.isfinite(), 0.0) for a, w in zip(adjoints, wanted)])
    for g, r in zip(got, right, strict=True):
        torch.testing.assert_close(g.double(), r, atol=atol * 4, rtol=1e-5)


def leaves(*shapes, seed=0, dtype=torch.float32, grad=True):
    """Normal tensors of the shapes, and the same in float64."""
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]
    return ours, [t.detach().double().requires_grad_(grad) for t in ours]
