"""What does a store take whose neighbours Triton cannot see? Tiles of rows and pixels, of which the place is a quotient and a remainder.

    python benchmarks/lane_order.py

Each line: the dtype, the pixels P of an image, the elements between rows, the rows of a tile, an eviction policy; microseconds, GB/s, and
nanoseconds a warp's store on each of 132 multiprocessors. Where P is a multiple of 16 Triton sees neighbours along the pixels; "within one b": there are no
remainders; "channels last": rows are contiguous. dtkernels/codegen/emit/triton/lane_order.py gives Triton the hint that it lacks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from common.cli_types import Parser  # noqa: E402
from common.timing import gpu_time  # noqa: E402

CORES = 132
COLUMNS = 128  #: of a tile
#: pixels, elements between rows, rows of a tile, warps
CASES = (
    (16384, 16384, 64, 4), (16641, 16641, 64, 4), (16640, 16640, 64, 4), (16641, 16648, 64, 4), (16641, 16672, 64, 4), (4225, 4225, 128, 8),
    (4096, 4096, 128, 8), (16641, 16641, 16, 4), (16641, 16641, 8, 4), (16641, 16641, 1, 4), (1050625, 1050625, 1, 4),
)  # fmt: skip


@triton.jit
def by_remainders(ptr, x, P, so, sb, BO: tl.constexpr, BN: tl.constexpr, MOD: tl.constexpr):
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    o = tl.arange(0, BO)
    v = (o[:, None] + i[None, :]).to(tl.float32) * x
    tl.store(ptr + (i // P)[None, :] * sb + o[:, None] * so + (i % P)[None, :], v.to(ptr.dtype.element_ty), cache_modifier=MOD)


@triton.jit
def within_images(ptr, x, P, so, sb, BO: tl.constexpr, BN: tl.constexpr):
    per = tl.cdiv(P, BN)
    b = tl.program_id(0) // per
    i = tl.program_id(0) % per * BN + tl.arange(0, BN)
    o = tl.arange(0, BO)
    v = (o[:, None] + i[None, :]).to(tl.float32) * x
    tl.store(ptr + b * sb + o[:, None] * so + i[None, :], v.to(ptr.dtype.element_ty), mask=(i < P)[None, :])


@triton.jit
def channels_last(ptr, x, BO: tl.constexpr, BN: tl.constexpr):
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    o = tl.arange(0, BO)
    v = (o[None, :] + i[:, None]).to(tl.float32) * x
    tl.store(ptr + i[:, None] * BO + o[None, :], v.to(ptr.dtype.element_ty))


def main() -> int:
    Parser("lane_order", __doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("lane_order: no GPU: torch.cuda.is_available() is False")
    held = torch.empty(2**29 + 2**27, dtype=torch.float32, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        p = held.view(dtype)
        for P, so, rows, warps in CASES:
            images = 2**29 // (64 * 16700) * 64 // rows if 5000 < P < 10**6 else 2**29 // (rows * 4300) if P < 10**6 else 500
            n = images * P // COLUMNS
            for policy in ("", ".cs") if P == 16641 and rows == 64 else ("",):
                t = gpu_time(lambda: by_remainders[(n,)](p, 1.0, P, so, so * rows, rows, COLUMNS, policy, num_warps=warps))  # noqa: B023
                rate, each = n * COLUMNS * rows * p.element_size() / t / 1e3, t * 1e3 * CORES / (n * rows * COLUMNS / 32)
                print(f"{dtype!s:15} P {P} stride {so} rows {rows} {policy} {t:9.1f} us  {rate:8.1f} GB/s  per warp store {each:.2f} ns", flush=True)
        for P, so in ((16641, 16641), (16641, 16648), (16641, 16672)):
            images = 2**29 // (64 * 16700)
            t = gpu_time(lambda: within_images[(images * triton.cdiv(P, COLUMNS),)](p, 1.0, P, so, so * 64, 64, COLUMNS, num_warps=4))  # noqa: B023
            print(f"{dtype!s:15} within one b: P {P} stride {so} rows 64 {t:9.1f} us  {images * P * 64 * p.element_size() / t / 1e3:8.1f} GB/s", flush=True)
        n = 2**29 // (64 * COLUMNS)
        t = gpu_time(lambda: channels_last[(n,)](p, 1.0, 64, COLUMNS, num_warps=4))  # noqa: B023
        print(f"{dtype!s:15} channels last {t:9.1f} us  {n * COLUMNS * 64 * p.element_size() / t / 1e3:8.1f} GB/s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
