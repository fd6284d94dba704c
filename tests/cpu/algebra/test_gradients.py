"""Gradients of ops and of registered specs by the interpreter, against torch.autograd in float64."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from gradient_specs import SPECS
from op_cases import MAKERS, normal

import dtkernels

EPS = torch.finfo(torch.float32).eps


def double(value):
    """A leaf of the same value in float64; masks and numbers as they are."""
    return value.detach().double().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def agree(ours, truth, inputs: dict, dtype: torch.dtype = torch.float32, terms: float = 1.0, seed: int = 5) -> None:
    """The result and every gradient of ``ours(**inputs)`` against ``truth(**inputs)`` in float64.

    Tolerance: a few roundings of the largest element to ``dtype`` (of inputs to products, of the result) and float32
    accumulation of ``terms`` times as much. The gradient of a parameter sums as many terms as the result has elements for
    each of its own, and they may cancel: the root of that number as much.
    """
    given = {n: v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
    exact = {n: double(v) for n, v in inputs.items()}
    leaves = [n for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad]
    result, wanted = ours(**given), truth(**exact)
    assert result.dtype == dtype and result.shape == wanted.shape
    adjoint = normal(*result.shape, dtype=dtype, device="cpu", seed=seed)
    pairs = [("result", result, wanted)]
    found = torch.autograd.grad(result, [given[n] for n in leaves], adjoint)
    pairs += zip(leaves, found, torch.autograd.grad(wanted, [exact[n] for n in leaves], adjoint.double()))
    largest = max((want.abs().max().item() for _, _, want in pairs if want.numel()), default=0.0)
    for name, got, want in pairs:
        if name in given:
            assert got.dtype == given[name].dtype and got.shape == given[name].shape, name
        if want.numel():
            error, peak = (got.double() - want).abs().max().item(), max(want.abs().max().item(), 1e-2)
            if want.numel() < result.numel():
                peak = max(peak, min(largest, 1.0) * (result.numel() / want.numel()) ** 0.5)
            bound = (4 * torch.finfo(dtype).eps + 16 * terms * EPS) * peak * (1 if dtype == torch.float32 else 2)
            assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g}, largest {peak:.3g}"


# -- the six ops ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "relu": [(1,), (3, 7), (257,), (0, 3)],
    "softmax": [(1, 1), (3, 17), (2, 3, 131), (0, 5)],
    "dyt": [(1, 1), (3, 17), (2, 3, 65)],
    "mmsigmoid": [(1, 1, 1), (5, 7, 17), (33, 17, 5)],
    "two_mm": [(1, 1, 1, 1), (5, 7, 17, 16), (33, 9, 17, 20)],
    "attention": [(1, 1, 1, 1, 1, 1, 1), (1, 4, 2, 9, 11, 16, 16), (2, 3, 3, 5, 19, 8, 24), (1, 4, 1, 17, 3, 20, 16)],
    "rmsnorm": [(1, 1), (3, 17), (2, 3, 65)],
    "layernorm": [(1, 2), (3, 17), (2, 3, 65)],
    "swiglu": [(1,), (3, 7), (257,)],
    "geglu": [(1,), (3, 7), (257,)],
    "rope": [(1, 1, 1, 1, 2), (2, 4, 2, 5, 6), (1, 3, 1, 7, 20)],
    "cross_entropy": [(1, 1), (3, 17), (2, 3, 131)],
}  # fmt: skip
NAMES = {"relu": "A", "softmax": "A", "dyt": ("A", "alpha", "w", "b"), "mmsigmoid": "AB", "two_mm": "ABC", "attention": "QKV",
         "rmsnorm": "Aw", "layernorm": "Awb", "swiglu": "AB", "geglu": "AB", "rope": ("Q", "K", "cos", "sin"), "cross_entropy": "A"}  # fmt: skip


def in_order(function, **values):
    return function(*values.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("op", MAKERS)
def test_gradients_of_the_ops(op, dtype):
    before = dtkernels.paths().get(f"{op} backward", {"interpreter": 0})["interpreter"]
    for shape in SHAPES[op]:
        case = MAKERS[op](shape, dtype, "cpu")
        inputs = dict(zip(NAMES[op], case.inputs))
        agree(partial(in_order, case.ours), partial(in_order, case.truth), inputs, dtype, terms=2.0)
    assert dtkernels.paths()[f"{op} backward"]["interpreter"] - before == len(SHAPES[op])


def test_grouped_heads_of_whole_tiles():
    case = MAKERS["attention"]((1, 2, 1, 16, 32, 16, 16), torch.float32, "cpu")
    agree(partial(in_order, case.ours), partial(in_order, case.truth), dict(zip("QKV", case.inputs)), terms=2.0)


def heads(h: int, g: int, m: int, n: int, d: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {"q": (1, h, m, d), "k": (1, g, n, d), "v": (1, g, n, d)}
    return {name: normal(*shape, dtype=dtype, device="cpu", seed=i) for i, (name, shape) in enumerate(shapes.items())}


def exact_attention(q, k, v, *, bias=0.0, scale=None):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return torch.nan_to_num(scores.softmax(-1)) @ v  # a row that sees nothing: zeros


def below_diagonal(m: int, n: int) -> torch.Tensor:
    return torch.zeros(m, n, dtype=torch.float64).masked_fill(~torch.ones(m, n, dtype=torch.bool).tril(), float("-inf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_causal_attention(dtype):
    for h, g, m, n in ((2, 1, 19, 19), (1, 1, 9, 21), (4, 2, 21, 9)):
        bias = below_diagonal(m, n)

        def truth(q, k, v, bias=bias):
            return exact_attention(q, k, v, bias=bias)

        agree(partial(dtkernels.ops.attention, causal=True), truth, heads(h, g, m, n, 16, dtype), dtype, terms=2.0)


def test_biased_attention_has_a_gradient_for_the_bias():
    def ours(q, k, v, bias):
        return dtkernels.ops.attention(q, k, v, bias)

    for shape in ((1, 2, 9, 13), (9, 13)):  # one for each head, one for both
        bias = normal(*shape, dtype=torch.float32, device="cpu", seed=8)
        agree(ours, exact_attention, {**heads(2, 1, 9, 13, 16), "bias": bias}, terms=4.0)


def test_scale_of_attention_has_a_gradient():
    agree(dtkernels.ops.attention, exact_attention, {**heads(2, 2, 9, 13, 16), "scale": torch.tensor([0.3])}, terms=8.0)


def test_rows_that_see_nothing_get_finite_gradients():
    q, k, v = (t.requires_grad_() for t in heads(2, 1, 8, 11, 16).values())
    mask = torch.rand(8, 11, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[3], mask[:, 5] = False, False
    out = dtkernels.ops.attention(q, k, v, mask)
    out.backward(torch.ones_like(out))
    exact = [double(t) for t in (q, k, v)]
    seen = [m for m in range(8) if m != 3]
    scores = (exact[0][:, :, seen] @ exact[1].transpose(-1, -2) / 4).masked_fill(~mask[seen], float("-inf"))
    (scores.softmax(-1) @ exact[2]).sum().backward()
    for ours, truth in zip((q, k, v), exact):
        assert torch.isfinite(ours.grad).all()
        torch.testing.assert_close(ours.grad.double(), truth.grad, rtol=0, atol=1e-5)
    assert (out[:, :, 3] == 0).all() and (q.grad[:, :, 3] == 0).all() and (v.grad[:, :, 5] == 0).all()


def test_large_logits_have_finite_gradients():
    x = (normal(3, 50, dtype=torch.float32, device="cpu") * 1e4).requires_grad_()
    dtkernels.ops.softmax(x)[:, :3].sum().backward()
    assert torch.isfinite(x.grad).all()
    q = (heads(1, 1, 8, 9, 16)["q"] * 300).requires_grad_()
    dtkernels.ops.attention(q, q, q).sum().backward()
    assert torch.isfinite(q.grad).all()


def test_gradients_of_strided_inputs_and_adjoints():
    x = normal(6, 5, 40, dtype=torch.float32, device="cpu")
    for view in (lambda t: t.transpose(0, 2), lambda t: t[:, ::2, ::3], lambda t: t[:1].expand(4, 5, 40)):
        a, b = x.clone().requires_grad_(), double(x)
        dtkernels.ops.softmax(view(a)).transpose(0, 1).square().sum().backward()
        view(b).softmax(-1).transpose(0, 1).square().sum().backward()
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-6)


def test_only_what_asks_for_a_gradient_gets_one():
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(7, 9)
    dtkernels.ops.mmsigmoid(a, b).sum().backward()
    assert a.grad is not None and b.grad is None
    with torch.no_grad():
        assert not dtkernels.ops.relu(a).requires_grad


@pytest.mark.parametrize("constant", [True, False])
def test_double_backward_is_refused_in_one_line(constant):
    """Also where the adjoint is a constant: a gradient penalty must not silently count as 0."""
    x = torch.randn(3, 4, requires_grad=True)
    y = dtkernels.ops.softmax(x)
    (grad,) = torch.autograd.grad(y[:, 0].sum() if constant else y.square().sum(), x, create_graph=True)
    for differentiate in (lambda: torch.autograd.grad(grad.sum(), x), lambda: (x.sum() + grad.square().sum()).backward()):
        with pytest.raises(RuntimeError) as caught:
            differentiate()
        assert str(caught.value) == "softmax: a gradient has no derivative; allowed: backward without create_graph"


# -- registered specs -----------------------------------------------------------------------------------------------------


def registered(name: str, algorithm: str, folder: Path):
    """``dtkernels.ops.<name>`` from a spec of three keys."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"op": name, "doc": f"{name}, for a test.\n", "algorithm": re.sub(r"\n\s+", "\n", algorithm)}))
    dtkernels.register(path)
    return getattr(dtkernels.ops, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SPECS)
