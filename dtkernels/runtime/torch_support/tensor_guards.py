"""Whether tensors are like others that were seen, asked of torch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

_Guards = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)  # what torch.compile asks before each call


def never_matches(*tensors) -> bool:
    """Nothing is like anything: where torch has no such question."""
    return False


def guards_for(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """(as many tensors) -> whether they have the types, dispatch keys, devices, dtypes, shapes, strides and ``requires_grad`` of these.

    Among the dispatch keys are those that autocast and functional transforms add: under them nothing is like what was seen
    without, and the other way round. Not asked for: data pointers, dispatch modes, whether gradients are recorded. One tensor given
    twice is like nothing. The tensors are not kept.
    """
    return never_matches if _Guards is None else _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
