# ruff: noqa: E501 (programs read best on one line)
"""Sums along rows and down columns in one kernel, by the interpreter, against float64."""

import numpy as np
import pytest
import torch
from op_cases import MAKERS, normal

import dtkernels
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import schedules
from dtkernels.codegen.target import target
from dtkernels.lang import parse

EPS = torch.finfo(torch.float32).eps

#: name -> algorithm, whose outputs are all kinds that share one way over the rows
PROGRAMS = {
    "row sums of one": "Func r, f, c; In A, B, w; Var x, y; r[x] = rsum(A[x, y] * B[x, y], y); f[x, y] = A[x, y] * r[x] + w[y]; c[y] = rsum(A[x, y] * B[x, y], x);",
    "row sums in both": "Func r, f, c; In A, B, w; Var x, y; r[x] = rmax(A[x, y], y); f[x, y] = B[x, y] * r[x] + w[y]; c[y] = rsum(A[x, y] * r[x], x);",
    "two row sums, one of the other": "Func r, s, f, c; In A, B, w; Var x, y; r[x] = rmean(A[x, y], y); s[x] = rsum(B[x, y] * (A[x, y] - r[x]), y); f[x, y] = A[x, y] * s[x] + w[y] * r[x]; c[y] = rsum(A[x, y] + B[x, y], x);",
    "a step between": "Func t, r, f, c; In A, B, w; Var x, y; t[x, y] = A[x, y] * w[y]; r[x] = rsum(t[x, y] * t[x, y], y); f[x, y] = t[x, y] * rsqrt(r[x] + 1); c[y] = rsum(t[x, y] * B[x, y], x);",
    "a largest of a column": "Func r, f, c; In A, B, w; Var x, y; r[x] = rsum(A[x, y], y); f[x, y] = B[x, y] + w[y] * r[x]; c[y] = rmax(A[x, y] * B[x, y], x);",
}  # fmt: skip


def truth(name: str, a, b, w):
    """f and c of a program, in float64."""
    r = {"row sums of one": (a * b).sum(1), "row sums in both": a.max(1), "a largest of a column": a.sum(1)}.get(name, a.mean(1))[:, None]
    match name:
        case "row sums of one":
            return a * r + w, (a * b).sum(0)
        case "row sums in both":
            return b * r + w, (a * r).sum(0)
        case "two row sums, one of the other":
            return a * (b * (a - r)).sum(1)[:, None] + w * r, (a + b).sum(0)
        case "a step between":
            t = a * w
            return t / np.sqrt((t * t).sum(1) + 1)[:, None], (t * b).sum(0)
    return b + w * r, (a * b).max(0)


SIZES = [(1, 1), (7, 5), (130, 100), (37, 1030), (700, 64), (0, 4)]


CASES = [(n, s) for n in PROGRAMS for s in SIZES if s[0] or "largest" not in n]  # of no rows none is largest


@pytest.mark.parametrize("name, sizes", CASES, ids=str)
def test_programs_of_row_and_column_sums_agree_with_float64(name, sizes):
    """By the first way to fuse, which is one pass wherever rows are few enough to be held, and there are any."""
    algorithm = prepare_algorithm(parse(PROGRAMS[name] + " f.compile(); c.compile();").algorithm, ("f", "c"))
    schedule = next(schedules(algorithm, ("f", "c"), dict(zip("xy", sizes)), 4, target("h200")))
    assert ("f.fuse_at(c, x);" in str(schedule)) == (0 not in sizes) and "c.tensorize(x:" in str(schedule)
    (x, y), kernel = sizes, dtkernels.compile(f"{algorithm}\n{schedule}")
    a, b, w = (normal(*s, dtype=torch.float32, device="cpu", seed=i) for i, s in enumerate(((x, y), (x, y), (y,))))
    given = {"A": a, "B": b, "w": w}
    both = kernel.c(**given) if 0 not in sizes else (kernel.f(**given), kernel.c(**given))
    for got, want in zip(both, truth(name, *(t.double().numpy() for t in (a, b, w)))):
        want = torch.from_numpy(want)
        assert got.shape == want.shape
        scale = max(want.abs().max().item(), 1.0) if want.numel() else 1.0
        assert (got.double() - want).abs().amax().item() <= 8 * EPS * max(x, y) ** 0.5 * scale if want.numel() else True