def test_registered_spec_is_differentiable(name, tmp_path):
    spec = SPECS[name]
    op = registered(f"test_{name}", spec.algorithm, tmp_path)
    inputs = {n: normal(*shape, dtype=torch.float32, device="cpu", seed=i) for i, (n, shape) in enumerate(spec.shapes.items())}
    if name == "functions":
        inputs = {n: t.clamp(-1.5, 1.5) for n, t in inputs.items()}
    inputs |= {n: torch.tensor([value]) for n, value in spec.scalars}
    agree(op, spec.truth, inputs, terms=spec.terms)
    assert dtkernels.paths()[f"test_{name} backward"]["interpreter"] == 1


def test_a_spec_with_two_outputs(tmp_path):
    sums = "m[x] = rmean(A[x, c], c); q[x] = rsum(A[x, c] * A[x, c], c);"
    op = registered("test_moments", f"Func m, q; In A; Var x; RVar c; {sums} m.compile(); q.compile();", tmp_path)
    a = normal(5, 33, dtype=torch.float32, device="cpu").requires_grad_()
    m, q = op(a)
    (m.sum() + 2 * q.sum()).backward()
    torch.testing.assert_close(a.grad, 1 / 33 + 4 * a.detach())
    (only,) = torch.autograd.grad(op(a)[1].sum(), a)
    torch.testing.assert_close(only, 2 * a.detach())


