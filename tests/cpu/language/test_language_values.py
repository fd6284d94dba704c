# ruff: noqa: E501 (programs and error texts read best on one line)
"""Strides, sizes and dtypes of any kind; infinities, NaNs and large numbers stay what they are."""

import math

import bounds  # noqa: F401 (an access outside the tensors raises)
import numpy as np
import pytest
import torch
from oracle import check
from small_programs import ATTENTION_SCHEDULES, CAUSAL, binary, random, unary

import dtkernels

inf, nan = float("inf"), float("nan")


# -- strides, sizes, dtypes -------------------------------------------------------------------------------------------

SCALE_ROWS = "Func f; In A, w; Var x, y; f[x, y] = A[x, y] * w[y]; f.block(x:4, y:8); f.tensorize(x:4, y:8);"


def test_strided_inputs():
    a, w = random((9, 26), (13, 3))
    check(SCALE_ROWS, a[:, ::2], w[:, 1])
    check(SCALE_ROWS, a.T[::2, :].contiguous().T, w[:, 1])
    check(SCALE_ROWS, a[2:7, 1:14], w[:, 0])
    check(SCALE_ROWS, random((13, 9)).T, w[:, 2])


def test_expanded_inputs():
    check(SCALE_ROWS, random((1, 13)).expand(9, 13), random((1,)).expand(13))
    check(SCALE_ROWS, random((9, 1)).expand(9, 13), random((13,)))


def test_product_of_strided_inputs():
    text = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);"
    check(text, random((33, 19)).T, random((33, 34))[:, ::2])
    check(text, random((19, 1)).expand(19, 33), random((1, 17)).expand(33, 17))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_compute(shape):
    for schedule in ("f.block(x:4, y:8); f.tensorize(x:4, y:8);", "f.block(x:4); f.tensorize(x:4, y:0);", "", "f.tensorize(x:0, y:0);"):
        got = dtkernels.compile(f"Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; {schedule}")(torch.zeros(shape))
        assert got.shape == shape


@pytest.mark.parametrize("reduction", ["rsum", "rmax", "rmin"])
@pytest.mark.parametrize("tile", [0, 1, 4])
def test_reduction_over_nothing(reduction, tile):
    check(f"Func f; In A; Var x; RVar y; f[x] = {reduction}(A[x, y], y); f.block(x:2); f.tensorize(x:2, y:{tile});", torch.zeros(3, 0))


def test_product_over_nothing():
    text = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:TILE);"
    for tile in ("16", "0"):
        check(text.replace("TILE", tile), torch.zeros(5, 0), torch.zeros(0, 3))


def test_half_precision():
    a, b = random((19, 33), (33, 17))
    mm = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k); f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16);"
    check(mm, a.half(), b.half(), dtype="float16")
    check(mm, a.half(), b, dtype="float32")
    check(SCALE_ROWS, a.half(), a[0].half(), dtype="float16")
    check(SCALE_ROWS, a.half(), a[0], dtype="float32")
    check(SCALE_ROWS, a.bfloat16(), a[0].bfloat16(), dtype="bfloat16")
    check(SCALE_ROWS, a.bfloat16(), a[0].half(), dtype="float32")


def test_sums_of_halves_accumulate_in_float32():
    a = torch.full((2, 4096), 1.0, dtype=torch.float16)
    a[:, 0] = 2048.0  # where a float16 sum is stuck: 2048 + 1 = 2048; the result is 3071.5, rounded
    for tile in (0, 64, 1024):
        got = dtkernels.compile(f"Func f; In A; Var x; RVar y; f[x] = rsum(A[x, y], y) / 2; f.block(x:2); f.tensorize(x:2, y:{tile});")(a)
        assert got.tolist() == [3072.0] * 2 and got.dtype == torch.float16


def test_softmax_of_halves():
    check(SOFTMAX + "s.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8);", random((5, 19)).half(), dtype="float16")


def test_unfused_intermediates_are_float32():
    text = "Func t, f; In A; Var x; t[x] = A[x] * 1000; f[x] = t[x] / 1000;"
    got = check(text, torch.full((3,), 100.0, dtype=torch.float16), dtype="float16")["f"]
    assert got.tolist() == [100.0] * 3


# -- what must stay what it is ------------------------------------------------------------------------------------------


def test_a_nan_stays_a_nan():
    a, b = torch.tensor([nan, 1.0, nan, -1.0]), torch.tensor([0.0, nan, nan, 0.0])
    check(binary("maximum(A[x], B[x])"), a, b)
    check(binary("minimum(A[x], B[x])"), a, b)
    check(unary("maximum(0, A[x])"), a)
    check(unary("maximum(A[x], 0)"), a)
    check(unary("where(A[x] > 0, A[x], 0)"), a)


@pytest.mark.parametrize("reduction", ["rmax", "rmin", "rsum", "rmean"])
@pytest.mark.parametrize("schedule", ["f.tensorize(y:0);", "f.tensorize(y:4);", "f.tensorize(x:2, y:4); f.block(x:2);", ""])
def test_a_nan_in_a_row_stays(reduction, schedule):
    a = random((4, 9))
    a[0, 0] = a[1, 8] = a[2, 4] = nan
    check(f"Func f; In A; Var x; RVar y; f[x] = {reduction}(A[x, y], y); {schedule}", a)


