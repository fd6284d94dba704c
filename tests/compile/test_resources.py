# ruff: noqa: E501 (programs read best on one line)
"""The resource model against what compiled kernels report: never below 0.8 of it, never above 2 times."""

import os
import re
import subprocess
import tempfile

import pytest
import torch

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.analysis.resources import resources
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.codegen.transforms.memory.tensor_descriptors import use_descriptors
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); mm.block(x:{0}, y:{1}); mm.tensorize(x:{0}, y:{1}, k:{2}); mm.num_warps({3}); mm.num_stages({4}); "
ATT = """Func s, e, total, att; In Q, K, V; Var m, n; RVar l, d;
s[m, l] = where({condition}, rdot(Q[m, d], K[l, d], d), -inf); e[m, l] = exp(s[m, l]); total[m] = rsum(e[m, l], l); att[m, n] = rdot(e[m, l], V[l, n], l) / total[m];
s.fuse_at(att, l); e.fuse_at(att, l); total.fuse_at(att, l); att.block(m:{m}); att.tensorize(m:{m}, l:{l}, n:0, d:0); att.num_warps({warps}); att.num_stages({stages});"""
ROWS = "Func total, f; In A; Var x; RVar y; total[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / total[x]; total.fuse_at(f, x); f.block(x:{0}); f.tensorize(x:{0}, y:{1}); f.num_warps({2});"
SLACK = 1024  #: bytes: what reductions and barriers take beside is not modelled to the byte

CASES = {
    "product": (MM.format(128, 128, 64, 8, 3), [(4096, 4096)] * 2),
    "wide product": (MM.format(128, 256, 64, 8, 3), [(4096, 4096)] * 2),
    "small product": (MM.format(32, 32, 32, 4, 2), [(4096, 4096)] * 2),
    "flat product": (MM.format(64, 128, 32, 4, 4), [(4096, 4096)] * 2),
    "described product": (MM.format(128, 128, 64, 4, 4) + "mm.descriptor(A, B, mm);", [(4096, 4096)] * 2),
    "attention": (ATT.format(condition="l >= 0", m=128, l=64, warps=8, stages=3), [(4096, 128)] * 3),
    "causal attention": (ATT.format(condition="l <= m", m=64, l=32, warps=4, stages=3), [(4096, 64)] * 3),
    "long tiles": (ATT.format(condition="l <= m", m=128, l=128, warps=8, stages=2), [(4096, 128)] * 3),
    "rows": (ROWS.format(1, 0, 8), [(4096, 8192)]),
    "short rows": (ROWS.format(4, 0, 4), [(4096, 1024)]),
    "rows in tiles": (ROWS.format(1, 2048, 8), [(4096, 65536)]),
}


def registers(binary) -> int:
    """Registers of a thread, as the binary says."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1])


def estimate_and_binary(text, shapes, gpu, dtype):
    program = prepare(parse(text))
    (kernel,) = lower(program)
    kernel = use_descriptors(kernel) if kernel.descriptors else kernel
    args = tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes)
    module = load_module(emit(program), "resources")
    sizes = {label: args[i].shape[d] for label in program.algorithm.labels for i, d in [_source(program, label)]}
    itemsizes = dict.fromkeys(program.algorithm.inputs + program.algorithm.funcs, dtype.itemsize)
    (launch,) = record_launches(module, program.outputs()[0], args)
    return resources(kernel, sizes, itemsizes, target(gpu)), build(launch, target(gpu))


def _source(program, label):
    tensor, dimension = program.algorithm.extent_source(label)
    return program.algorithm.inputs.index(tensor), dimension


#: an A100 has no descriptors
ON_GPUS = [(case, gpu) for case in CASES for gpu in ("h200", "a100") if gpu == "h200" or "descriptor" not in CASES[case][0]]


@pytest.mark.parametrize(("case", "gpu"), ON_GPUS)
def test_estimate_is_what_the_binary_takes(case, gpu):
    estimate, binary = estimate_and_binary(*CASES[case], gpu, torch.bfloat16)
    found, wanted = estimate.shared_bytes, binary.metadata.shared
    assert 0.8 * wanted <= found + SLACK and found <= 2 * wanted + SLACK, f"shared memory: estimated {found}, compiled {wanted}"
    found, wanted = estimate.registers, registers(binary)
    assert 0.8 * wanted <= found <= 2 * wanted, f"registers: estimated {found}, compiled {wanted}"


STAYS = "mm.persistent(); mm.descriptor(A, B{more}); "
BESIDE = MM.replace("A, B;", "A, B, C;").replace("k);", "k) * C[x, y];", 1)
#: kernels whose programs stay: tiles of the next block are there while a block is stored
AHEAD = {
    "through descriptors": (MM.format(128, 256, 64, 8, 3) + STAYS.format(more=", mm"), [(4096, 4096)] * 2),
    "stored by pointers": (MM.format(128, 128, 64, 8, 3) + STAYS.format(more=""), [(4096, 4096)] * 2),
    "beside another tile": (BESIDE.format(128, 128, 64, 8, 3) + STAYS.format(more=", mm"), [(4096, 4096)] * 3),
    "stages of blocks": (MM.format(128, 128, 64, 8, 1) + STAYS.format(more=", mm") + "mm.stages(x:3);", [(4096, 4096)] * 2),
    "whole depth": (MM.format(128, 128, 0, 8, 3) + "mm.persistent();", [(4096, 128), (128, 4096)]),
    "rows ahead": (ROWS.format(1, 0, 8) + "f.persistent(); f.stages(x:3);", [(4096, 4096)]),
}


@pytest.mark.parametrize("gpu", ["h200", "b200"])
@pytest.mark.parametrize("case", AHEAD)
def test_shared_memory_of_programs_that_stay(case, gpu):
    estimate, binary = estimate_and_binary(*AHEAD[case], gpu, torch.bfloat16)
    assert 0.9 * binary.metadata.shared <= estimate.shared_bytes + 64 <= 1.3 * binary.metadata.shared + 64


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("case", ["product", "flat product", "causal attention"])
def test_shared_memory_of_float32(case, gpu):
    estimate, binary = estimate_and_binary(*CASES[case], gpu, torch.float32)
    assert 0.8 * binary.metadata.shared <= estimate.shared_bytes <= 2 * binary.metadata.shared
