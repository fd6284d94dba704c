"""Products that forward keeps where making them again costs more: gradients against float64, what is kept at which sizes, and its bytes."""

import pytest
import torch
import torch._dynamo.testing as dynamo
import torch.nn.functional as F
from op_cases import normal

import dtkernels
from dtkernels.algebra.autodiff import rematerialization
from dtkernels.lang import Program, Schedule, parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.explain import explain_call

ROWS, COLUMNS = 21, 37
SIDES = {"A": ("m", "k"), "B": ("k", "n"), "C": ("k", "n"), "D": ("n", "k"), "z": ("n",)}
SCORE = "s[m, n] = rdot(A[m, k], B[k, n], k);"


def target(a: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(a)) % COLUMNS


def nll(logits: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target(a), reduction="none")


#: DT, the same in torch, and what is kept
PROGRAMS = {
    "gated": ("Func u, y; In A, B, C; Var m, n; RVar k; u[m, n] = rdot(A[m, k], B[k, n], k); y[m, n] = u[m, n] * sigmoid(u[m, n]) * rdot(A[m, k], C[k, n], k);",
              lambda A, B, C: F.silu(A @ B) * (A @ C), {"u", "y_product"}),
    "bias_gelu": ("Func u, y; In A, B, z; Var m, n; RVar k; u[m, n] = rdot(A[m, k], B[k, n], k) + z[n];"
                  "y[m, n] = 0.5 * u[m, n] * (1 + tanh(0.7978845608028654 * (u[m, n] + 0.044715 * u[m, n] * u[m, n] * u[m, n])));",
                  lambda A, B, z: F.gelu(A @ B + z, approximate="tanh"), {"u"}),
    "bias_relu_halved": ("Func y; In A, B, z; Var m, n; RVar k; y[m, n] = maximum(rdot(A[m, k], B[k, n], k) + z[n], 0) / 2;", lambda A, B, z: F.relu(A @ B + z) / 2, set()),
    "bias_inside": ("Func y; In A, B, z; Var m, n; RVar k; y[m, n] = sigmoid(rdot(A[m, k], B[k, n], k) + z[n]) * (rdot(A[m, k], B[k, n], k) + z[n]);",
                    lambda A, B, z: F.silu(A @ B + z), {"y_product"}),
    "bias_pooled": ("Func u, y; In A, B, z; Var m, n; RVar k, l; u[m, n] = rdot(A[m, k], B[k, n], k) + z[n]; y[m, n] = u[m, n] * rmax(u[m, l], l);",
                    lambda A, B, z: (u := A @ B + z) * u.amax(1, keepdim=True), {"u"}),
    "bias_relu": ("Func y; In A, B, z; Var m, n; RVar k; y[m, n] = maximum(rdot(A[m, k], B[k, n], k) + z[n], 0);", lambda A, B, z: F.relu(A @ B + z), set()),
    "sigmoid": ("Func y; In A, B; Var m, n; RVar k; y[m, n] = sigmoid(rdot(A[m, k], B[k, n], k));", lambda A, B: torch.sigmoid(A @ B), set()),
    "softmax": (f"Func s, y; In A, B; Var m, n; RVar k, l; {SCORE} y[m, n] = exp(s[m, n]) / rsum(exp(s[m, l]), l);", lambda A, B: torch.softmax(A @ B, 1), set()),
    "logits": (f"Func s, y; In A, B, t; Var m; RVar n, k; {SCORE} y[m] = log(rsum(exp(s[m, n]), n)) - s[m, t[m]];", lambda A, B: nll(A @ B, A), {"s"}),
    "capped": ("Func s, y; In A, B, t; Var m; RVar n, k; s[m, n] = 3 * tanh(rdot(A[m, k], B[k, n], k) / 3); y[m] = log(rsum(exp(s[m, n]), n)) - s[m, t[m]];",
               lambda A, B: nll(3 * torch.tanh(A @ B / 3), A), {"s_dot"}),
    "hidden": ("Func s, y; In A, B, D; Var m; RVar n, k; Var j; s[m, n] = rdot(A[m, k], B[k, n], k); y[m, j] = rdot(s[m, n] * sigmoid(s[m, n]), D[n, j], n);",
               lambda A, B, D: F.silu(A @ B) @ D, {"s"}),
    "attention": ("Func s, e, t, y; In A, B, D; Var m, j; RVar n, k; s[m, n] = rdot(A[m, k], B[k, n], k); e[m, n] = exp(s[m, n]); t[m] = rsum(e[m, n], n);"
                  "y[m, j] = rdot(e[m, n], D[n, j], n) / t[m];", lambda A, B, D: torch.softmax(A @ B, 1) @ D, set()),
}  # fmt: skip


