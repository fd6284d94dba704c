# ruff: noqa: E501 (programs read best on one line)
"""Variances and covariances in the loop that adds up their means, by the interpreter, against float64."""

import numpy as np
import pytest
import torch
from oracle import as_numpy, check
from small_programs import random

import dtkernels
from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.ir.nest import Loop, statements
from dtkernels.codegen.pipeline import lower
from dtkernels.lang import parse
from dtkernels.lang.errors import DTError

MOMENTS = """Func m, v, f; In A; Var x; RVar y;
m[x] = rsum(A[x, y], y) / len(y); v[x] = rsum((A[x, y] - m[x]) * (A[x, y] - m[x]), y) / len(y); """
NORM = MOMENTS + "f[x, y] = (A[x, y] - m[x]) * rsqrt(v[x] + 0.00001); m.fuse_at(v, y); v.fuse_at(f, x); "
VARIANCE = MOMENTS + "f[x] = v[x] + m[x]; m.fuse_at(v, y); v.fuse_at(f, x); "
#: name -> program whose sums share one loop over all reduced labels
PROGRAMS = {
    "covariance": """Func m, n, f; In A, B; Var x; RVar y; m[x] = rmean(A[x, y], y); n[x] = rmean(B[x, y], y);
        f[x] = rmean((A[x, y] - m[x]) * (B[x, y] - n[x]), y); m.fuse_at(f, y); n.fuse_at(f, y); """,
    "less a mean": """Func m, f; In A, B; Var x; RVar y; m[x] = rmean(A[x, y], y); f[x] = rsum(B[x, y] * (A[x, y] - m[x]), y); m.fuse_at(f, y); """,
    "two variances": """Func m, n, p, f; In A, B; Var x; RVar y; m[x] = rmean(A[x, y], y); n[x] = rmean(B[x, y], y);
        p[x] = rmean(pow(A[x, y] - m[x], 2), y); f[x] = rsum((n[x] - B[x, y]) * (B[x, y] - n[x]) + 3 * (A[x, y] - m[x]), y) + p[x];
        m.fuse_at(f, y); n.fuse_at(f, y); p.fuse_at(f, y); """,
    "a sum for the mean": """Func s, f; In A, B; Var x; RVar y; s[x] = rsum(A[x, y] + B[x, y], y);
        f[x] = rsum((A[x, y] + B[x, y] - s[x] / len(y)) * (A[x, y] - s[x] / len(y) + B[x, y]), y) + s[x]; s.fuse_at(f, y); """,
    "a step between": """Func t, m, c, f; In A, B; Var x; RVar y; t[x, y] = A[x, y] * B[x, y]; m[x] = rmean(t[x, y], y); c[x, y] = t[x, y] - m[x];
        f[x] = rsum(c[x, y] * c[x, y], y) / len(y); t.fuse_at(f, y); m.fuse_at(f, y); c.fuse_at(f, y); """,
    "a factor of the row": """Func m, n, q, f; In A, B; Var x; RVar y; q[x] = B[x, 0]; m[x] = rmean(A[x, y], y); n[x] = rmean(B[x, y], y);
        f[x] = rsum((A[x, y] - m[x]) * (q[x] * (B[x, y] - n[x]) + A[x, y]), y); q.fuse_at(f, x); m.fuse_at(f, y); n.fuse_at(f, y); """,
    "beside a largest": """Func m, t, e, f; In A, B; Var x; RVar y; m[x] = rmean(A[x, y], y); t[x] = rmax(B[x, y], y); e[x] = rsum(exp(B[x, y] - t[x]), y);
        f[x] = rsum((A[x, y] - m[x]) * (A[x, y] - m[x]), y) + log(e[x]) + t[x]; m.fuse_at(f, y); t.fuse_at(f, y); e.fuse_at(f, y); """,
}  # fmt: skip


def is_one_pass(text: str) -> bool:
    """Whether the first kernel has one loop that sums, and each one after it only a merge."""
    return all(sum(isinstance(s, Loop) and s.reduces for s in statements(k.body)) <= 1 for k in lower(prepare(parse(text))))


