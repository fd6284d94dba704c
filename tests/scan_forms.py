# ruff: noqa: E501 (programs read best on one line)
"""Programs of scans: partial sums, products and extrema, linear recurrences, and models that are made of them."""

from __future__ import annotations

import torch


def recur(a, b, dim=-1):
    """h[t] = a[t] * h[t - 1] + b[t] along ``dim``."""
    h, steps = torch.zeros_like((a * b).select(dim, 0)), []
    for x, y in zip(a.unbind(dim), b.unbind(dim)):
        h = x * h + y
        steps.append(h)
    return torch.stack(steps, dim)


def mamba(D, A, B, C, X):
    """h[b,d,n,t] = exp(D[b,d,t] A[d,n]) h[.., t-1] + D[b,d,t] B[b,n,t] X[b,d,t]; y[b,d,t] = sum over n of h C[b,n,t]."""
    return torch.einsum("bdnt,bnt->bdt", recur(torch.exp(D[:, :, None] * A[None, :, :, None]), (D * X)[:, :, None] * B[:, None]), C)


def gla(Q, K, V, G):
    """Gated linear attention in recurrent form: S[t] = diag(sigmoid(G[t])) S[t-1] + K[t]^T V[t]; y[t] = Q[t] S[t]."""
    return torch.einsum("btk,btkv->btv", Q, recur(torch.sigmoid(G)[..., None].expand(*G.shape, V.shape[-1]), K[..., None] * V[:, :, None], 1))


