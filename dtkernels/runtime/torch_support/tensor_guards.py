"""Compare tensors with earlier ones by torch's TensorGuards, in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch

_Guards = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)  # the guards that torch.compile evaluates before each call


def never_matches(*tensors) -> bool:
    """Return False. Stands in where torch has no TensorGuards."""
    return False


def guards_for(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """Return a function (as many tensors) -> whether their types, dispatch keys, devices, dtypes, shapes, strides and ``requires_grad`` match.

    The dispatch keys include those of autocast and functional transforms. Not compared: data pointers, dispatch modes, gradient recording.
    One tensor passed twice never matches. The tensors are not kept alive.
    """
    return never_matches if _Guards is None else _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
