# ruff: noqa: E501 (programs read best on one line)
"""Emitted kernels to machine code for GPUs that are not there."""

import functools
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import dtkernels

MM = """Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k);
mm.tensorize(x:128, k:32, y:128); mm.block(x:128, y:128); mm.map(x:x1/8, y, x1); mm.num_warps(4); mm.num_stages(3);"""
SOFTMAX = """Func _sum, _softmax; In A; Var x; RVar y;
_sum[x] = rsum(exp(A[x, y]), y); _softmax[x, y] = exp(A[x, y]) / reshape(_sum[x], x, 1);
_softmax.block(x:4); _softmax.tensorize(y:512); _softmax.tensorize(x:0); _softmax.num_warps(32); _sum.fuse_at(_softmax, x);"""
ATTENTION = """Func mm, e, dvsr, sm, attention; In A, B, C; Var m, n; RVar k, l;
mm[m, l] = rdot(A[m, k], B[k, l], k) / sqrt(len(k));
e[m, l] = exp(mm[m, l]); dvsr[m] = rsum(e[m, l], l); sm[m, l] = e[m, l] / reshape(dvsr[m], m, 1);
attention[m, n] = rdot(sm[m, l], C[l, n], l);
attention.block(m:64); attention.tensorize(m:64, n:0, k:0, l:64); attention.num_warps(4); attention.num_stages(2);
dvsr.fuse_at(attention, l); e.fuse_at(attention, l); mm.fuse_at(e, l); sm.fuse_at(attention, l);"""
CAUSAL = ATTENTION.replace(
    "mm[m, l] = rdot(A[m, k], B[k, l], k) / sqrt(len(k));", "mm[m, l] = where(l <= m, rdot(A[m, k], B[k, l], k) / sqrt(len(k)), -inf);"
)
DYT = "Func dyt; In A, w, b; SIn alpha; Var x, y; dyt[x, y] = tanh(alpha * A[x, y]) * w[y] + b[y]; dyt.block(x:1, y:1024); dyt.tensorize(y:1024);"

ROWS = SOFTMAX.replace("x:4", "x:1").replace("y:512", "y:1024").replace("num_warps(32)", "num_warps(4)")

PROGRAMS = {
    "mm": (MM, ((4096, 4096), (4096, 4096)), ()),
    "softmax": (SOFTMAX, ((4096, 8192),), ()),
    "softmax of rows": (ROWS, ((4096, 8192),), ()),
    "attention": (ATTENTION, ((4096, 128), (128, 4096), (4096, 128)), ()),
    "causal": (CAUSAL, ((4096, 128), (128, 4096), (4096, 128)), ()),
    "dyt": (DYT, ((4096, 8192), (8192,), (8192,)), (0.5,)),
}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32), "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
MATRIX_INSTRUCTIONS = {"sm_80": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma", "gfx942": r"v_mfma_f32"}
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


class Recorder:
    """Stands for a kernel while its wrapper runs on tensors without storage; keeps what a launch would pass."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **named):
            self.args, self.named = args, named

        return launch


@functools.cache
def machine_code(name: str, target: str, dtype: torch.dtype = torch.bfloat16):
    """The compiled kernel of a program at its shapes, as the wrapper would launch it."""
    text, shapes, scalars = PROGRAMS[name]
    compiled = dtkernels.compile(text)
    module = compiled.module
    (kernel_name,) = (n for n in vars(module) if n.endswith("_kernel"))
    recorder = Recorder(getattr(module, kernel_name))
    setattr(module, kernel_name, recorder)
    try:
        getattr(module, compiled.outputs[0])(*(torch.empty(s, dtype=dtype, device="meta") for s in shapes), *scalars)
    finally:
        setattr(module, kernel_name, recorder.kernel)
    return build(recorder, TARGETS[target])


def build(recorder: Recorder, target: GPUTarget):
    names = recorder.kernel.arg_names
    signature, constants, aligned = {}, {}, {}
    for i, (name, value) in enumerate(zip(names, recorder.args)):
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, int) and value == 1:  # as a launch specialises it
            signature[name] = "constexpr"
            constants[(i,)] = 1
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned[(i,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in recorder.named.items() if k not in names} | {"enable_fp_fusion": True}
    signature |= {k: "constexpr" for k in recorder.named if k in names}
    constants |= {(names.index(k),): v for k, v in recorder.named.items() if k in names}
    kernel = getattr(recorder.kernel, "jit", recorder.kernel)  # Triton 3.6 compiles its own functions only, not what launches them
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)


def assembly(built) -> str:
    return built.asm["ptx"] if "ptx" in built.asm else built.asm["amdgcn"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles(name, target):
    if name == "softmax" and target == "gfx942":
        pytest.skip("32 warps of 64 lanes are more than a work group holds")
    built = machine_code(name, target)
    assert built.asm["cubin" if target != "gfx942" else "hsaco"]
    limit = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}[target]
    assert built.metadata.shared <= limit


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["mm", "attention", "causal"])
def test_matrix_products_use_the_matrix_units(name, target):
    assert re.search(MATRIX_INSTRUCTIONS[target], assembly(machine_code(name, target)))


@pytest.mark.parametrize("dtype, kind", [(torch.float16, "f16.f16"), (torch.bfloat16, "bf16.bf16")])
@pytest.mark.parametrize("name", ["mm", "attention"])
def test_products_take_the_inputs_dtype_and_accumulate_in_float32(name, dtype, kind):
    kinds = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.(\S+)", assembly(machine_code(name, "sm_90", dtype))))
    assert kinds == {f"f32.{kind}"}


def test_attention_is_one_loop_with_two_products():
    built = machine_code("attention", "sm_90")
    assert built.asm["ttgir"].count("ttng.warp_group_dot ") == 2
    assert built.asm["ttir"].count("scf.for") == 1


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["softmax of rows", "dyt"])
def test_aligned_rows_are_read_sixteen_bytes_at_a_time(name, target):
    """Known divisibility must reach the loads: 2-byte loads of bf16 would be an eighth of the bandwidth."""
    text = assembly(machine_code(name, target))
    loads = re.findall(r"ld\.global\S*", text)
    assert loads and all(".v4.b32" in load or ".v2.b64" in load for load in loads if "alpha" not in load), loads


def test_matrix_product_is_pipelined():
    text = assembly(machine_code("mm", "sm_90"))
    assert "cp.async" in text and "wgmma.wait_group" in text


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_spilled(name, target):
    usage = resource_usage(machine_code(name, target))
    assert usage["STACK"] == 0, usage


def resource_usage(built) -> dict[str, int]:
    """What cuobjdump, which comes inside the Triton wheel, reports of a cubin: registers, stack, shared memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"])
        f.flush()
        text = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True, timeout=60).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}