def test_what_a_condition_leaves_out_of_a_softmax_does_not_shift_it(tmp_path):
    """Logits of 1000 that are masked, or come later: forward and backward are of the others."""
    masked = """Func s, y; In A, m; Var x, c; s[x] = rsum(where(m[x, c], exp(A[x, c]), 0), c);
        y[x, c] = where(m[x, c], exp(A[x, c]), 0) / s[x];"""
    running = "Func y; In A; Var x, c; RVar z; Extent c = A[1]; y[x, c] = log(rsum(where(z > c, 0, exp(A[x, z])), z));"
    a = torch.tensor([[-112.0, 0, 1000, -1e4, 5], [1, 2, 3, 4, 5]])
    m = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])
    agree(registered("test_masked", masked, tmp_path), lambda A, m: A.masked_fill(~m, -torch.inf).softmax(-1), {"A": a.clone(), "m": m})
    agree(registered("test_running", running, tmp_path), lambda A: A.logcumsumexp(-1), {"A": a})


def test_half_products_returned_in_float32(tmp_path):
    """The adjoint is float32 and meets half operands."""
    op = registered("test_wide", "Func y; In A, B; Var m, n; RVar k; y[m, n] = cast(rdot(A[m, k], B[k, n], k), fp32);", tmp_path)
    a, b = (normal(*s, dtype=torch.float16, device="cpu", seed=i).requires_grad_() for i, s in enumerate([(9, 17), (17, 20)]))
    grad = normal(9, 20, dtype=torch.float32, device="cpu", seed=5)
    found, exact = torch.autograd.grad(op(a, b), (a, b), grad), (grad.double() @ b.detach().double().T, a.detach().double().T @ grad.double())
    for got, want in zip(found, exact):
        assert (got.double() - want).abs().max() <= 8 * 2**-11 * want.abs().max() and got.dtype == torch.float16


