"""Interpreted kernels whose every load and store is checked to hit a tensor they were given.

The interpreter itself reads and writes any address, so that a kernel without a mask it needs is often right, and now
and then ends the process. Import this before kernels run; from then on such an access raises OutOfBounds.
"""

from __future__ import annotations

import numpy as np
from triton.runtime import interpreter


class OutOfBounds(AssertionError):
    """A kernel reads or writes outside the tensors it was given."""


class TooManySteps(Exception):
    """A program takes longer in the interpreter than its caller waits."""


steps_left: float = float("inf")  #: loads and stores that kernels may still do; a caller that wants an end sets it
_ranges: list[tuple[int, int]] = []  #: of the running kernel: first byte, byte after the last


def _bytes_of(tensor) -> tuple[int, int]:
    """The bytes of a tensor with what lies between its rows, after the last one too, as far as there is memory."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) if tensor.numel() else -1
    first, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
    if tensor.numel() and tensor.dim() > 1 and tensor.stride(-1) == 1:
        storage = tensor.untyped_storage()
        padding = max(0, tensor.stride(-2) - tensor.shape[-1]) * tensor.element_size()
        end = min(end + padding, storage.data_ptr() + storage.nbytes())
    return first, end


def _checked(what: str, ptrs, mask) -> None:
    global steps_left
    steps_left -= 1
    if steps_left < 0:
        raise TooManySteps(f"{what} is one too many")
    size = interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize
    at = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)].astype(np.int64)
    inside = np.zeros(at.shape, dtype=bool)
    for first, end in _ranges:
        inside |= (at >= first) & (at + size <= end)
    if not inside.all():
        away = min((int(a) - end for a in at[~inside] for _, end in _ranges), key=abs, default=0)
        raise OutOfBounds(f"{what} of {int((~inside).sum())} elements outside every tensor, one {away} bytes past the end of the nearest")


def _install() -> None:
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, prepare = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst

    def checked_load(self, ptrs, mask, other, *rest, **named):
        _checked("load", ptrs, mask)
        return load(self, ptrs, mask, other, *rest, **named)

    def checked_store(self, ptrs, value, mask, *rest, **named):
        _checked("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **named)

    def remembering(self, args, kwargs):
        found = prepare(self, args, kwargs)
        given = (getattr(t, "base", t) for t in (*found[0], *found[1].values()))  # a descriptor has its tensor as base
        _ranges[:] = [_bytes_of(t) for t in given if hasattr(t, "data_ptr")]
        return found

    builder.create_masked_load, builder.create_masked_store, executor._init_args_hst = checked_load, checked_store, remembering


_install()
