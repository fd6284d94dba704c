"""Name torch's dtypes as the language, the tables and Triton do."""

from __future__ import annotations

import torch

#: those that kernels compute with; ``lang.expr.DTYPES`` has torch's names of the same ones, ``codegen.analysis.product_types.BYTES`` their sizes
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
KERNEL_DTYPES = tuple(DTYPE_NAMES)
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64)
#: Triton's names of all that kernels read or write
TRITON_NAMES = DTYPE_NAMES | {
    torch.float64: "fp64", torch.bool: "i1", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
