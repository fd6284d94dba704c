"""Evaluate scans with torch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_TORCH: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.cumsum,
    "prod": torch.cumprod,
    "max": lambda x, dim: torch.cummax(x, dim).values,
    "min": lambda x, dim: torch.cummin(x, dim).values,
}


def scanned(kind: str, args: Sequence[torch.Tensor], dim: int, reverse: bool) -> torch.Tensor:
    """Return the partial results of ``args``, of one shape, along ``dim``: as the language's rscan, and rrecur for ``recur``."""
    if reverse:
        return scanned(kind, [x.flip(dim) for x in args], dim, False).flip(dim)
    if not args[0].numel():
        return args[0].clone()
    if kind != "recur":
        return _TORCH[kind](args[0], dim)
    (a, b), steps = args, []
    held = torch.zeros_like(b.select(dim, 0))
    for factor, term in zip(a.unbind(dim), b.unbind(dim)):
        held = factor * held + term
        steps.append(held)
    return torch.stack(steps, dim)