def test_ties_of_a_row_maximum_are_split_evenly(tmp_path):
    op = registered("test_amax", "Func y; In A; Var x; RVar c; y[x] = rmax(A[x, c], c);", tmp_path)
    a = torch.tensor([[1.0, 3, 3, 2, 3, 0], [5, 5, 1, 0, 2, 2]], requires_grad=True)
    op(a).backward(torch.tensor([3.0, 4.0]))
    assert a.grad.tolist() == [[0, 1, 1, 0, 1, 0], [2, 2, 0, 0, 0, 0]]


def test_the_nearest_is_found_again_from_16_bit_results(tmp_path):
    """The backward asks which distance is the least: of the distances as they were computed, not as the result was rounded."""
    dist = "dist[x, y] = rsum((A[x, k] - B[y, k]) * (A[x, k] - B[y, k]), k);"
    op = registered("test_nearest", f"Func dist, f; In A, B; Var x; RVar y, k; {dist} f[x] = rmin(dist[x, y], y);", tmp_path)
    inputs = {n: normal(*s, dtype=torch.float16, device="cpu", seed=i) for i, (n, s) in enumerate({"A": (7, 5), "B": (9, 5)}.items())}
    agree(op, lambda A, B: (A[:, None] - B).square().sum(-1).amin(-1), inputs, torch.float16, terms=8.0)


def test_a_variance_beside_its_mean(tmp_path):
    mean, square = "m[x] = rmean(A[x, c], c);", "(A[x, c] - m[x]) * (A[x, c] - m[x])"
    op = registered("test_mean_var", f"Func m, v; In A; Var x; RVar c; {mean} v[x] = rmean({square}, c); m.compile(); v.compile();", tmp_path)
    a = normal(5, 33, dtype=torch.float32, device="cpu").requires_grad_()
    m, v = op(a)
    torch.testing.assert_close(v, a.var(-1, correction=0))
    (grad,) = torch.autograd.grad(m.sum() + v.sum(), a)
    torch.testing.assert_close(grad, 1 / 33 + 2 / 33 * (a - a.mean(-1, keepdim=True)).detach())


def test_batched_gradients_of_shared_and_batched_inputs(tmp_path):
    op = registered("test_affine", "Func y; In A, w; Var x; y[x] = A[x] * w[x];", tmp_path)
    a, w = (normal(*shape, dtype=torch.float32, device="cpu").requires_grad_() for shape in ((2, 3, 7), (7,)))
    op(a, w).sum().backward()
    torch.testing.assert_close(w.grad, a.detach().sum((0, 1)))
    torch.testing.assert_close(a.grad, w.detach().expand(2, 3, 7))


INDICES = ("s + k - 3", "s - 3 + k", "k + s - 3", "3 - k + s", "-3 + s + k", "s - k + 1", "k - s", "s - (3 - k)", "2 * s + k", "2 * s + k - 1", "3 - 2 * s + k",
           "s + 2 * k - 3", "s * 2 - k", "s + s - k", "2 * s - s + k", "2 * (s + k) - 3", "s + (-k) / 3", "2 - s", "len(s) - 1 - s - k", "s + k / 2 - 1", "(s + k - 3) / 2",
           "(s / 2 + k) / 2", "s / 2 + k - 1", "(s + k - 3) % len(s)", "(2 - s) % len(s)", "(s / 3) % len(s)", "2 * s % len(s)", "s - 1 + s % 2")  # fmt: skip


