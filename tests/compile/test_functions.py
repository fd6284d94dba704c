# ruff: noqa: E501 (programs read best on one line)
"""Every elementwise function, reduction and operator on integers to machine code for each target, without a GPU."""

import re
from dataclasses import replace

import pytest
import torch

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.analysis.product_types import InputTypes
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

TARGETS = ("a100", "l40s", "h200", "b200", "mi300x")
TEXT = """Func f; In A, B; SIn s; Var x, y;
f[x, y] = sin(A[x, y]) + cos(s) + log1p(A[x, y]) + atan(A[x, y]) + asin(B[x, y]) + acos(A[x, y]) + atan2(A[x, y], s) + expm1(B[x, y]) + pow(A[x, y], B[x, y]) + pow(2, s) + pow(A[x, y], 2) + clamp(A[x, y], -1, s)
    + round(A[x, y]) + ceil(y / 3) + trunc(B[x, y]) + sign(A[x, y]) + sin(2) + where(isnan(A[x, y]) or isinf(B[x, y]), 0, where(isfinite(s), 1, 2));
f.block(x:1, y:256); f.tensorize(y:256);"""


@pytest.mark.parametrize("name, dtype", [*((name, torch.bfloat16) for name in TARGETS), ("h200", torch.float32)])
def test_compiles(name, dtype):
    program, gpu = prepare(parse(TEXT)), target(name)
    tensors = [torch.empty((64, 1000), dtype=dtype, device="meta") for _ in "AB"]
    for launch in record_launches(load_module(emit(program, "call", gpu), "functions"), "call", (*tensors, 0.5)):
        assert build(launch, gpu).asm


ROUGH = """Func f; In A, B; Var x, y;
f[x, y] = log(A[x, y]) + log2(B[x, y]) * log1p(A[x, y]) + expm1(A[x, y]) * erfc(B[x, y]) + tanh(A[x, y]);
f.block(x:1, y:256); f.tensorize(y:256); f.approximate(log, log2, log1p, expm1, erfc, tanh);"""


@pytest.mark.parametrize("name", ["a100", "l40s", "h200", "b200"])
def test_forms_of_few_instructions(name):
    """By the instructions of the special function unit, one each but for the two of erfc, and no call of a library."""
    program, gpu = prepare(parse(ROUGH)), target(name)
    tensors = [torch.empty((64, 1024), dtype=torch.bfloat16, device="meta") for _ in "AB"]
    (launch,) = record_launches(load_module(emit(program, "call", gpu), "rough"), "call", tuple(tensors))
    ptx = build(replace(launch, constants={**launch.constants, "ON_GPU": True}), gpu).asm["ptx"]
    count = {word: len(re.findall(word, ptx)) for word in ("lg2.approx.f32", "ex2.approx.ftz.f32", "rcp.approx.ftz.f32", "tanh.approx.f32")}
    elements = count["rcp.approx.ftz.f32"]
    assert elements and count == {"lg2.approx.f32": 3 * elements, "ex2.approx.ftz.f32": 2 * elements, "rcp.approx.ftz.f32": elements, "tanh.approx.f32": elements}
    assert "call.uni" not in ptx and "__nv_" not in ptx


INTEGERS = """Func p, q, f; In A, W, t; Var x, y; RVar z;
p[x] = rargmax(A[x, z], z); q[x, y] = cast(round(A[x, y] * 40), int8);
f[x, y] = ((W[x, y // 8] >> (4 * (y % 8))) & 15) * A[x, p[x]] + (q[x, y] ^ 5) // 3 + (~t[x] << 2) + cast(A[x, y], int64) + rprod(A[x, z], z) + where(rany(A[x, z] > 0, z), 1, 2);
p.block(x:4); p.tensorize(x:4, z:64); p.split(z:2); q.block(x:4, y:64); q.tensorize(x:4, y:64); f.block(x:4, y:64); f.tensorize(x:4, y:64, z:64);"""


@pytest.mark.parametrize("name", TARGETS)
def test_integers_compile(name):
    program, gpu = prepare(parse(INTEGERS)), target(name)
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in (((64, 1000), torch.bfloat16), ((64, 125), torch.int32), ((64,), torch.int64))]
    launches = record_launches(load_module(emit(program, "call", gpu), "integers"), "call", tuple(tensors))
    assert len(launches) >= 4 and all(build(launch, gpu).asm for launch in launches)


RANDOM = "Func f; In A; SIn seed; Var x, y; f[x, y] = random(seed, x, y) * normal(7, x * 3000000000 + y, y) + normal(seed, x, y, 1, 2) + A[x, y]; f.block(x:4, y:64); f.tensorize(x:4, y:64);"


@pytest.mark.parametrize("name", TARGETS)
def test_random_numbers_compile(name):
    program, gpu = prepare(parse(RANDOM)), target(name)
    for launch in record_launches(load_module(emit(program, "call", gpu), "drawn"), "call", (torch.empty((64, 1000), device="meta"), 7)):
        assert build(launch, gpu).asm


NARROW = {
    "int8, a scale of a row": ("W[n, k] * s[n]", torch.int8, (1024, 1024), (1024,)),
    "int4, a scale of a group": ("(((W[n, k // 8] >> (4 * (k % 8))) & 15) - 8) * s[n, k / 128]", torch.int32, (1024, 128), (1024, 8)),
}
MATRIX = {"a100": "mma.sync", "l40s": "mma.sync", "h200": "wgmma|mma.sync", "b200": "tcgen05|mma.sync", "mi300x": "v_mfma"}


@pytest.mark.parametrize("name, form", [*((name, "int4, a scale of a group") for name in TARGETS), ("h200", "int8, a scale of a row"), ("mi300x", "int8, a scale of a row")])
def test_products_with_narrow_weights_use_the_matrix_units(name, form):
    """By the default schedule, in bf16, though the scales are float32; few rows read the weight as it is."""
    weight, dtype, shape, scales = NARROW[form]
    text = f"Func f; In A, W, s; Var m, n; RVar k; f[m, n] = rdot(A[m, k], {weight}, k);"
    variant, gpu = Operator(Spec("narrow", "A product.", parse(text))).variant((), frozenset(), 0), target(name)
    types = InputTypes((("A", "bf16"), ("W", str(dtype).removeprefix("torch.")), ("s", "fp32")))
    program = variant.program({"m": 64, "n": 1024, "k": 1024}, types, gpu)
    program = replace(program, algorithm=replace(program.algorithm, integral=frozenset("W")))
    tensors = [torch.empty(size, dtype=d, device="meta") for size, d in (((64, 1024), torch.bfloat16), (shape, dtype), (scales, torch.float32))]
    launches = record_launches(load_module(emit(program, "call", gpu, uniform=False), "narrow"), "call", tuple(tensors))
    texts = [asm.get("ptx") or asm["amdgcn"] for asm in (build(launch, gpu).asm for launch in launches)]
    assert any(re.search(MATRIX[name], text) for text in texts)
    assert all(not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16 or value.shape != (1024, 1024) for launch in launches for value in launch.args)
