"""Tell what a tensor holds while torch.compile traces: whether it counts up by one, or is the same everywhere.

While anything traces, transformers cannot look at ``position_ids`` and takes every batch for one of packed sequences. The graph that is being
traced says more: positions that a model made by ``arange`` are those of one sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dynamo.comptime import comptime

from ...torch_compile.linear_index import Linear, Reader
from ...torch_compile.safety import mark_written

_found: list[Linear | None] = []


def is_uniform(numbers: torch.Tensor) -> bool:
    """Return whether torch.compile knows that a tensor of integers holds one number everywhere."""
    if not torch.compiler.is_compiling():
        return False
    comptime(_read)
    return _of_one_number()


def counts_up(numbers: torch.Tensor) -> bool:
    """Return whether torch.compile knows that a tensor of integers holds 0, 1, 2, ... along its last dimension."""
    if not torch.compiler.is_compiling():
        return False
    comptime(_read)
    return _of_places()


def _read(context: Any) -> None:
    """Read the argument ``numbers`` of the function that is being traced, from the graph so far."""
    try:
        node = context.get_local("numbers").as_proxy().node
    except Exception:  # a version of torch that keeps it elsewhere: nothing is known then
        node = None
    if isinstance(node, fx.Node):
        mark_written(node.graph)
    _found.append(Reader().linear(node))


def _last_found() -> Linear | None:
    return _found.pop() if _found else None


@torch.compiler.assume_constant_result
def _of_one_number() -> bool:
    found = _last_found()
    return found is not None and not found.terms


@torch.compiler.assume_constant_result
def _of_places() -> bool:
    return _last_found() == Linear(0, {-1: 1})
