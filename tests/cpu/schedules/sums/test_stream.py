# ruff: noqa: E501 (programs read best on one line)
"""``stream``: the sums of a last wave split over programs, under the interpreter, which runs 3 programs at once, against the float64 reference."""

import re

import pytest
import torch
from oracle import check
from small_programs import random

import dtkernels
from dtkernels.codegen.emit.host_helpers import waves_before_parts

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k); "
WAVES = "mm.block(x:32, y:64); mm.tensorize(x:32, y:64, k:16); mm.descriptor(A, B{}); mm.persistent(); "
PARTS = "mm.block(x:32, y:96); mm.tensorize(x:32, y:96, k:16); mm.descriptor(A, B, mm); mm.persistent(); "


def source(text: str) -> str:
    return dtkernels.compile(text).source


@pytest.mark.parametrize("schedule", [
    WAVES.format("") + "mm.stream(k:4);", WAVES.format(", mm") + "mm.stream(k:3);", WAVES.format("") + "mm.map(x:x1/2, y, x1); mm.stream(k:5); mm.tail(x:16);",
    PARTS + "mm.stream(k:4);", PARTS + "mm.stream(k:2); mm.tail(y:32, k:32);",
])  # fmt: skip
@pytest.mark.parametrize("shape", [(128, 256, 64), (64, 64, 16), (136, 200, 88), (136, 190, 40), (32, 64, 0)])
def test_a_last_wave_of_split_sums(shape, schedule):
    """Of 16 blocks the last, of 20 the last 2, of 10 the last, of 2 or 1 none are left to it; parts may be empty."""
    m, n, k = shape
    check(MM + schedule, *random((m, k), (k, n)))


@pytest.mark.parametrize("text, shapes", [
    ("Func mm; In A, B, c; Var x, y; RVar k; mm[x, y] = sigmoid(rdot(A[x, k], B[k, y], k) + c[y]) * x; ", ((136, 64), (64, 200), (200,))),
    ("Func mm; In A, B, C; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k) * sigmoid(rdot(A[x, k], C[k, y], k)); ", ((136, 64), (64, 200), (64, 200))),
    ("Func mm; In A, B; Var x, y; RVar k; mm[y, x] = rdot(A[x, k], B[k, y], k); ", ((136, 64), (64, 200))),
])  # fmt: skip
def test_epilogues_run_once_on_merged_sums(text, shapes):
    check(text + WAVES.format("") + "mm.stream(k:4);", *random(*shapes))


def test_batches():
    text = "Func mm; In A, B; Var b, x, y; RVar k; mm[b, x, y] = rdot(A[b, x, k], B[b, k, y], k); mm.block(b:1, x:32, y:64); mm.tensorize(b:1, x:32, y:64, k:16); mm.descriptor(A, B); mm.persistent(); mm.stream(k:4);"
    check(text, *random((4, 64, 64), (4, 64, 120)))


def test_the_same_bits_every_time():
    a, b = (t.half() for t in random((136, 64), (64, 200)))
    kernel = dtkernels.compile(MM + WAVES.format("") + "mm.stream(k:3);")
    first = kernel(A=a, B=b)
    assert all(torch.equal(kernel(A=a, B=b), first) for _ in range(3))
    torch.testing.assert_close(first.double(), a.double() @ b.double(), rtol=2e-3, atol=2e-3)


def test_no_more_memory_than_the_last_wave_has():
    text = source(MM + WAVES.format("") + "mm.stream(k:4);")
    assert "mm_acc_part_shape = (4, triton.cdiv(size_x, 32) * triton.cdiv(size_y, 64) - tiles_before, 32, 64)" in text
    assert "tl.atomic" not in text and not re.search(r"\bwhile\b.*tl\.load", text), "nobody waits for another program"


def test_the_wrapper_counts_rounds():
    tensor = torch.empty(1)
    counted = [waves_before_parts(blocks, 132, tensor, 3) for blocks in (94, 132, 480, 480 - 84 + 44, 2 * 132 - 1)]
    assert counted == [94, 132, 396, 396, 263], "132 and fewer are one wave; 84 x 3 parts are 2 rounds of a third each; 131 x 3 are 3 rounds"


@pytest.mark.parametrize("more, rule", [
    ("mm.stream(k:2);", r"stream is for programs that stay and read through descriptors: found mm without persistent\(\)"),
    ("mm.persistent(); mm.descriptor(A, B); mm.split(k:2); mm.stream(k:2);", "stream is for a kernel that is not split"),
    ("mm.persistent(); mm.descriptor(A, B); mm.stream(x:2);", r"split\(x:2\): found no loop that reduces over it"),
    ("mm.persistent(); mm.descriptor(A, B); mm.stream(z:2);", "stream names a label of mm"), ("mm.stream(k:2, x:2);", "arguments of stream"),
])  # fmt: skip
def test_what_is_not_streamed_is_refused(more, rule):
    with pytest.raises(dtkernels.DTError, match=rule):
        dtkernels.compile(MM + "mm.block(x:32, y:64); mm.tensorize(x:32, y:64, k:16); " + more)
