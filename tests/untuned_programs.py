"""Programs that nobody tuned: no schedule, no table's row, so every kernel and gradient of them comes from the default schedule alone.

They are checked at small sizes in the interpreter (tests/cpu) and at larger ones on a GPU (tests/gpu), and timed by
benchmarks/untuned.py. What a pipeliner or a matrix instruction gets wrong shows on a GPU alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import untuned_forms as forms
import untuned_layers
import untuned_products
import untuned_rows
import untuned_science
from untuned_program import Untuned, along, of_attention

# Sizes that several share. Checked on a GPU: more blocks than multiprocessors, several steps of every loop, and sizes that nothing divides.
ROWS = dict(sizes=(dict(x=8192, y=4096),), checked=(dict(x=515, y=4096), dict(x=67, y=40003)), small=dict(x=7, y=301))
COLUMNS = dict(checked=(dict(x=8192, y=1024), dict(x=4099, y=333)), small=dict(x=301, y=37))
FLAT = dict(sizes=(dict(x=1 << 25),), checked=(dict(x=1_000_003),), small=dict(x=1000))
PRODUCTS = dict(sizes=(dict(x=4096, y=4096, k=4096),), checked=(dict(x=4096, y=4096, k=1024), dict(x=1000, y=3000, k=2000)),
                small=dict(x=70, y=45, k=83), products=along("x", "y", "k"))  # fmt: skip
GEMV = PRODUCTS | dict(checked=(dict(x=16, y=4096, k=4096), dict(x=1, y=3000, k=2001)), small=dict(x=5, y=45, k=83))
TAPS = dict(sizes=(dict(b=2, s=2048, c=4096, k=4),), checked=(dict(b=2, s=515, c=1024, k=4),), small=dict(b=2, s=37, c=18, k=4))
HEADS = dict(sizes=(dict(b=32, m=4096, l=4096, d=128, n=128),), checked=(dict(b=20, m=1024, l=1024, d=128, n=128), dict(b=3, m=777, l=777, d=64, n=64)),
             small=dict(b=2, m=150, l=150, d=16, n=16), products=of_attention)  # fmt: skip
XY, QKV = {"A": "xy"}, {"Q": "bmd", "K": "bld", "V": "bln"}
GELU = "0.5 * u[x, y] * (1 + tanh(0.7978845608028654 * (u[x, y] + 0.044715 * u[x, y] * u[x, y] * u[x, y])))"
DOT = "scale * rdot(Q[b, m, d], K[b, l, d], d)"
ONE_QUERY = (
    "Func s, e, t, out; In Q, K, V; SIn scale; Var b, h, n; RVar l, d; s[b, h, l] = scale * rdot(Q[b, h, d], K[b, {0}, l, d], d);"
    " e[b, h, l] = exp(s[b, h, l]); t[b, h] = rsum(e[b, h, l], l); out[b, h, n] = rdot(e[b, h, l], V[b, {0}, l, n], l) / t[b, h];"
)


def attention(declared: str, score: str) -> str:
    """Attention with the given score of a query and a key."""
    return (f"Func s, e, t, out; In Q, K, V{declared}; Var b, m, n; RVar l, d; s[b, m, l] = {score}; e[b, m, l] = exp(s[b, m, l]);"
            " t[b, m] = rsum(e[b, m, l], l); out[b, m, n] = rdot(e[b, m, l], V[b, l, n], l) / t[b, m];")  # fmt: skip


NORMS = {
    "log_softmax": Untuned(
        "Func t, out; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); out[x, y] = A[x, y] - log(t[x]);",
        lambda a: torch.log_softmax(a, -1), XY, **ROWS | dict(sizes=(*ROWS["sizes"], dict(x=4096, y=32000))), grad=("A",)),
    "masked_softmax": Untuned(
        "Func s, t, out; In A; SIn tau; Var b, x; RVar y; s[b, x, y] = where(y <= x, A[b, x, y] * (1 / tau), -inf);"
        "t[b, x] = rsum(exp(s[b, x, y]), y); out[b, x, y] = exp(s[b, x, y]) / t[b, x];",
        forms.masked_softmax, {"A": "bxy"}, (dict(b=32, x=2048, y=2048),), (dict(b=2, x=1024, y=1024), dict(b=3, x=333, y=333)), dict(b=2, x=33, y=33),
        scalars=(1.5,), grad=("A",)),
    "groupnorm": Untuned(
        "Func mean, var, out; In A, w, z; SIn eps; Var n, g; RVar c, s; mean[n, g] = rmean(A[n, g, c, s], c, s);"
        "var[n, g] = rmean((A[n, g, c, s] - mean[n, g]) * (A[n, g, c, s] - mean[n, g]), c, s);"
        "out[n, g, c, s] = (A[n, g, c, s] - mean[n, g]) * rsqrt(var[n, g] + eps) * w[g, c] + z[g, c];",
        forms.group_norm, {"A": "ngcs", "w": "gc", "z": "gc"}, (dict(n=8, g=32, c=10, s=4096), dict(n=8, g=32, c=40, s=256)),
        (dict(n=4, g=32, c=10, s=1024), dict(n=3, g=7, c=40, s=255)), dict(n=2, g=3, c=5, s=37), scalars=(1e-5,), dtypes=("fp16",), grad=("A", "w", "z")),
    "l2_normalise": Untuned(
        "Func out; In A; Var x, y; RVar z; out[x, y] = A[x, y] * rsqrt(rsum(A[x, z] * A[x, z], z) + 1e-12);",
        forms.l2_normalise, XY, **ROWS | dict(sizes=(dict(x=16384, y=1024), dict(x=262144, y=128))), grad=("A",)),
    "add_rmsnorm": Untuned(
        "Func h, sq, out; In A, R, w; SIn eps; Var x; RVar y; h[x, y] = A[x, y] + R[x, y]; sq[x] = rmean(h[x, y] * h[x, y], y);"
        "out[x, y] = h[x, y] * rsqrt(sq[x] + eps) * w[y]; h.compile(); out.compile();",
        forms.add_rms, {"A": "xy", "R": "xy", "w": "y"}, **ROWS, scalars=(1e-6,), grad=("A", "R", "w")),
    "mean_var": Untuned(
        "Func mean, out; In A; Var x; RVar y; mean[x] = rmean(A[x, y], y); out[x] = rmean((A[x, y] - mean[x]) * (A[x, y] - mean[x]), y);"
        "mean.compile(); out.compile();",
        forms.mean_var, XY, **ROWS | dict(sizes=(dict(x=8192, y=5120),)), dtypes=("fp32",)),
    "modulate": Untuned(
        "Func mean, var, out; In A, g, h; SIn eps; Var b, s; RVar y; mean[b, s] = rmean(A[b, s, y], y);"
        "var[b, s] = rmean((A[b, s, y] - mean[b, s]) * (A[b, s, y] - mean[b, s]), y);"
        "out[b, s, y] = (A[b, s, y] - mean[b, s]) * rsqrt(var[b, s] + eps) * (1 + g[b, y]) + h[b, y];",
        forms.modulate, {"A": "bsy", "g": "by", "h": "by"}, (dict(b=16, s=1024, y=3072),), (dict(b=3, s=515, y=3072),), dict(b=2, s=9, y=77),
        scalars=(1e-6,), grad=("A", "g", "h")),
    "kl": Untuned(
        "Func a, b, out; In S, T; Var x; RVar y; a[x] = rsum(exp(S[x, y]), y); b[x] = rsum(exp(T[x, y]), y);"
        "out[x] = rsum(exp(T[x, y]) / b[x] * (T[x, y] - log(b[x]) - S[x, y] + log(a[x])), y);",
        forms.divergence, {"S": "xy", "T": "xy"}, **ROWS | dict(sizes=(dict(x=4096, y=32000),)), grad=("S",)),
    "z_loss": Untuned(
        "Func out; In A; Var x; RVar y; out[x] = log(rsum(exp(A[x, y]), y)) * log(rsum(exp(A[x, y]), y));",
        lambda a: torch.logsumexp(a, -1) ** 2, XY, **ROWS | dict(sizes=(dict(x=4096, y=128256),)), grad=("A",)),
    "quantise_rows": Untuned(
        "Func s, out; In A; Var x; RVar y; s[x] = rmax(abs(A[x, y]), y) * 0.007874015748031496; out[x, y] = floor(A[x, y] / s[x] + 0.5);"
        "s.compile(); out.compile();",
        forms.quantise, XY, **ROWS, dtypes=("fp32",)),
}  # fmt: skip

SUMS = {
    "row_sum": Untuned(
        "Func out; In A; Var x; RVar y; out[x] = rsum(A[x, y], y);",
        lambda a: a.sum(-1), XY, **ROWS | dict(sizes=(dict(x=16384, y=8192), dict(x=32, y=4194304)))),
    "column_sum": Untuned(
        "Func out; In A; Var y; RVar x; out[y] = rsum(A[x, y], x);",
        lambda a: a.sum(0), XY, (dict(x=65536, y=1024), dict(x=8192, y=14336)), **COLUMNS),
    "column_max": Untuned(
        "Func out; In A; Var y; RVar x; out[y] = rmax(abs(A[x, y]), x);",
        lambda a: a.abs().amax(0), XY, (dict(x=16384, y=4096),), **COLUMNS),
    "total_norm": Untuned(
        "Func out; In A; RVar x, y; out[] = sqrt(rsum(A[x, y] * A[x, y], x, y));",
        forms.norm_of_all, XY, **ROWS | dict(sizes=(dict(x=16384, y=4096),))),
    "total_norm_yx": Untuned(
        "Func out; In A; RVar x, y; out[] = sqrt(rsum(A[x, y] * A[x, y], y, x));",
        forms.norm_of_all, XY, **ROWS | dict(sizes=(dict(x=16384, y=4096),))),
    "gemv_sum": Untuned(
        "Func out; In W, v; Var y; RVar k; out[y] = rsum(W[y, k] * v[k], k);",
        torch.mv, {"W": "yk", "v": "k"}, (dict(y=14336, k=4096),), (dict(y=4096, k=4096), dict(y=1001, k=3001)), dict(y=45, k=83)),
}  # fmt: skip

ELEMENTS = {
    "bias_gelu": Untuned(
        "Func u, out; In A, z; Var x, y; u[x, y] = A[x, y] + z[y]; out[x, y] = " + GELU + ";",
        lambda a, z: forms.gelu(a + z), {"A": "xy", "z": "y"}, **ROWS | dict(sizes=(dict(x=8192, y=11008),)), grad=("A", "z")),
    "outer": Untuned(
        "Func out; In u, v; SIn alpha; Var x, y; out[x, y] = alpha * u[x] * v[y];",
        lambda u, v, alpha: alpha * u[:, None] * v, {"u": "x", "v": "y"}, **ROWS | dict(sizes=(dict(x=8192, y=8192),)), scalars=(0.3,)),
    "transpose": Untuned(
        "Func out; In A; Var y, x; out[y, x] = A[x, y] * 2;",
        lambda a: (a * 2).mT.contiguous(), XY, **ROWS | dict(sizes=(dict(x=8192, y=8192),))),
    "heads_first": Untuned(
        "Func out; In A; Var b, h, s, d; out[b, h, s, d] = A[b, s, h, d] * 2;",
        lambda a: (a * 2).transpose(1, 2).contiguous(), {"A": "bshd"}, (dict(b=4, s=4096, h=32, d=128),), (dict(b=2, s=515, h=6, d=128),), dict(b=2, s=37, h=3, d=16)),
    "row_column": Untuned(
        "Func out; In A, r, c; Var x, y; out[x, y] = tanh(A[x, y] * r[x] + c[y]) * sigmoid(A[x, y] - c[y]) + r[x];",
        forms.row_column, {"A": "xy", "r": "x", "c": "y"}, **ROWS, grad=("A", "r", "c")),
    "mish": Untuned(
        "Func out; In A; Var x; out[x] = A[x] * tanh(maximum(A[x], 0) + log(1 + exp(-abs(A[x]))));",
        F.mish, {"A": "x"}, **FLAT, grad=("A",)),
    "adamw": Untuned(
        "Func m2, v2, out; In p, g, m, v; SIn lr, b1, b2, eps, wd; Var x; m2[x] = b1 * m[x] + (1 - b1) * g[x]; v2[x] = b2 * v[x] + (1 - b2) * g[x] * g[x];"
        "out[x] = p[x] * (1 - lr * wd) - lr * m2[x] / (sqrt(v2[x]) + eps); m2.compile(); v2.compile(); out.compile();",
        forms.adamw, {"p": "x", "g": "x", "m": "x", "v": "x"}, **FLAT, dtypes=("fp32",), scalars=(1e-3, 0.9, 0.99, 1e-8, 0.1), kinds={"v": "positive"}),
    "embed": Untuned(
        "Func out; In W, t, E; Var b, s, y; out[b, s, y] = W[t[b, s], y] + E[s, y];",
        lambda w, t, e: w[t] + e, {"W": "vy", "t": "bs", "E": "sy"}, (dict(v=32000, b=4, s=4096, y=4096),), (dict(v=32000, b=2, s=515, y=1024),),
        dict(v=50, b=2, s=9, y=33), kinds={"t": "index:v", "W": "table"}),
    "average3": Untuned(
        "Func out; In A; Var x, y; out[x, y] = (A[x, y - 1] + A[x, y] + A[x, y + 1]) / 3;",
        forms.average3, XY, **ROWS | dict(sizes=(dict(x=8192, y=8192),)), grad=("A",)),
    "depthwise4": Untuned(
        "Func u, out; In A, W, z; Var b, s, c; RVar k; u[b, s, c] = rsum(A[b, s + k - 3, c] * W[c, k], k) + z[c];"
        "out[b, s, c] = u[b, s, c] * sigmoid(u[b, s, c]); Extent s = A[1]; Extent k = 4;",
        forms.convolution_silu, {"A": "bsc", "W": "ck", "z": "c"}, **TAPS, grad=("A", "W", "z")),
    "depthwise4_minus": Untuned(
        "Func out; In A, W; Var b, s, c; RVar k; out[b, s, c] = rsum(A[b, s - k, c] * W[c, k], k); Extent s = A[1]; Extent k = 4;",
        forms.convolution_reversed, {"A": "bsc", "W": "ck"}, **TAPS, grad=("A", "W")),
    "rope_pairs": Untuned(
        "Func out; In A, c, s; Var b, h, m, d; out[b, h, m, d] = A[b, h, m, d] * c[m, d]"
        " + where(d % 2 == 0, -A[b, h, m, d + 1], A[b, h, m, d - 1]) * s[m, d];",
        forms.rope_pairs, {"A": "bhmd", "c": "md", "s": "md"}, (dict(b=4, h=32, m=4096, d=128),), (dict(b=2, h=6, m=515, d=128),), dict(b=2, h=3, m=17, d=16), grad=("A",)),
}  # fmt: skip

WITH_PRODUCTS = {
    "mm_bias_relu": Untuned(
        "Func out; In A, B, z; Var x, y; RVar k; out[x, y] = maximum(rdot(A[x, k], B[k, y], k) + z[y], 0);",
        lambda a, b, z: torch.relu(torch.addmm(z, a, b)), {"A": "xk", "B": "ky", "z": "y"},
        **PRODUCTS | dict(sizes=(*PRODUCTS["sizes"], dict(x=1000, y=3000, k=2000))), grad=("A", "B", "z")),
    "mm_bias_gelu": Untuned(
        "Func u, out; In A, W, z; Var x, y; RVar k; u[x, y] = rdot(A[x, k], W[y, k], k) + z[y]; out[x, y] = " + GELU + ";",
        lambda a, w, z: forms.gelu(F.linear(a, w, z)), {"A": "xk", "W": "yk", "z": "y"}, **PRODUCTS | dict(sizes=(dict(x=8192, y=14336, k=4096),))),
    "mm_residual": Untuned(
        "Func out; In R, A, W; Var x, y; RVar k; out[x, y] = R[x, y] + rdot(A[x, k], W[y, k], k);",
        lambda r, a, w: r + forms.linear(a, w), {"R": "xy", "A": "xk", "W": "yk"}, **PRODUCTS | dict(sizes=(dict(x=4096, y=4096, k=11008),))),
    "bmm": Untuned(
        "Func out; In A, B; Var b, x, y; RVar k; out[b, x, y] = rdot(A[b, x, k], B[b, k, y], k);",
        torch.bmm, {"A": "bxk", "B": "bky"}, (dict(b=64, x=2048, y=128, k=2048), dict(b=64, x=1024, y=1024, k=128)),
        (dict(b=8, x=1024, y=512, k=768), dict(b=3, x=500, y=300, k=777)), dict(b=2, x=70, y=45, k=83), products=along("b", "x", "y", "k")),
    "mm_nt": Untuned(
        "Func out; In A, B; Var x, y; RVar k; out[x, y] = rdot(A[x, k], B[y, k], k);",
        forms.linear, {"A": "xk", "B": "yk"}, **PRODUCTS | dict(sizes=(*PRODUCTS["sizes"], dict(x=2048, y=2048, k=2048))), dtypes=("fp16", "fp32")),
    "mm_tn": Untuned(
        "Func out; In A, B; Var x, y; RVar k; out[x, y] = rdot(A[k, x], B[k, y], k);",
        lambda a, b: a.mT @ b, {"A": "kx", "B": "ky"}, **PRODUCTS | dict(sizes=(dict(x=4096, y=4096, k=8192),))),
    "gemv": Untuned(
        "Func out; In A, W; Var x, y; RVar k; out[x, y] = rdot(A[x, k], W[y, k], k);",
        forms.linear, {"A": "xk", "W": "yk"}, **GEMV | dict(sizes=(dict(x=1, y=14336, k=4096), dict(x=16, y=4096, k=14336)), small=dict(x=1, y=45, k=83))),
    "gemv_int8": Untuned(
        "Func out; In A, W, s; Var x, y; RVar k; out[x, y] = s[y] * rdot(A[x, k], cast(W[y, k], bf16), k);",
        lambda a, w, s: forms.linear(a, w.to(a.dtype)) * s, {"A": "xk", "W": "yk", "s": "y"},
        **GEMV | dict(sizes=(dict(x=16, y=14336, k=4096), dict(x=4096, y=4096, k=4096)), checked=(*GEMV["checked"], *PRODUCTS["checked"])), kinds={"W": "int8"}),
    "mm_row_sum": Untuned(
        "Func out; In A, B; Var x; RVar k, y; out[x] = rsum(maximum(rdot(A[x, k], B[k, y], k), 0), y);",
        lambda a, b: torch.relu(a @ b).sum(-1), {"A": "xk", "B": "ky"}, **PRODUCTS),
    "gated_mlp": Untuned(
        "Func u, out; In A, W, V; Var x, y; RVar k; u[x, y] = rdot(A[x, k], W[k, y], k);"
        "out[x, y] = u[x, y] * sigmoid(u[x, y]) * rdot(A[x, k], V[k, y], k);",
        lambda a, w, v: F.silu(a @ w) * (a @ v), {"A": "xk", "W": "ky", "V": "ky"},
        **PRODUCTS | dict(sizes=(dict(x=4096, y=11008, k=4096),), products=along("x", "y", "k", times=4.0)), grad=("A", "W", "V"), backward=3.0),
    "router": Untuned(
        "Func out; In A, W; Var x, y; RVar k, z; out[x, y] = exp(rdot(A[x, k], W[y, k], k)) / rsum(exp(rdot(A[x, k], W[z, k], k)), z);",
        lambda a, w: torch.softmax(forms.linear(a, w), -1), {"A": "xk", "W": "yk"}, (dict(x=8192, y=64, k=4096),),
        (dict(x=2048, y=64, k=2048), dict(x=1001, y=48, k=1000)), dict(x=33, y=16, k=83), products=along("x", "y", "k"), grad=("A", "W"), kinds={"W": "small"}),
    "lm_head_lse": Untuned(
        "Func out; In A, W; Var x; RVar y, k; out[x] = log(rsum(exp(rdot(A[x, k], W[y, k], k)), y));",
        lambda a, w: torch.logsumexp(forms.linear(a, w), -1), {"A": "xk", "W": "yk"}, **PRODUCTS | dict(sizes=(dict(x=4096, y=32000, k=2048),)), kinds={"W": "small"}),
    "linear_nll": Untuned(
        "Func z, out; In H, W, t; Var x; RVar y, k; z[x, y] = rdot(H[x, k], W[y, k], k); out[x] = log(rsum(exp(z[x, y]), y)) - z[x, t[x]];",
        lambda h, w, t: F.cross_entropy(forms.wide(forms.linear(h, w)), t, reduction="none").to(h.dtype), {"H": "xk", "W": "yk", "t": "x"},
        **PRODUCTS | dict(sizes=(dict(x=4096, y=32000, k=4096),)), kinds={"W": "small", "t": "index:y"}, grad=("H", "W"), backward=3.0),
    "by_expert": Untuned(
        "Func out; In A, W, e; Var x, y; RVar k; out[x, y] = rdot(A[x, k], W[e[x], k, y], k);",
        forms.by_expert, {"A": "xk", "W": "vky", "e": "x"}, (dict(x=4096, y=4096, k=2048, v=8),), (dict(x=1000, y=1024, k=512, v=8), dict(x=77, y=300, k=200, v=5)),
        dict(x=37, y=45, k=83, v=3), kinds={"e": "sorted:v"}, products=along("x", "y", "k"), grad=("A", "W"), library=forms.grouped_mm),
    "gram": Untuned(
        "Func out; In X; Var i, j; RVar n; out[i, j] = rdot(X[i, n], X[j, n], n);",
        lambda x: x @ x.mT, {"X": "in"}, (dict(i=4096, n=8192),), (dict(i=4096, n=1024), dict(i=1000, n=777)), dict(i=45, n=83), products=along("i", "i", "n")),
    "cosine": Untuned(
        "Func a, b, out; In A, B; Var x, y; RVar k; a[x] = rsum(A[x, k] * A[x, k], k); b[y] = rsum(B[y, k] * B[y, k], k);"
        "out[x, y] = rdot(A[x, k], B[y, k], k) * rsqrt(a[x]) * rsqrt(b[y]);",
        forms.cosine, {"A": "xk", "B": "yk"}, **PRODUCTS | dict(sizes=(dict(x=8192, y=8192, k=1024),)), grad=("A", "B")),
    "distances": Untuned(
        "Func a, b, out; In A, B; Var x, y; RVar k; a[x] = rsum(A[x, k] * A[x, k], k); b[y] = rsum(B[y, k] * B[y, k], k);"
        "out[x, y] = a[x] + b[y] - 2 * rdot(A[x, k], B[y, k], k);",
        forms.distances, {"A": "xk", "B": "yk"}, **PRODUCTS | dict(sizes=(dict(x=8192, y=8192, k=256),))),
    "distances_naive": Untuned(
        "Func out; In A, B; Var x, y; RVar k; out[x, y] = rsum((A[x, k] - B[y, k]) * (A[x, k] - B[y, k]), k);",
        forms.distances_by_torch, {"A": "xk", "B": "yk"},
        **PRODUCTS | dict(sizes=(dict(x=2048, y=2048, k=128),), checked=(dict(x=1024, y=1024, k=128), dict(x=333, y=500, k=77)))),
}  # fmt: skip

ATTENTIONS = {
    "linear_attention": Untuned(
        "Func c, out; In Q, K, V; Var b, m, n; RVar l, d; c[b, d, n] = rdot(K[b, l, d], V[b, l, n], l); out[b, m, n] = rdot(Q[b, m, d], c[b, d, n], d);",
        lambda q, k, v: q @ (k.mT @ v), QKV,
        **HEADS | dict(sizes=(dict(b=64, m=4096, l=4096, d=64, n=64),), products=lambda s: along("b", "d", "n")(s) * (s["m"] + s["l"])), grad=("Q", "K", "V")),
    "att_alibi": Untuned(
        attention(", slope; SIn scale", f"where(l <= m, {DOT} + slope[b] * (l - m), -inf)"),
        forms.alibi, QKV | {"slope": "b"}, **HEADS | dict(products=lambda s: of_attention(s) / 2), scalars=(0.0883,), grad=("Q", "K", "V"),
        kinds={"slope": "small"}, backward=2.5, library=forms.alibi_sdpa),
    "att_alibi_fp32": Untuned(
        attention(", slope; SIn scale", f"where(l <= m, {DOT} + slope[b] * (l - m), -inf)"),
        forms.alibi, QKV | {"slope": "b"}, **HEADS | dict(products=lambda s: of_attention(s) / 2), scalars=(0.0883,), grad=("Q", "K", "V", "slope"),
        kinds={"slope": "fp32"}, backward=2.5, library=lambda q, k, v, slope, scale: forms.alibi_sdpa(q, k, v, slope.to(q.dtype), scale)),
    "att_relative": Untuned(
        attention(", R; SIn scale", DOT + " + R[b, l - m + len(m) - 1]"),
        forms.relative, QKV | {"R": "br"}, (dict(b=16, m=2048, l=2048, d=64, n=64, r=4095),),
        (dict(b=20, m=1024, l=1024, d=64, n=64, r=2047), dict(b=3, m=777, l=777, d=64, n=64, r=1553)), dict(b=2, m=150, l=150, d=16, n=16, r=299),
        products=of_attention, scalars=(0.125,), library=forms.relative_sdpa),
    "att_window": Untuned(
        attention("; SIn scale, w", f"where(l <= m and l > m - w, {DOT}, -inf)"),
        forms.window, QKV, (dict(b=16, m=8192, l=8192, d=128, n=128),), (dict(b=10, m=2048, l=2048, d=128, n=128), dict(b=2, m=1555, l=1555, d=64, n=64)), HEADS["small"],
        products=lambda s: of_attention(s, min(1024, s["l"])), scalars=(0.0883, 1024), small_scalars=(0.0883, 20), grad=("Q", "K", "V"), backward=2.5,
        library=forms.window_sdpa),
    "att_lengths": Untuned(
        attention(", N; SIn scale", f"where(l < N[b], {DOT}, -inf)"),
        forms.lengths, QKV | {"N": "b"}, **HEADS, scalars=(0.0883,), kinds={"N": "index:l"}, library=forms.lengths_sdpa),
    "att_packed": Untuned(
        attention(", g; SIn scale", f"where(g[m] == g[l] and l <= m, {DOT}, -inf)"),
        forms.packed, QKV | {"g": "m"}, **HEADS | dict(sizes=(dict(b=16, m=8192, l=8192, d=128, n=128, v=8),),
        checked=(dict(b=20, m=1024, l=1024, d=128, n=128, v=5), dict(b=3, m=777, l=777, d=64, n=64, v=9)), small=dict(b=2, m=150, l=150, d=16, n=16, v=4),
        products=lambda s: of_attention(s, s["l"] / s["v"] / 2)), scalars=(0.0883,), grad=("Q", "K", "V"), kinds={"g": "sorted:v"}, backward=2.5,
        library=forms.packed_sdpa),
    "att_paged": Untuned(
        "Func s, e, t, out; In Q, K, V, T, N; SIn scale; Var b, h, n; RVar l, d; Extent l = T[1] * 16;"
        " s[b, h, l] = where(l < N[b], scale * rdot(Q[b, h, d], K[T[b, l / 16], l % 16, h / 4, d], d), -inf);"
        " e[b, h, l] = exp(s[b, h, l]); t[b, h] = rsum(e[b, h, l], l); out[b, h, n] = rdot(e[b, h, l], V[T[b, l / 16], l % 16, h / 4, n], l) / t[b, h];",
        forms.paged, {"Q": "bhd", "K": "pzgd", "V": "pzgn", "T": "bc", "N": "b"}, (dict(b=16, h=32, g=8, z=16, d=128, n=128, c=256, p=6000, l=4096),),
        (dict(b=3, h=32, g=8, z=16, d=128, n=128, c=50, p=200, l=800), dict(b=5, h=12, g=3, z=16, d=64, n=64, c=7, p=70, l=112)),
        dict(b=2, h=8, g=2, z=16, d=16, n=16, c=3, p=9, l=48), scalars=(0.0883,), kinds={"T": "index:p", "N": "index:l", "K": "table", "V": "table"},
        products=lambda s: 2.0 * s["b"] * s["h"] * s["l"] * (s["d"] + s["n"])),
    "att_one_query": Untuned(
        ONE_QUERY.format("h / 5"), forms.one_query, {"Q": "bhd", "K": "bgld", "V": "bgln"}, (dict(b=3, h=40, g=8, l=7777, d=128, n=128), dict(b=1, h=40, g=8, l=30000, d=128, n=128)),
        (dict(b=2, h=15, g=3, l=1777, d=64, n=64), dict(b=1, h=40, g=8, l=5000, d=128, n=128)), dict(b=2, h=10, g=2, l=70, d=16, n=16), scalars=(0.0883,),
        products=lambda s: 2.0 * s["b"] * s["h"] * s["l"] * (s["d"] + s["n"])),
    "att_one_query_a_head": Untuned(
        ONE_QUERY.format("h"), forms.one_query, {"Q": "bhd", "K": "bhld", "V": "bhln"}, (dict(b=1, h=32, l=30000, d=128, n=128), dict(b=64, h=32, l=2000, d=64, n=64)),
        (dict(b=2, h=6, l=1777, d=64, n=64), dict(b=1, h=4, l=5000, d=128, n=128)), dict(b=2, h=3, l=70, d=16, n=16), scalars=(0.0883,),
        products=lambda s: 2.0 * s["b"] * s["h"] * s["l"] * (s["d"] + s["n"])),
    "att_sigmoid": Untuned(
        "Func out; In Q, K, V; SIn scale, z; Var b, m, n; RVar l, d; out[b, m, n] = rdot(sigmoid(" + DOT + " - z), V[b, l, n], l);",
        forms.sigmoid_attention, QKV, **HEADS, scalars=(0.0883, 8.3), grad=("Q", "K", "V"), backward=2.5),
}  # fmt: skip

PROGRAMS: dict[str, Untuned] = (
    NORMS
    | SUMS
    | ELEMENTS
    | WITH_PRODUCTS
    | ATTENTIONS
    | untuned_rows.PROGRAMS
    | untuned_products.PROGRAMS
    | untuned_layers.PROGRAMS
    | untuned_science.PROGRAMS
)
