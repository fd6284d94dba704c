"""Transposed convolutions phase by phase: the rule against torch for many strides, dilations, offsets and numbers of taps."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.algebra.rearrangement import rearrangement
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.ir.nest import nest_text
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.errors import DTError
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


FOLLOWED = (
    "Func y, {funcs}; In A, W, B{inputs}; Var b, o, x; RVar c, r; Extent x = {s} * (A[2] - 1) + {d} * (W[2] - 1) + 1 - 2 * {p} + {more};"
    "y[b, o, x] = rdot(where((x + {p} - {d} * r) % {s} == 0, A[b, c, (x + {p} - {d} * r) / {s}], 0), W[c, o, r], c, r) + B[o];"
)
FOLLOWING = {  # what follows, its outputs, and the Funcs that the phases are put in order in
    "elementwise": ("low[b, o, x] = maximum(y[b, o, x], 0.1); f[b, o, x] = low[b, o, x] * low[b, o, x] + y[b, o, x];", ("f",), ("f",)),
    "rows of channels": ("low[b, x] = rmax(y[b, o, x], o); f[b, o, x] = y[b, o, x] - low[b, x];", ("f",), ("f",)),
    "reduced channels": ("low[b, x] = rmin(y[b, o, x], o); f[b] = rsum(low[b, x], x);", ("f",), ("low",)),
    "two results": ("f[b, o, x] = y[b, o, x] * 2; g[b, x] = rmax(y[b, o, x], o);", ("f", "g"), ("f", "g")),
    "a result that others read": ("f[b, o, x] = y[b, o, x] * 2; g[b, o] = rsum(f[b, o, x], x);", ("f", "g"), ("y",)),
    "another input": ("f[b, o, x] = y[b, o, x] * R[x];", ("f",), ("f",)),
    "sums along the result": ("low[b, o] = rsum(y[b, o, x], x) / len(x); f[b, o, x] = y[b, o, x] - low[b, o];", ("f",), ("y",)),
    "neighbours": ("f[b, o, x] = y[b, o, x] + where(x >= 1, y[b, o, x - 1], 0);", ("f",), ("y",)),
    "its own place": ("f[b, o, x] = y[b, o, x] * x;", ("f",), ("y",)),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_what_follows_is_computed_by_phase_as_far_as_it_can_be(name):
    after, outputs, in_order = FOLLOWING[name]
    for s, d, p, more in ((2, 1, 1, 0), (3, 1, 0, 2), (3, 2, 1, 1), (4, 1, 1, 3), (5, 3, 2, 0)):
        funcs = ", ".join(dict.fromkeys(re.findall(r"(?:^|; )(\w+)\[", after)))
        algorithm = parse(FOLLOWED.format(s=s, d=d, p=p, more=more, funcs=funcs, inputs=", R" if "R[" in after else "") + after).algorithm
        prepared = prepare_algorithm(algorithm, outputs)
        assert {f for f in prepared.funcs if rearrangement(prepared[f], prepared)} == {*in_order}, str(prepared)
        tensors = {"A": torch.randn(2, 3, 7), "W": torch.randn(3, 4, 4), "B": torch.randn(4), "R": torch.randn(s * 6 + d * 3 + 1 - 2 * p + more)}
        tensors = {n: t.double() for n, t in tensors.items() if n in algorithm.inputs}
        for got, expected in zip(*(evaluate(a, tensors, {}, outputs) for a in (prepared, algorithm)), strict=True):
            torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-5)


def test_a_condition_that_is_no_remainder_keeps_the_phases_where_they_are_read():
    text = "Func f; In A, W, B; Var b, o, y, x; RVar c, r, s; Extent y = 2 * (A[2] - 1) + 2 * (W[2] - 1) + 1; Extent x = 2 * (A[3] - 1) + W[3];" + (
        "f[b, o, y, x] = rdot(where((y - 2 * r) % 2 == 0 and (x - s) % 2 == 0, A[b, c, (y - 2 * r) / 2, (x - s) / 2], 0), W[c, o, r, s], c, r, s) + B[o];"
    )
    assert prepare_algorithm(parse(text).algorithm, ("f",)).funcs == ("f_phases", "f")  # rows of odd y are 0: no phase has them


INTERLEAVED = (
    "Func g, f; In A, W; Var b, o, p, x, k; RVar c, r; Extent p = 2; Extent r = 2; Extent x = 2 * A[2] - 1; Extent k = {steps};"
    "g[p, b, o, k] = rdot(where(p + 2 * r < 4, A[b, c, k - r], 0), W[p + 2 * r, c, o], c, r); f[b, o, x] = g[(x + 1) % 2, b, o, (x + 1) / 2]; {schedule} f.compile();"
)
STEPS = {"len(x) / 2 + 1": True, "(len(x) + 2) / 2": True, "(len(x) + 1) / 2": True, "A[2]": True, "(len(x) - 1) / 2": False, "len(x) / 2 + 2": False, "A[2] + 1": False}


@pytest.mark.parametrize("steps", STEPS)
def test_a_result_is_stored_elsewhere_only_if_each_of_its_elements_is_made_there(steps):
    algorithm = parse(INTERLEAVED.format(steps=steps, schedule="")).algorithm
    found = rearrangement(algorithm["f"], algorithm)
    assert (found is not None) == STEPS[steps]
    if found:
        assert {x: str(e) for x, e in found.places.items()} == {"b": "b", "o": "o", "x": "2 * k + p - 1"} and found.interleaves
    else:
        with pytest.raises(DTError, match="an output is computed over all its labels: found f is not, where it is fused"):
            lower(parse(INTERLEAVED.format(steps=steps, schedule="f.fuse_at(g, k);")))


SCHEDULES = (
    "g.block(p:1, b:1, o:16, k:16); g.tensorize(p:1, b:1, o:16, k:16, c:16, r:1);",
    "g.block(p:2, b:1, o:16, k:32); g.tensorize(p:1, b:1, o:16, k:16, c:16, r:1); g.map(b, o, k, p);",
    "g.block(p:1, b:1, o:16, k:16); g.tensorize(p:1, b:1, o:16, k:16, c:16, r:1); g.split(c:2);",
    "g.block(p:1, b:1, o:16, k:16); g.tensorize(p:1, b:1, o:16, k:16, c:16, r:1); g.stage(A:c); g.specialize(r); g.persistent();",
    "g.merge(m, b, k); g.block(p:1, o:16, m:16); g.tensorize(p:1, o:16, m:16, c:16, r:1);",
    "g.merge(m, p, o); g.block(b:1, k:16, m:16); g.tensorize(b:1, k:16, m:16, c:16, r:1);",
    "g.merge(m, p, k); g.block(b:1, o:16, m:16); g.tensorize(b:1, o:16, m:16, c:16, r:1);",
    "g.reorder(k, o); g.tensorize(c:16);",
)


@pytest.mark.kernels
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_of_the_phases_stores_the_result_alone(schedule):
    torch.manual_seed(0)
    A, W = torch.randn(2, 33, 21), torch.randn(4, 33, 18)
    program = parse(INTERLEAVED.format(steps="len(x) / 2 + 1", schedule="f.fuse_at(g, k);" + schedule))
    kernels = lower(program)
    assert kernels[-1].writes == ("f",) and not any("g" in k.writes for k in kernels)
    assert any(f":= g   # {program.algorithm['f']}" in nest_text(k) for k in kernels), "what show prints"
    got = Operator(Spec("interleaved", "Phases.", program))(A, W)
    expected = F.conv_transpose1d(A.double(), W.permute(1, 2, 0).double(), stride=2)[..., 1:42]
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)


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


@pytest.mark.parametrize("more", [-1, 1])
def test_another_input_still_tells_the_extent(more):
    """Though its index is a place of the phases then, from which no extent follows."""
    after, outputs, _ = FOLLOWING["another input"]
    op = Operator(Spec("other", "A transposed convolution times another input.", parse(FOLLOWED.format(s=2, d=1, p=1, more=0, funcs="f", inputs=", R") + after)))
    A, W, B = torch.randn(2, 18, 21), torch.randn(18, 5, 3), torch.randn(5)
    assert op(A, W, B, torch.ones(41)).shape == (2, 5, 41)
    with pytest.raises(ValueError, match=f"x has extent 41.*inputs have {41 + more}"):
        op(A, W, B, torch.ones(41 + more))


@pytest.mark.kernels
def test_a_result_that_sums_go_along_is_stored_in_order_by_the_kernel_of_its_phases():
    after, outputs, _ = FOLLOWING["sums along the result"]
    parsed = parse(FOLLOWED.format(s=2, d=1, p=1, more=0, funcs="low, f", inputs="") + after)
    algorithm = prepare_algorithm(parsed.algorithm, outputs)
    sizes = dict(b=64, c=64, o=64, x=1023, r=3, x_phase=2, x_step=512, r_step=2)
    schedule = default_schedule(algorithm, outputs, sizes, 2, target("h200"))
    assert [str(p) for p in schedule.of("y", "fuse_at")] == ["y.fuse_at(y_phases, x_step);"] and schedule.of("y", "store")
    torch.manual_seed(0)
    A, W, B = torch.randn(2, 18, 21).requires_grad_(), torch.randn(18, 5, 3).requires_grad_(), torch.randn(5).requires_grad_()
    got = Operator(Spec("centered", "A transposed convolution less its means.", parsed))(A, W, B)
    y = F.conv_transpose1d(A.double(), W.double(), B.double(), stride=2, padding=1)
    expected = y - y.mean(2, keepdim=True)
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)
    grad = torch.randn_like(got)
    for ours, wanted in zip(torch.autograd.grad(got, (A, W), grad), torch.autograd.grad(expected, (A, W), grad.double())):
        assert torch.allclose(ours.double(), wanted.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("order", "factor", "queries", "keys"), [("u, i, j", "", 40, 48), ("i, u, j", " * w[u]", 43, 37), ("i, j, u", "", 16, 21)])
def test_gradients_of_dilated_products_are_right(order, factor, queries, keys):
    torch.manual_seed(0)
    text = (
        "Func s, f; In Q, K, w; Var b, u, i, j; RVar d; Extent u = 8; Extent i = Q[1] / 8; Extent j = K[1] / 8;"
        f"s[b, {order}] = rdot(Q[b, 8 * i + u, d], K[b, 8 * j + u, d], d); f[b, {order}] = exp(0.2 * s[b, {order}]) + w[u]{factor};"
    )
    op = Operator(Spec("dilated_products", "Products of positions of one remainder.", parse(text)))
    Q, K, w = (torch.randn(*shape, requires_grad=True) for shape in ((2, queries, 16), (2, keys, 16), (8,)))
    exact = [t.detach().double().requires_grad_() for t in (Q, K, w)]
    q, k = (t[:, : t.shape[1] // 8 * 8].unflatten(1, (-1, 8)) for t in exact[:2])
    to = "".join(order.split(", "))
    weight = torch.einsum(f"u,buij->b{to}", exact[2] ** (2 if factor else 1), torch.ones(2, 8, q.shape[1], k.shape[1], dtype=torch.float64))
    expected = torch.exp(0.2 * torch.einsum(f"biud,bjud->b{to}", q, k)) + weight
    got = op(Q, K, w)
    grad = torch.randn(got.shape)
    for mine, theirs in zip((got, *torch.autograd.grad(got, (Q, K, w), grad)), (expected, *torch.autograd.grad(expected, exact, grad.double()))):
        assert (mine.double() - theirs).norm() <= 1e-5 * theirs.norm()


SUBPIXEL = (
    "Func u, f; In X, W, z; Var b, c, y, x; RVar i; Extent y = {s} * X[2]{m}; Extent x = {t} * X[3]{m}; u[b, c, y, x] = rdot(X[b, i, {y} / {s}, {x} / {t}],"
    " W[c, {y} % {s}, {x} % {t}, i], i) + z[c]; f[b, c, y, x] = u[b, c, y, x] * sigmoid(u[b, c, y, x]);"
)


def elements(a, dim, index):
    """The elements of ``a`` at ``index``; 0 past the last one."""
    found = a.index_select(dim, index.clamp(max=a.shape[dim] - 1))
    return torch.where((index < a.shape[dim]).reshape(*(-1 if d == dim else 1 for d in range(a.dim()))), found, 0)


@pytest.mark.kernels
@pytest.mark.parametrize(("s", "t", "more", "offset", "p"), [(3, 2, -1, 0, 3), (2, 4, 0, 1, 3), (2, 3, 2, 2, 1)])
def test_subpixel_convolutions_are_right_forward_and_backward(s, t, more, offset, p):
    """Also where quotients are cropped, begin inside a step, or remainders are more or fewer than the weights have."""
    torch.manual_seed(0)
    x = f"(x + {offset})" if offset else "x"
    text = SUBPIXEL.format(s=s, t=t, m=f" + {more}" if more > 0 else f" - {-more}" if more else "", y="y", x=x)
    inputs = tuple(torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 2, 3), (3, p, t, 5), (3,)))
    X, W, z = exact = [v.detach().double().requires_grad_() for v in inputs]
    rows, columns = torch.arange(2 * s + more), torch.arange(3 * t + more) + offset
    read = elements(elements(X, 2, rows // s), 3, columns // t), elements(elements(W, 1, rows % s), 2, columns % t)
    expected = F.silu(torch.einsum("biyx,cyxi->bcyx", *read) + z[:, None, None])
    got = Operator(Spec("subpixel", "A convolution to several pixels.", parse(text)))(*inputs)
    grad = torch.randn(got.shape)
    for mine, theirs in zip((got, *torch.autograd.grad(got, inputs, grad)), (expected, *torch.autograd.grad(expected, exact, grad.double()))):
        assert (mine.double() - theirs).norm() <= 1e-6 * theirs.norm()


def test_remainders_that_a_sum_asks_for_are_summed_step_by_step():
    """With several conditions, beyond the last whole step, and where a label of the sum is the remainder."""
    for text in (
        "f[p, q] = rsum(where(x % 3 == p and y % 2 == q, A[y, x] * B[x / 3], 0), y, x);",
        "f[p, q] = rsum(where((x + 1) % 3 == p, exp(A[q + 0, x]) + B[(x + 1) / 3], 0), x);",
        "f[p, q] = rsum(where(x % 4 == 1, A[y, x] * x + p * q, 0), y, x);",
        "f[p, q] = rsum(where(x % 3 == y, A[y, x] * p + q, 0), y, x);",
    ):
        algorithm = parse("Func f, g; In A, B; Var p, q, y, x; Extent p = 4; Extent q = 2; g[y, x] = A[y, x] + B[0];" + text.replace("A[", "g[")).algorithm
        prepared = prepare_algorithm(algorithm, ("f",))
        assert "x_step" in prepared.labels, str(prepared)
        tensors = {n: torch.randn(s, dtype=torch.float64) for n, s in {"A": (5, 11), "B": (4,)}.items() if n in prepared.inputs}
        got, expected = (evaluate(a, tensors, {}, ("f",))[0].double() for a in (prepared, algorithm))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
