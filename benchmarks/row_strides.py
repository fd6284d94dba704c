"""How much longer does a product take whose operands' rows start in the middle of a sector of memory?

    python benchmarks/row_strides.py            M x N x K of --sizes, at strides that are odd multiples of 16, 32 and 64 bytes, and multiples of 128

One schedule, with tensor descriptors; only the operands' strides differ. Cold L2, results checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from common import timing  # noqa: E402
from common.cli_types import Parser  # noqa: E402

import dtkernels  # noqa: E402

PROGRAM = """Func f; In A, B; Var x, y; RVar k; f[x, y] = 1 / (1 + exp(-rdot(A[x, k], B[k, y], k)));
f.block(x:128, y:256); f.tensorize(x:128, y:256, k:64); f.map(x:x1/4, y, x1); f.persistent(); f.descriptor(A, B); f.num_warps(8); f.num_stages(3);
"""
STRIDES = (16, 32, 64, 128)  #: bytes: the largest power of two that divides a stride; 128: or more
LINE = 64  #: elements
TOLERANCE = 4e-3  #: of a sigmoid in bfloat16


def laid_out(x: torch.Tensor, stride: int) -> torch.Tensor:
    """Return a copy of ``x`` whose rows are an odd multiple of ``stride`` bytes apart, or any multiple of 128."""
    step = stride // x.element_size()
    row = -(-x.shape[1] // LINE) * LINE + step % LINE
    held = torch.zeros(x.shape[0], row, dtype=x.dtype, device=x.device)[:, : x.shape[1]]
    return held.copy_(x)


def main() -> int:
    parser = Parser("row_strides", __doc__)
    parser.add_argument("--sizes", default="4096x4096x4096,3000x5000x3072,2918x11160x10540,2211x5945x3692", help="M x N x K, separated by commas")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16: microseconds, by the bytes that divide the strides of A, and of B")
    product = dtkernels.compile(PROGRAM)
    for size in options.sizes.split(","):
        m, n, k = map(int, size.split("x"))
        a, b = torch.randn(m, k, device="cuda").bfloat16(), (torch.randn(k, n, device="cuda") / k**0.5).bfloat16()
        truth = torch.sigmoid(a.double() @ b.double())
        for strides in ((128, 128), *((s, 128) for s in STRIDES[:-1]), *((128, s) for s in STRIDES[:-1]), (16, 16)):
            operands = laid_out(a, strides[0]), laid_out(b, strides[1])
            wrong = (product(*operands) - truth).abs().max().item() > TOLERANCE
            us = timing.gpu_time(lambda: product(*operands), 10.0)  # noqa: B023
            print(f"{size:20} {strides[0]:4} {strides[1]:4} {us:8.1f} us {2e-6 * m * n * k / us:6.0f} TFLOP/s{'  WRONG' if wrong else ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