ROWS = {"A": (5, 37)}
#: name -> (algorithm, in torch, shapes of its inputs)
FORMS = {
    "cumsum": ("Func f; In A; Var x, t; f[x, t] = rscan(sum, A[x, t], t);", lambda A: A.cumsum(1), ROWS),
    "cumsum from the end": ("Func f; In A; Var x, t; f[x, t] = rscan(sum, A[x, t], t, reversed);", lambda A: A.flip(1).cumsum(1).flip(1), ROWS),
    "exclusive cumsum": ("Func f; In A; Var x, t; f[x, t] = rscan(sum, A[x, t], t, exclusive);", lambda A: A.cumsum(1) - A, ROWS),
    "exclusive cumprod from the end": ("Func f; In A; Var x, t; f[x, t] = rscan(prod, A[x, t], t, exclusive, reversed);",
        lambda A: torch.cat([A.flip(1).cumprod(1).flip(1)[:, 1:], torch.ones_like(A[:, :1])], 1), {"A": (5, 13)}),
    "cumprod": ("Func f; In A; Var x, t; f[x, t] = rscan(prod, A[x, t], t);", lambda A: A.cumprod(1), {"A": (5, 13)}),
    "cummax": ("Func f; In A; Var x, t; f[x, t] = rscan(max, A[x, t], t);", lambda A: A.cummax(1).values, ROWS),
    "cummin from the end": ("Func f; In A; Var x, t; f[x, t] = rscan(min, A[x, t], t, reversed);", lambda A: A.flip(1).cummin(1).values.flip(1), ROWS),
    "down columns": ("Func f; In A; Var t, x; f[t, x] = rscan(sum, A[t, x], t);", lambda A: A.cumsum(0), {"A": (37, 21)}),
    "one row": ("Func f; In A; Var t; f[t] = rscan(sum, A[t] * A[t], t);", lambda A: (A * A).cumsum(0), {"A": (5000,)}),
    "inside an expression": ("Func f; In A, B; Var x, t; f[x, t] = B[x, t] / (1 + exp(rscan(sum, tanh(A[x, t]), t)));", lambda A, B: B / (1 + A.tanh().cumsum(1).exp()), {"A": (5, 13), "B": (5, 13)}),
    "logcumsumexp": ("Func m, f; In A; Var x, t; m[x] = rmax(A[x, t], t); f[x, t] = m[x] + log(rscan(sum, exp(A[x, t] - m[x]), t));", lambda A: A.logcumsumexp(1), ROWS),
    "integral image": ("Func f; In A; Var y, x; f[y, x] = rscan(sum, rscan(sum, A[y, x], x), y);", lambda A: A.cumsum(0).cumsum(1), {"A": (19, 23)}),
    "first differences and back": ("Func d, f; In A; Var x, t; d[x, t] = A[x, t] - A[x, t - 1]; f[x, t] = rscan(sum, d[x, t], t);", lambda A: A * 1, ROWS),
    "sum of partial sums": ("Func f; In A; Var x; RVar t; f[x] = rsum(rscan(sum, A[x, t], t) * A[x, t], t);", lambda A: (A.cumsum(1) * A).sum(1), ROWS),
    "deepest fall": ("Func v, f; In A; Var x; RVar t; v[x, t] = rscan(sum, A[x, t], t); f[x] = rmax(rscan(max, v[x, t], t) - v[x, t], t);",
        lambda A: (A.cumsum(1).cummax(1).values - A.cumsum(1)).amax(1), ROWS),
    "both ways": ("Func f; In A, B; Var x, t; f[x, t] = rrecur(sigmoid(A[x, t]), B[x, t], t) * rrecur(sigmoid(B[x, t]), A[x, t], t, reversed) + rscan(min, A[x, t], t, reversed);",
        lambda A, B: recur(A.sigmoid(), B) * recur(B.sigmoid().flip(1), A.flip(1)).flip(1) + A.flip(1).cummin(1).values.flip(1), {"A": (5, 37), "B": (5, 37)}),
    "sum of both ways": ("Func f; In A; Var x; RVar t; f[x] = rsum(rscan(sum, A[x, t], t) * rscan(prod, A[x, t], t, reversed), t);",
        lambda A: (A.cumsum(1) * A.flip(1).cumprod(1).flip(1)).sum(1), {"A": (5, 13)}),
    "both ways along long rows": ("Func f; In A; Var x; RVar t; f[x] = rmax(rscan(sum, A[x, t], t) - rscan(sum, A[x, t], t, reversed), t);",
        lambda A: (A.cumsum(1) - A.flip(1).cumsum(1).flip(1)).amax(1), {"A": (2, 4200)}),
    "of sums": ("Func f; In A, B; Var x, t; RVar k; f[x, t] = rscan(sum, rdot(A[x, k], B[k, t], k), t);", lambda A, B: (A @ B).cumsum(1), {"A": (17, 24), "B": (24, 33)}),
    "recurrence": ("Func h; In A, B; Var x, t; h[x, t] = rrecur(sigmoid(A[x, t]), B[x, t], t);", lambda A, B: recur(A.sigmoid(), B), {"A": (5, 37), "B": (5, 37)}),
    "recurrence from the end": ("Func h; In A, B; Var t, x; h[t, x] = rrecur(A[t, x], B[t, x], t, reversed);", lambda A, B: recur(A.flip(0), B.flip(0), 0).flip(0), {"A": (11, 6), "B": (11, 6)}),
    "exponential average": ("Func h; In A; SIn w; Var x, t; h[x, t] = rrecur(w, (1 - w) * A[x, t], t);", lambda A, w: recur(w.expand(A.shape), (1 - w) * A), {"A": (5, 37), "w": ()}),
    "selective scan": (
        "Func h, y; In D, A, B, C, X; Var b, d, n, t; h[b, d, n, t] = rrecur(exp(D[b, d, t] * A[d, n]), D[b, d, t] * B[b, n, t] * X[b, d, t], t); y[b, d, t] = rsum(h[b, d, n, t] * C[b, n, t], n);",
        mamba, {"D": (2, 3, 9), "A": (3, 4), "B": (2, 4, 9), "C": (2, 4, 9), "X": (2, 3, 9)}),
    "gated linear attention": (
        "Func S, y; In Q, K, V, G; Var b, t, k, v; S[b, t, k, v] = rrecur(sigmoid(G[b, t, k]), K[b, t, k] * V[b, t, v], t); y[b, t, v] = rsum(Q[b, t, k] * S[b, t, k, v], k);",
        gla, {"Q": (2, 9, 4), "K": (2, 9, 4), "V": (2, 9, 5), "G": (2, 9, 4)}),
}  # fmt: skip