ONE_TERM = """Func g, a, b; In A, B, d, c; Var x, y, k; g[x, y] = d[x, y] * (c[x, y] * (1 - c[x, y]));
a[x, k] = rdot(g[x, y], B[k, y], y); b[k, y] = rdot(g[x, y], A[x, k], x); a.compile(); b.compile();"""


@pytest.mark.parametrize("x, y", [(2, 3), (417, 462), (130, 100), (37, 1030)])
def test_gradients_of_a_sum_of_one_term_agree_with_float64(x, y):
    """Both are sums of the same elements, along rows and down columns: the first way to fuse has one kernel."""
    algorithm = prepare_algorithm(parse(ONE_TERM).algorithm, ("a", "b"))
    schedule = next(schedules(algorithm, ("a", "b"), {"x": x, "y": y, "k": 1}, 4, target("h200")))
    assert "a.fuse_at(b, x);" in str(schedule)
    given = {n: normal(*s, dtype=torch.float32, device="cpu", seed=i) for i, (n, s) in enumerate({"A": (x, 1), "B": (1, y), "d": (x, y), "c": (x, y)}.items())}
    left, right, d, c = (t.double() for t in given.values())
    g = d * (c * (1 - c))
    for got, want in zip(dtkernels.compile(f"{algorithm}\n{schedule}").b(**given), (g @ right.T, g.T @ left)):
        want = want if got.shape == want.shape else want.T
        assert got.shape == want.shape
        assert (got.double() - want).abs().max().item() <= 8 * EPS * max(x, y) ** 0.5 * max(want.abs().max().item(), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(67, 1000), (333, 33), (5, 4097)], ids=str)
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "swiglu", "geglu"])
def test_gradients_of_many_rows_agree_with_float64(op, shape, dtype):
    """Of rows enough to be cut into parts. An element is off by its rounding; a sum down the rows by theirs, before it."""
    case = MAKERS[op](shape, dtype, "cpu")
    inputs = tuple(t.requires_grad_() for t in case.inputs)
    result = case.ours(*inputs, **case.options)
    grad = normal(*shape, dtype=dtype, device="cpu", seed=9)
    found = torch.autograd.grad(result, inputs, grad)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    wanted = torch.autograd.grad(case.truth(*exact), exact, grad.double())
    for got, want in zip(found, wanted):
        assert got.dtype == dtype and got.shape == want.shape
        bound = torch.finfo(dtype).eps * want.abs() + 32 * EPS * max(shape) ** 0.5 * want.abs().max()
        assert ((got.double() - want).abs() <= bound).all()


def test_the_same_inputs_give_the_same_bits():
    x, w = normal(200, 130, dtype=torch.float32, device="cpu").requires_grad_(), torch.ones(130, requires_grad=True)
    grad = normal(200, 130, dtype=torch.float32, device="cpu", seed=3)
    first, second = (torch.autograd.grad(dtkernels.ops.rmsnorm(x, w), (x, w), grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


MERGED = """Func f, g; In A, w; Var x, y; f[y] = {reduction}(A[x, y], x); g[x, y] = A[x, y] * w[y];
g.fuse_at(f, x); f.tensorize(x:{rows}, y:0); f.split(x:{parts}); f.compile(); g.compile();"""


@pytest.mark.parametrize("parts", [3, 32, 48])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("reduction", ["rsum", "rmax", "rmin"])
def test_parts_of_whole_rows_are_merged(reduction, rows, parts):
    """Also where some parts are empty, and where columns are no whole number of blocks."""
    kernel = dtkernels.compile(MERGED.format(reduction=reduction, rows=rows, parts=parts))
    for x, y in ((1, 1), (101, 33)):
        a, w = normal(x, y, dtype=torch.float32, device="cpu"), normal(y, dtype=torch.float32, device="cpu", seed=1)
        f, g = kernel.f(A=a, w=w)
        assert torch.equal(g, a * w)
        if reduction == "rsum":
            torch.testing.assert_close(f.double(), a.double().sum(0), rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(f, a.amax(0) if reduction == "rmax" else a.amin(0))
