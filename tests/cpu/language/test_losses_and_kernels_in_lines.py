# ruff: noqa: E501 (programs read best on one line)
"""Losses, kernels and norms in the few lines that someone from outside writes: values and gradients, against float64."""

import pytest
import torch
import torch.nn.functional as F

import dtkernels


def kernel_regression(x, c, y):
    return torch.softmax(-((x[:, None] - c) ** 2).sum(-1), -1) @ y


def cosine_attention(q, k, v):
    return torch.softmax(4 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT, -1) @ v


def fake_quantise(x):
    groups = x.unflatten(-1, (-1, 8))
    return (groups * torch.rsqrt((groups * groups).mean(-1, keepdim=True) + 0.01)).flatten(-2)


#: name -> (algorithm, in torch, shapes)
FORMS = {
    "weights of attention, named": (
        "Func s, p, f; In Q, K, V; Var m, n, l; RVar d; s[m, l] = where(l <= m, rdot(Q[m, d], K[l, d], d), -inf); p[m, l] = exp(s[m, l]) / rsum(exp(s[m, l]), l); f[m, n] = rdot(p[m, l], V[l, n], l);",
        lambda Q, K, V: torch.softmax((Q @ K.T).masked_fill(torch.ones(9, 9).triu(1) > 0, -torch.inf), -1) @ V, {"Q": (9, 5), "K": (9, 5), "V": (9, 3)}),
    "cosine attention": (
        "Func a, b, s, t, f; In Q, K, V; Var m, n; RVar l, d, e; a[m, d] = Q[m, d] * rsqrt(rsum(Q[m, e] * Q[m, e], e)); b[l, d] = K[l, d] / sqrt(rsum(K[l, d] * K[l, d], d));"
        " s[m, l] = exp(4 * rdot(a[m, d], b[l, d], d)); t[m] = rsum(s[m, l], l); f[m, n] = rdot(s[m, l], V[l, n], l) / t[m];",
        cosine_attention, {"Q": (7, 5), "K": (9, 5), "V": (9, 3)}),
    "contrastive loss": (
        "Func s, f; In A, B; Var i, j; RVar d; s[i, j] = 2 * rdot(A[i, d], B[j, d], d); f[] = rmean(log(rsum(exp(s[i, j]), j)) - s[i, i], i);",
        lambda A, B: F.cross_entropy(2 * A @ B.T, torch.arange(len(A))), {"A": (7, 5), "B": (7, 5)}),
    "pairwise sigmoid loss": (
        "Func s, f; In A, B; Var i, j; RVar d; s[i, j] = where(i == j, 1, -1) * rdot(A[i, d], B[j, d], d); f[] = rsum(log1p(exp(-s[i, j])), i, j) / len(i);",
        lambda A, B: -F.logsigmoid((2 * torch.eye(7) - 1) * (A @ B.T)).sum() / 7, {"A": (7, 5), "B": (7, 5)}),
    "largest similarities": ("Func f; In A, B; Var b; RVar i, j, k; f[b] = rsum(rmax(rdot(A[b, i, k], B[b, j, k], k), j), i);", lambda A, B: (A @ B.mT).amax(-1).sum(-1), {"A": (2, 4, 5), "B": (2, 6, 5)}),
    "covariance": ("Func m, f; In X; Var i, j; RVar n; m[i] = rmean(X[n, i], n); f[i, j] = rsum((X[n, i] - m[i]) * (X[n, j] - m[j]), n) / (len(n) - 1);", lambda X: torch.cov(X.T), {"X": (9, 5)}),
    "bilinear form": ("Func f; In X, W, Y; Var b, o; RVar i, j; f[b, o] = rsum(X[b, i] * W[o, i, j] * Y[b, j], i, j);", lambda X, W, Y: torch.einsum("bi,oij,bj->bo", X, W, Y), {"X": (5, 4), "W": (3, 4, 6), "Y": (5, 6)}),
    "kernel regression": (
        "Func w, f; In X, C, Y; Var n, o; RVar m, d; w[n, m] = exp(-rsum((X[n, d] - C[m, d]) * (X[n, d] - C[m, d]), d)); f[n, o] = rsum(w[n, m] * Y[m, o], m) / rsum(w[n, m], m);",
        kernel_regression, {"X": (5, 4), "C": (7, 4), "Y": (7, 3)}),
    "mean of a kernel": ("Func k, f; In X, Y; RVar i, j, d; k[i, j] = exp(-rsum((X[i, d] - Y[j, d]) * (X[i, d] - Y[j, d]), d)); f[] = rmean(k[i, j], i, j);", lambda X, Y: torch.exp(-((X[:, None] - Y) ** 2).sum(-1)).mean(), {"X": (5, 3), "Y": (7, 3)}),
    "a product twice": ("Func f; In X, W; Var n, o; RVar i; f[n, o] = tanh(rdot(X[n, i], W[o, i], i)) * sigmoid(rdot(X[n, i], W[o, i], i));", lambda X, W: torch.tanh(X @ W.T) * torch.sigmoid(X @ W.T), {"X": (5, 4), "W": (6, 4)}),
    "norm by groups of an index": (
        "Func m, f; In X; Var n, c; RVar k; Extent k = 8; m[n, c] = rmean(X[n, c / 8 * 8 + k] * X[n, c / 8 * 8 + k], k); f[n, c] = X[n, c] * rsqrt(m[n, c] + 0.01);", fake_quantise, {"X": (3, 24)}),
    "transposed convolution in two dimensions": (
        "Func f; In X, W; Var b, o, y, x; RVar c, r, s; Extent y = 2 * X[2]; Extent x = 2 * X[3];"
        " f[b, o, y, x] = rdot(where((y - r) % 2 == 0 and (x - s) % 2 == 0, X[b, c, (y - r) / 2, (x - s) / 2], 0), W[c, o, r, s], c, r, s);",
        lambda X, W: F.conv_transpose2d(X, W, stride=2), {"X": (2, 3, 4, 5), "W": (3, 2, 2, 2)}),
    "labels of one name, one inside the other": ("Func f; In A; Var x; RVar y; f[x] = rsum(exp(A[x, y] - rmax(A[x, y], y)), y);", lambda A: torch.exp(A - A.amax(-1, keepdim=True)).sum(-1), {"A": (4, 9)}),
    "selective scan": (
        "Func h, f; In D, A, B, C; Var t, d, n; h[t, d, n] = rrecur(exp(-abs(D[t, d] * A[d, n])), D[t, d] * B[t, n], t); f[t, d] = rsum(h[t, d, n] * C[t, n], n);", None, {"D": (9, 5), "A": (5, 3), "B": (9, 3), "C": (9, 3)}),
}  # fmt: skip


