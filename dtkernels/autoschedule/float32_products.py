"""Decide whether float32 products may be computed as three products in TF32."""

from __future__ import annotations

import os

from ..codegen.target import Target

UNITS_SINCE = 80  #: compute capability of the first matrix units for TF32


def tripled_float32(target: Target) -> bool:
    """Return whether the default schedule may ask for ``approximate(rdot)``: the GPU has TF32, and DTKERNELS_FP32_PRODUCTS is not ``ieee``."""
    return target.backend == "cuda" and int(target.arch) >= UNITS_SINCE and os.environ.get("DTKERNELS_FP32_PRODUCTS", "") != "ieee"
