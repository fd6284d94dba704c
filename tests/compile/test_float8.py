"""Machine code of float8: the matrix units and conversions of GPUs that have it, arithmetic on bits where they do not; wide loads."""

import re
from dataclasses import replace

import pytest
import torch

import dtkernels
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches
from dtkernels.runtime.torch_support.dtypes import float8_inputs

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
PRODUCT = "Func f; In A, W; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[n, k], k); f.block(m:64, n:64); f.tensorize(m:64, n:64, k:64);"
ROWS = "Func f; In A; Var m, n; f[m, n] = %s; f.block(m:1, n:4096); f.tensorize(n:4096);"
#: GPU -> the instruction of a product of two operands in e4m3, and of one in bfloat16 with one in e4m3
INSTRUCTIONS = {
    "a100": (r"mma\.sync\S*f32\.f16\.f16\.f32", r"mma\.sync\S*f32\.bf16\.bf16\.f32"),
    "l40s": (r"mma\.sync\S*f32\.e4m3\.e4m3\.f32", r"mma\.sync\S*f32\.bf16\.bf16\.f32"),
    "h200": (r"wgmma\.mma_async\S*f32\.e4m3\.e4m3", r"wgmma\.mma_async\S*f32\.bf16\.bf16"),
    "b200": (r"tcgen05\.mma\S*kind::f8f6f4", r"tcgen05\.mma\S*kind::f16"),
    "mi300x": (r"v_mfma_f32_\S*_f16", r"v_mfma_f32_\S*_bf16"),
}


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))


def machine_code(text: str, dtypes: tuple[torch.dtype, ...], gpu: str) -> str:
    (code,) = kernels_of(text, dtypes, gpu).values()
    return code


def kernels_of(text: str, dtypes: tuple[torch.dtype, ...], gpu: str) -> dict[str, str]:
    """The machine code, PTX for NVIDIA, of each kernel that a call launches."""
    program = dtkernels.compile(text).prepared
    tensors = {n: torch.empty(4096, 4096, dtype=d, device="meta") for n, d in zip(program.algorithm.inputs, dtypes)}
    program = replace(program, algorithm=replace(program.algorithm, float8=float8_inputs(tensors)))
    module = load_module(emit(program, target=target(gpu)), "f")
    made = {launch.kernel.__name__: build(launch, target(gpu)).asm for launch in record_launches(module, "f", tuple(tensors.values()))}
    return {name: asm["ptx"] if "ptx" in asm else asm["amdgcn"] for name, asm in made.items()}


@pytest.mark.parametrize("gpu", INSTRUCTIONS)
def test_products_take_the_matrix_units(gpu):
    alone, beside = INSTRUCTIONS[gpu]
    assert re.search(alone, machine_code(PRODUCT, (E4M3, E4M3), gpu))
    assert re.search(beside, machine_code(PRODUCT, (BF16, E4M3), gpu))


def test_forms_of_products_on_hopper():
    descriptors = machine_code(PRODUCT + "f.descriptor(A, W);", (E4M3, E4M3), "h200")
    assert "cp.async.bulk.tensor" in descriptors and re.search(r"wgmma\S*e4m3\.e4m3", descriptors)
    assert re.search(r"wgmma\S*f32\.f16\.f16", machine_code(PRODUCT, (E5M2, E4M3), "h200"))
    shallow = machine_code(PRODUCT.replace("k:64", "k:16"), (E4M3, E4M3), "h200")  # the instruction in float8 is 32 deep
    assert re.search(r"wgmma\S*f32\.f16\.f16", shallow)


def test_partial_sums_on_hopper_reach_float32():
    """The matrix units add up as many products as the tile is deep, waited for once; the sum so far is added by the cores."""
    text = machine_code(PRODUCT.replace("k:64", "k:128"), (E4M3, E4M3), "h200")
    loop = text[text.rindex("wgmma.fence") :]
    assert len(re.findall(r"wgmma\.mma_async", loop)) == 4 and len(re.findall(r"wgmma\.wait_group", loop)) == 1
    assert len(re.findall(r"add\.f32|add\.rn\.f32", text)) >= 32
    fast = machine_code(PRODUCT + "f.approximate(rdot);", (E4M3, E4M3), "h200")
    assert not re.findall(r"add\.f32|add\.rn\.f32", fast) and re.search(r"wgmma\S*e4m3\.e4m3", fast)


LARGE = "f.block(m:128, n:128); f.tensorize(m:128, n:128, k:128); f.num_warps(8); f.num_stages(4); f.persistent();"
TURNED = "f_right.block(n:64, k:64); f_right.tensorize(n:64, k:64); f.descriptor(A, f_right);"


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("form", ["turned first", "aligned copies", "specialized warps", "in turn"])
def test_operands_stay_in_float8_from_memory_to_the_matrix_units(form, dtype):
    """A copy along the sum, copies with aligned rows, and producer and consumers: the product's kernel converts no operand."""
    text = "Func f; In A, W; Var m, n; RVar k; f[m, n] = cast(rdot(A[m, k], W[n, k], k), bf16);" + LARGE
    warps = "f.descriptor(A, W, f); f.specialize_warps(k);"
    more = {"turned first": TURNED, "aligned copies": "f.descriptor(A, W); f.stage(A, W);", "specialized warps": warps, "in turn": warps + "f.ping_pong();"}
    text = text.replace("W[n, k]", "W[k, n]") if form == "turned first" else text.replace("m:128", "m:64") if form == "in turn" else text
    found = kernels_of(text + more[form], (dtype, dtype), "h200")
    product = found.pop("f_gluon_kernel" if form in ("specialized warps", "in turn") else "f_descriptor_kernel")
    name = "e4m3" if dtype == E4M3 else "e5m2"
    assert re.search(rf"wgmma\.mma_async\S*f32\.{name}\.{name}", product) and "cp.async.bulk.tensor" in product
    assert "cvt.rn.f16x2" not in product, "an operand is converted"
    assert len(found) == {"turned first": 1, "aligned copies": 2}.get(form, 0)
    assert all(f"cvt.rn.satfinite.{name}x2" in copy for copy in found.values()), "copies are written in float8"


@pytest.mark.parametrize("gpu", ["a100", "h200", "mi300x"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_elements_are_loaded_16_at_a_time_and_converted_by_what_the_gpu_has(gpu, dtype):
    name = "e4m3" if dtype == E4M3 else "e5m2"
    text = machine_code(ROWS % "2 * A[m, n]", (dtype,), gpu)
    assert re.search(r"ld\.global\S*\.v4\.b32|global_load_dwordx4", text)
    assert (f"cvt.rn.f16x2.{name}x2" in text) == (gpu == "h200")
    text = machine_code(ROWS % f"cast(A[m, n], {name})", (BF16,), gpu)
    assert (f"cvt.rn.satfinite.{name}x2.f32" in text) == (gpu == "h200")