def selective_scan(D, A, B, C):
    h, rows = torch.zeros_like(A), []
    for d, b, c in zip(D, B, C, strict=True):
        h = torch.exp(-(d[:, None] * A).abs()) * h + d[:, None] * b
        rows.append((h * c).sum(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name, tmp_path):
    text, truth, shapes = FORMS[name]
    op = f"lines_{list(FORMS).index(name)}"
    path = tmp_path / "form.yaml"
    path.write_text(f"op: {op}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    fn, generator = dtkernels.register(path), torch.Generator().manual_seed(0)
    given = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    ours, exact = ({n: t.clone().to(dtype).requires_grad_() for n, t in given.items()} for dtype in (torch.float32, torch.float64))
    got, want = fn(**ours), (truth or selective_scan)(*exact.values())
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=2e-5)
    adjoint = torch.randn(got.shape, generator=generator)
    found, wanted = torch.autograd.grad(got, list(ours.values()), adjoint), torch.autograd.grad(want, list(exact.values()), adjoint.double())
    for n, a, b in zip(shapes, found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=2e-5 * max(b.abs().max().item(), 1), msg=lambda m, n=n: f"d_{n}: {m}")
    assert dtkernels.paths()[op]["interpreter"] == dtkernels.paths()[f"{op} backward"]["interpreter"] == 1
