"""Which way calls went: counted, so that a fallback is never silent."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KINDS = ("gpu", "interpreter", "reference")
_counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))


def count(op: str, kind: str) -> None:
    """Record one call of ``op`` by ``kind``."""
    _counts[op][kind] += 1


def counter(op: str) -> dict[str, int]:
    """The counts of ``op``, to add to."""
    return _counts[op]


def paths() -> dict[str, dict[str, int]]:
    """Calls so far by op: {"softmax": {"gpu": 3, "interpreter": 0, "reference": 1}}.

    ``gpu`` and ``interpreter`` ran a generated kernel, ``reference`` eager torch on the same algorithm.
    """
    return {op: dict(kinds) for op, kinds in _counts.items()}


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter: what it takes ``TRITON_INTERPRET`` to say."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def checking() -> bool:
    """Whether ``DTKERNELS_CHECK`` asks for checked indices. Set it before the first call: kernels repeat a known call without a further look."""
    return os.environ.get("DTKERNELS_CHECK", "").lower() in ("1", "true", "yes", "on", "y")


FALLBACKS = ("own", "reference")


def fallback() -> str:
    """Return what a patched module runs where no kernel can: "own", its own path, or "reference", the ops' torch reference.

    ``DTKERNELS_FALLBACK`` says which; "own" unless it is set. Raises ValueError for another word.
    """
    found = os.environ.get("DTKERNELS_FALLBACK") or "own"
    if found not in FALLBACKS:
        raise ValueError(f"DTKERNELS_FALLBACK is {found!r}; allowed: {', '.join(FALLBACKS)}")
    return found


_unable: dict[int, str] = {}  #: GPU -> why kernels cannot be compiled for it


def unable(gpu: int, why: str) -> None:
    """Note that no kernel can be compiled for a GPU. Patched modules with tensors on it take their own path from then on."""
    _unable[gpu] = why


def no_kernel(tensor: torch.Tensor) -> str | None:
    """Return why a patched module should take its own path for tensors on this device; None if kernels run there.

    This is the one place that decides it. Kernels run on a GPU, and on a CPU under ``TRITON_INTERPRET=1``. None also where
    ``DTKERNELS_FALLBACK=reference`` asks for the reference instead. Constant under torch.compile, like the device itself.
    """
    if tensor.is_cuda:
        return _why_unable(tensor.get_device()) if _unable else None
    return without_kernels(tensor.device.type)


def runs_reference(tensor: torch.Tensor) -> bool:
    """Whether an op on this tensor's device computes by the reference."""
    return not tensor.is_cuda and not (tensor.device.type == "cpu" and interpreting())


def _why_unable(gpu: int) -> str | None:
    return _unable.get(gpu) if fallback() == "own" else None


def without_kernels(device: str) -> str | None:
    """``no_kernel`` for a type of device: "cpu", "xpu", "cuda"."""
    if device == "cpu" and interpreting() or device == "cuda" or fallback() == "reference":
        return None
    return f"no kernel runs on {'a CPU' if device == 'cpu' else device}"


_function: Any
for _function in (_why_unable, without_kernels):  # torch.compiler.assume_constant_result, without its import
    _function._dynamo_marked_constant = True


#: held while a kernel is imported, and while the interpreter runs one, which changes triton.language for that long, for every thread
one_at_a_time = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child has the thread that forked alone: none of its own holds the lock
    os.register_at_fork(after_in_child=one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]
