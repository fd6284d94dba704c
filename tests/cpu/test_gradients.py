"""Gradients of ops and of registered specs by the interpreter, against torch.autograd in float64."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
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


@dataclass(frozen=True)
class Spec:
    """A spec of three keys, what it means in torch, shapes of its inputs, values of its scalars (as one-element tensors)."""

    algorithm: str
    truth: object
    shapes: dict[str, tuple[int, ...]]
    scalars: tuple[tuple[str, float], ...] = ()
    terms: float = 2.0


def masked(m: int, n: int, window: int) -> torch.Tensor:
    ones = torch.ones(m, n, dtype=torch.bool)
    return torch.zeros(m, n, dtype=torch.float64).masked_fill(~(ones.tril() & ones.triu(1 - window)), float("-inf"))


def chained(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    x, z, c = torch.meshgrid(*map(torch.arange, A.shape), indexing="ij")
    diagonal = (x == z) * A.exp()[0, 0, c]
    return B * (((x >= z) & (z >= c)) * A.exp()[(x - z).clamp(0), (z - c).clamp(0), c] + A.exp()[(x - z) % 5, (z - x) % 7, c] + diagonal)


MLP = {"X": (9, 17), "W": (17, 20), "V": (20, 11)}
QKV = {"Q": (9, 16), "K": (13, 16), "V": (13, 8)}
ROWS = {"A": (5, 33)}
SPECS = {
    "rmsnorm": Spec("""Func ms, y; In A, w; SIn eps; Var x, c;
        ms[x] = rmean(A[x, c] * A[x, c], c);
        y[x, c] = A[x, c] * rsqrt(ms[x] + eps) * w[c];""",
        lambda A, w, eps: A * torch.rsqrt((A * A).mean(-1, keepdim=True) + eps) * w, {**ROWS, "w": (33,)}, (("eps", 0.1),)),
    "layernorm": Spec("""Func mean, var, y; In A, w, b; SIn eps; Var x, c;
        mean[x] = rmean(A[x, c], c);
        var[x] = rmean((A[x, c] - mean[x]) * (A[x, c] - mean[x]), c);
        y[x, c] = (A[x, c] - mean[x]) * rsqrt(var[x] + eps) * w[c] + b[c];""",
        lambda A, w, b, eps: (A - A.mean(-1, keepdim=True)) * torch.rsqrt(A.var(-1, unbiased=False, keepdim=True) + eps) * w + b,
        {**ROWS, "w": (33,), "b": (33,)}, (("eps", 0.1),)),
    "layernorm_by_moments": Spec("""Func mean, square, var, y; In A; Var x, c;
        mean[x] = rmean(A[x, c], c);  square[x] = rmean(A[x, c] * A[x, c], c);
        var[x] = square[x] - mean[x] * mean[x];
        y[x, c] = (A[x, c] - mean[x]) * rsqrt(var[x] + 0.001);""",
        lambda A: F.layer_norm(A, (A.shape[-1],), eps=1e-3), ROWS),
    "log_softmax": Spec("""Func s, y; In A; Var x, c;
        s[x] = rsum(exp(A[x, c]), c);  y[x, c] = A[x, c] - log(s[x]);""", lambda A: A.log_softmax(-1), ROWS),
    "logsumexp": Spec("Func y; In A; Var x; RVar c; y[x] = log(rsum(exp(A[x, c]), c));", lambda A: A.logsumexp(-1), ROWS),
    "cross_of_softmaxes": Spec("""Func s, t, y; In A; Var x, c;
        s[x] = rsum(exp(A[x, c]), c);  t[c] = rsum(exp(A[x, c]), x);
        y[x, c] = 2 * A[x, c] - log(s[x]) - log(t[c]);""", lambda A: A.log_softmax(1) + A.log_softmax(0), ROWS),
    "swiglu": Spec("Func y; In G, U; Var x, c; y[x, c] = G[x, c] * sigmoid(G[x, c]) * U[x, c];",
        lambda G, U: F.silu(G) * U, {"G": (5, 33), "U": (5, 33)}),
    "geglu": Spec("Func y; In G, U; Var x, c; y[x, c] = 0.5 * G[x, c] * (1 + erf(G[x, c] * 0.7071067811865476)) * U[x, c];",
        lambda G, U: F.gelu(G) * U, {"G": (5, 33), "U": (5, 33)}),
    "squared_relu_mlp": Spec("""Func h, a, y; In X, W, V; Var m, n; RVar k, l;
        h[m, l] = rdot(X[m, k], W[k, l], k);
        a[m, l] = maximum(h[m, l], 0) * maximum(h[m, l], 0);
        y[m, n] = rdot(a[m, l], V[l, n], l);""", lambda X, W, V: (X @ W).relu().square() @ V, MLP),
    "softcapped_attention": Spec("""Func s, e, t, o; In Q, K, V; SIn cap; Var m, n; RVar l, d;
        s[m, l] = cap * tanh(rdot(Q[m, d], K[l, d], d) / cap);
        e[m, l] = exp(s[m, l]);  t[m] = rsum(e[m, l], l);
        o[m, n] = rdot(e[m, l] / t[m], V[l, n], l);""",
        lambda Q, K, V, cap: (cap * torch.tanh(Q @ K.T / cap)).softmax(-1) @ V, QKV, (("cap", 5.0),), terms=8.0),
    "windowed_attention": Spec("""Func s, e, t, o; In Q, K, V; Var m, n; RVar l, d;
        s[m, l] = where(l <= m and m - l < 4, rdot(Q[m, d], K[l, d], d), -inf);
        e[m, l] = exp(s[m, l]);  t[m] = rsum(e[m, l], l);
        o[m, n] = rdot(e[m, l] / t[m], V[l, n], l);""",
        lambda Q, K, V: (Q @ K.T + masked(19, 19, 4)).softmax(-1) @ V, {"Q": (19, 16), "K": (19, 16), "V": (19, 8)}, terms=8.0),
    "grouped_query_attention": Spec("""Func s, e, t, o; In Q, K, V; Var h, m, n; RVar l, d;
        s[h, m, l] = rdot(Q[h, m, d], K[h / 2, l, d], d);
        e[h, m, l] = exp(s[h, m, l]);  t[h, m] = rsum(e[h, m, l], l);
        o[h, m, n] = rdot(e[h, m, l] / t[h, m], V[h / 2, l, n], l);""",
        lambda Q, K, V: (Q @ K.repeat_interleave(2, 0).transpose(-1, -2)).softmax(-1) @ V.repeat_interleave(2, 0),
        {"Q": (4, 9, 16), "K": (2, 13, 16), "V": (2, 13, 8)}, terms=8.0),
    "linear_attention": Spec("""Func kv, o; In Q, K, V; Var m, n; RVar l, d;
        kv[d, n] = rdot(K[l, d], V[l, n], l);  o[m, n] = rdot(Q[m, d], kv[d, n], d);""", lambda Q, K, V: Q @ (K.T @ V), QKV),
    "cosine_similarity": Spec("""Func y; In A, B; Var x; RVar c;
        y[x] = rsum(A[x, c] * B[x, c], c) * rsqrt(rsum(A[x, c] * A[x, c], c) * rsum(B[x, c] * B[x, c], c));""",
        lambda A, B: torch.cosine_similarity(A, B, -1), {"A": (5, 33), "B": (5, 33)}),
    "row_maximum": Spec("Func mx, y; In A; Var x, c; mx[x] = rmax(A[x, c], c); y[x, c] = A[x, c] * mx[x] + abs(A[x, c]);",
        lambda A: A * A.amax(-1, keepdim=True) + A.abs(), ROWS),
    "shifts": Spec("Func y; In A; Var x; y[x] = A[x + 1] * A[x] + A[x - 2];",
        lambda A: torch.cat([A[1:], A.new_zeros(1)]) * A + torch.cat([A.new_zeros(2), A[:-2]]), {"A": (40,)}),
    "halves_of_an_odd_row": Spec("Func y; In A; Var x, d; y[x, d] = A[x, d] + where(d < len(d) / 2, -A[x, d + len(d) / 2], A[x, d - len(d) / 2]);",
        lambda A: A + torch.cat([-A[:, 16:], A[:, 1:17]], 1), ROWS),  # len(d) / 2 of 33: 16 in an index, 16.5 in the condition
    "a_shifted_mask": Spec("""Func m, y; In A, B; Var x; m[x] = where(x < 20, A[x], A[x] * x / 8); y[x] = m[x + len(x) / 2] * B[x];""",
        lambda A, B: torch.cat([torch.where(torch.arange(41) < 20, A, A * torch.arange(41) / 8)[20:], A.new_zeros(20)]) * B, {"A": (41,), "B": (41,)}),
    "transposes": Spec("Func t, y; In A, B; Var x, z; t[x, z] = exp(A[x, z]); y[z, x] = t[x, z] * B[z, x];",
        lambda A, B: A.exp().T * B, {"A": (7, 9), "B": (9, 7)}),
    "diagonal": Spec("Func y; In A; Var x; y[x] = A[x, x] * A[x, 0];", lambda A: A.diagonal() * A[:, 0], {"A": (9, 9)}),
    "one_index_twice": Spec("Func y; In A, u; Var x; y[x] = A[x - 1, x - 1] * u[x];",
        lambda A, u: torch.cat([A.new_zeros(1), A.diagonal()[:-1]]) * u, {"A": (9, 9), "u": (9,)}),
    "labels_that_give_one_another": Spec("""Func g, y; In A, B; Var x, z, c; g[x, z, c] = exp(A[x, z, c]);
        y[x, z, c] = B[x, z, c] * (g[x - z, z - c, c] + g[(x - z) % len(x), (z - x) % len(z), c] + g[x - z, z - x, c]);""",
        chained, {"A": (5, 7, 3), "B": (5, 7, 3)}),
    "label_bound_elsewhere": Spec("Func y; In C, w; Var x; RVar z; y[x] = rsum(w[z] * C[x, z], z) + rsum(C[z, x], z) * w[x];",
        lambda C, w: C @ w + C.sum(0) * w, {"C": (9, 9), "w": (9,)}),
    "maximum_of_products": Spec("Func y; In A, w; Var x; RVar c; y[x] = 2 * rmax(exp(A[x, c]) * w[c], c) - rmin(A[x, c] + w[c], c);",
        lambda A, w: 2 * (A.exp() * w).amax(-1) - (A + w).amin(-1), {**ROWS, "w": (33,)}),
    "upsampled": Spec("Func y; In A, B; Var x; y[x] = A[x / 3] * B[x];",
        lambda A, B: A.repeat_interleave(3)[: len(B)] * B, {"A": (5,), "B": (14,)}),
    "pairs_of_labels_of_constant_extent": Spec("""Func g, y; In A; Var r, s; Extent r = 3; Extent s = 3;
        g[r] = A[2 * r] * A[2 * r + 1];  y[r, s] = g[s] * A[r + s];""",
        lambda A: (A[0::2] * A[1::2]) * A.unfold(0, 3, 1)[:3], {"A": (6,)}),
    "a_product_of_a_cast_input": Spec("""Func p, y; In A, B; Var m, n; RVar k;
        p[m, n] = rdot(cast(A[m, k], fp32), B[k, n], k);  y[m, n] = p[m, n] * p[m, n];""", lambda A, B: (A @ B) ** 2, {"A": (9, 17), "B": (17, 20)}),
    "packed_glu": Spec("Func y; In A, w; Var x, c; Extent c = w[0]; y[x, c] = A[x, c + 0] * sigmoid(A[x, c + len(c)]) * w[c];",
        lambda A, w: A[:, : len(w)] * torch.sigmoid(A[:, len(w) :]) * w, {"A": (5, 34), "w": (17,)}),
    "huber": Spec("Func y; In A; SIn d; Var x; y[x] = where(abs(A[x]) <= d, 0.5 * A[x] * A[x], d * (abs(A[x]) - 0.5 * d));",
        lambda A, d: torch.where(A.abs() <= d, 0.5 * A * A, d * (A.abs() - 0.5 * d)), {"A": (40,)}, (("d", 0.7),)),
    "functions": Spec("""Func y; In A, B; Var x;
        y[x] = exp2(A[x]) + log2(1 + A[x] * A[x]) * sqrt(2 + B[x]) - minimum(A[x], B[x]) / maximum(3 + A[x], B[x]) + rsqrt(5 + A[x]);""",
        lambda A, B: torch.exp2(A) + torch.log2(1 + A * A) * torch.sqrt(2 + B)
        - torch.minimum(A, B) / torch.maximum(3 + A, B) + torch.rsqrt(5 + A),
        {"A": (40,), "B": (40,)}),
}  # fmt: skip


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
