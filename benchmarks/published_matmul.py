"""The emitted matrix product against one written as Triton's tutorial writes it, at the same tiles (128x128x32, groups of 8, w4 s3).

    python benchmarks/published_matmul.py --json out.json       times both, by replay of CUDA graphs, in turns
    python benchmarks/published_matmul.py --sass DIR            writes the machine code of both for sm_90; needs no GPU

The hand-written form bumps pointers by ``BLOCK_K * stride``, wraps rows and columns by ``% M`` and ``% N`` instead of masking
them, and masks only what is left of K. Both are checked against float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dtkernels  # noqa: E402

PROGRAM = """Func mm; In A, B; Var x, y; RVar k;
mm[x, y] = rdot(A[x, k], B[k, y], k);
mm.tensorize(x:128, k:32, y:128); mm.block(x:128, y:128); mm.map(x:x1/8, y, x1); mm.num_warps(4); mm.num_stages(3);
"""
SHAPES = [(2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 1024), (4095, 4097, 1000)]


@triton.jit
def by_hand_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_group = GROUP_M * tiles_n
    first_m = pid // per_group * GROUP_M
    group = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + pid % per_group % group
    tile_n = pid % per_group // group
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    depth = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (rows[:, None] * stride_am + depth[None, :] * stride_ak)
    b_ptrs = b_ptr + (depth[:, None] * stride_bk + columns[None, :] * stride_bn)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=depth[None, :] < K - step * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=depth[:, None] < K - step * BLOCK_K, other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    if SIGMOID:
        total = tl.sigmoid(total)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + stride_cm * rows[:, None] + stride_cn * columns[None, :]
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


def by_hand(a, b, tiles: tuple[int, int, int] = (128, 128, 32), warps: int = 4, sigmoid: bool = False):
    """Compute a @ b, or its sigmoid."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, tiles[0]) * triton.cdiv(n, tiles[1]),)
    by_hand_kernel[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), *tiles, 8, sigmoid, num_warps=warps, num_stages=3)
    return c


def graph(fn, *args) -> torch.cuda.CUDAGraph:
    """Capture ``fn`` as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn(*args)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        fn(*args)
    return captured


def times(graphs: dict, seconds: float) -> dict[str, list[float]]:
    """Return the microseconds of each graph, replayed in turns, each turn in another order."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    names, spent = list(graphs), 0.0
    while spent < seconds * 1e3:
        for name in names:
            for _ in range(2):
                graphs[name].replay()
            start.record()
            for _ in range(5):
                graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / 5)
            spent += start.elapsed_time(end)
        names = names[1:] + names[:1]
    return found


def measure(shape: tuple[int, int, int], dtype: torch.dtype, seconds: float, others: dict) -> dict:
    """Return one row of the result: median times, and the largest error of each against float64."""
    m, n, k = shape
    torch.manual_seed(0)
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    forms = {"emitted": dtkernels.compile(PROGRAM), "by_hand": by_hand, **others}
    truth = a[:256].double() @ b.double()
    errors = {name: (fn(a, b)[:256].double() - truth).abs().max().item() for name, fn in forms.items()}
    found = {name: statistics.median(t) for name, t in times({name: graph(fn, a, b) for name, fn in forms.items()}, seconds).items()}
    return {"shape": shape, "dtype": str(dtype)[6:], "microseconds": found, "ratio": found["emitted"] / found["by_hand"], "errors": errors}


def sass(folder: Path, triton_target=("cuda", 90, 32)) -> None:
    """Machine code of both kernels for 4096^3 in fp16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dtkernels.codegen.target import target
    from dtkernels.runtime.build.triton_compile import build, record_launches

    folder.mkdir(parents=True, exist_ok=True)
    meta = [torch.empty(4096, 4096, dtype=torch.float16, device="meta") for _ in range(2)]
    for name in ("emitted",):
        kernel = dtkernels.compile(PROGRAM)
        (launch,) = record_launches(kernel.module, "mm", tuple(meta))
        (folder / f"{name}.cubin").write_bytes(build(launch, target("h200")).asm["cubin"])
    names = by_hand_kernel.arg_names
    signature = {n: "*fp16" if n.endswith("_ptr") else "constexpr" if n.startswith(("BLOCK", "GROUP", "SIGMOID")) else "i32" for n in names}
    ones = {"stride_ak": 1, "stride_bn": 1, "stride_cn": 1}
    signature |= dict.fromkeys(ones, "constexpr")
    constants = {(names.index(n),): v for n, v in {**ones, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP_M": 8, "SIGMOID": False}.items()}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n] != "constexpr"}
    source = ASTSource(by_hand_kernel, signature, constants, attrs)
    made = triton.compile(source, target=GPUTarget(*triton_target), options={"num_warps": 4, "num_stages": 3})
    (folder / "by_hand.cubin").write_bytes(made.asm["cubin"])
    (folder / "by_hand.ttgir").write_text(made.asm["ttgir"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--sass", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0, help="GPU time for each shape and dtype")
    args = parser.parse_args()
    if args.sass:
        return sass(args.sass)
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is False; --sass needs none")
    rows = []
    for shape in SHAPES:
        for dtype in (torch.float16, torch.bfloat16):
            rows.append(measure(shape, dtype, args.seconds, {}))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
                Path(args.json).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
