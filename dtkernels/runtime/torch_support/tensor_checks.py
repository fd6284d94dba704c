"""Convert tensors to what kernels read: plain memory, without torch's lazy negation or batching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

_batched = (torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor)


def in_memory(value):
    """Return ``value``; resolve a lazily negated tensor, such as the imaginary part of a conjugate."""
    return value.resolve_neg() if isinstance(value, torch.Tensor) else value


def check_written(op: str, written: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, one line, for a tensor that a call changes and that shares its memory with itself or with what the call reads."""
    names = tuple(written)
    for name in names:
        t = tensors[name]
        if t.requires_grad and t.is_leaf and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} is written and is a leaf that requires a gradient; allowed: {name}.detach(), or torch.no_grad()")
        if t.is_neg() or any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape)):
            raise ValueError(f"{op}: {name} is written and is an expanded or negated view; allowed: a tensor with memory of its own")
        begin, end = _range(t)
        for other, u in tensors.items():
            first, last = _range(u)
            if other not in names and t.device == u.device and begin < last and first < end:
                raise ValueError(f"{op}: {name} is written and shares memory with {other}, which is read; allowed: {other}.clone()")


def _range(t: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of what follows the last one; (0, 0) where there is no memory."""
    if t.is_meta or not t.numel() or is_batch(t) or not (begin := t.data_ptr()):
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return begin, begin + (last + 1) * t.element_size()


def is_batch(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a batch of vmap or of is_grads_batched, which has no memory of its own."""
    return any(batched(tensor) for batched in _batched)


def refuse_batches(op: str, values: Iterable[object]) -> None:
    """Raise NotImplementedError, one line, where a value is a batch of vmap or of is_grads_batched."""
    if any(isinstance(v, torch.Tensor) and is_batch(v) for v in values):
        raise NotImplementedError(f"{op}: torch.vmap is not supported, nor are batches of gradients; allowed: a call for each")
