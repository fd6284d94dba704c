"""Specs that are differentiated: their text, and what it means in torch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


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


def crossing(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    s, k = torch.meshgrid(*map(torch.arange, B.shape), indexing="ij")
    i, j = s + k - 2, s - k + 1
    inside = (i >= 0) & (i < len(A)) & (j >= 0) & (j < A.shape[1])
    return torch.where(inside, A[i.clamp(0, len(A) - 1), j.clamp(0, A.shape[1] - 1)], 0) * B


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
    "all_cosines": Spec("""Func a, b, y; In A, B; Var x, z; RVar k; a[x] = rdot(A[x, k], A[x, k], k);  b[z] = rdot(B[z, k], B[z, k], k);
        y[x, z] = rdot(A[x, k], B[z, k], k) * rsqrt(a[x] * b[z]);""", lambda A, B: F.normalize(A) @ F.normalize(B).T, {"A": (9, 17), "B": (7, 17)}, terms=4.0),
    "cosines_of_one_matrix": Spec("""Func a, y; In A; Var x, z; RVar k; a[x] = rdot(A[x, k], A[x, k], k);
        y[x, z] = rdot(A[x, k], A[z, k], k) * rsqrt(a[x]) * rsqrt(a[z]);""", lambda A: F.normalize(A) @ F.normalize(A).T, {"A": (9, 17)}, terms=4.0),
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
    "labels_that_two_sums_share": Spec("Func y; In A, B, w; Var x; RVar k; Extent x = A[0]; y[x] = rsum(A[x + k] * w[k], k) * rsum(B[x - k] * w[k], k);",
        lambda A, B, w: F.conv1d(F.pad(A, (0, 3))[None, None], w[None, None])[0, 0] * F.conv1d(F.pad(B, (3, 0))[None, None], w.flip(0)[None, None])[0, 0],
        {"A": (11,), "B": (11,), "w": (4,)}),
    "strided_product": Spec("""Func y; In A, W, z; Var b, o, x; RVar c, k; y[b, o, x] = rdot(A[b, c, 2 * x + k - 2], W[o, c, k], c, k) + z[x];""",
        lambda A, W, z: F.conv1d(A, W, stride=2, padding=2) + z, {"A": (2, 5, 13), "W": (6, 5, 5), "z": (7,)}, terms=4.0),
    "image": Spec("""Func y; In A, W, z; Var x, v; RVar i, j; y[x, v] = rsum(A[2 * x + i - 1, v * 3 - 1 + j] * W[i, j], i, j) + z[x, v];""",
        lambda A, W, z: F.conv2d(A[None, None], W[None, None], stride=(2, 3), padding=1)[0, 0] + z, {"A": (9, 11), "W": (3, 3), "z": (5, 4)}),
    "crossing": Spec("Func y; In A, B; Var s, k; y[s, k] = A[s + k - 2, s - k + 1] * B[s, k];", crossing, {"A": (9, 8), "B": (7, 5)}),
    "rolled_rows": Spec("Func y; In A, w; Var s, c; Extent s = A[0]; y[s, c] = exp(A[(s + 2 - c) % len(s), c]) * w[s];",
        lambda A, w: torch.stack([A[:, c].exp().roll(c - 2) for c in range(A.shape[1])], 1) * w[:, None], {"A": (9, 4), "w": (9,)}),
    "pairs_of_labels_of_constant_extent": Spec("""Func g, y; In A; Var r, s; Extent r = 3; Extent s = 3;
        g[r] = A[2 * r] * A[2 * r + 1];  y[r, s] = g[s] * A[r + s];""",
        lambda A: (A[0::2] * A[1::2]) * A.unfold(0, 3, 1)[:3], {"A": (6,)}),
    "a_product_of_a_cast_input": Spec("""Func p, y; In A, B; Var m, n; RVar k;
        p[m, n] = rdot(cast(A[m, k], fp32), B[k, n], k);  y[m, n] = p[m, n] * p[m, n];""", lambda A, B: (A @ B) ** 2, {"A": (9, 17), "B": (17, 20)}),
    "packed_glu": Spec("Func y; In A, w; Var x, c; Extent c = w[0]; y[x, c] = A[x, c + 0] * sigmoid(A[x, c + len(c)]) * w[c];",
        lambda A, w: A[:, : len(w)] * torch.sigmoid(A[:, len(w) :]) * w, {"A": (5, 34), "w": (17,)}),
    "gates_of_one_product": Spec("""Func i, f, o, y; In X, W, c, h; Var m, n; RVar k;
        i[m, n] = sigmoid(rdot(X[m, k], W[n + len(n), k], k) + h[m, n] + c[n + len(n)]);  f[m, n] = tanh(h[m, n] * rdot(X[m, k], W[n + 0, k], k) + c[n + 0]);
        o[m, n] = rdot(X[m, k], W[n + 2 * len(n), k], k) * c[n + 2 * len(n)];  y[m, n] = i[m, n] * f[m, n] + o[m, n] * h[m, n];""",
        lambda X, W, c, h: torch.sigmoid((X @ W.T)[:, 7:14] + h + c[7:14]) * torch.tanh(h * (X @ W.T)[:, :7] + c[:7]) + (X @ W.T)[:, 14:21] * c[14:] * h,
        {"X": (9, 17), "W": (23, 17), "c": (21,), "h": (9, 7)}),
    "huber": Spec("Func y; In A; SIn d; Var x; y[x] = where(abs(A[x]) <= d, 0.5 * A[x] * A[x], d * (abs(A[x]) - 0.5 * d));",
        lambda A, d: torch.where(A.abs() <= d, 0.5 * A * A, d * (A.abs() - 0.5 * d)), {"A": (40,)}, (("d", 0.7),)),
    "functions": Spec("""Func y; In A, B; Var x;
        y[x] = exp2(A[x]) + log2(1 + A[x] * A[x]) * sqrt(2 + B[x]) - minimum(A[x], B[x]) / maximum(3 + A[x], B[x]) + rsqrt(5 + A[x]);""",
        lambda A, B: torch.exp2(A) + torch.log2(1 + A * A) * torch.sqrt(2 + B)
        - torch.minimum(A, B) / torch.maximum(3 + A, B) + torch.rsqrt(5 + A),
        {"A": (40,), "B": (40,)}),
    "tucker": Spec("Func y; In G, A, B, C; Var i, j, k; RVar a, b, c; y[i, j, k] = rsum(G[a, b, c] * A[i, a] * B[j, b] * C[k, c], a, b, c);",
        lambda G, A, B, C: torch.einsum("abc,ia,jb,kc->ijk", G, A, B, C), {"G": (3, 4, 2), "A": (5, 3), "B": (7, 4), "C": (9, 2)}, terms=8.0),
    "retention": Spec("""Func y; In Q, K, V, g; Var b, h, m, n; RVar l, d;
        y[b, h, m, n] = rdot(where(l <= m, rdot(Q[b, h, m, d], K[b, h, l, d], d) * exp2(-abs(g[h]) * (m - l)), 0), V[b, h, l, n], l);""",
        lambda Q, K, V, g: (torch.exp2(-g.abs()[:, None, None] * (torch.arange(19)[:, None] - torch.arange(19))).tril() * (Q @ K.mT)) @ V,
        {"Q": (2, 2, 19, 9), "K": (2, 2, 19, 9), "V": (2, 2, 19, 11), "g": (2,)}, terms=8.0),
    "forces": Spec("""Func r, y; In P, m; Var i, c; RVar j, e;
        r[i, j] = rsum(pow(P[j, e] - P[i, e], 2), e) + 0.5;
        y[i, c] = rsum(m[j] * (P[j, c] - P[i, c]) * pow(r[i, j], -1.5), j);""",
        lambda P, m: (m[None, :, None] * (P[None] - P[:, None]) * (((P[None] - P[:, None]) ** 2).sum(-1, keepdim=True) + 0.5) ** -1.5).sum(1),
        {"P": (23, 3), "m": (23,)}, terms=8.0),
}  # fmt: skip
