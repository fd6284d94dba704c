"""Tensors as kernels read them: by what lies in memory, whatever torch has noted about it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_batched = (torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor)


def in_memory(value):
    """``value``; a tensor that stands for its negative, as the imaginary part of a conjugate does, is written out."""
    return value.resolve_neg() if isinstance(value, torch.Tensor) else value


def is_batch(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for several, of vmap or of gradients that are asked for at once: it has no memory of its own."""
    return any(batched(tensor) for batched in _batched)


def refuse_batches(op: str, values: Iterable[object]) -> None:
    """Raise NotImplementedError, one line, where a value is a batch of vmap, as gradients are that are asked for several at once."""
    if any(isinstance(v, torch.Tensor) and is_batch(v) for v in values):
        raise NotImplementedError(f"{op}: torch.vmap is not supported, nor are batches of gradients; allowed: a call for each")
