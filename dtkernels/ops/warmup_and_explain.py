"""Prepare kinds of calls ahead of time (``warmup``), and explain what a call runs (``explain``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..runtime.bind.operator import Operator
from ..runtime.explain import Explanation, explain_call
from .registry import registered, shipped_names


def explain(op: str | Callable, /, *args, **kwargs) -> Explanation:
    """Explain what a call of ``op`` would run: the row of the schedule table, its distance, the reason, and the other rows with their times.

    ``op`` is an op or its name; the other arguments are those of the call. Nothing is run. ``gpu="h200"`` explains the call on that GPU,
    wherever the tensors are; tensors on ``meta`` suffice. (An op with its own argument ``gpu`` receives it instead.) Raises ValueError for
    an unknown op and DTError for an unknown GPU. Examples::

        print(dtkernels.explain("softmax", torch.randn(4096, 4096, device="cuda")))
        print(dtkernels.explain("softmax", torch.empty(16384, 8192, dtype=torch.bfloat16, device="meta"), gpu="h200"))
    """
    function = _callable(op)
    operator = function if isinstance(function, Operator) else function.operator()  # type: ignore[attr-defined]
    if hasattr(function, "operator_of"):
        operator = function.operator_of(*args, **{n: v for n, v in kwargs.items() if n != "gpu"})
    manifest = operator.manifest
    own = "gpu" in (*manifest.inputs, *manifest.scalars, *(name for name, _ in manifest.params))
    gpu = None if own else kwargs.pop("gpu", None)
    given, named = operator.arguments(lambda: function(*args, **kwargs))
    return explain_call(operator, given, named, gpu)


def warmup(op: str | Callable, /, *args, backward: bool | None = None, **kwargs) -> None:
    """Prepare a kind of call, so that the next one compiles and loads nothing.

    Runs ``op`` once on the given tensors, and its backward where one of them requires a gradient, unless ``backward=False``. Their
    ``grad`` stays unchanged. Use it before a CUDA graph capture, or where a first call must be fast.
    """
    result = _callable(op)(*args, **kwargs)
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad]
    if backward is False or not results:
        return
    leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.autograd.grad(results, leaves, [torch.zeros_like(r) for r in results], allow_unused=True)


def _callable(op: str | Callable) -> Callable:
    if isinstance(op, Operator) or not isinstance(op, str) and hasattr(op, "operator"):
        return op
    from .. import ops

    if isinstance(op, str) and (op in shipped_names() or registered(op) is not None):
        return getattr(ops, op)
    found = op if isinstance(op, str) else getattr(op, "__name__", type(op).__name__)
    raise ValueError(f"no op {found!r}; allowed: {', '.join(shipped_names())}, or one that was registered")


__all__ = ["explain", "warmup"]
