# ruff: noqa: E501 (programs read best on one line)
"""Products, conditions and places of extrema over labels: against torch, under every kind of schedule, with gradients."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

import dtkernels
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

inf, nan = float("inf"), float("nan")
SCHEDULES = {
    "single elements": "",
    "whole rows": "f.block(x:2); f.tensorize(x:2, y:0);",
    "tiles": "f.block(x:2); f.tensorize(x:2, y:4);",
    "columns": "f.block(x:4); f.tensorize(x:4, y:1);",
    "split": "f.block(x:2); f.tensorize(x:2, y:4); f.split(y:2);",
}
WAYS = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def op_of(text: str) -> Operator:
    return Operator(Spec("reduced", "A reduction.", parse(text)))


def rows(*shape: int) -> torch.Tensor:
    """Ties, NaNs, infinities, zeros of both signs, a row of -inf."""
    a = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    a[0, 3] = a[0, 7] = 9.0
    a[1, 5] = a[1, 8] = nan
    a[2] = -inf
    a[3] = 0.0
    a[3, 2] = -0.0
    a[4, 1], a[4, 9] = -inf, inf
    return a


@WAYS
@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_places(kind, schedule):
    a = rows(7, 11)
    got = dtkernels.compile(f"Func f; In A; Var x; RVar y; f[x] = r{kind}(A[x, y], y); {schedule}")(a)
    assert got.dtype == torch.int64 and got.tolist() == getattr(torch, kind)(a, 1).tolist()


@WAYS
def test_products(schedule):
    a = rows(7, 11)
    got = dtkernels.compile(f"Func f; In A; Var x; RVar y; f[x] = rprod(A[x, y], y); {schedule}")(a)
    torch.testing.assert_close(got, a.prod(1), equal_nan=True)


@WAYS
def test_conditions(schedule):
    a = rows(7, 11)
    text = f"Func f; In A; Var x; RVar y; f[x] = where(rany(A[x, y] > 2, y), 1, 0) + where(rall(A[x, y] <= 0, y), 2, 0); {schedule}"
    assert dtkernels.compile(text)(a).tolist() == ((a > 2).any(1).float() + 2 * (a <= 0).all(1)).tolist()
    mask = a > 0.5
    text = f"Func f; In A, M; Var x; RVar y; f[x] = where(rany(M[x, y], y) and not rall(M[x, y], y), A[x, 0], 0); {schedule}"
    torch.testing.assert_close(dtkernels.compile(text)(a, mask), torch.where(mask.any(1) & ~mask.all(1), a[:, 0], torch.zeros(())), equal_nan=True)


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
def test_over_several_labels_and_over_nothing(reference, monkeypatch):
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    a = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    text = "Func f, g; In A; Var x; RVar y, z; f[x] = rargmax(A[x, y, z], y, z); g[x] = rprod(A[x, y, z], z, y); f.compile(); g.compile();"
    places, products = op_of(text)(a)
    assert places.tolist() == a.flatten(1).argmax(1).tolist() and places.dtype == torch.int64
    torch.testing.assert_close(products, a.flatten(1).prod(1))
    nothing = torch.zeros(3, 0)
    for expression, value in (("rprod(A[x, y], y)", 1), ("rargmax(A[x, y], y)", 0), ("where(rall(A[x, y] > 0, y), 2, 3)", 2), ("where(rany(A[x, y] > 0, y), 2, 3)", 3)):
        assert op_of(f"Func f; In A; Var x; RVar y; f[x] = {expression};")(nothing).tolist() == [value] * 3


PICKED = "Func p, f; In A, W; Var x, z; RVar y; p[x] = rargmax(A[x, y], y); f[x, z] = W[p[x], z] + W[p[x] - 1, z]; "


@pytest.mark.parametrize("schedule", ["", "p.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:4, z:0);", "p.block(x:4); p.tensorize(x:4, y:8); f.block(x:2, z:4); f.tensorize(x:2, z:4);"])
def test_a_place_stands_in_an_index(schedule):
    a, w = rows(7, 11), torch.randn(11, 5)
    at = a.argmax(1)
    want = w[at] + torch.where(at[:, None] > 0, w[(at - 1).clamp(0)], torch.zeros(()))
    torch.testing.assert_close(dtkernels.compile(PICKED + schedule)(a, w), want)


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
def test_gradients_through_an_index(reference, monkeypatch):
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET")
    a, w = torch.randn(7, 11).requires_grad_(), torch.randn(11, 5).requires_grad_()
    got = op_of("Func p, f; In A, W; Var x, z; RVar y; p[x] = rargmax(A[x, y], y); f[x, z] = W[p[x], z] * A[x, p[x]] + p[x]; p.compile(); f.compile();")(a, w)
    at = a.detach().argmax(1)
    want = w[at] * a.gather(1, at[:, None]) + at[:, None]
    assert got[0].tolist() == at.tolist() and not got[0].requires_grad
    torch.testing.assert_close(got[1], want)
    adjoint = torch.randn(7, 5)
    for mine, theirs in zip(torch.autograd.grad(got[1], (a, w), adjoint), torch.autograd.grad(want, (a, w), adjoint)):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_gradients_of_a_product(zeros):
    a = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    a[1, :zeros] = 0.0
    ours, exact = a.clone().requires_grad_(), a.double().requires_grad_()
    got, want = op_of("Func f; In A; Var x; RVar y; f[x] = rprod(A[x, y], y);")(ours), exact.prod(1)
    adjoint = torch.randn(4)
    (mine,), (theirs,) = torch.autograd.grad(got, ours, adjoint), torch.autograd.grad(want, exact, adjoint.double())
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


def test_the_place_of_a_value_that_is_computed():
    a, b = torch.randn(33, 19), torch.randn(19, 24)
    got = op_of("Func f; In A, B; Var x; RVar y, k; f[x] = rargmin(abs(rdot(A[x, k], B[k, y], k)), y);")(a, b)
    assert got.tolist() == (a @ b).abs().argmin(1).tolist()
    got = op_of("Func s, f; In A; Var x; RVar y; s[x] = rsum(exp(A[x, y]), y); f[x] = rargmax(exp(A[x, y]) / s[x], y);")(a)
    assert got.tolist() == a.argmax(1).tolist()


@pytest.mark.parametrize(
    "text, error",
    [
        ("f[x] = rany(A[x, y] + 1, y);", "a boolean is wanted here"),
        ("f[x] = rargmax(A[x, y] > 0, y);", "a number is wanted here"),
        ("f[x] = rprod(A[x, y]);", "names the label it runs over"),
        ("f[x] = argmax(A[x, y], y);", r"rargmax\(e, k\)"),
    ],
)
def test_what_does_not_fit_is_refused(text, error):
    with pytest.raises(dtkernels.DTError, match=error):
        parse(f"Func f; In A; Var x; RVar y; {text}")
