# ruff: noqa: E501
"""Programs of an outsider: matrix products with what is fused to them, and variants of attention. None has a schedule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from untuned_forms import wide
from untuned_program import Untuned, along


def times(*products):
    """Operations of several products, each given by its labels."""
    return lambda s: sum(along(*p)(s) for p in products)


# -- the same in torch ------------------------------------------------------------------------------------------------------



def causal(queries, keys, device):
    return torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None]


def bert_output(x, w, z, r, g, h, eps):
    return F.layer_norm(F.linear(x, w, z) + r, r.shape[-1:], g, h, eps)


def rmsnorm_linear(x, g, w, eps):
    return F.rms_norm(x, x.shape[-1:], g, eps) @ w


def gelu_drop_linear(h, c, w, z, keep, r, p):
    return r + torch.where(keep > 0, F.linear(F.gelu(h + c), w, z), 0) / (1 - p)


def int8_group(x, w, s, z):
    full = w.to(x.dtype).view(*s.shape, -1) * s[..., None]
    return F.linear(x, full.flatten(1), z)


def gru_cell(x, h, w, u, c, e):
    xr, xz, xn = F.linear(x, w, c).chunk(3, -1)
    hr, hz, hn = F.linear(h, u, e).chunk(3, -1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return (1 - z) * n + z * h


def two_loras(x, w, a, b, c, d, alpha, beta):
    return F.linear(x, w) + alpha * F.linear(F.linear(x, a), b) + beta * F.linear(F.linear(x, c), d)


def biaffine(h, w, d, u, v):
    return (h @ w) @ d.mT + (h @ u)[:, :, None] + (d @ v)[:, None, :]


def kernel_ridge(q, x, alpha, gamma):
    return (torch.exp(-gamma * torch.cdist(wide(q), wide(x)).pow(2)) @ wide(alpha)).to(q.dtype)


def clip_loss(image, text, tau):
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    logits = wide(tau * image @ text.mT)
    labels = torch.arange(len(image), device=image.device)
    return ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.mT, labels)) / 2).to(image.dtype)


def barlow_twins(a, b, lam, eps):
    a, b, kind = wide(a), wide(b), a.dtype
    a, b = ((t - t.mean(0)) / torch.sqrt(t.var(0, correction=0) + eps) for t in (a, b))
    c = a.mT @ b / len(a)
    on = torch.eye(len(c), dtype=torch.bool, device=c.device)
    return torch.where(on, (c - 1) ** 2, lam * c**2).sum().to(kind)


def vit_qkv(x, w, z):
    c, h, d, _ = w.shape
    qkv = F.linear(x, w.flatten(0, 2), z.flatten())
    return qkv.view(*x.shape[:2], c, h, d).permute(2, 0, 3, 1, 4)


def padded_weights(q, k, n, scale):
    b, h, m, d = q.shape
    scores = (q.view(b, k.shape[1], -1, m, d) @ k[:, :, None].mT).flatten(1, 2) * scale
    seen = torch.arange(k.shape[2], device=q.device) < n[:, None, None, None]
    return torch.softmax(wide(scores.masked_fill(~seen, float("-inf"))), -1).to(q.dtype)


def elu_linear_attention(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    kv = torch.einsum("blhd,blhn->bhdn", k, v)
    z = 1 / (torch.einsum("bmhd,bhd->bmh", q, k.sum(1)) + 1e-6)
    return torch.einsum("bmhd,bhdn,bmh->bmhn", q, kv, z)


def t5_cross(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=1.0)


def swin_v2(q, k, v, tau, bias, mask):
    windows, heads, m, _ = q.shape
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * tau.clamp(max=4.6052).exp()[:, None, None] + bias
    scores = (scores.view(-1, len(mask), heads, m, m) + mask[None, :, None]).view(windows, heads, m, m)
    return torch.softmax(wide(scores), -1).to(v.dtype) @ v


def relu2_attention(u, q, k, v, scale):
    queries, keys = q.shape[1], k.shape[1]
    a = F.relu(q @ k.mT * scale).square().masked_fill(~causal(queries, keys, q.device), 0)
    return u * (a @ v / keys)


def gemma_window(q, k, v, scale, cap, w):
    b, h, m, d = q.shape
    k, v = (t.repeat_interleave(h // t.shape[1], 1) for t in (k, v))
    scores = torch.tanh(q @ k.mT * scale / cap) * cap
    apart = torch.arange(m, device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    scores = scores.masked_fill((apart < 0) | (apart >= w), float("-inf"))
    return torch.softmax(wide(scores), -1).to(v.dtype) @ v


def mla_scores(q, p, k, c, v, scale):
    s = torch.einsum("bmhd,blhd->bhml", q, k) + torch.einsum("bmhr,blr->bhml", p, c)
    s = wide(s * scale).masked_fill(~causal(q.shape[1], k.shape[1], q.device), float("-inf"))
    return torch.einsum("bhml,blhn->bmhn", torch.softmax(s, -1).to(v.dtype), v)


def talking_heads(q, k, v, before, after, scale):
    s = torch.einsum("bhml,hg->bgml", q @ k.mT * scale, before)
    p = torch.softmax(wide(s), -1).to(v.dtype)
    return torch.einsum("bgml,go->boml", p, after) @ v


def diff_attention(q, p, k, j, v, lam, scale, eps):
    first, second = (torch.softmax(wide(a @ b.mT * scale), -1) for a, b in ((q, k), (p, j)))
    o = (first - wide(lam)[:, None, None] * second).to(v.dtype) @ v
    return F.rms_norm(o, o.shape[-1:], eps=eps)


def abmil_pooling(x, u, g, w):
    a = (torch.tanh(F.linear(x, u)) * torch.sigmoid(F.linear(x, g))) @ w
    p = torch.softmax(wide(a), -1).to(x.dtype)
    return (p[:, None] @ x)[:, 0]


def mixer_tokens(x, w, c, u, e, eps):
    y = F.layer_norm(x, x.shape[-1:], eps=eps).mT
    return x + F.linear(F.gelu(F.linear(y, w, c)), u, e).mT


def newton_schulz(x, a, b, c):
    x = x / (wide(x).norm() + 1e-7).to(x.dtype)
    s = x @ x.mT
    return a * x + (b * s + c * s @ s) @ x


def convnext_mlp(x, r, g, h, w, c, u, e, gamma, eps):
    y = F.layer_norm(x, x.shape[-1:], g, h, eps)
    return r + gamma * F.linear(F.gelu(F.linear(y, w, c)), u, e)


def squeeze_excite(x, w, z, u, v):
    m = x.mean((2, 3))
    return x * torch.sigmoid(F.linear(F.relu(F.linear(m, w, z)), u, v))[:, :, None, None]


def film(x, c, w, z):
    scale, shift = F.linear(c, w, z).chunk(2, -1)
    return F.silu(x * (1 + scale[..., None, None]) + shift[..., None, None])


def fno_modes(a, b, c, d):
    e = torch.einsum
    return e("bim,iom->bom", a, c) - e("bim,iom->bom", b, d), e("bim,iom->bom", a, d) + e("bim,iom->bom", b, c)


def spectral_norm(w, u, eps):
    v = F.normalize(wide(w).mT @ wide(u), dim=0, eps=eps)
    u = F.normalize(wide(w) @ v, dim=0, eps=eps)
    sigma = torch.dot(u, wide(w) @ v)
    return u.to(w.dtype), v.to(w.dtype), (wide(w) / sigma).to(w.dtype)


def soft_moe_dispatch(x, phi):
    logits = torch.einsum("bmd,des->bmes", x, phi)
    return torch.einsum("bmes,bmd->besd", torch.softmax(wide(logits), 1).to(x.dtype), x)


def late_interaction(q, d):
    return torch.einsum("aik,bjk->abij", q, d).amax(-1).sum(-1)


def triangle_multiply(a, b, g):
    return torch.sigmoid(g) * torch.einsum("ikc,jkc->ijc", a, b)


def mahalanobis(x, mu, p):
    d = wide(x)[:, None] - wide(mu)
    return ((d @ wide(p)) * d).sum(-1).to(x.dtype)


def perceiver(q, k, v, scale):
    s = torch.einsum("mhd,blhd->bhml", q, k) * scale
    return torch.einsum("bhml,blhn->bmhn", torch.softmax(wide(s), -1).to(v.dtype), v)


# -- products ---------------------------------------------------------------------------------------------------------------

PRODUCTS = {
    "bert_output": Untuned(
        "Func u, mu, var, out; In X, W, z, R, g, h; SIn eps; Var b, s; RVar i, o; u[b, s, o] = rdot(X[b, s, i], W[o, i], i) + z[o] + R[b, s, o];"
        " mu[b, s] = rmean(u[b, s, o], o); var[b, s] = rmean((u[b, s, o] - mu[b, s]) * (u[b, s, o] - mu[b, s]), o);"
        " out[b, s, o] = (u[b, s, o] - mu[b, s]) * rsqrt(var[b, s] + eps) * g[o] + h[o];",
        bert_output, {"X": "bsi", "W": "oi", "z": "o", "R": "bso", "g": "o", "h": "o"},
        (dict(b=8, s=512, i=4096, o=1024), dict(b=3, s=1000, i=2040, o=1000)), (dict(b=3, s=333, i=776, o=520),), dict(b=2, s=19, i=41, o=37),
        scalars=(1e-5,), products=along("b", "s", "i", "o"), grad=("X", "W", "z", "R", "g", "h"), kinds={"W": "small"}),
    "rmsnorm_linear": Untuned(
        "Func ms, out; In X, g, W; SIn eps; Var t, o; RVar i; ms[t] = rmean(X[t, i] * X[t, i], i);"
        " out[t, o] = rdot(X[t, i] * rsqrt(ms[t] + eps) * g[i], W[i, o], i);",
        rmsnorm_linear, {"X": "ti", "g": "i", "W": "io"}, (dict(t=4096, i=4096, o=4096), dict(t=3000, i=1000, o=2040)), (dict(t=777, i=1000, o=520),),
        dict(t=33, i=45, o=37), scalars=(1e-6,), products=along("t", "i", "o"), grad=("X", "g", "W"), kinds={"W": "small"}),
    "gelu_drop_linear": Untuned(
        "Func a, out; In H, c, W, z, M, R; SIn p; Var b, s, o; RVar i;"
        " a[b, s, i] = 0.5 * (H[b, s, i] + c[i]) * (1 + erf((H[b, s, i] + c[i]) * 0.7071067811865476));"
        " out[b, s, o] = R[b, s, o] + where(M[b, s, o] > 0, rdot(a[b, s, i], W[o, i], i) + z[o], 0) / (1 - p);",
        gelu_drop_linear, {"H": "bsi", "c": "i", "W": "oi", "z": "o", "M": "bso", "R": "bso"},
        (dict(b=4, s=1024, i=4096, o=4096), dict(b=3, s=1000, i=1000, o=2040)), (dict(b=2, s=301, i=1000, o=520),), dict(b=2, s=19, i=45, o=37),
        scalars=(0.5,), products=along("b", "s", "i", "o"), grad=("H", "c", "W", "z", "R"), kinds={"W": "small", "M": "int8"}),
    "int8_group": Untuned(
        "Func out; In X, W, s, z; Var t, o; RVar k; out[t, o] = rdot(X[t, k], W[o, k] * s[o, k / 64], k) + z[o];",
        int8_group, {"X": "tk", "W": "ok", "s": "og", "z": "o"}, (dict(t=4096, k=4096, g=64, o=4096), dict(t=50, k=2048, g=32, o=3000)),
        (dict(t=301, k=768, g=12, o=520),), dict(t=21, k=128, g=2, o=37), products=along("t", "k", "o"), grad=("X", "s"), kinds={"W": "int8", "s": "small"}),
    "gru_cell": Untuned(
        "Func r, u, n, out; In X, H, W, U, c, e; Var b, j; RVar i, k;"
        " r[b, j] = sigmoid(rdot(X[b, i], W[j + 0, i], i) + c[j + 0] + rdot(H[b, k], U[j + 0, k], k) + e[j + 0]);"
        " u[b, j] = sigmoid(rdot(X[b, i], W[j + len(j), i], i) + c[j + len(j)] + rdot(H[b, k], U[j + len(j), k], k) + e[j + len(j)]);"
        " n[b, j] = tanh(rdot(X[b, i], W[j + 2 * len(j), i], i) + c[j + 2 * len(j)] + r[b, j] * (rdot(H[b, k], U[j + 2 * len(j), k], k) + e[j + 2 * len(j)]));"
        " out[b, j] = (1 - u[b, j]) * n[b, j] + u[b, j] * H[b, j];",
        gru_cell, {"X": "bi", "H": "bj", "W": "gi", "U": "gj", "c": "g", "e": "g"}, (dict(b=4096, i=1024, j=1024, g=3072), dict(b=1000, i=500, j=680, g=2040)),
        (dict(b=333, i=260, j=200, g=600),), dict(b=19, i=33, j=21, g=63), products=times("big", "bjg"), grad=("X", "H", "W", "U", "c", "e"),
        kinds={"W": "small", "U": "small"}),
    "two_loras": Untuned(
        "Func a, c, out; In X, W, A, B, C, D; SIn alpha, beta; Var t, o; RVar i, r, q; a[t, r] = rdot(X[t, i], A[r, i], i); c[t, q] = rdot(X[t, i], C[q, i], i);"
        " out[t, o] = rdot(X[t, i], W[o, i], i) + alpha * rdot(a[t, r], B[o, r], r) + beta * rdot(c[t, q], D[o, q], q);",
        two_loras, {"X": "ti", "W": "oi", "A": "ri", "B": "or", "C": "qi", "D": "oq"},
        (dict(t=4096, i=4096, o=4096, r=16, q=64), dict(t=3000, i=1000, o=2040, r=8, q=24)), (dict(t=777, i=520, o=600, r=8, q=32),),
        dict(t=33, i=45, o=37, r=4, q=8), scalars=(0.5, 2.0), products=times("tio", "tir", "tro", "tiq", "tqo"), grad=("X", "A", "B", "C", "D"),
        kinds={"W": "small", "A": "small", "B": "small", "C": "small", "D": "small"}, backward=1.0),
    "biaffine": Untuned(
        "Func out; In H, W, D, u, v; Var b, i, j; RVar k, l;"
        " out[b, i, j] = rsum(H[b, i, k] * W[k, l] * D[b, j, l], k, l) + rsum(H[b, i, k] * u[k], k) + rsum(D[b, j, l] * v[l], l);",
        biaffine, {"H": "bik", "W": "kl", "D": "bjl", "u": "k", "v": "l"}, (dict(b=16, i=512, j=512, k=512, l=512), dict(b=12, i=300, j=310, k=400, l=500)),
        (dict(b=5, i=130, j=111, k=200, l=260),), dict(b=2, i=17, j=19, k=21, l=23), products=times("bikl", "bijl"), grad=("H", "W", "D", "u", "v"),
        kinds={"W": "small"}),
    "kernel_ridge": Untuned(
        "Func d, out; In Q, X, alpha; SIn gamma; Var m, t; RVar n, k; d[m, n] = rsum((Q[m, k] - X[n, k]) * (Q[m, k] - X[n, k]), k);"
        " out[m, t] = rdot(exp(-gamma * d[m, n]), alpha[n, t], n);",
        kernel_ridge, {"Q": "mk", "X": "nk", "alpha": "nt"}, (dict(m=4096, n=4096, k=64, t=16), dict(m=3000, n=2040, k=30, t=7)), (dict(m=777, n=1000, k=64, t=16),),
        dict(m=33, n=45, k=19, t=5), scalars=(0.015,), products=times("mnk", "mnt"), grad=("Q", "X", "alpha"), backward=2.5),
    "clip_loss": Untuned(
        "Func a, c, s, out; In I, T; SIn tau; RVar i, j, k; a[i] = rsum(I[i, k] * I[i, k], k); c[j] = rsum(T[j, k] * T[j, k], k);"
        " s[i, j] = tau * rdot(I[i, k], T[j, k], k) * rsqrt(a[i]) * rsqrt(c[j]);"
        " out[] = (rmean(log(rsum(exp(s[i, j]), j)) - s[i, i], i) + rmean(log(rsum(exp(s[i, j]), i)) - s[j, j], j)) / 2;",
        clip_loss, {"I": "ik", "T": "jk"}, (dict(i=4096, j=4096, k=1024), dict(i=3000, j=3000, k=640)), (dict(i=777, j=777, k=200),), dict(i=37, j=37, k=29),
        scalars=(14.3,), products=along("i", "j", "k"), grad=("I", "T")),
    "barlow_twins": Untuned(
        "Func ma, mb, va, vb, c, out; In A, B; SIn lam, eps; RVar n, i, j; ma[i] = rmean(A[n, i], n); mb[j] = rmean(B[n, j], n);"
        " va[i] = rmean((A[n, i] - ma[i]) * (A[n, i] - ma[i]), n); vb[j] = rmean((B[n, j] - mb[j]) * (B[n, j] - mb[j]), n);"
        " c[i, j] = rmean((A[n, i] - ma[i]) * (B[n, j] - mb[j]), n) * rsqrt(va[i] + eps) * rsqrt(vb[j] + eps);"
        " out[] = rsum(where(i == j, (c[i, j] - 1) * (c[i, j] - 1), lam * c[i, j] * c[i, j]), i, j);",
        barlow_twins, {"A": "ni", "B": "nj"}, (dict(n=1024, i=2048, j=2048), dict(n=1000, i=1500, j=1500)), (dict(n=333, i=520, j=520),), dict(n=41, i=19, j=19),
        scalars=(0.005, 1e-5), products=along("n", "i", "j"), grad=("A", "B")),
    "vit_qkv": Untuned(
        "Func out; In X, W, z; Var c, b, h, s, d; RVar i; out[c, b, h, s, d] = rdot(X[b, s, i], W[c, h, d, i], i) + z[c, h, d];",
        vit_qkv, {"X": "bsi", "W": "chdi", "z": "chd"}, (dict(c=3, b=8, s=1024, h=16, d=64, i=1024), dict(c=3, b=24, s=197, h=12, d=64, i=768)),
        (dict(c=3, b=3, s=197, h=5, d=48, i=240),), dict(c=3, b=2, s=11, h=2, d=16, i=32), products=along("c", "b", "h", "s", "d", "i"), grad=("X", "W", "z"),
        kinds={"W": "small"}),
    "newton_schulz": Untuned(
        "Func total, Y, S, P, out; In X; SIn a, b, c; RVar i, j, l, k; total[] = rsum(X[i, k] * X[i, k], i, k); Y[i, k] = X[i, k] / (sqrt(total[]) + 1e-7);"
        " S[i, j] = rdot(Y[i, k], Y[j, k], k); P[i, j] = b * S[i, j] + c * rdot(S[i, l], S[l, j], l); out[i, k] = a * Y[i, k] + rdot(P[i, j], Y[j, k], j);",
        newton_schulz, {"X": "ik"}, (dict(i=1024, k=4096), dict(i=1000, k=2040)), (dict(i=333, k=520),), dict(i=21, k=45), scalars=(3.4445, -4.775, 2.0315),
        products=times("iik", "iii", "iik")),
    "mixer_tokens": Untuned(
        "Func mu, var, y, v, h, out; In X, W, c, U, e; SIn eps; Var b, s; RVar t, j, f; mu[b, t] = rmean(X[b, t, f], f);"
        " var[b, t] = rmean((X[b, t, f] - mu[b, t]) * (X[b, t, f] - mu[b, t]), f); y[b, t, f] = (X[b, t, f] - mu[b, t]) * rsqrt(var[b, t] + eps);"
        " v[b, j, f] = rdot(W[j, t], y[b, t, f], t) + c[j]; h[b, j, f] = 0.5 * v[b, j, f] * (1 + erf(v[b, j, f] * 0.7071067811865476));"
        " out[b, s, f] = X[b, s, f] + rdot(U[s, j], h[b, j, f], j) + e[s];",
        mixer_tokens, {"X": "bsf", "W": "js", "c": "j", "U": "sj", "e": "s"}, (dict(b=32, s=256, j=1024, f=1024), dict(b=24, s=196, j=384, f=768)),
        (dict(b=3, s=196, j=130, f=200),), dict(b=2, s=17, j=22, f=19), scalars=(1e-6,), products=times("bsjf", "bsjf"), grad=("X", "W", "c", "U", "e"),
        kinds={"W": "small", "U": "small"}),
    "convnext_mlp": Untuned(
        "Func mu, var, n, v, a, out; In X, R, g, h, W, c, U, e, gamma; SIn eps; Var b, y, x, o; RVar f, j; mu[b, y, x] = rmean(X[b, y, x, f], f);"
        " var[b, y, x] = rmean((X[b, y, x, f] - mu[b, y, x]) * (X[b, y, x, f] - mu[b, y, x]), f);"
        " n[b, y, x, f] = (X[b, y, x, f] - mu[b, y, x]) * rsqrt(var[b, y, x] + eps) * g[f] + h[f]; v[b, y, x, j] = rdot(n[b, y, x, f], W[j, f], f) + c[j];"
        " a[b, y, x, j] = 0.5 * v[b, y, x, j] * (1 + erf(v[b, y, x, j] * 0.7071067811865476));"
        " out[b, y, x, o] = R[b, y, x, o] + gamma[o] * (rdot(a[b, y, x, j], U[o, j], j) + e[o]);",
        convnext_mlp, {"X": "byxf", "R": "byxf", "g": "f", "h": "f", "W": "jf", "c": "j", "U": "fj", "e": "f", "gamma": "f"},
        (dict(b=8, y=32, x=32, f=384, j=1536), dict(b=16, y=14, x=14, f=760, j=3040)), (dict(b=3, y=14, x=14, f=200, j=400),), dict(b=2, y=3, x=5, f=17, j=22),
        scalars=(1e-6,), products=times("byxfj", "byxfj"), grad=("X", "R", "g", "h", "W", "c", "U", "e", "gamma"), kinds={"W": "small", "U": "small"}),
}  # fmt: skip

# -- attentions -------------------------------------------------------------------------------------------------------------

ATTENTIONS = {
    "padded_weights": Untuned(
        "Func s, t, out; In Q, K, N; SIn scale; Var b, h, m; RVar l, d; s[b, h, m, l] = where(l < N[b], scale * rdot(Q[b, h, m, d], K[b, h / 4, l, d], d), -inf);"
        " t[b, h, m] = rsum(exp(s[b, h, m, l]), l); out[b, h, m, l] = exp(s[b, h, m, l]) / t[b, h, m];",
        padded_weights, {"Q": "bhmd", "K": "bgld", "N": "b"}, (dict(b=2, h=16, g=4, m=1024, l=2048, d=128), dict(b=3, h=12, g=3, m=500, l=1500, d=80)),
        (dict(b=3, h=8, g=2, m=250, l=777, d=80),), dict(b=2, h=8, g=2, m=17, l=37, d=16), scalars=(0.1,), products=along("b", "h", "m", "l", "d"), grad=("Q", "K"),
        kinds={"N": "index:l"}),
    "elu_linear_attention": Untuned(
        "Func q, k, kv, ks, out; In Q, K, V; Var b, h, m, n; RVar l, d; q[b, m, h, d] = where(Q[b, m, h, d] > 0, Q[b, m, h, d] + 1, exp(minimum(Q[b, m, h, d], 0)));"
        " k[b, l, h, d] = where(K[b, l, h, d] > 0, K[b, l, h, d] + 1, exp(minimum(K[b, l, h, d], 0))); kv[b, h, d, n] = rdot(k[b, l, h, d], V[b, l, h, n], l);"
        " ks[b, h, d] = rsum(k[b, l, h, d], l); out[b, m, h, n] = rdot(q[b, m, h, d], kv[b, h, d, n], d) / (rsum(q[b, m, h, d] * ks[b, h, d], d) + 1e-6);",
        elu_linear_attention, {"Q": "bmhd", "K": "blhd", "V": "blhn"}, (dict(b=4, m=4096, l=4096, h=16, d=64, n=64), dict(b=3, m=1500, l=1700, h=12, d=80, n=80)),
        (dict(b=2, m=777, l=1000, h=5, d=80, n=48),), dict(b=2, m=37, l=41, h=3, d=16, n=16), products=times("blhdn", "bmhdn"), grad=("Q", "K", "V")),
    "t5_cross": Untuned(
        "Func s, t, out; In Q, K, V, B; Var b, h, m, n; RVar l, d; s[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h, l, d], d) + B[h, m, l];"
        " t[b, h, m] = rsum(exp(s[b, h, m, l]), l); out[b, h, m, n] = rdot(exp(s[b, h, m, l]), V[b, h, l, n], l) / t[b, h, m];",
        t5_cross, {"Q": "bhmd", "K": "bhld", "V": "bhln", "B": "hml"}, (dict(b=2, h=16, m=1024, l=2048, d=64, n=64), dict(b=3, h=12, m=500, l=1500, d=80, n=80)),
        (dict(b=3, h=5, m=250, l=777, d=80, n=80),), dict(b=2, h=2, m=37, l=70, d=16, n=16), products=times("bhmld", "bhmln"), grad=("Q", "K", "V", "B"),
        kinds={"Q": "small"}, backward=2.5),
    "swin_v2": Untuned(
        "Func a, c, s, e, out; In Q, K, V, tau, B, M; Var w, h, m, n, i; RVar l, d; Extent i = M[0]; a[w, h, m] = rsum(Q[w, h, m, d] * Q[w, h, m, d], d);"
        " c[w, h, l] = rsum(K[w, h, l, d] * K[w, h, l, d], d);"
        " s[w, h, m, l] = rdot(Q[w, h, m, d], K[w, h, l, d], d) * rsqrt(a[w, h, m] + 1e-12) * rsqrt(c[w, h, l] + 1e-12) * exp(minimum(tau[h], 4.6052)) + B[h, m, l] + M[w % len(i), m, l];"
        " e[w, h, m, l] = exp(s[w, h, m, l]); out[w, h, m, n] = rdot(e[w, h, m, l] / rsum(e[w, h, m, l], l), V[w, h, l, n], l);",
        swin_v2, {"Q": "whmd", "K": "whld", "V": "whln", "tau": "h", "B": "hml", "M": "iml"},
        (dict(w=512, i=64, h=8, m=64, l=64, d=32, n=32), dict(w=384, i=16, h=6, m=49, l=49, d=32, n=32)), (dict(w=32, i=8, h=3, m=49, l=49, d=32, n=32),),
        dict(w=6, i=3, h=2, m=25, l=25, d=16, n=16), products=times("whmld", "whmln"), grad=("Q", "K", "V", "tau", "B"), backward=2.5),
    "relu2_attention": Untuned(
        "Func a, out; In U, Q, K, V; SIn scale; Var b, m, n; RVar l, d; a[b, m, l] = where(l <= m, pow(maximum(scale * rdot(Q[b, m, d], K[b, l, d], d), 0), 2), 0);"
        " out[b, m, n] = U[b, m, n] * rdot(a[b, m, l], V[b, l, n], l) / len(l);",
        relu2_attention, {"U": "bmn", "Q": "bmd", "K": "bld", "V": "bln"}, (dict(b=4, m=2048, l=2048, d=128, n=1536), dict(b=3, m=1500, l=1500, d=128, n=1000)),
        (dict(b=2, m=333, l=333, d=128, n=520),), dict(b=2, m=37, l=37, d=16, n=70), scalars=(0.09,), products=lambda s: times("bmld", "bmln")(s) / 2,
        grad=("U", "Q", "K", "V"), backward=2.5),
    "gemma_window": Untuned(
        "Func s, t, out; In Q, K, V; SIn scale, cap, w; Var b, h, m, n; RVar l, d;"
        " s[b, h, m, l] = where(l <= m and m - l < w, cap * tanh(scale * rdot(Q[b, h, m, d], K[b, h / 2, l, d], d) / cap), -inf);"
        " t[b, h, m] = rsum(exp(s[b, h, m, l]), l); out[b, h, m, n] = rdot(exp(s[b, h, m, l]), V[b, h / 2, l, n], l) / t[b, h, m];",
        gemma_window, {"Q": "bhmd", "K": "bgld", "V": "bgln"}, (dict(b=1, h=16, g=8, m=2048, l=2048, d=256, n=256), dict(b=1, h=12, g=6, m=1500, l=1500, d=80, n=80)),
        (dict(b=2, h=4, g=2, m=777, l=777, d=80, n=80),), dict(b=2, h=4, g=2, m=70, l=70, d=16, n=16), scalars=(0.0625, 50.0, 512), small_scalars=(0.25, 5.0, 20),
        products=lambda s: times("bhmd", "bhmn")(s) * min(512, s["l"]), grad=("Q", "K", "V"), backward=2.5),
    "mla_scores": Untuned(
        "Func s, e, t, out; In Q, P, K, C, V; SIn scale; Var b, m, h, n; RVar l, d, r;"
        " s[b, h, m, l] = where(l <= m, scale * (rdot(Q[b, m, h, d], K[b, l, h, d], d) + rdot(P[b, m, h, r], C[b, l, r], r)), -inf); e[b, h, m, l] = exp(s[b, h, m, l]);"
        " t[b, h, m] = rsum(e[b, h, m, l], l); out[b, m, h, n] = rdot(e[b, h, m, l], V[b, l, h, n], l) / t[b, h, m];",
        mla_scores, {"Q": "bmhd", "P": "bmhr", "K": "blhd", "C": "blr", "V": "blhn"},
        (dict(b=1, m=2048, l=2048, h=16, d=128, r=64, n=128), dict(b=2, m=1500, l=1500, h=6, d=80, r=32, n=96)), (dict(b=2, m=333, l=333, h=3, d=80, r=32, n=96),),
        dict(b=2, m=37, l=37, h=2, d=16, r=16, n=16), scalars=(0.07,), products=lambda s: times("bhmld", "bhmlr", "bhmln")(s) / 2, grad=("Q", "P", "K", "C", "V"), backward=2.5),
    "talking_heads": Untuned(
        "Func s, x, p, y, out; In Q, K, V, P, R; SIn scale; Var b, m, o, n; RVar h, g, l, d; s[b, h, m, l] = scale * rdot(Q[b, h, m, d], K[b, h, l, d], d);"
        " x[b, g, m, l] = rdot(s[b, h, m, l], P[h, g], h); p[b, g, m, l] = exp(x[b, g, m, l]) / rsum(exp(x[b, g, m, l]), l);"
        " y[b, o, m, l] = rdot(p[b, g, m, l], R[g, o], g); out[b, o, m, n] = rdot(y[b, o, m, l], V[b, o, l, n], l);",
        talking_heads, {"Q": "bhmd", "K": "bhld", "V": "boln", "P": "hg", "R": "go"},
        (dict(b=4, h=16, g=16, o=16, m=512, l=512, d=64, n=64), dict(b=3, h=12, g=12, o=12, m=300, l=300, d=80, n=80)),
        (dict(b=2, h=5, g=6, o=5, m=130, l=150, d=48, n=48),), dict(b=2, h=3, g=4, o=3, m=19, l=23, d=16, n=16), scalars=(0.125,),
        products=times("bhmld", "bhgml", "bgoml", "bomln"), grad=("Q", "K", "V", "P", "R")),
    "diff_attention": Untuned(
        "Func s, z, t, u, o, out; In Q, P, K, J, V, lam; SIn scale, eps; Var b, h, m; RVar l, d, n; s[b, h, m, l] = scale * rdot(Q[b, h, m, d], K[b, h, l, d], d);"
        " z[b, h, m, l] = scale * rdot(P[b, h, m, d], J[b, h, l, d], d); t[b, h, m] = rsum(exp(s[b, h, m, l]), l); u[b, h, m] = rsum(exp(z[b, h, m, l]), l);"
        " o[b, h, m, n] = rdot(exp(s[b, h, m, l]) / t[b, h, m] - lam[h] * exp(z[b, h, m, l]) / u[b, h, m], V[b, h, l, n], l);"
        " out[b, h, m, n] = o[b, h, m, n] * rsqrt(rmean(o[b, h, m, n] * o[b, h, m, n], n) + eps);",
        diff_attention, {"Q": "bhmd", "P": "bhmd", "K": "bhld", "J": "bhld", "V": "bhln", "lam": "h"},
        (dict(b=2, h=8, m=1024, l=1024, d=64, n=128), dict(b=1, h=12, m=1500, l=1500, d=80, n=80)), (dict(b=2, h=3, m=333, l=500, d=80, n=80),),
        dict(b=2, h=2, m=37, l=41, d=16, n=16), scalars=(0.125, 1e-5), products=times("bhmld", "bhmld", "bhmln"), grad=("Q", "P", "K", "J", "V", "lam"), backward=2.5,
        kinds={"lam": "positive"}),
    "abmil_pooling": Untuned(
        "Func a, s, t, out; In X, U, G, w; Var b; RVar l, i, j; a[b, l, j] = tanh(rdot(X[b, l, i], U[j, i], i)) * sigmoid(rdot(X[b, l, i], G[j, i], i));"
        " s[b, l] = rsum(a[b, l, j] * w[j], j); t[b] = rsum(exp(s[b, l]), l); out[b, i] = rsum(exp(s[b, l]) * X[b, l, i], l) / t[b];",
        abmil_pooling, {"X": "bli", "U": "ji", "G": "ji", "w": "j"}, (dict(b=8, l=4096, i=1024, j=256), dict(b=5, l=3000, i=1000, j=190)),
        (dict(b=3, l=777, i=520, j=100),), dict(b=2, l=37, i=29, j=19), products=lambda s: 2 * times("blij")(s), grad=("X", "U", "G", "w"),
        kinds={"U": "small", "G": "small"}),
}  # fmt: skip

# -- more -------------------------------------------------------------------------------------------------------------------

MORE = {
    "squeeze_excite": Untuned(
        "Func m, r, g, out; In X, W, z, U, v; Var b; RVar f, y, x, j; m[b, f] = rmean(X[b, f, y, x], y, x); r[b, j] = maximum(rdot(m[b, f], W[j, f], f) + z[j], 0);"
        " g[b, f] = sigmoid(rdot(r[b, j], U[f, j], j) + v[f]); out[b, f, y, x] = X[b, f, y, x] * g[b, f];",
        squeeze_excite, {"X": "bfyx", "W": "jf", "z": "j", "U": "fj", "v": "f"}, (dict(b=64, f=256, y=56, x=56, j=64), dict(b=40, f=480, y=28, x=28, j=20)),
        (dict(b=5, f=200, y=14, x=15, j=20),), dict(b=2, f=17, y=5, x=6, j=7), products=times("bfj", "bfj"), grad=("X", "W", "z", "U", "v")),
    "film": Untuned(
        "Func g, h, u, out; In X, C, W, z; Var b, f, y, x; RVar k; g[b, f] = rdot(C[b, k], W[f + 0, k], k) + z[f + 0]; h[b, f] = rdot(C[b, k], W[f + len(f), k], k) + z[f + len(f)];"
        " u[b, f, y, x] = X[b, f, y, x] * (1 + g[b, f]) + h[b, f]; out[b, f, y, x] = u[b, f, y, x] * sigmoid(u[b, f, y, x]);",
        film, {"X": "bfyx", "C": "bk", "W": "gk", "z": "g"}, (dict(b=32, f=256, g=512, y=64, x=64, k=1024), dict(b=24, f=320, g=640, y=27, x=27, k=500)),
        (dict(b=5, f=100, g=200, y=14, x=15, k=130),), dict(b=2, f=11, g=22, y=5, x=6, k=19), products=along("b", "g", "k"), grad=("X", "C", "W", "z"), kinds={"W": "small"}),
    "fno_modes": Untuned(
        "Func re, out; In A, B, C, D; Var b, o, m; RVar i; re[b, o, m] = rsum(A[b, i, m] * C[i, o, m] - B[b, i, m] * D[i, o, m], i);"
        " out[b, o, m] = rsum(A[b, i, m] * D[i, o, m] + B[b, i, m] * C[i, o, m], i); re.compile(); out.compile();",
        fno_modes, {"A": "bim", "B": "bim", "C": "iom", "D": "iom"}, (dict(b=32, i=64, o=64, m=1024), dict(b=20, i=40, o=50, m=300)), (dict(b=7, i=40, o=33, m=100),),
        dict(b=3, i=9, o=7, m=11), products=lambda s: 4 * along("b", "i", "o", "m")(s), grad=("A", "B", "C", "D"), dtypes=("fp32",), kinds={"C": "small", "D": "small"}),
    "spectral_norm": Untuned(
        "Func p, v, q, r, sigma, out; In W, u; SIn eps; RVar o, i; p[i] = rsum(W[o, i] * u[o], o); v[i] = p[i] / maximum(sqrt(rsum(p[i] * p[i], i)), eps);"
        " q[o] = rsum(W[o, i] * v[i], i); r[o] = q[o] / maximum(sqrt(rsum(q[o] * q[o], o)), eps); sigma[] = rsum(r[o] * q[o], o); out[o, i] = W[o, i] / sigma[];"
        " r.compile(); v.compile(); out.compile();",
        spectral_norm, {"W": "oi", "u": "o"}, (dict(o=4096, i=4096), dict(o=3000, i=2040)), (dict(o=777, i=520),), dict(o=37, i=45), scalars=(1e-12,),
        products=times("oi", "oi")),
    "soft_moe_dispatch": Untuned(
        "Func z, t, out; In X, F; Var b, e, s; RVar m, d; z[b, m, e, s] = rdot(X[b, m, d], F[d, e, s], d); t[b, e, s] = rsum(exp(z[b, m, e, s]), m);"
        " out[b, e, s, d] = rdot(exp(z[b, m, e, s]), X[b, m, d], m) / t[b, e, s];",
        soft_moe_dispatch, {"X": "bmd", "F": "des"}, (dict(b=16, m=1024, d=1024, e=64, s=16), dict(b=12, m=196, d=760, e=30, s=7)), (dict(b=3, m=196, d=200, e=10, s=7),),
        dict(b=2, m=21, d=19, e=5, s=3), products=times("bmdes", "bmdes"), grad=("X", "F"), kinds={"F": "small"}),
    "late_interaction": Untuned(
        "Func out; In Q, D; Var a, b; RVar i, j, k; out[a, b] = rsum(rmax(rdot(Q[a, i, k], D[b, j, k], k), j), i);",
        late_interaction, {"Q": "aik", "D": "bjk"}, (dict(a=16, i=32, b=256, j=256, k=128), dict(a=10, i=30, b=150, j=180, k=96)), (dict(a=5, i=20, b=30, j=100, k=96),),
        dict(a=3, i=5, b=4, j=17, k=19), products=along("a", "i", "b", "j", "k"), grad=("Q", "D")),
    "triangle_multiply": Untuned(
        "Func out; In A, B, G; Var i, j, f; RVar k; out[i, j, f] = sigmoid(G[i, j, f]) * rdot(A[i, k, f], B[j, k, f], k);",
        triangle_multiply, {"A": "ikf", "B": "jkf", "G": "ijf"}, (dict(i=512, j=512, k=512, f=128), dict(i=300, j=300, k=300, f=100)), (dict(i=130, j=100, k=111, f=32),),
        dict(i=17, j=19, k=21, f=5), products=along("i", "j", "k", "f"), grad=("A", "B", "G")),
    "mahalanobis": Untuned(
        "Func out; In X, mu, P; Var b, c; RVar i, j; out[b, c] = rsum((X[b, i] - mu[c, i]) * P[i, j] * (X[b, j] - mu[c, j]), i, j);",
        mahalanobis, {"X": "bi", "mu": "ci", "P": "ij"}, (dict(b=4096, c=64, i=256, j=256), dict(b=3000, c=30, i=100, j=100)), (dict(b=333, c=10, i=64, j=64),),
        dict(b=19, c=5, i=17, j=17), products=times("bcij"), grad=("X", "mu")),
    "perceiver": Untuned(
        "Func s, t, out; In Q, K, V; SIn scale; Var b, m, h, n; RVar l, d; s[b, h, m, l] = scale * rdot(Q[m, h, d], K[b, l, h, d], d);"
        " t[b, h, m] = rsum(exp(s[b, h, m, l]), l); out[b, m, h, n] = rdot(exp(s[b, h, m, l]), V[b, l, h, n], l) / t[b, h, m];",
        perceiver, {"Q": "mhd", "K": "blhd", "V": "blhn"}, (dict(b=4, m=256, l=8192, h=8, d=64, n=64), dict(b=3, m=100, l=5000, h=12, d=80, n=80)),
        (dict(b=2, m=100, l=777, h=5, d=80, n=80),), dict(b=2, m=21, l=70, h=2, d=16, n=16), scalars=(0.125,), products=times("bhmld", "bhmln"), grad=("Q", "K", "V"), backward=2.5),
}  # fmt: skip

PROGRAMS = PRODUCTS | ATTENTIONS | MORE
