# ruff: noqa: E501 (programs read best on one line)
"""Kernels that a GPU has no room for are refused before Triton sees them, with what they need and what there is."""

import pytest

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.analysis.resources import check_resources
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import DTError, parse

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); mm.block(x:{0}, y:{1}); mm.tensorize(x:{0}, y:{1}, k:{2}); mm.num_warps({3}); mm.num_stages({4}); "
SIZES = dict.fromkeys("xyk", 4096)
HALF = {"A": 2, "B": 2, "mm": 2}


def check(text, gpu="h200", sizes=SIZES, itemsizes=HALF):
    for kernel in lower(prepare(parse(text))):
        check_resources(kernel, sizes, itemsizes, target(gpu))


def test_what_fits_is_let_through():
    check(MM.format(128, 256, 64, 8, 4))
    check(MM.format(128, 128, 32, 8, 3), "a100")


@pytest.mark.parametrize("text, gpu, message", [
    (MM.format(128, 256, 64, 8, 5), "h200", "mm on h200: bytes of shared memory: found 245760; allowed: at most 232448"),
    (MM.format(128, 256, 64, 8, 4), "l40s", "mm on l40s: bytes of shared memory: found 147456; allowed: at most 101376"),
    (MM.format(256, 256, 32, 4, 2), "h200", "mm on h200: registers of a thread for accumulators: found 512; allowed: at most 255"),
    (MM.format(16, 16, 16, 32, 2), "mi300x", "mm on mi300x: threads of one program: found 2048; allowed: at most 1024"),
    (MM.format(64, 64, 32, 4, 2) + "mm.cluster(2);", "a100", "mm on a100: clusters: found cluster; allowed: GPUs of compute capability 9.0 or higher"),
    ("Func f; In A; Var x, y; f[x, y] = A[x, y]; f.tensorize(x:0, y:0);", "h200", "f on h200: elements of one tensor: found 16777216; allowed: at most 1048576"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(text, gpu, message):
    with pytest.raises(DTError) as error:
        check(text, gpu)
    assert str(error.value) == message


def test_a_products_loop_unrolled_more_than_old_triton_compiles(monkeypatch):
    unrolled = MM.format(64, 64, 32, 4, 3) + "mm.unroll(k:8);"
    monkeypatch.setattr("dtkernels.codegen.analysis.resources.triton_version", lambda: (3, 6))
    with pytest.raises(DTError, match="mm on b200: a product's loop unrolled: found 8 times by Triton 3.6; allowed: 4, or Triton 3.9"):
        check(unrolled, "b200")
    check(unrolled, "h200")
    check(unrolled.replace("k:8", "k:4"), "b200")
    assert "**unrolled(8)" in emit(prepare(parse(unrolled)))  # the file that runs alone asks for itself
    assert "unrolled" not in emit(prepare(parse(unrolled.replace("k:8", "k:4"))))
    monkeypatch.setattr("dtkernels.codegen.analysis.resources.triton_version", lambda: (3, 9))
    check(unrolled, "b200")


def test_clusters_are_refused_by_triton_that_has_none(monkeypatch):
    clusters = "Func f; In A; Var x; f[x] = A[x]; f.block(x:1024); f.tensorize(x:1024); f.cluster({});"
    monkeypatch.setattr("dtkernels.codegen.analysis.resources.triton_version", lambda: (3, 6))
    with pytest.raises(DTError, match="f: clusters: found Triton 3.6; allowed: Triton 3.8 or newer"):
        check(clusters.format(2))
    check(clusters.format(1), "a100")  # one block is no cluster
    monkeypatch.setattr("dtkernels.codegen.analysis.resources.triton_version", lambda: None)
    check(clusters.format(2))


def test_loads_that_reach_a_product_through_arithmetic_run_ahead_too():
    """Four tiles of 16 KiB for one operand: for an H200 Triton's machine code takes 262144 bytes with 4 stages, 98304 with 2."""
    made = MM.format(128, 128, 64, 8, 4).replace("In A, B", "In A, C, D, E, B").replace("rdot(A[x, k]", "rdot(A[x, k] * C[x, k] + D[x, k] * E[x, k]")
    with pytest.raises(DTError, match="mm on h200: bytes of shared memory"):
        check(made, itemsizes=HALF | {"C": 2, "D": 2, "E": 2})
    check(made.replace("num_stages(4)", "num_stages(2)"), itemsizes=HALF | {"C": 2, "D": 2, "E": 2})
