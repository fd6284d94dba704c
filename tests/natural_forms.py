"""Programs as mathematics has them: in one line, with names of their own for what is summed over, nothing named that need not be."""

from __future__ import annotations

import torch

Q, K, V = (3, 20, 16), (3, 300, 16), (3, 300, 32)
WIDE = {"A": (20, 16), "B": (16, 300)}
HELD = {"A": (50, 40), "B": (40, 33)}


def retain(Q, K, V, g):
    near = torch.arange(Q.shape[1])[:, None] - torch.arange(K.shape[1])
    return torch.where(near >= 0, (Q @ K.mT) * torch.exp(-0.05 * (g * g)[:, None, None] * near.clamp_min(0)), 0) @ V


def attend(Q, K, V):
    return torch.softmax(Q @ K.mT, -1) @ V


#: name -> (algorithm, in torch, shapes of its inputs, factor that brings scores beyond what exp can take unshifted)
FORMS = {
    "softmax, its own label": ("Func f, t; In A; Var x, y; RVar z; t[x] = rsum(exp(A[x, z]), z); f[x, y] = exp(A[x, y]) / t[x];", lambda A: torch.softmax(A, -1), {"A": (7, 300)}, 50),
    "softmax in a line": ("Func f; In A; Var x, y; RVar z; f[x, y] = exp(A[x, y]) / rsum(exp(A[x, z]), z);", lambda A: torch.softmax(A, -1), {"A": (7, 300)}, 50),
    "safe softmax in a line": (
        "Func f; In A; Var x, y; RVar z, w, v; f[x, y] = exp(A[x, y] - rmax(A[x, z], z)) / rsum(exp(A[x, w] - rmax(A[x, v], v)), w);",
        lambda A: torch.softmax(A, -1), {"A": (7, 300)}, 50),
    "layer norm in a line": (
        "Func f; In A, w; Var x, y; RVar z, u, v; f[x, y] = (A[x, y] - rmean(A[x, z], z)) * rsqrt(rmean((A[x, u] - rmean(A[x, v], v)) * (A[x, u] - rmean(A[x, v], v)), u) + 0.00001) * w[y];",
        lambda A, w: torch.nn.functional.layer_norm(A, A.shape[-1:], w), {"A": (7, 300), "w": (300,)}, 1),
    "attention in a line": (
        "Func f; In Q, K, V; Var b, m, d; RVar l, j, k; f[b, m, d] = rdot(exp(rdot(Q[b, m, k], K[b, l, k], k)), V[b, l, d], l) / rsum(exp(rdot(Q[b, m, k], K[b, j, k], k)), j);",
        attend, {"Q": Q, "K": K, "V": V}, 12),
    "attention with a named sum": (
        "Func t, f; In Q, K, V; Var b, m, d; RVar l, k; t[b, m] = rsum(exp(rdot(Q[b, m, k], K[b, l, k], k)), l); f[b, m, d] = rdot(exp(rdot(Q[b, m, k], K[b, l, k], k)), V[b, l, d], l) / t[b, m];",
        attend, {"Q": Q, "K": K, "V": V}, 12),
    "weights of attention": ("Func t, f; In A, B; Var m, j; RVar l, k; t[m] = rsum(exp(rdot(A[m, k], B[k, l], k)), l); f[m, j] = exp(rdot(A[m, k], B[k, j], k)) / t[m];",
        lambda A, B: torch.softmax(A @ B, -1), WIDE, 12),
    "gates of experts": ("Func f; In A, B; Var m, l; RVar k, z; f[m, l] = exp(rdot(A[m, k], B[k, l], k)) / rsum(exp(rdot(A[m, k], B[k, z], k)), z);",
        lambda A, B: torch.softmax(A @ B, -1), HELD, 12),
    "softmax down columns": ("Func t, f; In A, B; Var m, l; RVar k; t[l] = rsum(exp(rdot(A[m, k], B[k, l], k)), m); f[m, l] = exp(rdot(A[m, k], B[k, l], k)) / t[l];",
        lambda A, B: torch.softmax(A @ B, 0), WIDE, 12),
    "logarithm of a sum": ("Func f; In A, B; Var m; RVar l, k; f[m] = log(rsum(exp(rdot(A[m, k], B[k, l], k)), l));", lambda A, B: torch.logsumexp(A @ B, -1), WIDE, 12),
    "norm of a product": ("Func f; In A, B; Var m, l; RVar k, z; f[m, l] = rdot(A[m, k], B[k, l], k) * rsqrt(rmean(rdot(A[m, k], B[k, z], k) * rdot(A[m, k], B[k, z], k), z) + 0.001);",
        lambda A, B: torch.nn.functional.rms_norm(A @ B, (B.shape[1],), eps=0.001), WIDE, 1),
    "rows by the sum of others": (
        "Func t, f; In A, W; Var b, x; RVar z; t[b] = rsum(W[b, z], z); f[b, x] = A[b, x] * t[b];", lambda A, W: A * W.sum(1, keepdim=True), {"A": (5, 1000), "W": (5, 77)}, 1),
    "softmax down columns of what is given": ("Func t, f; In A; Var x, y; t[y] = rsum(exp(A[x, y]), x); f[x, y] = exp(A[x, y]) / t[y];", lambda A: torch.softmax(A, 0), {"A": (300, 20)}, 50),
    "softmax down short columns": ("Func t, f; In A; Var b, x, y; t[b, y] = rsum(exp(A[b, x, y]), x); f[b, x, y] = exp(A[b, x, y]) / t[b, y];", lambda A: torch.softmax(A, 1), {"A": (3, 40, 20)}, 50),
    "columns without their mean": ("Func f; In A; Var x, y; RVar z; f[x, y] = A[x, y] - rmean(A[z, y], z);", lambda A: A - A.mean(0), {"A": (300, 20)}, 1),
    "a convolution": ("Func f; In A, W, z; Var b, o, x; RVar c, k; f[b, o, x] = rdot(A[b, c, x + k], W[o, c, k], c, k) + z[x];",
        lambda A, W, z: torch.nn.functional.conv1d(A, W) + z, {"A": (3, 20, 304), "W": (16, 20, 5), "z": (300,)}, 1),
    "a convolution of each channel": ("Func f; In A, W, z; Var b, c, x; RVar k; f[b, c, x] = rsum(A[b, c, k + x] * W[c, k], k) + z[x];",
        lambda A, W, z: torch.nn.functional.conv1d(A, W[:, None], groups=len(W)) + z, {"A": (3, 20, 304), "W": (20, 5), "z": (300,)}, 1),
    "a gated pair of layers": ("Func h, f; In X, W, G, U; Var x, y; RVar k, j; h[x, j] = rdot(X[x, k], W[k, j], k) * sigmoid(rdot(X[x, k], G[k, j], k)); f[x, y] = rdot(h[x, j], U[j, y], j);",
        lambda X, W, G, U: ((X @ W) * torch.sigmoid(X @ G)) @ U, {"X": (50, 40), "W": (40, 300), "G": (40, 300), "U": (300, 40)}, 1),
    "a product as a sum": ("Func f; In A, B; Var x, y; RVar k; f[x, y] = rsum(A[x, k] * B[k, y], k);", lambda A, B: A @ B, {"A": (50, 40), "B": (40, 33)}, 1),
    "all distances": ("Func f; In A, B; Var x, y; RVar k; f[x, y] = sqrt(rsum((A[x, k] - B[y, k]) * (A[x, k] - B[y, k]), k));",
        lambda A, B: ((A[:, None] - B) ** 2).sum(-1).sqrt(), {"A": (50, 33), "B": (20, 33)}, 1),
    "distances in a batch": ("Func f; In A, B; Var b, x, y; RVar k; f[b, x, y] = rsum(abs(A[b, x, k] - B[b, y, k]), k);",
        lambda A, B: (A[:, :, None] - B[:, None]).abs().sum(-1), {"A": (3, 50, 33), "B": (3, 20, 33)}, 1),
    "retention": (
        "Func f; In Q, K, V, g; Var b, m, d; RVar l, k; f[b, m, d] = rdot(where(l <= m, rdot(Q[b, m, k], K[b, l, k], k) * exp(0.05 * g[b] * g[b] * (l - m)), 0), V[b, l, d], l);",
        retain, {"Q": (3, 300, 16), "K": K, "V": V, "g": (3,)}, 1),
    "a weighted covariance": ("Func f; In X, w; Var i, j; RVar n; f[i, j] = rsum(w[n] * X[n, i] * X[n, j], n);", lambda X, w: X.T @ (w[:, None] * X), {"X": (300, 20), "w": (300,)}, 1),
    "two vectors and a matrix": ("Func f; In X, W, Y; Var b; RVar i, j; f[b] = rsum(X[b, i] * rsum(W[i, j] * Y[b, j], j), i);",
        lambda X, W, Y: ((X @ W) * Y).sum(-1), {"X": (50, 40), "W": (40, 33), "Y": (50, 33)}, 1),
}  # fmt: skip
