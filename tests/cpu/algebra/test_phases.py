"""Transposed convolutions phase by phase: the rule against torch for many strides, dilations, offsets and numbers of taps."""

import math

import pytest
import torch
import torch.nn.functional as F

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.reference.evaluator import evaluate, extents

TEXT = (
    "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = {s} * (A[2] - 1) + {d} * (W[2] - 1) + 1 - 2 * {p} + {more};"
    "f[b, o, x] = 2 * rdot(where((x + {p} - {d} * r) % {s} == 0, A[b, c, (x + {p} - {d} * r) / {s}], 0), W[c, o, r], c, r) + 1;"
)
CASES = [(s, d, p, taps) for s in (2, 3, 5) for d in (1, 2, 3, 4, 6) for p in (0, 1, 2) for taps in (1, 2, 3, 4, 7) if d * (taps - 1) + 1 > 2 * p]


def terms(algorithm, shapes) -> int:
    """The products that an algorithm adds up."""
    sizes = extents(algorithm, {n: torch.empty(s, device="meta") for n, s in shapes.items()})
    dots = [n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    return sum(math.prod(sizes[x] for x in {*ex.free_labels(n.left), *ex.free_labels(n.right), *n.labels}) for n in dots)


def test_every_stride_and_dilation_is_right():
    torch.manual_seed(0)
    for s, d, p, taps in CASES:
        A, W = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(3, 4, taps, dtype=torch.float64)
        algorithm = parse(TEXT.format(s=s, d=d, p=p, more=s - 1)).algorithm
        prepared = prepare_algorithm(algorithm, ("f",))
        assert ("f_phases" in prepared) == (math.gcd(s, d) in (1, s)), (s, d)
        (got,) = evaluate(prepared, {"A": A, "W": W}, {}, ("f",))
        expected = 2 * F.conv_transpose1d(A, W, stride=s, padding=p, dilation=d, output_padding=s - 1) + 1
        assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-5), (s, d, p, taps)


def test_terms_that_the_stride_leaves_out_are_not_computed():
    shapes = {"A": (1, 16, 64), "W": (16, 8, 6)}
    for s, d in ((2, 1), (3, 1), (3, 2), (2, 2)):
        algorithm = parse(TEXT.format(s=s, d=d, p=1, more=0)).algorithm
        assert terms(prepare_algorithm(algorithm, ("f",)), shapes) <= 1.1 * terms(algorithm, shapes) / s


def test_an_infinity_beside_a_tap_that_is_not_there_makes_no_nan():
    A, W = torch.full((1, 1, 4), math.inf), torch.ones(1, 1, 3)
    algorithm = prepare_algorithm(parse(TEXT.format(s=2, d=1, p=0, more=0)).algorithm, ("f",))
    assert (evaluate(algorithm, {"A": A, "W": W}, {}, ("f",))[0] == math.inf).all()


def test_the_gradient_of_a_strided_convolution_takes_it():
    text = (
        "Func f; In A, W; Var b, o, y, x; RVar c, r, s; Extent y = (A[2] + 2 - W[2]) / 2 + 1; Extent x = (A[3] + 2 - W[3]) / 2 + 1;"
        "f[b, o, y, x] = rdot(A[b, c, 2 * y + r - 1, 2 * x + s - 1], W[o, c, r, s], c, r, s);"
    )
    algorithm = parse(text).algorithm
    found = gradient(differentiable_form(algorithm, ("f",)), ("f",), ("A",))
    made = prepare_algorithm(found.backward, ("d_A",))
    assert made.funcs == ("d_A_phases", "d_A") and {*made["d_A_phases"].labels[:2]} == {"A_2_phase", "A_3_phase"}


