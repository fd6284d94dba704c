"""Read torch's TF32 setting under both of its APIs. The older one raises once the newer one was used."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

_older = getattr(torch._C, "_get_cublas_allow_tf32", lambda: torch.backends.cuda.matmul.allow_tf32)
_newer = getattr(torch._C, "_get_fp32_precision_getter", lambda device, kind: torch.backends.cuda.matmul.fp32_precision)
_newer_set = False


def allows_tf32() -> bool:
    """Tell whether float32 products may round to TF32. Asks the older API, which is twice as fast, until it raises."""
    global _newer_set
    if not _newer_set:
        try:
            return _older()
        except RuntimeError:
            _newer_set = True
    return _newer("cuda", "matmul") == "tf32"


def dot_precision() -> str:
    """Return the precision of dots. Replaces the function of this name in emitted files, which knows only the older API."""
    return "tf32" if allows_tf32() else "ieee"


def heeding_ieee(exact_products: Callable[[torch.Tensor], str]) -> Callable[[torch.Tensor], str]:
    """Return the function of this name in emitted files, but for DTKERNELS_FP32_PRODUCTS=ieee: products are then made in float32."""

    def precision(tensor: torch.Tensor) -> str:
        return "ieee" if os.environ.get("DTKERNELS_FP32_PRODUCTS", "") == "ieee" else exact_products(tensor)

    return precision