SOFTMAX = "Func s, f; In A; Var x; RVar y; s[x] = rsum(exp(A[x, y]), y); f[x, y] = exp(A[x, y]) / s[x]; "
SOFTMAX_SCHEDULES = {
    "fused, whole rows": "s.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:0);",
    "fused, tiles": "s.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8);",
    "two kernels": "s.block(x:2); s.tensorize(x:2, y:8); f.block(x:2, y:8); f.tensorize(x:2, y:8);",
    "single elements": "s.fuse_at(f, x);",
}


@pytest.mark.parametrize("schedule", SOFTMAX_SCHEDULES.values(), ids=SOFTMAX_SCHEDULES)
def test_softmax_of_large_logits(schedule):
    a = random((3, 19)) * 1e4
    got = dtkernels.compile(SOFTMAX + schedule)(a)
    torch.testing.assert_close(got, torch.softmax(a.double(), -1).float(), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", SOFTMAX_SCHEDULES.values(), ids=SOFTMAX_SCHEDULES)
def test_softmax_with_infinities_and_nans(schedule):
    a = random((5, 19))
    a[0, 3:] = -inf
    a[1] = -inf  # nothing to share: 0 / 0, as in torch
    a[2, 5] = nan
    a[3, :9] = -inf
    got = dtkernels.compile(SOFTMAX + schedule)(a)
    torch.testing.assert_close(got, torch.softmax(a, -1), equal_nan=True, rtol=2e-5, atol=1e-7)


def test_log_sum_exp_of_large_logits():
    text = "Func f; In A; Var x; RVar y; f[x] = log(rsum(exp(A[x, y]), y)); "
    a = random((3, 19)) * 1e4
    for schedule in ("f.tensorize(y:0);", "f.tensorize(y:8);", "f.block(x:2); f.tensorize(x:2, y:8);", ""):
        torch.testing.assert_close(dtkernels.compile(text + schedule)(a), torch.logsumexp(a, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", ATTENTION_SCHEDULES.values(), ids=ATTENTION_SCHEDULES)
@pytest.mark.parametrize("scale", [1, 3e3])
def test_causal_attention(schedule, scale):
    q, k, v = random((37, 8), (37, 8), (37, 5))
    got = dtkernels.compile(CAUSAL + schedule)(q * scale, k, v)
    mask = torch.ones(37, 37, dtype=torch.bool).tril()
    scores = ((q * scale) @ k.T).double().masked_fill(~mask, -inf)  # float32 scores, so that only what follows is compared
    want = torch.softmax(scores, -1) @ v.double()
    # at scale 3e3 a score of ~1e5 carries a float32 rounding of ~1e-2, which moves the weights by that
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 if scale == 1 else 0.2)
    if scale == 1:
        check(CAUSAL + schedule, q, k, v)


@pytest.mark.parametrize("schedule", ATTENTION_SCHEDULES.values(), ids=ATTENTION_SCHEDULES)
def test_attention_of_a_row_that_sees_nothing(schedule):
    """0 / 0 as the text says; other rows are not touched by it."""
    text = CAUSAL.replace("l <= m", "l < m")
    q, k, v = random((19, 8), (19, 8), (19, 5))
    got = dtkernels.compile(text + schedule)(q, k, v)
    assert torch.isnan(got[0]).all() and torch.isfinite(got[1:]).all()
    assert torch.allclose(got[1], v[0].expand(5), atol=1e-6)


def test_math_of_the_reference_itself():
    """The oracle against closed forms, once, so that it is not its own judge."""
    from oracle import evaluate

    a = np.array([[1.0, 2.0], [3.0, 4.0]])
    softmax = evaluate(SOFTMAX, {"A": a})["f"].v
    assert np.allclose(softmax[0], [1 / (1 + math.e), math.e / (1 + math.e)])
    shifted = evaluate("Func f; In A; Var x; f[x] = A[x] + A[x - 1] + A[2 * x] + A[(x - 1) / 2];", {"A": np.array([1.0, 2.0, 4.0])})["f"].v
    assert shifted.tolist() == [1 + 0 + 1 + 0, 2 + 1 + 4 + 1, 4 + 2 + 0 + 1]
    reduced = evaluate("Func f; In A; Var x; RVar y; f[x] = rmax(A[x, y], y) + 10 * rmin(A[x, y], y) + 100 * rmean(A[x, y], y) + 1000 * rdot(A[x, y], A[x, y], y);", {"A": a})["f"].v
    assert reduced.tolist() == [2 + 10 + 150 + 5000, 4 + 30 + 350 + 25000]
    error = evaluate("Func f; In A; Var x; f[x] = exp(1000 * A[x]) + 1 / (0.1 * A[x] - 0.1);", {"A": np.array([1.0, 0.0])})["f"].e
    assert np.isinf(error[0]) and error[1] < 1e-3