def op_of(name: str) -> Operator:
    return Operator(Spec(f"kept_{name}", "", Program(parse(PROGRAMS[name][0]).algorithm, Schedule(()))))


def made(name: str, k: int, dtype: torch.dtype, rows: int = ROWS) -> dict[str, torch.Tensor]:
    sizes = {"m": rows, "n": COLUMNS, "k": k}
    inputs = [i for i in parse(PROGRAMS[name][0]).algorithm.inputs if i != "t"]
    return {n: normal(*(sizes[x] for x in SIDES[n]), dtype=dtype, device="cpu", seed=i) * (k**-0.25 if len(SIDES[n]) > 1 else 1) for i, n in enumerate(inputs)}


def indices(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"t": target(tensors["A"])} if "In A, B, t" in PROGRAMS[name][0] else {}


def kept(name: str, tensors: dict[str, torch.Tensor]) -> set[str]:
    return set(op_of(name).variant((), frozenset(), 0).pair_for(tuple(tensors), tensors | indices(name, tensors)).gradient.products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_with_what_is_kept(name, dtype, monkeypatch):
    """Against float64: roundings to the dtype of operands and of what is kept, and float32 sums."""
    monkeypatch.setattr(rematerialization, "LONG", 48)
    given = {n: t.requires_grad_() for n, t in made(name, 48, dtype).items()}
    exact = {n: t.detach().double().requires_grad_() for n, t in given.items()}
    assert kept(name, given) == PROGRAMS[name][2]
    result, right = op_of(name)(**given, **indices(name, given)), PROGRAMS[name][1](**exact)
    grad = normal(*right.shape, dtype=dtype, device="cpu", seed=9)
    found, truth = torch.autograd.grad(result, list(given.values()), grad), torch.autograd.grad(right, list(exact.values()), grad.double())
    for label, got, want in [("result", result, right), *zip(given, found, truth)]:
        error, bound = (got.double() - want).abs().max().item(), 16 * torch.finfo(dtype).eps * max(1.0, want.abs().max().item())
        assert got.dtype == dtype and error <= bound, f"{label}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("name", ["gated", "logits"])
@pytest.mark.parametrize("k, is_kept", [(576, False), (1023, False), (1024, True)])
def test_only_products_of_long_sums_are_kept(name, k, is_kept):
    assert kept(name, made(name, k, torch.bfloat16)) == (PROGRAMS[name][2] if is_kept else set())


def test_what_is_kept_has_the_dtype_of_the_result_and_takes_so_many_bytes():
    given = {n: t.requires_grad_() for n, t in made("gated", 1024, torch.bfloat16).items()}
    result = op_of("gated")(**given)
    (u, v) = [t for t in result.grad_fn.saved_tensors if t.shape == result.shape]
    assert u.dtype == v.dtype == torch.bfloat16 and u.nbytes + v.nbytes == 2 * 2 * ROWS * COLUMNS
    torch.testing.assert_close(u.double(), given["A"].double() @ given["B"].double(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(v.double(), given["A"].double() @ given["C"].double(), rtol=2e-2, atol=2e-2)


def test_a_gradient_that_needs_no_product_keeps_none():
    tensors = made("gated", 1024, torch.bfloat16)
    pair = op_of("gated").variant((), frozenset(), 0).pair_for(("C",), tensors)
    assert pair.gradient.products == ("u",), "d_C reads u alone"


def test_sums_of_rows_fit_the_logits_that_are_kept():
    """Where one class has nearly all the probability, a sum of unrounded logits would double the error of the gradient."""
    given = made("logits", 1024, torch.bfloat16)
    given = {n: (t.detach() * (4 if n == "A" else 1)).requires_grad_() for n, t in given.items()}
    saved = op_of("logits")(**given, **indices("logits", given)).grad_fn.saved_tensors
    (logits,), (total,) = ([t for t in saved if t.shape == s and t.is_floating_point()] for s in ((ROWS, COLUMNS), (ROWS,)))
    assert logits.dtype == torch.bfloat16 and total.dtype == torch.float32 and logits.abs().max() > 8
    torch.testing.assert_close((logits.double() - total.double()[:, None]).exp().sum(1), torch.ones(ROWS, dtype=torch.float64), rtol=1e-5, atol=0)


def test_no_product_is_kept_for_a_result_in_float32():
    text = PROGRAMS["logits"][0].replace("y[m] = ", "y[m] = cast(").replace("t[m]];", "t[m]], fp32);")
    op = Operator(Spec("kept_wide", "", Program(parse(text).algorithm, Schedule(()))))
    tensors = made("logits", 1024, torch.bfloat16)
    assert op.variant((), frozenset(), 0).pair_for(("A", "B"), tensors | indices("logits", tensors)).gradient.products == ()


def limited(megabytes: int, monkeypatch) -> None:
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", str(megabytes))


def test_all_that_is_kept_stays_within_the_limit(monkeypatch):
    sizes = {"m": 1024, "n": 1024, "k": 1024}  # 2 MiB each in 16 bits
    variant = op_of("gated").variant((), frozenset(), 0)
    for megabytes, count in ((0, 2), (4, 2), (3, 1), (2, 1), (1, 0)):
        limited(megabytes, monkeypatch)
        assert len(variant.pair_at(("A", "B", "C"), sizes, 2).gradient.products) == count, megabytes
    limited(4, monkeypatch)
    assert len(variant.pair_at(("A", "B", "C"), sizes, 4).gradient.products) == 1, "float32 takes twice the room"
    monkeypatch.delenv("DTKERNELS_MEMORY_LIMIT")
    assert len(variant.pair_at(("A", "B", "C"), {"m": 4096, "n": 11008, "k": 4096}, 2).gradient.products) == 2
    assert len(variant.pair_at(("A", "B", "C"), {"m": 16384, "n": 11008, "k": 4096}, 2).gradient.products) == 0, "344 MiB each"


def test_the_longest_sums_are_kept_first(monkeypatch):
    text = "Func u, v, y; In A, B, G, H; Var m, n; RVar k, j; u[m, n] = rdot(A[m, k], B[k, n], k); v[m, n] = rdot(G[m, j], H[j, n], j); y[m, n] = sigmoid(u[m, n]) * tanh(v[m, n]);"
    variant = Operator(Spec("kept_two", "", Program(parse(text).algorithm, Schedule(())))).variant((), frozenset(), 0)
    limited(3, monkeypatch)
    for k, j, first in ((1024, 4096, "v"), (4096, 1024, "u")):
        assert variant.pair_at(tuple("ABGH"), {"m": 1024, "n": 1024, "k": k, "j": j}, 2).gradient.products == (first,)


def test_explain_names_the_forward_that_saves_and_a_backward_without_the_product():
    given = [t.to("meta").requires_grad_() for t in made("gated", 1024, torch.bfloat16, rows=4096).values()]
    said = str(explain_call(op_of("gated"), tuple(given), {}, "h100"))
    forward, backward = said.split("\nbackward:")
    assert "(saving for backward: u, y_product)" in forward and "u.fuse_at(y_product, k);" in forward and "y_product.fuse_at(y, n);" in forward
    assert " u.block" not in backward and "d_u.block" in backward


def test_symbolic_rows_compile_once_and_keep(tmp_path):
    counter = dynamo.CompileCounterWithBackend("aot_eager")
    (tmp_path / "kept_gated.yaml").write_text("op: kept_gated\ndoc: A gated product.\nalgorithm: |\n  " + PROGRAMS["gated"][0].replace("y[", "kept_gated[").replace(", y;", ", kept_gated;") + "\n")
    op = dtkernels.register(tmp_path / "kept_gated.yaml")
    compiled = torch.compile(lambda a, b, c: op(a, b, c), fullgraph=True, backend=counter)
    weights = [made("gated", 1024, torch.float32)[n].requires_grad_() for n in "BC"]
    for rows in (4, 9, 30):
        a = made("gated", 1024, torch.float32, rows)["A"].requires_grad_()
        torch._dynamo.mark_dynamic(a, 0)
        found = torch.autograd.grad(compiled(a, *weights).square().sum(), (a, *weights))
        for got, want in zip(found, torch.autograd.grad(PROGRAMS["gated"][1](a, *weights).square().sum(), (a, *weights))):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)
    assert counter.frame_count == 1
    shapes = [tuple(t.shape) for t in op(a, *weights).grad_fn.saved_tensors]
    assert shapes.count((30, COLUMNS)) == 2
