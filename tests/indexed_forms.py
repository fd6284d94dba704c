# ruff: noqa: E501 (programs read best on one line)
"""Programs that read one dimension by two labels, or two dimensions by one: gathered elements, and diagonals."""

import torch


def index(below: int, *shape: int) -> tuple:
    """An input of integers from 0 to below."""
    return ("index", below, *shape)


def routed(s, b):
    w = (s + b).sigmoid().gather(1, torch.topk(s + b, 2, -1).indices)
    return w / w.sum(-1, keepdim=True)


def contrast(s):
    return torch.logsumexp(s, -1) - s.diagonal()


#: name -> (algorithm, in torch, shapes of its inputs, shapes in use)
FORMS = {
    "router": (  # the gradient reads the saved places in an index
        "Func p, w, n, f; In S, B; Var y, z; RVar u; Extent z = 2; p[y, z] = rargtopk(S[y, u] + B[u], u, z); w[y, z] = sigmoid(S[y, p[y, z]] + B[p[y, z]]); n[y] = rsum(w[y, z], z); f[y, z] = w[y, z] / n[y];",
        lambda S, B: routed(S, B),
        {"S": (37, 20), "B": (20,)},
        {"S": (4096, 64), "B": (64,)},
    ),
    "infonce": (
        "Func s, f; In A, B; Var m, l; RVar k; s[m, l] = rdot(A[m, k], B[l, k], k); f[m] = log(rsum(exp(s[m, l]), l)) - s[m, m];",
        lambda A, B: contrast(A @ B.T),
        {"A": (37, 20), "B": (37, 20)},
        {"A": (1024, 512), "B": (1024, 512)},
    ),
    "clip": (
        "Func s, f; In A, B; Var m, l; RVar k; s[m, l] = rdot(A[m, k], B[l, k], k); f[m] = log(rsum(exp(s[m, l]), l)) + log(rsum(exp(s[l, m]), l)) - 2 * s[m, m];",
        lambda A, B: contrast(A @ B.T) + contrast(B @ A.T),
        {"A": (37, 20), "B": (37, 20)},
        {"A": (1024, 512), "B": (1024, 512)},
    ),
    "diag": (
        "Func s, f; In A, B; Var m, l; RVar k; s[m, l] = rdot(A[m, k], B[l, k], k); f[m] = s[m, m];",
        lambda A, B: (A @ B.T).diagonal(),
        {"A": (37, 20), "B": (37, 20)},
        {"A": (1024, 512), "B": (1024, 512)},
    ),
    "trace": (
        "Func s, f; In A, B; Var m, l; RVar k; s[m, l] = rdot(A[m, k], B[l, k], k); f[] = rsum(s[m, m], m);",
        lambda A, B: (A @ B.T).trace(),
        {"A": (37, 20), "B": (37, 20)},
        {"A": (1024, 512), "B": (1024, 512)},
    ),
    "mean_loss": (
        "Func s, h, f; In A, B; RVar m, l; RVar k; s[m, l] = rdot(A[m, k], B[l, k], k); h[m] = log(rsum(exp(s[m, l]), l)) - s[m, m]; f[] = rmean(h[m], m);",
        lambda A, B: contrast(A @ B.T).mean(),
        {"A": (37, 20), "B": (37, 20)},
        {"A": (1024, 512), "B": (1024, 512)},
    ),
    "adiag": (
        "Func f; In A, q; Var m; f[m] = A[m, m] * q[m];",
        lambda A, q: A.diagonal() * q,
        {"A": (37, 37), "q": (37,)},
        {"A": (4096, 4096), "q": (4096,)},
    ),
    "atrace": (
        "Func f; In A; RVar m; f[] = rsum(A[m, m], m);",
        lambda A: A.trace(),
        {"A": (37, 37)},
        {"A": (4096, 4096)},
    ),
    "softmaxdiag": (
        "Func f; In A; Var m; RVar l; f[m] = exp(A[m, m]) / rsum(exp(A[m, l]), l);",
        lambda A: torch.softmax(A, -1).diagonal(),
        {"A": (37, 37)},
        {"A": (4096, 4096)},
    ),
    "nodiag": (
        "Func f; In A; Var m, l; f[m, l] = A[m, l] - A[m, m] - A[l, l];",
        lambda A: A - A.diagonal()[:, None] - A.diagonal()[None],
        {"A": (37, 37)},
        {"A": (4096, 4096)},
    ),
    "dist": (
        "Func s, f; In A; Var m, l; RVar k; s[m, l] = rdot(A[m, k], A[l, k], k); f[m, l] = s[m, m] + s[l, l] - 2 * s[m, l];",
        lambda A: ((A[:, None] - A) ** 2).sum(-1),
        {"A": (37, 20)},
        {"A": (1024, 512)},
    ),
    "bdiag1": (
        "Func s, f; In A, B; Var m, l, b; RVar k; s[m, l, b] = rdot(A[b, m, k], B[b, l, k], k); f[m, b] = s[m, m, b];",
        lambda A, B: (A @ B.mT).diagonal(dim1=1, dim2=2).T,
        {"A": (3, 37, 20), "B": (3, 37, 20)},
        {"A": (16, 1024, 128), "B": (16, 1024, 128)},
    ),
    "bdiag2": (
        "Func s, f; In A, B; Var m, l, b; RVar k; s[b, m, l] = rdot(A[b, m, k], B[b, l, k], k); f[b, m] = log(rsum(exp(s[b, m, l]), l)) - s[b, m, m];",
        lambda A, B: torch.logsumexp(A @ B.mT, -1) - (A @ B.mT).diagonal(dim1=1, dim2=2),
        {"A": (3, 37, 20), "B": (3, 37, 20)},
        {"A": (16, 1024, 128), "B": (16, 1024, 128)},
    ),
    "diagscale": (
        "Func s, f; In A, B, C; Var m, n, l; RVar k, j; s[m, l] = rdot(A[m, k], B[l, k], k); f[m, n] = rdot(C[m, j] * s[j, j], C[n, j], j);",
        lambda A, B, C: (C * (A @ B.T).diagonal()) @ C.T,
        {"A": (37, 20), "B": (37, 20), "C": (37, 37)},
        {"A": (1024, 512), "B": (1024, 512), "C": (1024, 1024)},
    ),
    "diagmul": (
        "Func f; In A, B; Var m, n; RVar j; f[m, n] = rdot(A[m, j] * A[j, j], B[j, n], j);",
        lambda A, B: (A * A.diagonal()) @ B,
        {"A": (37, 37), "B": (37, 20)},
        {"A": (1024, 1024), "B": (1024, 512)},
    ),
    "aaprod": (
        "Func f; In A, B; Var m, n; RVar j; f[m, n] = rdot(A[m, m, j], B[j, n], j);",
        lambda A, B: torch.einsum("mmj,jn->mn", A, B),
        {"A": (17, 17, 20), "B": (20, 33)},
        {"A": (256, 256, 512), "B": (512, 512)},
    ),
    "bag": (
        "Func f; In W, t; Var b, c; RVar s; f[b, c] = rsum(W[t[b, s], c], s);",
        lambda W, t: W[t].sum(1),
        {"W": (11, 20), "t": index(11, 5, 13)},
        {"W": (50000, 512), "t": index(50000, 4096, 37)},
    ),
    "bagmean": (
        "Func f; In W, t; Var b, c; RVar s; f[b, c] = rmean(W[t[b, s], c], s);",
        lambda W, t: W[t].mean(1),
        {"W": (11, 20), "t": index(11, 5, 13)},
        {"W": (50000, 512), "t": index(50000, 4096, 37)},
    ),
    "bagmax": (
        "Func f; In W, t; Var b, c; RVar s; f[b, c] = rmax(W[t[b, s], c], s);",
        lambda W, t: W[t].amax(1),
        {"W": (11, 20), "t": index(11, 5, 13)},
        {"W": (50000, 512), "t": index(50000, 4096, 37)},
    ),
    "baglse": (
        "Func f; In W, t; Var b, c; RVar s; f[b, c] = log(rsum(exp(W[t[b, s], c]), s));",
        lambda W, t: W[t].logsumexp(1),
        {"W": (11, 20), "t": index(11, 5, 13)},
        {"W": (50000, 512), "t": index(50000, 4096, 37)},
    ),
    "bagw": (
        "Func f; In W, t, v; Var b, c; RVar s; f[b, c] = rsum(W[t[b, s], c] * v[b, s], s);",
        lambda W, t, v: (W[t] * v[..., None]).sum(1),
        {"W": (11, 20), "t": index(11, 5, 13), "v": (5, 13)},
        {"W": (50000, 512), "t": index(50000, 4096, 37), "v": (4096, 37)},
    ),
    "bagsq": (
        "Func f; In W, t; Var b, c; RVar s; f[b, c] = rsum(W[t[b, s], c] * W[t[b, s], c], s);",
        lambda W, t: (W[t] ** 2).sum(1),
        {"W": (11, 20), "t": index(11, 5, 13)},
        {"W": (50000, 512), "t": index(50000, 4096, 37)},
    ),
    "gdot": (
        "Func f; In A, B, t; Var b, c; RVar s; f[b, c] = rdot(A[t[s], c], B[t[s], b], s);",
        lambda A, B, t: B[t].T @ A[t],
        {"A": (11, 20), "B": (11, 33), "t": index(11, 37)},
        {"A": (5000, 512), "B": (5000, 512), "t": index(5000, 1000)},
    ),
    "gdot1": (
        "Func f; In A, B, t; Var b, c; RVar s; f[b, c] = rdot(A[t[s], c], B[b, s], s);",
        lambda A, B, t: B @ A[t],
        {"A": (11, 20), "B": (33, 37), "t": index(11, 37)},
        {"A": (5000, 512), "B": (512, 1000), "t": index(5000, 1000)},
    ),
    "grow": (
        "Func f; In A, B, t; Var m, n; RVar k; f[m, n] = rdot(A[t[m], k], B[k, n], k);",
        lambda A, B, t: A[t] @ B,
        {"A": (11, 20), "B": (20, 33), "t": index(11, 37)},
        {"A": (5000, 500), "B": (500, 512), "t": index(5000, 1000)},
    ),
    "gscore": (
        "Func f; In A, B, t, u; Var m, n; RVar k; f[m, n] = rdot(A[t[m], k], B[u[n], k], k);",
        lambda A, B, t, u: A[t] @ B[u].T,
        {"A": (11, 20), "B": (13, 20), "t": index(11, 37), "u": index(13, 19)},
        {"A": (5000, 500), "B": (512, 500), "t": index(5000, 1000), "u": index(512, 1000)},
    ),
    "counts": (
        "Func f; In t, q; Var b, c; RVar s; f[b, c] = q[c] * rsum(where(t[b, s] == c, 1, 0), s);",
        lambda t, q: q * torch.nn.functional.one_hot(t, 20).sum(1),
        {"t": index(20, 5, 13), "q": (20,)},
        {"t": index(512, 4096, 37), "q": (512,)},
    ),
    "nested": (
        "Func f; In W, u, t; Var b, c; RVar s; f[b, c] = rsum(W[u[t[b, s]], c], s);",
        lambda W, u, t: W[u[t]].sum(1),
        {"W": (11, 20), "u": index(11, 9), "t": index(9, 5, 13)},
        {"W": (50000, 512), "u": index(50000, 900), "t": index(900, 4096, 37)},
    ),
    "intw": (
        "Func f; In W, t; Var b, c; RVar s; f[b, c] = rsum(W[t[b, s], c] * t[b, s], s);",
        lambda W, t: (W[t] * t[..., None]).sum(1),
        {"W": (11, 20), "t": index(11, 5, 13)},
        {"W": (50000, 512), "t": index(50000, 4096, 37)},
    ),
    "attpos": (
        "Func s, e, z, f; In Q, K, V, W, t; Var m, n; RVar l, k; s[m, l] = rdot(Q[m, k], K[l, k], k) + W[t[l]]; e[m, l] = exp(s[m, l]); z[m] = rsum(e[m, l], l); f[m, n] = rdot(e[m, l], V[l, n], l) / z[m];",
        lambda Q, K, V, W, t: torch.softmax(Q @ K.T + W[t], -1) @ V,
        {"Q": (37, 16), "K": (45, 16), "V": (45, 20), "W": (11,), "t": index(11, 45)},
        {"Q": (4096, 128), "K": (4097, 128), "V": (4097, 128), "W": (11,), "t": index(11, 4097)},
    ),
    "attbias": (
        "Func s, e, z, f; In Q, K, V, W, t; Var m, n; RVar l, k; s[m, l] = rdot(Q[m, k], K[l, k], k) + W[t[m, l]]; e[m, l] = exp(s[m, l]); z[m] = rsum(e[m, l], l); f[m, n] = rdot(e[m, l], V[l, n], l) / z[m];",
        lambda Q, K, V, W, t: torch.softmax(Q @ K.T + W[t], -1) @ V,
        {"Q": (37, 16), "K": (45, 16), "V": (45, 20), "W": (11,), "t": index(11, 37, 45)},
        {"Q": (4096, 128), "K": (4097, 128), "V": (4097, 128), "W": (11,), "t": index(11, 4096, 4097)},
    ),
    "attpaged": (
        "Func s, e, z, f; In Q, K, V, t; Var m, n; RVar l, k; s[m, l] = rdot(Q[m, k], K[t[l], k], k); e[m, l] = exp(s[m, l]); z[m] = rsum(e[m, l], l); f[m, n] = rdot(e[m, l], V[t[l], n], l) / z[m];",
        lambda Q, K, V, t: torch.softmax(Q @ K[t].T, -1) @ V[t],
        {"Q": (37, 16), "K": (15, 16), "V": (15, 20), "t": index(15, 45)},
        {"Q": (4096, 128), "K": (5000, 128), "V": (5000, 128), "t": index(5000, 4097)},
    ),
}
