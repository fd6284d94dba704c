"""Torch's setting of float32 products, by whichever of its names it was set: the older raises where the newer was used."""

from __future__ import annotations

import torch

_older = getattr(torch._C, "_get_cublas_allow_tf32", lambda: torch.backends.cuda.matmul.allow_tf32)
_newer = getattr(torch._C, "_get_fp32_precision_getter", lambda device, kind: torch.backends.cuda.matmul.fp32_precision)
_newer_set = False


def allows_tf32() -> bool:
    """Whether float32 products may round to TF32. The older name is asked until it raises, in half the time."""
    global _newer_set
    if not _newer_set:
        try:
            return _older()
        except RuntimeError:
            _newer_set = True
    return _newer("cuda", "matmul") == "tf32"


def dot_precision() -> str:
    """Stands for the function of this name in emitted files, which knows the older name only."""
    return "tf32" if allows_tf32() else "ieee"