@pytest.mark.parametrize("at", range(len(INDICES)), ids=INDICES.__getitem__)
def test_index_arithmetic_is_undone(at, tmp_path):
    """What an element receives from wherever it was read, and nothing from what lies outside."""
    text = f"Func f; In A, W; Var s, c; RVar k; Extent s = A[0]; Extent k = W[1]; f[s, c] = rsum(A[{INDICES[at]}, c] * W[c, k], k);"

    def truth(A, W):
        labels = {"s": torch.arange(len(A))[:, None], "k": torch.arange(W.shape[1])}
        i = eval(INDICES[at].replace("/", "//").replace("len(s)", str(len(A))), labels) + 0 * labels["k"]
        read = torch.where(((i >= 0) & (i < len(A)))[..., None], A[i.clamp(0, len(A) - 1)], 0)
        return (read * W.T).sum(1)

    A, W = (normal(*shape, dtype=torch.float32, device="cpu", seed=i) for i, shape in enumerate([(13, 3), (3, 4)]))
    agree(registered(f"test_index_{at}", text, tmp_path), truth, {"A": A, "W": W})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["log_softmax", "logsumexp", "cross_of_softmaxes"])
def test_registered_specs_at_large_logits(name, tmp_path):
    spec = SPECS[name]
    a = normal(5, 33, dtype=torch.float32, device="cpu") * 1e4
    agree(registered(f"test_large_{name}", spec.algorithm, tmp_path), spec.truth, {"A": a}, terms=4.0)


@pytest.mark.filterwarnings("ignore")
def test_moments_of_numbers_far_from_zero(tmp_path):
    """A variance from naive text: 10000 +- 1 has it to as many digits as its mean leaves."""
    text = "Func m, v; In A; Var x; RVar c; m[x] = rmean(A[x, c], c); v[x] = rmean(A[x, c] * A[x, c], c) - m[x] * m[x];"
    a = (normal(5, 333, dtype=torch.float32, device="cpu") + 1e4).requires_grad_()
    got = registered("test_variance", text, tmp_path)(a)
    got.sum().backward()
    exact = double(a)
    exact.var(-1, unbiased=False).sum().backward()
    torch.testing.assert_close(got.double(), exact.detach().var(-1, unbiased=False), rtol=1e-5, atol=0)
    torch.testing.assert_close(a.grad.double(), exact.grad, rtol=0, atol=1e4 * EPS * 4 / 333)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_logarithm_of_a_sum_inside_another(scale, tmp_path):
    """Backward keeps both logarithms: the inner one must not move what the outer one was taken of. At 100 an exp by itself overflows."""
    text = "Func once, f; In A; Var x, u; once[x, u] = log(rsum(exp(A[x, u]), u)); f[x, u] = log(rsum(exp(once[x, u]), u));"

    def truth(A):
        for _ in range(2):
            A = torch.logsumexp(A, 1, keepdim=True).expand(A.shape)
        return A

    A = normal(3, 4, dtype=torch.float32, device="cpu") * scale
    agree(registered("test_nested_logsumexp", text, tmp_path), truth, {"A": A}, terms=scale)


def test_the_gradient_of_a_float32_scalar_beside_float16_inputs_is_not_rounded_to_float16(tmp_path):
    path = tmp_path / "scaled.yaml"
    path.write_text("op: scaled_by_number\ndoc: x\nalgorithm: |\n  Func scaled_by_number; In X; SIn a; Var x, y; scaled_by_number[x, y] = a * X[x, y];\n")
    X, a = torch.full((40, 50), 60.0, dtype=torch.float16), torch.tensor(0.5, requires_grad=True)
    (d_a,) = torch.autograd.grad(dtkernels.register(path)(X, a).sum(), a)
    assert d_a.dtype == torch.float32 and d_a.item() == 60.0 * 2000  # beyond what float16 holds
