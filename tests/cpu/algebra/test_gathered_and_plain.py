# ruff: noqa: E501 (programs read best on one line)
"""Gradients of tensors that a program reads both at elements that data picks and at all of them, as graph networks and tied embeddings do."""

import re

import pytest
import torch

import dtkernels

CASES = {
    "a node and its neighbour": ("Func h, f; In X, t, W; Var i, o; RVar d; h[i, o] = rdot(X[t[i], d] + X[i, d], W[o, d], d); f[i, o] = tanh(h[i, o]);", lambda X, t, W: ((X[t] + X) @ W.T).tanh(), {"X": (6, 4), "W": (5, 4)}),
    "two products": ("Func f; In X, t, W, V; Var i, o; RVar d; f[i, o] = rdot(X[i, d], W[o, d], d) + rdot(X[t[i], d], V[o, d], d);", lambda X, t, W, V: X @ W.T + X[t] @ V.T, {"X": (6, 4), "W": (5, 4), "V": (5, 4)}),
    "a product of a product": ("Func h, f; In X, t, W, V; Var i, o, p; RVar d; h[i, o] = rdot(X[i, d], W[o, d], d); f[i, p] = rdot(h[t[i], o] + h[i, o], V[p, o], o);", lambda X, t, W, V: ((X @ W.T)[t] + X @ W.T) @ V.T, {"X": (6, 4), "W": (5, 4), "V": (3, 5)}),
    "remainders and quotients": ("Func f; In X, W; Var i, o; RVar d; f[i, o] = rdot(X[i % 3, d] + X[i / 2, d] + X[i, d], W[o, d], d);", lambda X, W: (X[torch.arange(6) % 3] + X[torch.arange(6) // 2] + X) @ W.T, {"X": (6, 4), "W": (5, 4)}),
    "edges": ("Func h, f; In X, n, W; Var i, q, o; RVar d; h[i, q, o] = rdot(X[n[i, q], d] - X[i, d], W[o, d], d); f[i, o] = rsum(h[i, q, o] * h[i, q, o], q);", lambda X, n, W: ((X[n] - X[:, None]) @ W.T).square().sum(1), {"X": (6, 4), "W": (5, 4)}),
    "tied embeddings": ("Func h, f; In E, W, t; Var n, v, k; RVar d; h[n, k] = tanh(rdot(E[t[n], d], W[d, k], d)); f[n, v] = rdot(h[n, k], E[v, k], k);", lambda E, W, t: (E[t] @ W).tanh() @ E.T, {"E": (7, 4), "W": (4, 4)}),
    "one table for all windows": ("Func f; In X, T, n; Var w, h, m, l; f[w, h, m, l] = tanh(X[w, h, m, l] + T[n[m, l], h]);", lambda X, T, n: (X + T[n].permute(2, 0, 1)).tanh(), {"X": (5, 2, 6, 3), "T": (6, 2)}),
    "gathered twice": ("Func h, f; In X, t, W; Var i, o; RVar d; h[i, d] = X[t[i], d] * X[i, d]; f[i, o] = rdot(h[t[i], d] + h[i, d], W[o, d], d);", lambda X, t, W: ((X[t] * X)[t] + X[t] * X) @ W.T, {"X": (6, 4), "W": (5, 4)}),
}  # fmt: skip


@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_torch(name, reference, tmp_path, monkeypatch):
    text, truth, shapes = CASES[name]
    if reference:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op = f"gathered_{list(CASES).index(name)}{'_reference' * reference}"
    path = tmp_path / "form.yaml"
    text = re.sub(r"\bf\b", op, text)  # the result has the op's name
    path.write_text(f"op: {op}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    call, generator = dtkernels.register(path), torch.Generator().manual_seed(0)
    given = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    picked = {n: torch.randint(0, 6, (6, 3) if n == "n" else (6,), generator=generator) for n in ("t", "n") if f"{n}[" in text and f" {n}," in text.split(";")[1] + ","}
    ours, exact = ({n: cast(t).requires_grad_() for n, t in given.items()} for cast in (torch.clone, torch.Tensor.double))
    got, want = call(**ours, **picked), truth(**exact, **picked)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    adjoint = torch.randn(got.shape, generator=generator)
    found, wanted = torch.autograd.grad(got, list(ours.values()), adjoint), torch.autograd.grad(want, list(exact.values()), adjoint.double())
    for n, a, b in zip(given, found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5, msg=lambda m, n=n: f"d_{n}: {m}")
