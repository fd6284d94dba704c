# ruff: noqa: E501
"""Programs of an outsider: layers of recent models, each written from the documentation alone. None has a schedule."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from untuned_forms import wide
from untuned_products import times
from untuned_program import Untuned, along

# -- the same in torch ------------------------------------------------------------------------------------------------------


def attend(scores, v):
    return torch.softmax(wide(scores), -1).to(v.dtype) @ v


def behind(queries, keys, device):
    """How far each key is behind its query, negative: l - m."""
    return torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]


def recurrence(a, b):
    """h[t] = a[t] * h[t - 1] + b[t] along dimension 1, in as many steps as the length has bits."""
    n, steps = 1, a.shape[1]
    while n < steps:
        b = b + a * F.pad(b, (0, 0, n, 0))[:, :steps]
        a = a * F.pad(a, (0, 0, n, 0))[:, :steps]
        n *= 2
    return b


def rwkv_channel_mix(x, mk, mr, k, r, v):
    d = F.pad(x, (0, 0, 1, 0))[:, :-1] - x
    return torch.sigmoid(F.linear(x + d * mr, r)) * F.linear(F.relu(F.linear(x + d * mk, k)).square(), v)


def reglu_rmsnorm(x, w, b, v, c, g, eps):
    u = F.linear(x, w, b) * F.relu(F.linear(x, v, c))
    return F.rms_norm(u, u.shape[-1:], g, eps)


def dynamic_streams(h, y, w, s, beta):
    x = wide(h)
    mix = wide(s) + torch.tanh((x * wide(w)).mean(-1))[..., None]
    return (torch.einsum("bsmn,bsmd->bsnd", mix, x) + wide(beta)[:, None] * wide(y)[:, :, None]).to(h.dtype)


def mixture_of_softmaxes(h, w, g):
    p = torch.softmax(wide(g), -1)
    return (p[..., None] * torch.softmax(wide(F.linear(h, w)), -1)).sum(1).to(h.dtype)


def outer_product_mean(a, b, w, z):
    o = torch.einsum("sic,sje->ijce", a, b) / len(a)
    return o.flatten(2) @ w.flatten(0, 1) + z


def pair_biased_attention(q, k, v, g, z, w, scale):
    s = torch.einsum("rihd,rjhd->rhij", q, k) * scale + F.linear(z, w).permute(2, 0, 1)
    return torch.sigmoid(g) * torch.einsum("rhij,rjhn->rihn", torch.softmax(wide(s), -1).to(v.dtype), v)


def block_local_attention(q, k, v, scale):
    m = q.shape[2]
    k, v = (F.pad(t, (0, 0, m, 0)).unfold(1, 2 * m, m).mT for t in (k, v))
    apart = behind(m, 2 * m, q.device) - m
    first = torch.arange(q.shape[1], device=q.device)[:, None, None] * m + torch.arange(2 * m, device=q.device) - m < 0
    return attend((q @ k.mT * scale).masked_fill((apart > 0) | first, float("-inf")), v)


def retention(q, k, v, g, eps):
    apart = behind(q.shape[2], k.shape[2], q.device)
    decay = torch.where(apart <= 0, torch.exp(wide(g)[:, None, None] * apart.clamp(max=0)), 0)
    y = (q @ k.mT * decay).to(v.dtype) @ v
    return F.rms_norm(y, y.shape[-1:], eps=eps)


def softcap_alibi_mqa(q, k, v, slope, scale, cap):
    apart = behind(q.shape[2], k.shape[1], q.device)
    s = torch.tanh(wide(q @ k[:, None].mT) * scale / cap) * cap + wide(slope)[:, None, None] * apart
    return attend(s.masked_fill(apart > 0, float("-inf")), v[:, None])


def patch_embedding(x, w, z, p):
    return F.conv2d(x, w, z, stride=w.shape[2:]).permute(0, 2, 3, 1) + p


def axial_rope(a):
    h, w, d = a.shape[1], a.shape[2], a.shape[4]
    i, q = torch.arange(d, device=a.device), d // 4
    y, x = torch.arange(h, device=a.device)[:, None, None], torch.arange(w, device=a.device)[:, None]
    angle = torch.where(i < d // 2, y, x) * torch.exp((i % q).to(wide(a).dtype) * (-math.log(10000.0) / q))
    first = i % (2 * q) < q
    turned = torch.where(first, -torch.roll(wide(a), -q, -1), torch.roll(wide(a), q, -1))
    return (wide(a) * angle.cos()[:, :, None] + turned * angle.sin()[:, :, None]).to(a.dtype)


def convmixer_block(a, w, z, g, h):
    u = F.gelu(F.conv2d(a, w[:, None], z, padding=2, groups=len(w)))
    return a + u * g[:, None, None] + h[:, None, None]


def dilated_attention(q, k, v, scale):
    q, k, v = (t.unflatten(1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
    return attend(q @ k.mT * scale, v).transpose(1, 2).flatten(1, 2)


def kan_gaussians(x, c, w, v, s):
    near = torch.exp(-((wide(x)[..., None] - wide(c)) * s).square()).to(x.dtype)
    return near.flatten(1) @ w.flatten(1).mT + F.linear(F.silu(x), v)


def gated_short_convolution(b, c, x, w):
    u = F.pad(wide(b) * wide(x), (0, 0, 2, 0))
    return (wide(c) * sum(u[:, k : k + x.shape[1]] * wide(w)[:, k] for k in range(3))).to(x.dtype)


def swin_bias_table(q, k, v, t, r, scale):
    return attend(q @ k.mT * scale + t[r].permute(2, 0, 1), v)


def bottleneck_adapter(x, g, h, w, c, u, e, eps):
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], g, h, eps), w, c)), u, e)


def lora_of_requests(y, x, a, b, e):
    out = y
    for i in range(len(a)):
        out = torch.where(e[:, None] == i, y + F.linear(F.linear(x, a[i]), b[i]), out)
    return out


def performer(q, k, v, w, scale):
    q, k = (torch.exp(scale * (wide(t) @ wide(w).mT) - 0.5 * scale**2 * wide(t).square().sum(-1, keepdim=True)) for t in (q, k))
    kv, ks = k.to(v.dtype).mT @ v, k.sum(2)
    return (wide(q.to(v.dtype) @ kv) / (q @ ks[..., None])).to(v.dtype)


def sigmoid_router(x, w, bias, factor):
    z = torch.sigmoid(wide(x) @ wide(w).mT)
    g = z.gather(1, torch.topk(z + wide(bias), 4, -1).indices)
    return (factor * g / g.sum(-1, keepdim=True)).to(x.dtype)


def min_gru(x, w, b, v, e):
    k, c = F.linear(x, w, b), wide(F.linear(x, v, e))
    keep, take = -F.softplus(wide(k)).cumsum(1), -F.softplus(-wide(k))
    log_c = torch.where(c >= 0, (F.relu(c) + 0.5).log(), -F.softplus(-c))
    return torch.exp(keep + torch.logcumsumexp(take + log_c - keep, 1)).to(x.dtype)


def rg_lru(x, r, i, lam):
    a = torch.exp(-8 * F.softplus(wide(lam)) * torch.sigmoid(wide(r)))
    return recurrence(a, torch.sqrt(1 - a * a) * torch.sigmoid(wide(i)) * wide(x)).to(x.dtype)


def lightweight_convolution(x, w):
    p, u = torch.softmax(wide(w), -1), F.pad(wide(x), (0, 0, 0, 0, 6, 0))
    return sum(p[..., k, None] * u[:, k : k + x.shape[1]] for k in range(7)).to(x.dtype)


def point_sample(a, p, q):
    b, h, w, _ = a.shape
    y, x = torch.sigmoid(wide(p)) * (h - 1), torch.sigmoid(wide(q)) * (w - 1)
    i, j = y.detach().floor().long(), x.detach().floor().long()
    v, u = (y - i)[..., None], (x - j)[..., None]
    n = torch.arange(b, device=a.device)[:, None]
    i1, j1 = (i + 1).clamp(max=h - 1), (j + 1).clamp(max=w - 1)
    f = wide(a)
    return ((1 - v) * ((1 - u) * f[n, i, j] + u * f[n, i, j1]) + v * ((1 - u) * f[n, i1, j] + u * f[n, i1, j1])).to(a.dtype)


def subpixel_convolution(x, w, z):
    return F.silu(F.pixel_shuffle(torch.einsum("biyx,cpqi->bcpqyx", x, w).flatten(1, 3), 2) + z[:, None, None])


def cross_covariance_attention(q, k, v, tau):
    q, k = (F.normalize(wide(t), dim=1).to(t.dtype) for t in (q, k))
    s = torch.einsum("blhd,blhe->bhde", q, k) * tau[:, None, None]
    return torch.einsum("bhde,bmhe->bmhd", torch.softmax(wide(s), -1).to(v.dtype), v)


def nearest_codes(x, c):
    near = (wide(c).square().sum(-1) - 2 * (wide(x) @ wide(c).mT)).argmin(-1)
    code = wide(c)[near]
    return (wide(x) - code.detach()).square().mean(-1).to(x.dtype), (wide(x) + (code - wide(x)).detach()).to(x.dtype)


def factorised_embedding(e, t, w, p, g, h, eps):
    u = F.linear(e[t], w) + p
    return F.layer_norm(u, u.shape[-1:], g, h, eps)


def dlrm_interactions(x):
    i = torch.arange(x.shape[1], device=x.device)
    return torch.where(i < i[:, None], x @ x.mT, 0)


def drop_path_residual(x, y, gamma, seed, p):
    kept = torch.rand(len(x), 1, 1, device=x.device) >= p
    return (wide(x) + torch.where(kept, wide(gamma) * wide(y) / (1 - p), 0)).to(x.dtype)


# -- programs ---------------------------------------------------------------------------------------------------------------

ROWS_OF_MODELS = {
    "dynamic_streams": Untuned(
        "Func a, out; In H, Y, w, S, beta; Var b, s, n, d; RVar m; a[b, s, m] = tanh(rmean(H[b, s, m, d] * w[d], d));"
        " out[b, s, n, d] = rsum((S[m, n] + a[b, s, m]) * H[b, s, m, d], m) + beta[n] * Y[b, s, d];",
        dynamic_streams, {"H": "bsmd", "Y": "bsd", "w": "d", "S": "mn", "beta": "n"}, (dict(b=4, s=1024, m=4, n=4, d=2048), dict(b=3, s=701, m=3, n=3, d=1111)),
        (dict(b=2, s=130, m=4, n=4, d=515),), dict(b=2, s=5, m=4, n=4, d=37), grad=("H", "Y", "w", "S", "beta")),
    "axial_rope": Untuned(
        "Func t, out; In A; Var b, y, x, h, d; t[y, x, d] = where(d < len(d) // 2, y, x) * exp((d % (len(d) // 4)) * (-9.210340371976184 / (len(d) // 4)));"
        " out[b, y, x, h, d] = A[b, y, x, h, d] * cos(t[y, x, d])"
        " + where(d % (len(d) // 2) < len(d) // 4, -A[b, y, x, h, d + len(d) / 4], A[b, y, x, h, d - len(d) / 4]) * sin(t[y, x, d]);",
        axial_rope, {"A": "byxhd"}, (dict(b=8, y=32, x=32, h=16, d=64), dict(b=5, y=27, x=33, h=9, d=80)), (dict(b=3, y=14, x=15, h=5, d=64),), dict(b=2, y=4, x=5, h=3, d=16), grad=("A",)),
    "convmixer_block": Untuned(
        "Func u, out; In A, W, z, g, h; Var b, c, y, x; RVar r, s; Extent y = A[2]; Extent x = A[3]; u[b, c, y, x] = rsum(A[b, c, y + r - 2, x + s - 2] * W[c, r, s], r, s) + z[c];"
        " out[b, c, y, x] = A[b, c, y, x] + 0.5 * u[b, c, y, x] * (1 + erf(u[b, c, y, x] * 0.7071067811865476)) * g[c] + h[c];",
        convmixer_block, {"A": "bcyx", "W": "crs", "z": "c", "g": "c", "h": "c"}, (dict(b=16, c=256, y=32, x=32, r=5, s=5), dict(b=9, c=130, y=27, x=35, r=5, s=5)),
        (dict(b=3, c=33, y=14, x=15, r=5, s=5),), dict(b=2, c=3, y=7, x=9, r=5, s=5), grad=("A", "W", "z", "g", "h")),
    "gated_short_convolution": Untuned(
        "Func out; In B, C, X, W; Var b, s, c; RVar k; out[b, s, c] = C[b, s, c] * rsum(B[b, s + k - 2, c] * X[b, s + k - 2, c] * W[c, k], k); Extent s = X[1];",
        gated_short_convolution, {"B": "bsc", "C": "bsc", "X": "bsc", "W": "ck"}, (dict(b=4, s=2048, c=2048, k=3), dict(b=7, s=333, c=1111, k=3)), (dict(b=3, s=130, c=333, k=3),),
        dict(b=2, s=13, c=19, k=3), grad=("B", "C", "X", "W")),
}  # fmt: skip

PRODUCTS = {
    "rwkv_channel_mix": Untuned(
        "Func p, q, k, out; In X, mk, mr, K, R, V; Var b, t, o; RVar c, j; p[b, t, c] = X[b, t, c] + (X[b, t - 1, c] - X[b, t, c]) * mk[c];"
        " q[b, t, c] = X[b, t, c] + (X[b, t - 1, c] - X[b, t, c]) * mr[c]; k[b, t, j] = pow(maximum(rdot(p[b, t, c], K[j, c], c), 0), 2);"
        " out[b, t, o] = sigmoid(rdot(q[b, t, c], R[o, c], c)) * rdot(k[b, t, j], V[o, j], j);",
        rwkv_channel_mix, {"X": "btc", "mk": "c", "mr": "c", "K": "jc", "R": "cc", "V": "cj"}, (dict(b=4, t=1024, c=1024, j=3584), dict(b=3, t=501, c=770, j=2040)),
        (dict(b=2, t=130, c=200, j=333),), dict(b=2, t=15, c=19, j=45), products=times("btcj", "btcc", "btcj"), grad=("X", "mk", "mr", "K", "R", "V"),
        kinds={"K": "small", "R": "small", "V": "small"}, dtypes=("fp16",)),
    "reglu_rmsnorm": Untuned(
        "Func u, ms, out; In X, W, b, V, c, g; SIn eps; Var t; RVar i, o; u[t, o] = (rdot(X[t, i], W[o, i], i) + b[o]) * maximum(rdot(X[t, i], V[o, i], i) + c[o], 0);"
        " ms[t] = rmean(u[t, o] * u[t, o], o); out[t, o] = u[t, o] * rsqrt(ms[t] + eps) * g[o];",
        reglu_rmsnorm, {"X": "ti", "W": "oi", "b": "o", "V": "oi", "c": "o", "g": "o"}, (dict(t=4096, i=1024, o=2048), dict(t=1501, i=700, o=1333)), (dict(t=333, i=200, o=515),),
        dict(t=19, i=37, o=41), scalars=(1e-5,), products=times("tio", "tio"), grad=("X", "W", "b", "V", "c", "g"), kinds={"W": "small", "V": "small"}),
    "mixture_of_softmaxes": Untuned(
        "Func z, t, p, out; In H, W, G; Var x, v; RVar k, d; z[x, k, v] = rdot(H[x, k, d], W[v, d], d); t[x, k] = rsum(exp(z[x, k, v]), v);"
        " p[x, k] = exp(G[x, k]) / rsum(exp(G[x, k]), k); out[x, v] = rsum(p[x, k] * exp(z[x, k, v]) / t[x, k], k);",
        mixture_of_softmaxes, {"H": "xkd", "W": "vd", "G": "xk"}, (dict(x=1024, k=4, d=256, v=8192), dict(x=777, k=3, d=200, v=5003)), (dict(x=130, k=3, d=100, v=1111),),
        dict(x=7, k=3, d=19, v=61), products=along("x", "k", "d", "v"), grad=("H", "W", "G"), kinds={"W": "small"}),
    "outer_product_mean": Untuned(
        "Func o, out; In A, B, W, z; Var i, j, f; RVar s, c, e; o[i, j, c, e] = rdot(A[s, i, c], B[s, j, e], s) / len(s); out[i, j, f] = rdot(o[i, j, c, e], W[c, e, f], c, e) + z[f];",
        outer_product_mean, {"A": "sic", "B": "sje", "W": "cef", "z": "f"}, (dict(s=128, i=128, j=128, c=32, e=32, f=128), dict(s=101, i=93, j=93, c=24, e=24, f=100)),
        (dict(s=61, i=33, j=35, c=16, e=16, f=50),), dict(s=17, i=5, j=6, c=4, e=4, f=9), products=times("sijce", "ijcef"), grad=("A", "B", "W", "z")),
    "patch_embedding": Untuned(
        "Func out; In X, W, z, P; Var b, u, v, o; RVar c, r, s; Extent u = X[2] / 8; Extent v = X[3] / 8; Extent r = 8; Extent s = 8;"
        " out[b, u, v, o] = rdot(X[b, c, 8 * u + r, 8 * v + s], W[o, c, r, s], c, r, s) + z[o] + P[u, v, o];",
        patch_embedding, {"X": "bcyx", "W": "ocrs", "z": "o", "P": "uvo"}, (dict(b=16, c=3, y=224, x=224, u=28, v=28, r=8, s=8, o=1024), dict(b=11, c=3, y=104, x=152, u=13, v=19, r=8, s=8, o=384)),
        (dict(b=3, c=3, y=56, x=40, u=7, v=5, r=8, s=8, o=200),), dict(b=1, c=2, y=16, x=16, u=2, v=2, r=8, s=8, o=9), products=along("b", "c", "y", "x", "o"), grad=("X", "W", "z", "P"),
        kinds={"W": "small"}),
    "kan_gaussians": Untuned(
        "Func n, out; In X, C, W, V; SIn s; Var t, o; RVar i, g; n[t, i, g] = exp(-pow((X[t, i] - C[g]) * s, 2));"
        " out[t, o] = rdot(n[t, i, g], W[o, i, g], i, g) + rdot(X[t, i] * sigmoid(X[t, i]), V[o, i], i);",
        kan_gaussians, {"X": "ti", "C": "g", "W": "oig", "V": "oi"}, (dict(t=4096, i=256, g=8, o=512), dict(t=1501, i=130, g=5, o=333)), (dict(t=333, i=65, g=8, o=100),),
        dict(t=11, i=9, g=8, o=13), scalars=(1.5,), products=times("tigo", "tio"), grad=("X", "C", "W", "V"), kinds={"W": "small", "V": "small"}),
    "bottleneck_adapter": Untuned(
        "Func mu, var, y, v, a, out; In X, g, h, W, c, U, e; SIn eps; Var t, o; RVar i, j; mu[t] = rmean(X[t, i], i); var[t] = rmean(pow(X[t, i] - mu[t], 2), i);"
        " y[t, i] = (X[t, i] - mu[t]) * rsqrt(var[t] + eps) * g[i] + h[i]; v[t, j] = rdot(y[t, i], W[j, i], i) + c[j];"
        " a[t, j] = 0.5 * v[t, j] * (1 + erf(v[t, j] * 0.7071067811865476)); out[t, o] = X[t, o] + rdot(a[t, j], U[o, j], j) + e[o];",
        bottleneck_adapter, {"X": "ti", "g": "i", "h": "i", "W": "ji", "c": "j", "U": "ij", "e": "i"}, (dict(t=8192, i=2048, j=64), dict(t=3001, i=1111, j=24)),
        (dict(t=333, i=520, j=32),), dict(t=19, i=45, j=7), scalars=(1e-5,), products=times("tij", "tij"), grad=("X", "g", "h", "W", "c", "U", "e"), kinds={"W": "small", "U": "small"}),
    "lora_of_requests": Untuned(
        "Func a, out; In Y, X, A, B, e; Var t, o; RVar i, r; a[t, r] = rdot(X[t, i], A[e[t], r, i], i); out[t, o] = Y[t, o] + rdot(a[t, r], B[e[t], o, r], r);",
        lora_of_requests, {"Y": "to", "X": "ti", "A": "vri", "B": "vor", "e": "t"}, (dict(t=4096, i=2048, o=2048, r=16, v=8), dict(t=501, i=1000, o=1500, r=8, v=5)),
        (dict(t=333, i=520, o=600, r=8, v=5),), dict(t=37, i=45, o=41, r=4, v=3), products=times("tir", "tor"), grad=("Y", "X", "A", "B"),
        kinds={"e": "sorted:v", "A": "small"}),
}  # fmt: skip

ATTENTIONS = {
    "pair_biased_attention": Untuned(
        "Func s, t, out; In Q, K, V, G, Z, W; SIn scale; Var r, i, h, n; RVar j, d, z; s[r, h, i, j] = scale * rdot(Q[r, i, h, d], K[r, j, h, d], d) + rdot(Z[i, j, z], W[h, z], z);"
        " t[r, h, i] = rsum(exp(s[r, h, i, j]), j); out[r, i, h, n] = sigmoid(G[r, i, h, n]) * rdot(exp(s[r, h, i, j]), V[r, j, h, n], j) / t[r, h, i];",
        pair_biased_attention, {"Q": "rihd", "K": "rjhd", "V": "rjhn", "G": "rihn", "Z": "ijz", "W": "hz"}, (dict(r=64, i=256, j=256, h=8, d=32, n=32, z=128), dict(r=33, i=201, j=201, h=5, d=24, n=24, z=100)),
        (dict(r=5, i=77, j=77, h=3, d=32, n=32, z=50),), dict(r=2, i=19, j=19, h=2, d=16, n=16, z=9), scalars=(0.18,), products=times("rihjd", "rihjn", "ijhz"),
        grad=("Q", "K", "V", "G", "Z", "W"), kinds={"W": "small"}, backward=2.5),
    "block_local_attention": Untuned(
        "Func s, t, out; In Q, K, V; SIn scale; Var b, w, m, n; RVar l, d; Extent l = 2 * Q[2];"
        " s[b, w, m, l] = where(l <= m + len(m) and len(m) * w + l >= len(m), scale * rdot(Q[b, w, m, d], K[b, len(m) * w + l - len(m), d], d), -inf);"
        " t[b, w, m] = rsum(exp(s[b, w, m, l]), l); out[b, w, m, n] = rdot(exp(s[b, w, m, l]), V[b, len(m) * w + l - len(m), n], l) / t[b, w, m];",
        block_local_attention, {"Q": "bwmd", "K": "bsd", "V": "bsn"}, (dict(b=16, w=16, m=128, s=2048, d=64, n=64), dict(b=9, w=13, m=100, s=1300, d=80, n=80)),
        (dict(b=3, w=5, m=61, s=305, d=64, n=64),), dict(b=2, w=3, m=17, s=51, d=16, n=16), scalars=(0.125,), products=lambda s: 1.5 * times("bwmmd", "bwmmn")(s), grad=("Q", "K", "V"), backward=2.5),
    "retention": Untuned(
        "Func a, y, ms, out; In Q, K, V, g; SIn eps; Var b, h, m; RVar l, d, n; a[b, h, m, l] = where(l <= m, rdot(Q[b, h, m, d], K[b, h, l, d], d) * exp(g[h] * (l - m)), 0);"
        " y[b, h, m, n] = rdot(a[b, h, m, l], V[b, h, l, n], l); ms[b, h, m] = rmean(y[b, h, m, n] * y[b, h, m, n], n); out[b, h, m, n] = y[b, h, m, n] * rsqrt(ms[b, h, m] + eps);",
        retention, {"Q": "bhmd", "K": "bhld", "V": "bhln", "g": "h"}, (dict(b=2, h=8, m=1024, l=1024, d=64, n=128), dict(b=3, h=5, m=777, l=777, d=80, n=80)),
        (dict(b=2, h=3, m=333, l=333, d=64, n=64),), dict(b=2, h=2, m=37, l=37, d=16, n=16), scalars=(1e-5,), products=lambda s: times("bhmld", "bhmln")(s) / 2,
        grad=("Q", "K", "V", "g"), kinds={"g": "positive"}, backward=2.5),
    "softcap_alibi_mqa": Untuned(
        "Func s, t, out; In Q, K, V, slope; SIn scale, cap; Var b, h, m, n; RVar l, d; s[b, h, m, l] = where(l <= m, cap * tanh(scale / cap * rdot(Q[b, h, m, d], K[b, l, d], d)) + slope[h] * (l - m), -inf);"
        " t[b, h, m] = rsum(exp(s[b, h, m, l]), l); out[b, h, m, n] = rdot(exp(s[b, h, m, l]), V[b, l, n], l) / t[b, h, m];",
        softcap_alibi_mqa, {"Q": "bhmd", "K": "bld", "V": "bln", "slope": "h"}, (dict(b=2, h=16, m=1024, l=1024, d=128, n=128), dict(b=3, h=7, m=701, l=701, d=80, n=80)),
        (dict(b=2, h=3, m=333, l=333, d=64, n=64),), dict(b=2, h=2, m=37, l=37, d=16, n=16), scalars=(0.09, 20.0), products=lambda s: times("bhmld", "bhmln")(s) / 2,
        grad=("Q", "K", "V", "slope"), kinds={"slope": "positive"}, backward=2.5),
    "dilated_attention": Untuned(
        "Func s, t, o, out; In Q, K, V; SIn scale; Var b, m, u, i, n; RVar j, d; Extent u = 8; Extent i = Q[1] / 8; Extent j = K[1] / 8; Extent m = Q[1];"
        " s[b, u, i, j] = scale * rdot(Q[b, 8 * i + u, d], K[b, 8 * j + u, d], d); t[b, u, i] = rsum(exp(s[b, u, i, j]), j);"
        " o[b, u, i, n] = rdot(exp(s[b, u, i, j]), V[b, 8 * j + u, n], j) / t[b, u, i]; out[b, m, n] = o[b, m % 8, m / 8, n];",
        dilated_attention, {"Q": "bmd", "K": "bld", "V": "bln"}, (dict(b=16, m=4096, l=4096, d=64, n=64), dict(b=11, m=1736, l=1736, d=80, n=80)),
        (dict(b=3, m=408, l=408, d=64, n=64),), dict(b=1, m=40, l=40, d=16, n=16), scalars=(0.125,), products=lambda s: times("bmld", "bmln")(s) / 8, grad=("Q", "K", "V"), backward=2.5),
    "swin_bias_table": Untuned(
        "Func s, t, out; In Q, K, V, T, R; SIn scale; Var w, h, m, n; RVar l, d; s[w, h, m, l] = scale * rdot(Q[w, h, m, d], K[w, h, l, d], d) + T[R[m, l], h];"
        " t[w, h, m] = rsum(exp(s[w, h, m, l]), l); out[w, h, m, n] = rdot(exp(s[w, h, m, l]), V[w, h, l, n], l) / t[w, h, m];",
        swin_bias_table, {"Q": "whmd", "K": "whld", "V": "whln", "T": "vh", "R": "ml"}, (dict(w=256, h=8, m=64, l=64, d=32, n=32, v=225), dict(w=130, h=3, m=49, l=49, d=32, n=32, v=169)),
        (dict(w=17, h=3, m=49, l=49, d=32, n=32, v=169),), dict(w=3, h=2, m=9, l=9, d=16, n=16, v=25), scalars=(0.18,), products=times("whmld", "whmln"), grad=("Q", "K", "V", "T"),
        kinds={"R": "index:v"}, backward=2.5),
    "performer": Untuned(
        "Func q, k, kv, ks, out; In Q, K, V, W; SIn c; Var b, h, m, n; RVar l, d, r; q[b, h, m, r] = exp(c * rdot(Q[b, h, m, d], W[r, d], d) - 0.5 * c * c * rsum(Q[b, h, m, d] * Q[b, h, m, d], d));"
        " k[b, h, l, r] = exp(c * rdot(K[b, h, l, d], W[r, d], d) - 0.5 * c * c * rsum(K[b, h, l, d] * K[b, h, l, d], d)); kv[b, h, r, n] = rdot(k[b, h, l, r], V[b, h, l, n], l);"
        " ks[b, h, r] = rsum(k[b, h, l, r], l); out[b, h, m, n] = rdot(q[b, h, m, r], kv[b, h, r, n], r) / rsum(q[b, h, m, r] * ks[b, h, r], r);",
        performer, {"Q": "bhmd", "K": "bhld", "V": "bhln", "W": "rd"}, (dict(b=4, h=8, m=2048, l=2048, d=64, n=64, r=128), dict(b=3, h=5, m=1111, l=777, d=80, n=80, r=100)),
        (dict(b=2, h=3, m=333, l=401, d=64, n=64, r=100),), dict(b=2, h=2, m=21, l=25, d=16, n=16, r=24), scalars=(0.3,), products=times("bhmrd", "bhlrd", "bhlrn", "bhmrn"), grad=("Q", "K", "V")),
}  # fmt: skip

MORE = {
    "sigmoid_router": Untuned(
        "Func z, i, g, out; In X, W, bias; SIn factor; Var t, j; RVar e, d; Extent j = 4; z[t, e] = sigmoid(rdot(X[t, d], W[e, d], d)); i[t, j] = rargtopk(z[t, e] + bias[e], e, j);"
        " g[t, j] = z[t, i[t, j]]; out[t, j] = factor * g[t, j] / rsum(g[t, j], j);",
        sigmoid_router, {"X": "td", "W": "ed", "bias": "e"}, (dict(t=8192, d=2048, e=64), dict(t=3001, d=1111, e=97)), (dict(t=333, d=520, e=61),), dict(t=21, d=37, e=19),
        scalars=(2.5,), products=along("t", "d", "e"), grad=("X", "W"), kinds={"W": "small", "bias": "small"}),
    "rg_lru": Untuned(
        "Func a, out; In X, R, I, L; Var b, t, c; a[b, t, c] = exp(-8 * (maximum(L[c], 0) + log1p(exp(-abs(L[c])))) * sigmoid(R[b, t, c]));"
        " out[b, t, c] = rrecur(a[b, t, c], sqrt(1 - a[b, t, c] * a[b, t, c]) * sigmoid(I[b, t, c]) * X[b, t, c], t);",
        rg_lru, {"X": "btc", "R": "btc", "I": "btc", "L": "c"}, (dict(b=8, t=1024, c=2048), dict(b=5, t=333, c=1111)), (dict(b=3, t=130, c=222),), dict(b=2, t=21, c=19),
        grad=("X", "R", "I", "L")),
    "lightweight_convolution": Untuned(
        "Func t, out; In X, W; Var b, s, h, c; RVar k; t[b, s, h] = rsum(exp(W[b, s, h, k]), k); out[b, s, h, c] = rsum(exp(W[b, s, h, k]) / t[b, s, h] * X[b, s + k - 6, h, c], k);",
        lightweight_convolution, {"X": "bshc", "W": "bshk"}, (dict(b=8, s=1024, h=16, c=64, k=7), dict(b=5, s=333, h=11, c=70, k=7)), (dict(b=3, s=130, h=5, c=33, k=7),),
        dict(b=2, s=13, h=3, c=9, k=7), grad=("X", "W")),
    "point_sample": Untuned(
        "Func y, x, i, j, v, u, out; In A, P, Q; Var b, n, c, h, w; Extent h = A[1]; Extent w = A[2]; y[b, n] = sigmoid(P[b, n]) * (len(h) - 1); x[b, n] = sigmoid(Q[b, n]) * (len(w) - 1);"
        " i[b, n] = cast(floor(y[b, n]), int32); j[b, n] = cast(floor(x[b, n]), int32); v[b, n] = y[b, n] - floor(y[b, n]); u[b, n] = x[b, n] - floor(x[b, n]);"
        " out[b, n, c] = (1 - v[b, n]) * ((1 - u[b, n]) * A[b, i[b, n], j[b, n], c] + u[b, n] * A[b, i[b, n], j[b, n] + 1, c])"
        " + v[b, n] * ((1 - u[b, n]) * A[b, i[b, n] + 1, j[b, n], c] + u[b, n] * A[b, i[b, n] + 1, j[b, n] + 1, c]);",
        point_sample, {"A": "bhwc", "P": "bn", "Q": "bn"}, (dict(b=16, h=32, w=32, c=256, n=512), dict(b=7, h=27, w=35, c=130, n=333)), (dict(b=3, h=14, w=15, c=33, n=101),),
        dict(b=2, h=4, w=5, c=7, n=9), grad=("A", "P", "Q")),
    "subpixel_convolution": Untuned(
        "Func u, out; In X, W, z; Var b, c, y, x; RVar i; Extent y = 2 * X[2]; Extent x = 2 * X[3]; u[b, c, y, x] = rdot(X[b, i, y / 2, x / 2], W[c, y % 2, x % 2, i], i) + z[c];"
        " out[b, c, y, x] = u[b, c, y, x] * sigmoid(u[b, c, y, x]);",
        subpixel_convolution, {"X": "biyx", "W": "cpqi", "z": "c"}, (dict(b=8, i=128, c=64, p=2, q=2, y=64, x=64), dict(b=5, i=100, c=33, p=2, q=2, y=45, x=61)),
        (dict(b=3, i=70, c=17, p=2, q=2, y=14, x=15),), dict(b=2, i=17, c=5, p=2, q=2, y=3, x=4), products=along("b", "i", "c", "p", "q", "y", "x"), grad=("X", "W", "z"), kinds={"W": "small"}),
    "cross_covariance_attention": Untuned(
        "Func a, c, s, t, out; In Q, K, V, tau; Var b, m, h, d; RVar l, e; a[b, h, d] = rsum(Q[b, l, h, d] * Q[b, l, h, d], l); c[b, h, e] = rsum(K[b, l, h, e] * K[b, l, h, e], l);"
        " s[b, h, d, e] = tau[h] * rdot(Q[b, l, h, d], K[b, l, h, e], l) * rsqrt(a[b, h, d] + 1e-12) * rsqrt(c[b, h, e] + 1e-12); t[b, h, d] = rsum(exp(s[b, h, d, e]), e);"
        " out[b, m, h, d] = rdot(exp(s[b, h, d, e]) / t[b, h, d], V[b, m, h, e], e);",
        cross_covariance_attention, {"Q": "blhd", "K": "blhd", "V": "blhd", "tau": "h"}, (dict(b=32, l=1024, h=8, d=48), dict(b=13, l=785, h=4, d=64)), (dict(b=3, l=333, h=3, d=40),),
        dict(b=2, l=21, h=2, d=16), products=times("blhdd", "blhdd"), grad=("Q", "K", "V", "tau"), kinds={"tau": "positive"}),
    "nearest_codes": Untuned(
        "Func near, loss, out; In X, C; Var t, d; RVar k; near[t] = rargmin(rsum(C[k, d] * C[k, d], d) - 2 * rdot(X[t, d], C[k, d], d), k);"
        " loss[t] = rmean(pow(X[t, d] - detach(C[near[t], d]), 2), d); out[t, d] = X[t, d] + detach(C[near[t], d] - X[t, d]); loss.compile(); out.compile();",
        nearest_codes, {"X": "td", "C": "kd"}, (dict(t=16384, k=1024, d=64), dict(t=5003, k=777, d=100)), (dict(t=515, k=333, d=50),), dict(t=21, k=37, d=19),
        products=along("t", "k", "d"), grad=("X",), backward=0.0),
    "factorised_embedding": Untuned(
        "Func u, mu, var, out; In E, t, W, P, g, h; SIn eps; Var b, s; RVar y, k; u[b, s, y] = rdot(E[t[b, s], k], W[y, k], k) + P[s, y]; mu[b, s] = rmean(u[b, s, y], y);"
        " var[b, s] = rmean(pow(u[b, s, y] - mu[b, s], 2), y); out[b, s, y] = (u[b, s, y] - mu[b, s]) * rsqrt(var[b, s] + eps) * g[y] + h[y];",
        factorised_embedding, {"E": "vk", "t": "bs", "W": "yk", "P": "sy", "g": "y", "h": "y"}, (dict(v=30000, b=16, s=512, k=128, y=1024), dict(v=21128, b=7, s=197, k=100, y=777)),
        (dict(v=1000, b=3, s=61, k=64, y=222),), dict(v=31, b=2, s=9, k=17, y=33), scalars=(1e-5,), products=along("b", "s", "k", "y"), grad=("E", "W", "P", "g", "h"),
        kinds={"t": "index:v", "E": "table"}),
    "dlrm_interactions": Untuned(
        "Func out; In X; Var b, i, j; RVar k; Extent j = X[1]; out[b, i, j] = where(j < i, rdot(X[b, i, k], X[b, j, k], k), 0);",
        dlrm_interactions, {"X": "bik"}, (dict(b=8192, i=27, k=128), dict(b=3001, i=40, k=100)), (dict(b=130, i=27, k=64),), dict(b=3, i=11, k=17), products=along("b", "i", "i", "k"), grad=("X",)),
    "drop_path_residual": Untuned(  # p is 0, for torch draws other numbers
        "Func out; In X, Y, g; SIn seed, p; Var b, s, d; out[b, s, d] = X[b, s, d] + where(random(seed, b) < p, 0, g[d] * Y[b, s, d] / (1 - p));",
        drop_path_residual, {"X": "bsd", "Y": "bsd", "g": "d"}, (dict(b=32, s=256, d=1024), dict(b=13, s=197, d=771)), (dict(b=5, s=61, d=222),), dict(b=3, s=7, d=19), scalars=(7, 0.0),
        grad=("X", "Y", "g")),
    "min_gru": Untuned(
        "Func k, c, z, out; In X, W, b, V, e; Var n, t, o; RVar i; k[n, t, o] = rdot(X[n, t, i], W[o, i], i) + b[o]; c[n, t, o] = rdot(X[n, t, i], V[o, i], i) + e[o];"
        " z[n, t, o] = sigmoid(k[n, t, o]); out[n, t, o] = rrecur(1 - z[n, t, o], z[n, t, o] * where(c[n, t, o] >= 0, c[n, t, o] + 0.5, sigmoid(c[n, t, o])), t);",
        min_gru, {"X": "nti", "W": "oi", "b": "o", "V": "oi", "e": "o"}, (dict(n=16, t=512, i=512, o=1024), dict(n=13, t=301, i=400, o=777)), (dict(n=3, t=130, i=100, o=222),),
        dict(n=2, t=21, i=17, o=19), products=times("ntio", "ntio"), grad=("X", "W", "b", "V", "e"), kinds={"W": "small", "V": "small"}),
}  # fmt: skip

PROGRAMS: dict[str, Untuned] = ROWS_OF_MODELS | PRODUCTS | ATTENTIONS | MORE