@pytest.mark.parametrize("schedule", ["f.block(x:1); f.tensorize(y:32);", "f.block(x:4); f.tensorize(x:4, y:16);", "f.block(x:2); f.tensorize(x:2, y:8); f.split(y:4);",
                                      "f.block(x:1); f.tensorize(y:16); f.split(y:32);", "f.block(x:1); f.split(y:3);"])  # fmt: skip
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_loop_agrees_with_float64(name, schedule):
    """Single numbers, tiles of one row and of several, and parts, of which most are empty in the end."""
    text = PROGRAMS[name] + schedule
    assert is_one_pass(text)
    for x, y in ((3, 39), (1, 1)):
        check(text, *random((x, y), (x, y)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["f.block(x:1); f.tensorize(x:1, y:64);", "f.block(x:4); f.tensorize(x:4, y:32); f.split(y:4);", "f.block(x:1); f.tensorize(x:1, y:16); f.split(y:32);"])
def test_a_norm_of_long_rows_agrees_with_float64(schedule, dtype):
    check(NORM + schedule, (random((3, 1)) * 2 + 3).to(dtype))
    check(NORM + schedule, (random((5, 201)) * 2 + 3).to(dtype))


@pytest.mark.parametrize("schedule", ["f.tensorize(c:1, s:32);", "f.tensorize(c:2, s:0);", "f.tensorize(c:0, s:8);", "f.tensorize(c:2, s:16); f.split(s:4);", "f.tensorize(c:1, s:0); f.split(c:2);"])
def test_a_norm_of_volumes_agrees_with_float64(schedule):
    """Loops over several labels: the masks of the inner one come back in each step of the outer one."""
    text = """Func m, v, f; In A, w; Var n, g, c, s; m[n, g] = rmean(A[n, g, c, s], c, s); v[n, g] = rmean((A[n, g, c, s] - m[n, g]) * (A[n, g, c, s] - m[n, g]), c, s);
    f[n, g, c, s] = (A[n, g, c, s] - m[n, g]) * rsqrt(v[n, g] + 0.00001) * w[g, c]; m.fuse_at(v, s); v.fuse_at(f, g); f.block(n:1, g:1); """
    for c, s in ((5, 37), (1, 1), (3, 64)):
        check(text + schedule, *random((2, 3, c, s), (3, c)))


SCHEDULES = ["f.block(x:1);", "f.block(x:1); f.tensorize(x:1, y:64);", "f.block(x:1); f.tensorize(x:1, y:16); f.split(y:8);", "f.block(x:1); f.tensorize(x:1, y:16); f.split(y:64);"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_large_mean_costs_no_digits(schedule):
    """What is off is the square of the rounding of a mean, as in two passes, and that of a sum."""
    n = 100 if "tensorize" not in schedule else 401
    small = torch.from_numpy(np.random.default_rng(1).standard_normal((2, n)) * 1e-3 + 1e4).float()
    step = 2.0 ** -23 * 1e4
    outlier = random((2, n))
    outlier[:, 0] = 1e6
    constant = torch.full((2, n), 12345.678)
    late = torch.cat((torch.full((2, n // 2), 1e-3), torch.full((2, n - n // 2), 1e3)), 1)
    for data, off in ((small, step), (outlier, 0.0), (constant, 2 * step), (late, 0.0)):
        got = as_numpy(dtkernels.compile(VARIANCE.replace("v[x] + m[x]", "v[x]") + schedule)(data))
        want = data.numpy().astype(np.float64).var(1)
        assert (np.abs(got - want) <= 4 * off**2 + 1e-5 * want).all(), (got, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_means_and_variances_of_rows_without_a_finite_value(schedule):
    data = random((4, 130))
    data[1, 7], data[2, 100], data[3, 3] = float("inf"), float("nan"), 1e30
    got = dtkernels.compile(VARIANCE + schedule)(data)
    assert torch.isfinite(got[0]) and not torch.isfinite(got[1:]).any()
    far = torch.full((1, 130), 2.0**100)
    assert torch.equal(dtkernels.compile(VARIANCE + schedule)(far), far[:, 0]), "deviations of 0 have squares of 0, however large the mean"


def test_a_mean_of_nothing_is_no_number():
    for more in SCHEDULES[1:3]:
        assert torch.isnan(dtkernels.compile(VARIANCE + more)(torch.empty(2, 0))).all()


def test_same_inputs_give_same_bits():
    data = random((2, 201))
    for more in SCHEDULES[2:]:
        run = dtkernels.compile(NORM + more)
        assert torch.equal(run(data), run(data))


REFUSED = {
    "weights": "m[x] = rmean(A[x, y], y); f[x] = rsum(B[x, y] * (A[x, y] - m[x]) * (A[x, y] - m[x]), y);",
    "a cube": "m[x] = rmean(A[x, y], y); f[x] = rsum(pow(A[x, y] - m[x], 3), y);",
    "another's mean": "m[x] = rmean(A[x, y], y); f[x] = rsum((B[x, y] - m[x]) * (A[x, y] - m[x]), y);",
    "a multiple of the mean": "m[x] = rmean(A[x, y], y); f[x] = rsum((A[x, y] - 2 * m[x]) * (A[x, y] - m[x]), y);",
    "a mean of weights": "m[x] = rsum(B[x, y] * A[x, y], y) / len(y); f[x] = rsum((A[x, y] - m[x]) * (A[x, y] - m[x]), y);",
    "a distance": "m[x] = rmean(A[x, y], y); f[x] = rsum(abs(A[x, y] - m[x]), y);",
    "a mask": "m[x] = rmean(A[x, y], y); f[x] = rsum(where(B[x, y] > 0, (A[x, y] - m[x]) * (A[x, y] - m[x]), 0), y);",
    "a largest": "m[x] = rmean(A[x, y], y); f[x] = rmax((A[x, y] - m[x]) * (A[x, y] - m[x]), y);",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repaired_is_refused(name):
    with pytest.raises(DTError, match="used there before it is finished, and the sum cannot be repaired: found m in f; allowed: m fused outside the loop over y"):
        dtkernels.compile(f"Func m, f; In A{', B' * ('B[' in REFUSED[name])}; Var x; RVar y; {REFUSED[name]} m.fuse_at(f, y); f.tensorize(y:16);")


def test_what_is_stored_in_the_loop_waits_for_the_mean():
    text = """Func m, v, c; In A; Var x, y; m[x] = rsum(A[x, y], y) / len(y); v[x] = rsum((A[x, y] - m[x]) * (A[x, y] - m[x]), y); c[x, y] = A[x, y] - m[x];
    m.fuse_at(v, y); c.fuse_at(v, y); v.block(x:1); v.tensorize(y:16); v.compile(); c.compile();"""
    with pytest.raises(DTError, match="a stored Func is made from finished reductions"):
        lower(parse(text))
