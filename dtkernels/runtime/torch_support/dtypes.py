"""Name torch's dtypes as the language, the tables and Triton do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...lang.algorithm import Algorithm

#: those that kernels compute with; ``lang.expr.DTYPES`` has torch's names of the same ones, ``codegen.analysis.product_types.BYTES`` their sizes
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
KERNEL_DTYPES = tuple(DTYPE_NAMES)
#: those that kernels read and write, and compute with in another dtype or in products alone
FLOAT8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64)
#: Triton's names of all that kernels read or write
TRITON_NAMES = DTYPE_NAMES | {
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.float64: "fp64", torch.bool: "i1", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def rms_norm_eps(dtype: torch.dtype) -> float:
    """Return the eps that ``torch.nn.functional.rms_norm`` takes where none is given: that of the dtype which it computes in."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def scalar_gradient_dtype(algorithm: Algorithm, func: str, scalars: Mapping[str, object]) -> torch.dtype | None:
    """Return the dtype that ``func`` has as the gradient of a scalar given as a 16-bit tensor; None for any other Func. The emitted ``scalar_dtype`` does the same."""
    scalar = scalars.get(dict(algorithm.scalar_gradients).get(func, ""))
    return scalar.dtype if isinstance(scalar, torch.Tensor) and scalar.dtype in (torch.float16, torch.bfloat16) else None


def float8_inputs(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """Return (input, dtype) of the tensors that hold float8, as ``Algorithm.float8`` has them."""
    return tuple((name, FLOAT8_NAMES[t.dtype]) for name, t in tensors.items() if t.dtype in FLOAT8_NAMES)
