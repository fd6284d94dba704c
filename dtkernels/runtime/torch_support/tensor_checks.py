"""Convert tensors to what kernels read: plain memory, without torch's lazy negation or batching."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_batched = (torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor)


def in_memory(value):
    """Return ``value``; resolve a lazily negated tensor, such as the imaginary part of a conjugate."""
    return value.resolve_neg() if isinstance(value, torch.Tensor) else value


def is_batch(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a batch of vmap or of is_grads_batched, which has no memory of its own."""
    return any(batched(tensor) for batched in _batched)


def refuse_batches(op: str, values: Iterable[object]) -> None:
    """Raise NotImplementedError, one line, where a value is a batch of vmap or of is_grads_batched."""
    if any(isinstance(v, torch.Tensor) and is_batch(v) for v in values):
        raise NotImplementedError(f"{op}: torch.vmap is not supported, nor are batches of gradients; allowed: a call for each")
