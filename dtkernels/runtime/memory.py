"""Tensors as kernels read them: by what lies in memory, whatever torch has noted about it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_batched = (torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor)


def in_memory(value):
    """``value``; a tensor that stands for its negative, as the imaginary part of a conjugate does, is written out."""
    return value.resolve_neg() if isinstance(value, torch.Tensor) else value


def refuse_batches(op: str, values: Iterable[object]) -> None:
    """Raise NotImplementedError, one line, where a value is a batch of vmap, as gradients are that are asked for several at once."""
    if any(isinstance(v, torch.Tensor) and any(batched(v) for batched in _batched) for v in values):
        raise NotImplementedError(f"{op}: torch.vmap is not supported, nor are batches of gradients; allowed: a call for each")