def test_sums_without_products_are_shortened_in_place():
    torch.manual_seed(0)
    for s, d, p, taps in CASES:
        text = f"Func f; In A, W; Var b, x; RVar r; Extent x = {s} * (A[1] - 1) + {d} * (W[0] - 1) + 1;" + (
            f"f[b, x] = 3 * rsum(where((x + {p} - {d} * r) % {s} == 0, A[b, (x + {p} - {d} * r) / {s}] * W[r] + r, 0), r);"
        )
        algorithm = parse(text).algorithm
        prepared = prepare_algorithm(algorithm, ("f",))
        assert ("r_step" in prepared.labels) == (math.gcd(s, d) == 1), (s, d)
        tensors = {"A": torch.randn(2, 6, dtype=torch.float64), "W": torch.randn(taps, dtype=torch.float64)}
        got, expected = (evaluate(a, tensors, {}, ("f",))[0].double() for a in (prepared, algorithm))
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-4), (s, d, p, taps)


def test_the_gradient_of_a_mean_over_windows_reads_one_element_for_each():
    text = "Func f; In A; Var y, x; RVar r, s; Extent r = 5; Extent s = 3; Extent y = A[0] / 5; Extent x = A[1] / 3; f[y, x] = rmean(A[5 * y + r, 3 * x + s], r, s);"
    found = gradient(differentiable_form(parse(text).algorithm, ("f",)), ("f",), ("A",))
    made = prepare_algorithm(found.backward, ("d_A",))
    assert not any(isinstance(n, ex.Reduce) for n in made["d_A"].expr.walk()), str(made)
    d_f = torch.randn(4, 7, dtype=torch.float64)
    (got,) = evaluate(made, {"A": torch.zeros(21, 23, dtype=torch.float64), "d_f": d_f}, {}, ("d_A",))
    expected = torch.zeros(21, 23, dtype=torch.float64)
    expected[:20, :21] = d_f.repeat_interleave(5, 0).repeat_interleave(3, 1) / 15
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", [
    "f[b, o, x] = rdot(where((x - r) % 2 == 0, A[b, c, (x - r) / 2] * B[x + c], 0), W[c, o, r], c, r);",
    "f[b, o, x] = rdot(where((x - r) % 2 == 0, A[b, c, (x - r) / 2], 0), W[c, o, r] * B[x + r], c, r);",
    "f[b, o, x] = rdot(where((x - r) % 2 == 0, A[b, c, (x - r) / 2], 1), W[c, o, r] * B[0], c, r);",
    "f[b, o, x] = rdot(where((x - r) % 2 == 0, A[b, c, x - r], 0), W[c, o, r] * B[0], c, r);",
    "f[b, o, x] = rdot(where((x + r) % 2 == 0, A[b, c, (x + r) / 2], 0), W[c, o, r] * B[0], c, r);",
])  # fmt: skip
def test_what_is_no_transposed_convolution_stays(text):
    algorithm = parse("Func f; In A, W, B; Var b, o, x; RVar c, r; Extent x = B[0];" + text).algorithm
    assert prepare_algorithm(algorithm, ("f",)).funcs == ("f",)


@pytest.mark.kernels
def test_kernels_are_right_forward_and_backward():
    torch.manual_seed(0)
    op = Operator(Spec("transposed", "A transposed convolution.", parse(TEXT.format(s=2, d=1, p=1, more=0))))
    A, W = torch.randn(2, 18, 21).requires_grad_(), torch.randn(18, 5, 3).requires_grad_()
    out = op(A, W)
    expected = 2 * F.conv_transpose1d(A.double(), W.double(), stride=2, padding=1) + 1
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-4)
    grad = torch.randn_like(out)
    pool = Operator(Spec("means", "Means of windows.", parse("Func f; In A; Var b, x; RVar r; Extent r = 3; Extent x = (A[1] - 3) / 2 + 1; f[b, x] = rmean(A[b, 2 * x + r], r);")))
    B = torch.randn(3, 150).requires_grad_()
    (got,), (wanted,) = (torch.autograd.grad((fn(B) ** 2).sum(), B) for fn in (pool, lambda B: F.avg_pool1d(B[None], 3, 2)[0]))
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(torch.autograd.grad(out, (A, W), grad), torch.autograd.grad(expected, (A, W), grad.double())):
        assert torch.allclose(got.double(), wanted.double(), rtol=1e-5, atol=1e-4)
