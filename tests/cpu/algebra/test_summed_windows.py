"""Sums along one dimension of a convolution's result: what the windows of the other dimensions read is summed once for each place."""

import pytest
import torch
import torch.nn.functional as F

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

TEXT = """Func y, f; In X, W; Var b, o, t, u; RVar c, q, s; Extent t = X[2] + 2 * {p} - W[2] + 1; Extent u = X[3] + 2 * {p} - W[3] + 1;
y[b, o, t, u] = rdot(X[b, c, t + q - {p}, u + s - {p}], W[o, c, q, s], c, q, s); f[b, o, u] = rsum(y[b, o, t, u], t);"""


@pytest.mark.kernels
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_sum_along_one_dimension_and_its_gradients(padding):
    op = Operator(Spec("summed", "A convolution, summed along one dimension.", parse(TEXT.format(p=padding))))
    X, W = torch.randn(2, 3, 5, 7, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    got = op(X, W)
    exact = [t.detach().double().requires_grad_() for t in (X, W)]
    wanted = F.conv2d(*exact, padding=padding).sum(2)
    adjoint = torch.randn(wanted.shape)
    pairs = zip((got, *torch.autograd.grad(got, (X, W), adjoint)), (wanted, *torch.autograd.grad(wanted, exact, adjoint.double())))
    for ours, truth in pairs:
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


def test_each_place_is_summed_once():
    made = prepare_algorithm(parse(TEXT.format(p=1)).algorithm, ("f",))
    assert str(made["f_operand"]) == "f_operand[b, c, q, X_3] = rsum(X[b, c, t + q - 1, X_3], t);"
    assert str(made["f"]) == "f[b, o, u] = rdot(f_operand[b, c, q, u + s - 1], W[o, c, q, s], c, q, s);"


def test_windows_at_steps_are_summed_as_they_are_read():
    """They may leave places out."""
    made = prepare_algorithm(parse(TEXT.format(p=0).replace("u + s - 0", "3 * u + s")).algorithm, ("f",))
    assert str(made["f_operand"]) == "f_operand[b, u, c, q, s] = rsum(X[b, c, t + q, 3 * u + s], t);"


def test_places_that_data_picks_are_read_as_they_are():
    """The input's own check of the index stays, and only what is picked is summed."""
    text = """Func y, f; In X, W, i; Var o, t, x; RVar c, r; Extent x = i[0];
    y[o, t, x] = rdot(X[c, t, i[x] + r], W[o, c, r], c, r); f[o, x] = rsum(y[o, t, x], t);"""
    made = prepare_algorithm(parse(text).algorithm, ("f",))
    assert str(made["f_operand"]) == "f_operand[x, c, r] = rsum(X[c, t, i[x] + r], t);"
