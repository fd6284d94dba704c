"""Name torch's dtypes as the language, the tables and Triton do."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...lang.expr import FLOAT8

#: those that kernels compute with; ``lang.expr.DTYPES`` has torch's names of the same ones, ``codegen.analysis.product_types.BYTES`` their sizes
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
KERNEL_DTYPES = tuple(DTYPE_NAMES)
#: those that kernels read and write, and compute with in another dtype or in products alone
FLOAT8_NAMES = {getattr(torch, f.torch): name for name, f in FLOAT8.items()}
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64)
#: Triton's names of all that kernels read or write
TRITON_NAMES = DTYPE_NAMES | {
    **{getattr(torch, f.torch): f.triton.replace("float", "fp") for f in FLOAT8.values()},
    torch.float64: "fp64", torch.bool: "i1", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def float8_inputs(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """Return (input, dtype) of the tensors that hold float8, as ``Algorithm.float8`` has them."""
    return tuple((name, FLOAT8_NAMES[t.dtype]) for name, t in tensors.items() if t.dtype in FLOAT8_NAMES)
