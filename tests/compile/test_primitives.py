# ruff: noqa: E501 (programs read best on one line)
"""Every schedule primitive beyond the published ones, compiled to machine code for GPUs that need not be there."""

import re

import pytest
import torch

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

GPUS = ("h200", "a100", "mi300x")
MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); mm.block(x:64, y:64); mm.tensorize(x:64, y:64, k:32); "
CAUSAL = """Func s, e, total, att; In Q, K, V; Var m, n; RVar l, d;
s[m, l] = where(l <= m, rdot(Q[m, d], K[l, d], d), -inf); e[m, l] = exp(s[m, l]); total[m] = rsum(e[m, l], l);
att[m, n] = rdot(e[m, l], V[l, n], l) / total[m];
s.fuse_at(att, l); e.fuse_at(att, l); total.fuse_at(att, l); att.block(m:64); att.tensorize(m:64, n:0, d:0, l:64);
"""
WINDOW = CAUSAL.replace("l <= m,", "l <= m and m - l < 100,")


def binaries(text, shapes, gpu, dtype=torch.bfloat16):
    """The compiled kernels of a program for inputs of ``shapes``."""
    program = parse(text)
    module = load_module(emit(prepare(program)), "test")
    args = [torch.empty(s, dtype=dtype, device="meta") for s in shapes]
    return [build(launch, target(gpu)) for launch in record_launches(module, program.outputs()[0], tuple(args))]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("text", [CAUSAL, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("length", [1024, 1000])
def test_mask_ranges(text, length, gpu):
    assert binaries(text, [(length, 64)] * 3, gpu)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("more", ["mm.stages(k:3); mm.unroll(k:2); mm.maxnreg(168); mm.evict(A:first); mm.specialize(k);", "mm.persistent(); mm.map(x:x1/4, y, x1);", "mm.reorder(y, x);"])
def test_options(more, gpu):
    (binary,) = binaries(MM + more, [(200, 256), (256, 200)], gpu)
    if "maxnreg" in more and gpu != "mi300x":
        assert ".maxnreg 168" in binary.asm["ptx"]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("text, shapes", [(MM + "mm.split(k:4);", [(200, 1024), (1024, 200)]), (WINDOW + "att.split(l:3); att.persistent();", [(1000, 64)] * 3)], ids=["product", "window"])
def test_split(text, shapes, gpu):
    assert len(binaries(text, shapes, gpu)) == 2


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "text, shapes",
    [(MM + "mm.descriptor(A, B, mm);", [(200, 256), (256, 200)]), (MM + "mm.descriptor(A, B, mm); mm.persistent();", [(200, 256), (256, 200)]),
     (WINDOW + "att.descriptor(Q, K, V, att);", [(1000, 64)] * 3)],
    ids=["product", "persistent", "window"],
)  # fmt: skip
def test_descriptors(text, shapes, gpu):
    (binary,) = binaries(text, shapes, gpu)
    if gpu == "h200":
        assert "cp.async.bulk.tensor" in binary.asm["ptx"]


@pytest.mark.parametrize("gpu, split", [("h200", True), ("a100", True), ("mi300x", False)])
def test_float32_products_are_split_on_nvidia_gpus(gpu, split):
    (binary,) = binaries(MM + "mm.approximate(rdot);", [(200, 256), (256, 200)], gpu, torch.float32)
    assert ("tf32" in binary.asm["ptx" if split else "amdgcn"]) is split
    (halves,) = binaries(MM + "mm.approximate(rdot);", [(200, 256), (256, 200)], gpu)
    assert "tf32" not in halves.asm["amdgcn" if gpu == "mi300x" else "ptx"]


@pytest.mark.parametrize("gpu", GPUS)
def test_specialized_warps(gpu):
    (binary,) = binaries(MM + "mm.descriptor(A, B, mm); mm.specialize_warps(k); mm.persistent();", [(256, 256), (256, 256)], gpu)
    if gpu == "h200":
        assert binary.metadata.num_warps >= 4 and "cp.async.bulk.tensor" in binary.asm["ptx"]


def test_cluster():
    (binary,) = binaries(MM + "mm.cluster(2);", [(256, 256), (256, 256)], "h200")
    assert binary.metadata.num_ctas == 2


ODD = "mm.persistent(); mm.stage(A, B); mm.descriptor(A, B); "


@pytest.mark.parametrize("gpu", GPUS)
def test_a_product_of_odd_rows_is_loaded_by_descriptors_from_copies_stored_16_bytes_at_a_time(gpu):
    found = {b.metadata.name: b for b in binaries(MM + ODD + "mm.tail(y:32, k:64);", [(201, 257), (257, 203)], gpu)}
    if gpu != "h200":  # by pointers, and all blocks by one kernel
        return
    assert set(found) == {"A_rows_kernel", "B_rows_kernel", "mm_descriptor_kernel", "mm_tail_descriptor_kernel"}
    for name in ("A_rows_kernel", "B_rows_kernel"):
        assert "st.global.v4.b32" in found[name].asm["ptx"] and "st.global.b16" not in found[name].asm["ptx"]
    for name in ("mm_descriptor_kernel", "mm_tail_descriptor_kernel"):
        text = found[name].asm["ptx"]
        assert "cp.async.bulk.tensor" in text and "ld.global.b16" not in text and "wgmma" in text


def test_what_feeds_a_product_is_stored_16_bytes_at_a_time_whatever_its_length():
    text = "Func a, mm; In A, B; Var x, y, k; a[x, k] = A[x, k] + 1; mm[x, y] = rdot(a[x, k], B[k, y], k); mm.block(x:64, y:64); mm.tensorize(x:64, y:64, k:32); mm.descriptor(a); a.block(x:1, k:1024); a.tensorize(k:1024); a.align(); mm.compile();"
    stored = next(b.asm["ptx"] for b in binaries(text, [(201, 257), (257, 203)], "h200") if b.metadata.name == "a_kernel")
    assert "st.global.v4.b32" in stored and "st.global.b16" not in stored


@pytest.mark.parametrize("gpu", GPUS)
def test_a_stored_operand_goes_to_the_matrix_units_as_any_other(gpu):
    """Its kernel converts int8 once; the product loads both operands asynchronously, and converts nothing."""
    text = "Func f; In A, W; Var x, y; RVar k; f[x, y] = rdot(A[x, k], cast(W[y, k], bf16), k); f.block(x:64, y:64); f.tensorize(x:64, y:64, k:64); "
    args = tuple(torch.empty(256, 256, dtype=t, device="meta") for t in (torch.bfloat16, torch.int8))

    def built(more):
        return {launch.kernel.fn.__name__: build(launch, target(gpu)) for launch in record_launches(load_module(emit(prepare(parse(text + more))), "test"), "f", args)}

    inside, stored = built(""), built("f_right.block(y:4, k:256); f_right.tensorize(y:4, k:256);")
    assert (*inside, *stored) == ("f_kernel", "f_right_kernel", "f_kernel")
    if gpu != "mi300x":
        loop, product = (b.asm["ptx"] for b in (inside["f_kernel"], stored["f_kernel"]))
        converts = [bool(re.search(r"cvt\.rn\.b?f(16|32)\.s(8|16|32)", asm)) for asm in (loop, product)]
        assert converts == [True, False] and "cp.async" in product
