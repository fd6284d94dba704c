"""Count the path of each call, so that no fallback is silent; decide where kernels can run."""

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
    """Count one call of ``op`` by the path ``kind``."""
    counts = _counts[op]
    counts[kind] = counts.get(kind, 0) + 1


def counter(op: str) -> dict[str, int]:
    """Return the mutable counts of ``op``."""
    return _counts[op]


def paths() -> dict[str, dict[str, int]]:
    """Return the calls so far, by op and path: {"softmax": {"gpu": 3, "interpreter": 0, "reference": 1}}.

    ``gpu`` and ``interpreter`` ran a generated kernel. ``reference`` ran eager torch on the same algorithm. ``torch``, of a function with
    ``fuse(fallback=True)``, ran the function itself.
    """
    return {op: dict(kinds) for op, kinds in _counts.items()}


def interpreting() -> bool:
    """Tell whether Triton runs kernels in its interpreter. Accepts the values of ``TRITON_INTERPRET`` that Triton accepts."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def checking() -> bool:
    """Tell whether ``DTKERNELS_CHECK`` asks for index checks. Set it before the first call: cached calls do not look again."""
    return os.environ.get("DTKERNELS_CHECK", "").lower() in ("1", "true", "yes", "on", "y")


FALLBACKS = ("own", "reference")


def fallback() -> str:
    """Return the fallback of patched modules where no kernel runs: "own", the module's own path, or "reference", the torch reference.

    ``DTKERNELS_FALLBACK`` selects it; the default is "own". Raises ValueError for another word.
    """
    found = os.environ.get("DTKERNELS_FALLBACK") or "own"
    if found not in FALLBACKS:
        raise ValueError(f"DTKERNELS_FALLBACK is {found!r}; allowed: {', '.join(FALLBACKS)}")
    return found


_unable: dict[int, str] = {}  #: GPU -> why no kernel can be compiled for it


def unable(gpu: int, why: str) -> None:
    """Note that no kernel can be compiled for a GPU. Patched modules with tensors on it take their own path from then on."""
    _unable[gpu] = why


def no_kernel(tensor: torch.Tensor) -> str | None:
    """Return why a patched module should take its own path for tensors on this device; None if kernels run there.

    This is the one place that decides it. Kernels run on a GPU, and on a CPU under ``TRITON_INTERPRET=1``. None also where
    ``DTKERNELS_FALLBACK=reference`` asks for the reference instead. Constant under torch.compile, like the device itself.
    """
    if tensor.is_cuda:
        return _why_compiler_fails(tensor.get_device()) if _unable else None
    return without_kernels(tensor.device.type)


def runs_reference(tensor: torch.Tensor) -> bool:
    """Tell whether an op runs the reference for tensors on this device."""
    return not tensor.is_cuda and not (tensor.device.type == "cpu" and interpreting())


def _why_compiler_fails(gpu: int) -> str | None:
    return _unable.get(gpu) if fallback() == "own" else None


def without_kernels(device: str) -> str | None:
    """Return ``no_kernel`` for a device type: "cpu", "xpu", "cuda"."""
    if device == "cpu" and interpreting() or device == "cuda" or fallback() == "reference":
        return None
    return f"no kernel runs on {'a CPU' if device == 'cpu' else device}"


_function: Any
for _function in (_why_compiler_fails, without_kernels):  # torch.compiler.assume_constant_result, without its import
    _function._dynamo_marked_constant = True


#: held while a kernel is imported, and while the interpreter runs one: the interpreter patches triton.language for all threads
one_at_a_time = threading.RLock()
if hasattr(os, "register_at_fork"):  # a forked child has one thread, which may not hold the lock
    os.register_at_fork(after_in_child=one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]
