# ruff: noqa: E501
"""Programs of an outsider: rows, columns, norms, losses, quantisation, optimizers, embeddings, scans, windows. None has a schedule."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from untuned_forms import masked, wide
from untuned_program import Untuned

ROWS = dict(sizes=(dict(x=8192, y=4096), dict(x=3000, y=5003)), checked=(dict(x=515, y=1027),), small=dict(x=7, y=301))
COLUMNS = dict(sizes=(dict(x=16384, y=1024), dict(x=5003, y=3000)), checked=(dict(x=1031, y=515),), small=dict(x=301, y=37))
FLAT = dict(sizes=(dict(x=1 << 22), dict(x=3_000_017)), checked=(dict(x=1_000_003),), small=dict(x=1000))
XY = {"A": "xy"}


# -- the same in torch ------------------------------------------------------------------------------------------------------


def as_integers(x, a):
    """Integers as they are, beside float64 as float64: what is compared takes the norm of the truth."""
    return x.double() if a.dtype == torch.float64 else x


def adaln_gate_residual(x, shift, scale, gate, eps):
    h = F.layer_norm(wide(x), x.shape[-1:], eps=eps) * (1 + wide(scale)[:, None]) + wide(shift)[:, None]
    return (wide(x) + wide(gate)[:, None] * h).to(x.dtype)


def gated_rmsnorm(a, g, w, eps):
    h = wide(a) * F.silu(wide(g))
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * wide(w)).to(a.dtype)


def batchnorm2d_relu(a, w, z, eps):
    x = wide(a)
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    n = (x - mean[:, None, None]) * torch.rsqrt(var + eps)[:, None, None]
    return mean.to(a.dtype), var.to(a.dtype), F.relu(n * wide(w)[:, None, None] + wide(z)[:, None, None]).to(a.dtype)


def instance_norm_lrelu(a, slope, eps):
    return F.leaky_relu(F.instance_norm(wide(a), eps=eps), slope).to(a.dtype)


def focal_loss(a, t, gamma):
    logp = torch.log_softmax(wide(a), -1).gather(1, t[:, None]).squeeze(1)
    return (-((1 - logp.exp()) ** gamma) * logp).to(a.dtype)


def smoothed_ce_ignore(a, t, eps, ignore):
    return F.cross_entropy(wide(a), t, ignore_index=int(ignore), label_smoothing=eps, reduction="none").to(a.dtype)


def supcon_rows(s, g, tau):
    z = wide(s) / tau
    other = ~torch.eye(len(g), dtype=torch.bool, device=s.device)
    alike = (g[:, None] == g) & other
    logp = z - torch.logsumexp(masked(z, other), 1, keepdim=True)
    return (-torch.where(alike, logp, 0).sum(1) / alike.sum(1).clamp(min=1)).to(s.dtype)


def padding_softmax(s, n, tau):
    seen = torch.arange(s.shape[-1], device=s.device) < n[:, None, None, None]
    return torch.softmax(masked(wide(s) / tau, seen), -1).to(s.dtype)


def topk_gates(a):
    return torch.softmax(torch.topk(wide(a), 4, -1).values, -1).to(a.dtype)


def argmax_accuracy(a, t):
    p = torch.softmax(wide(a), -1)
    best = a.argmax(-1)
    return as_integers(best, a), (best == t).float(), p.amax(-1).to(a.dtype)


def quantise_columns(a):
    x = wide(a)
    lo, hi = x.amin(0), x.amax(0)
    s = (hi - lo) / 255
    return lo.to(a.dtype), s.to(a.dtype), as_integers(torch.clamp(torch.round((x - lo) / s), 0, 255).to(torch.uint8), a)


def group_int4(a):
    x = wide(a).unflatten(1, (-1, 32))
    s = x.abs().amax(-1, keepdim=True) / 7
    return (torch.clamp(torch.round(x / s), -8, 7) * s).flatten(1).to(a.dtype)


def lion(p, g, m, lr, b1, b2, wd):
    return b2 * m + (1 - b2) * g, p * (1 - lr * wd) - lr * torch.sign(b1 * m + (1 - b1) * g)


def adafactor(g, r, c, beta):
    sq = g * g + 1e-30
    r2, c2 = beta * r + (1 - beta) * sq.mean(1), beta * c + (1 - beta) * sq.mean(0)
    return r2, c2, g * torch.rsqrt(r2[:, None] * c2 / r2.mean())


def sgd_clipped(p, g, v, lr, mu, wd, most):
    clip = torch.clamp(most / (g.pow(2).sum().sqrt() + 1e-6), max=1.0)
    d = g * clip + wd * p
    v2 = mu * v + d
    return v2, p - lr * (d + mu * v2)


def ema_weights(e, p, decay, step):
    d = min(decay, (1 + step) / (10 + step))
    return d * e + (1 - d) * wide(p)


def bert_embeddings(w, p, u, t, k, g, z, eps):
    h = wide(w)[t] + wide(p) + wide(u)[k]
    return F.layer_norm(h, h.shape[-1:], wide(g), wide(z), eps).to(w.dtype)


def sinusoid_embed(w, t):
    s, y = t.shape[1], w.shape[1]
    x = wide(w[t])
    place, d = torch.arange(s, device=w.device, dtype=x.dtype)[:, None], torch.arange(y, device=w.device)
    angle = place * torch.exp((d // 2 * 2).to(x.dtype) * (-math.log(10000.0) / y))
    return (x * y**0.5 + torch.where(d % 2 == 0, angle.sin(), angle.cos())).to(w.dtype)


def running_mean(a):
    return (wide(a).cumsum(1) / torch.arange(1, a.shape[1] + 1, device=a.device)[:, None]).to(a.dtype)


def gae(r, v, gamma, lam):
    delta = r + gamma * F.pad(v[:, 1:], (0, 1)) - v
    t = torch.arange(r.shape[1], device=r.device)
    apart = t[:, None] - t
    adv = delta @ torch.where(apart >= 0, (gamma * lam) ** apart.clamp(min=0), 0).to(r.dtype)
    return adv, adv + v


def channel_gate(a):
    x = wide(a)
    return (x * torch.sigmoid(x.mean((2, 3), keepdim=True) + x.amax((2, 3), keepdim=True))).to(a.dtype)


def convnext_depthwise(a, w, z):
    return F.conv2d(a.permute(0, 3, 1, 2), w.permute(2, 0, 1)[:, None], z, padding=3, groups=a.shape[-1]).permute(0, 2, 3, 1).contiguous()


def glu_depthwise1d(a, b, w):
    return F.conv1d(a * torch.sigmoid(b), w[:, None], padding=7, groups=len(w))


def expert_load(t, w, load, d):
    counts = torch.zeros_like(load).index_add(0, t.flatten(), w.flatten().to(load.dtype))
    return d * load + (1 - d) * counts / t.shape[0]


def state_update(s, g, k, v, q):
    s2 = torch.exp(-F.softplus(wide(g)))[..., None] * wide(s) + wide(k)[..., None] * wide(v)[..., None, :]
    return s2.to(s.dtype), (s2 * wide(q)[..., None]).sum(-2).to(s.dtype)


def shifted_windows(a, g):
    x = torch.roll(a * g, (-3, -3), (1, 2))
    return x.unflatten(2, (-1, 7)).unflatten(1, (-1, 7)).transpose(2, 3).contiguous()


def segmentation_nll(a, t):
    return F.cross_entropy(wide(a), t, reduction="none").to(a.dtype)


def response_norm(a, g, z):
    x = wide(a)
    big = x.pow(2).sum((1, 2), keepdim=True).add(1e-12).sqrt()
    return (wide(g) * (x * (big / (big.mean(-1, keepdim=True) + 1e-6))) + wide(z) + x).to(a.dtype)


def dice_bce(a, t):
    x, y = wide(a), t.to(wide(a).dtype)
    p = torch.sigmoid(x)
    dice = 1 - (2 * (p * y).sum((2, 3)) + 1) / (p.sum((2, 3)) + y.sum((2, 3)) + 1)
    return (dice + F.binary_cross_entropy_with_logits(x, y, reduction="none").mean((2, 3))).to(a.dtype)


def weight_norm(v, g):
    x = wide(v)
    return (wide(g)[:, None, None] * x / x.pow(2).sum((1, 2), keepdim=True).sqrt()).to(v.dtype)


def token_shift(a, mr, mk, mv):
    d = F.pad(a, (0, 0, 1, 0))[:, :-1] - a
    return a + d * mr, a + d * mk, a + d * mv


def masked_mean_pool(a, n):
    seen = torch.arange(a.shape[1], device=a.device) < n[:, None]
    return F.normalize(torch.where(seen[..., None], wide(a), 0).sum(1) / n[:, None], dim=-1).to(a.dtype)


def series_decomp(a):
    terms = F.pad(torch.ones_like(wide(a[0, :, 0])), (12, 12)).unfold(0, 25, 1).sum(-1)
    trend = F.pad(wide(a), (0, 0, 12, 12)).unfold(1, 25, 1).sum(-1) / terms[:, None]
    return trend.to(a.dtype), (wide(a) - trend).to(a.dtype)


def ppo_rows(new, old, adv, n, clip):
    ratio = torch.exp(wide(new) - wide(old))
    loss = -torch.minimum(ratio * wide(adv)[:, None], ratio.clamp(1 - clip, 1 + clip) * wide(adv)[:, None])
    seen = torch.arange(new.shape[1], device=new.device) < n[:, None]
    return (torch.where(seen, loss, 0).sum(1) / n).to(new.dtype)


def vae_rows(mu, lv, e):
    m, v = wide(mu), wide(lv)
    return (m + torch.exp(0.5 * v) * wide(e)).to(mu.dtype), (-0.5 * (1 + v - m * m - v.exp()).sum(-1)).to(mu.dtype)


# -- programs ---------------------------------------------------------------------------------------------------------------

NORMS = {
    "adaln_gate_residual": Untuned(
        "Func mu, var, out; In X, shift, scale, gate; SIn eps; Var b, s, d; mu[b, s] = rmean(X[b, s, d], d); var[b, s] = rmean(pow(X[b, s, d] - mu[b, s], 2), d);"
        "out[b, s, d] = X[b, s, d] + gate[b, d] * ((X[b, s, d] - mu[b, s]) / sqrt(var[b, s] + eps) * (1 + scale[b, d]) + shift[b, d]);",
        adaln_gate_residual, {"X": "bsd", "shift": "bd", "scale": "bd", "gate": "bd"}, (dict(b=8, s=1024, d=1152), dict(b=12, s=197, d=768)),
        (dict(b=3, s=515, d=768),), dict(b=2, s=9, d=77), scalars=(1e-6,), grad=("X", "shift", "scale", "gate")),
    "gated_rmsnorm": Untuned(
        "Func h, ms, out; In A, G, w; SIn eps; Var x; RVar y; h[x, y] = A[x, y] * G[x, y] * sigmoid(G[x, y]); ms[x] = rsum(h[x, y] * h[x, y], y) * (1 / len(y));"
        "out[x, y] = h[x, y] * rsqrt(ms[x] + eps) * w[y];",
        gated_rmsnorm, {"A": "xy", "G": "xy", "w": "y"}, **ROWS, scalars=(1e-5,), grad=("A", "G", "w")),
    "batchnorm2d_relu": Untuned(
        "Func mean, var, out; In A, w, z; SIn eps; Var n, c, h, l; mean[c] = rsum(A[n, c, h, l], n, h, l) / (len(n) * len(h) * len(l));"
        "var[c] = rmean((A[n, c, h, l] - mean[c]) * (A[n, c, h, l] - mean[c]), n, h, l);"
        "out[n, c, h, l] = maximum((A[n, c, h, l] - mean[c]) * rsqrt(var[c] + eps) * w[c] + z[c], 0); mean.compile(); var.compile(); out.compile();",
        batchnorm2d_relu, {"A": "nchl", "w": "c", "z": "c"}, (dict(n=32, c=256, h=28, l=28), dict(n=17, c=96, h=55, l=55)), (dict(n=5, c=33, h=27, l=29),),
        dict(n=3, c=4, h=7, l=5), scalars=(1e-5,), grad=("A", "w", "z")),
    "instance_norm_lrelu": Untuned(
        "Func mean, var, u, out; In A; SIn slope, eps; Var n, c, h, l; mean[n, c] = rmean(A[n, c, h, l], h, l); var[n, c] = rmean(A[n, c, h, l] * A[n, c, h, l], h, l) - mean[n, c] * mean[n, c];"
        "u[n, c, h, l] = (A[n, c, h, l] - mean[n, c]) / sqrt(var[n, c] + eps); out[n, c, h, l] = where(u[n, c, h, l] > 0, u[n, c, h, l], slope * u[n, c, h, l]);",
        instance_norm_lrelu, {"A": "nchl"}, (dict(n=16, c=64, h=128, l=128), dict(n=7, c=33, h=99, l=101)), (dict(n=3, c=17, h=64, l=33),), dict(n=2, c=3, h=9, l=7),
        scalars=(0.2, 1e-5), grad=("A",)),
    "response_norm": Untuned(
        "Func big, nx, out; In A, g, z; Var b, h, l, c; big[b, c] = sqrt(rsum(A[b, h, l, c] * A[b, h, l, c], h, l) + 0.000000000001); nx[b, c] = big[b, c] / (rmean(big[b, c], c) + 0.000001);"
        "out[b, h, l, c] = g[c] * (A[b, h, l, c] * nx[b, c]) + z[c] + A[b, h, l, c];",
        response_norm, {"A": "bhlc", "g": "c", "z": "c"}, (dict(b=32, h=28, l=28, c=384), dict(b=12, h=14, l=13, c=771)), (dict(b=3, h=14, l=15, c=130),), dict(b=2, h=5, l=4, c=13),
        grad=("A", "g", "z")),
    "weight_norm": Untuned(
        "Func out; In V, g; Var o, i, k; RVar j, l; out[o, i, k] = g[o] * V[o, i, k] / sqrt(rsum(V[o, j, l] * V[o, j, l], j, l));",
        weight_norm, {"V": "oik", "g": "o"}, (dict(o=2048, i=1024, k=3), dict(o=1001, i=777, k=7)), (dict(o=130, i=515, k=3),), dict(o=5, i=13, k=3), grad=("V", "g")),
}  # fmt: skip

LOSSES = {
    "focal_loss": Untuned(
        "Func logp, out; In A, t; SIn gamma; Var x; RVar y; logp[x] = A[x, t[x]] - log(rsum(exp(A[x, y]), y)); out[x] = -pow(1 - exp(logp[x]), gamma) * logp[x];",
        focal_loss, {"A": "xy", "t": "x"}, **ROWS | dict(sizes=(dict(x=32768, y=1000), dict(x=3000, y=5003))), kinds={"t": "index:y"}, scalars=(2.0,), grad=("A",)),
    "smoothed_ce_ignore": Untuned(
        "Func lse, out; In A, t; SIn eps, ignore; Var x; RVar y; lse[x] = log(rsum(exp(A[x, y]), y));"
        "out[x] = where(t[x] == ignore, 0, (1 - eps) * (lse[x] - A[x, t[x]]) + eps * (lse[x] - rmean(A[x, y], y)));",
        smoothed_ce_ignore, {"A": "xy", "t": "x"}, **ROWS | dict(sizes=(dict(x=4096, y=16384), dict(x=3000, y=5003)), small=dict(x=37, y=9)), kinds={"t": "index:y"},
        scalars=(0.1, 1), grad=("A",)),
    "supcon_rows": Untuned(
        "Func z, lse, same, out; In S, g; SIn tau; Var x, y; z[x, y] = S[x, y] / tau; lse[x] = log(rsum(where(x != y, exp(z[x, y]), 0), y));"
        "same[x, y] = where(g[x] == g[y] and x != y, 1, 0); out[x] = -rsum(same[x, y] * (z[x, y] - lse[x]), y) / maximum(rsum(same[x, y], y), 1);",
        supcon_rows, {"S": "xy", "g": "x"}, (dict(x=4096, y=4096, v=100), dict(x=3001, y=3001, v=10)), (dict(x=515, y=515, v=10),), dict(x=41, y=41, v=5),
        kinds={"g": "index:v"}, scalars=(0.5,), grad=("S",)),
    "segmentation_nll": Untuned(
        "Func out; In A, t; Var b, h, l; RVar c; out[b, h, l] = log(rsum(exp(A[b, c, h, l]), c)) - A[b, t[b, h, l], h, l];",
        segmentation_nll, {"A": "bchl", "t": "bhl"}, (dict(b=8, c=19, h=512, l=512), dict(b=3, c=21, h=333, l=500)), (dict(b=2, c=21, h=65, l=99),), dict(b=2, c=5, h=7, l=9),
        kinds={"t": "index:c"}, grad=("A",)),
    "dice_bce": Untuned(
        "Func p, inter, total, dice, bce, out; In A, T; Var b, c; RVar h, l; p[b, c, h, l] = sigmoid(A[b, c, h, l]); inter[b, c] = rsum(p[b, c, h, l] * T[b, c, h, l], h, l);"
        "total[b, c] = rsum(p[b, c, h, l], h, l) + rsum(T[b, c, h, l], h, l); dice[b, c] = 1 - (2 * inter[b, c] + 1) / (total[b, c] + 1);"
        "bce[b, c] = rmean(maximum(A[b, c, h, l], 0) - A[b, c, h, l] * T[b, c, h, l] + log1p(exp(-abs(A[b, c, h, l]))), h, l); out[b, c] = dice[b, c] + bce[b, c];",
        dice_bce, {"A": "bchl", "T": "bchl"}, (dict(b=8, c=4, h=512, l=512, v=2), dict(b=5, c=3, h=333, l=501, v=2)), (dict(b=3, c=5, h=65, l=99, v=2),),
        dict(b=2, c=3, h=7, l=9, v=2), kinds={"T": "sorted:v"}, grad=("A",)),
    "ppo_rows": Untuned(
        "Func ratio, loss, out; In New, Old, adv, N; SIn clip; Var b, t; ratio[b, t] = exp(New[b, t] - Old[b, t]);"
        "loss[b, t] = -minimum(ratio[b, t] * adv[b], clamp(ratio[b, t], 1 - clip, 1 + clip) * adv[b]); out[b] = rsum(where(t < N[b], loss[b, t], 0), t) / N[b];",
        ppo_rows, {"New": "bt", "Old": "bt", "adv": "b", "N": "b"}, (dict(b=4096, t=4096), dict(b=3000, t=2003)), (dict(b=130, t=1027),), dict(b=5, t=61),
        kinds={"N": "index:t", "New": "small", "Old": "small"}, scalars=(0.05,), grad=("New",), dtypes=("fp32",)),
    "vae_rows": Untuned(
        "Func z, out; In mu, lv, E; Var b, d; z[b, d] = mu[b, d] + exp(0.5 * lv[b, d]) * E[b, d]; out[b] = -0.5 * rsum(1 + lv[b, d] - pow(mu[b, d], 2) - exp(lv[b, d]), d);"
        "z.compile(); out.compile();",
        vae_rows, {"mu": "bd", "lv": "bd", "E": "bd"}, (dict(b=16384, d=512), dict(b=3000, d=5003)), (dict(b=515, d=333),), dict(b=7, d=61), grad=("mu", "lv")),
}  # fmt: skip

ROWWISE = {
    "padding_softmax": Untuned(
        "Func s, e, out; In A, N; SIn tau; Var b, h, m, l; s[b, h, m, l] = where(l < N[b], A[b, h, m, l] / tau, -inf); e[b, h, m, l] = exp(s[b, h, m, l]);"
        "out[b, h, m, l] = e[b, h, m, l] / rsum(e[b, h, m, l], l);",
        padding_softmax, {"A": "bhml", "N": "b"}, (dict(b=8, h=12, m=512, l=512), dict(b=3, h=7, m=777, l=779)), (dict(b=3, h=5, m=65, l=333),), dict(b=3, h=2, m=7, l=45),
        kinds={"N": "index:l"}, scalars=(1.5,), grad=("A",)),
    "topk_gates": Untuned(
        "Func v, out; In A; Var x, j; RVar y; Extent j = 4; v[x, j] = rtopk(A[x, y], y, j); out[x, j] = exp(v[x, j]) / rsum(exp(v[x, j]), j);",
        topk_gates, XY, (dict(x=262144, y=64), dict(x=100003, y=40)), (dict(x=5003, y=60),), dict(x=37, y=19), grad=("A",), dtypes=("fp32",)),  # in 16 bits several elements are the fourth
    "argmax_accuracy": Untuned(
        "Func best, hit, out; In A, t; Var x; RVar y; best[x] = rargmax(A[x, y], y); hit[x] = where(best[x] == t[x], 1, 0);"
        "out[x] = exp(rmax(A[x, y], y)) / rsum(exp(A[x, y]), y); best.compile(); hit.compile(); out.compile();",
        argmax_accuracy, {"A": "xy", "t": "x"}, **ROWS | dict(sizes=(dict(x=32768, y=1000),), small=dict(x=37, y=9)), kinds={"t": "index:y"}, dtypes=("fp32",)),
    "masked_mean_pool": Untuned(
        "Func m, out; In A, N; Var b, y; RVar s; m[b, y] = rsum(where(s < N[b], A[b, s, y], 0), s) / N[b]; out[b, y] = m[b, y] / maximum(sqrt(rsum(m[b, y] * m[b, y], y)), 0.000000000001);",
        masked_mean_pool, {"A": "bsy", "N": "b"}, (dict(b=64, s=512, y=1024), dict(b=33, s=197, y=771)), (dict(b=5, s=130, y=333),), dict(b=3, s=17, y=21), kinds={"N": "index:s"}, grad=("A",)),
    "channel_gate": Untuned(
        "Func g, out; In A; Var b, c, h, l; g[b, c] = sigmoid(rmean(A[b, c, h, l], h, l) + rmax(A[b, c, h, l], h, l)); out[b, c, h, l] = A[b, c, h, l] * g[b, c];",
        channel_gate, {"A": "bchl"}, (dict(b=32, c=256, h=32, l=32), dict(b=12, c=97, h=55, l=57)), (dict(b=3, c=33, h=27, l=29),), dict(b=2, c=3, h=7, l=5), grad=("A",)),
}  # fmt: skip

QUANTISED = {
    "quantise_columns": Untuned(
        "Func lo, s, out; In A; Var x, y; lo[y] = rmin(A[x, y], x); s[y] = (rmax(A[x, y], x) - lo[y]) / 255; out[x, y] = cast(clamp(round((A[x, y] - lo[y]) / s[y]), 0, 255), uint8);"
        "lo.compile(); s.compile(); out.compile();",
        quantise_columns, XY, **COLUMNS),
    "group_int4": Untuned(
        "Func s, out; In A; Var x, y, g; RVar k; Extent k = 32; Extent g = A[1] / 32; s[x, g] = rmax(abs(A[x, 32 * g + k]), k) / 7;"
        "out[x, y] = clamp(round(A[x, y] / s[x, y / 32]), -8, 7) * s[x, y / 32];",
        group_int4, XY, (dict(x=4096, y=8192), dict(x=3000, y=4960)), (dict(x=515, y=1056),), dict(x=7, y=96)),
}  # fmt: skip

OPTIMIZERS = {
    "lion": Untuned(
        "Func m2, out; In p, g, m; SIn lr, b1, b2, wd; Var x; m2[x] = b2 * m[x] + (1 - b2) * g[x]; out[x] = p[x] * (1 - lr * wd) - lr * sign(b1 * m[x] + (1 - b1) * g[x]); m2.compile(); out.compile();",
        lion, {"p": "x", "g": "x", "m": "x"}, **FLAT, scalars=(1e-3, 0.9, 0.99, 0.1), dtypes=("fp32",)),
    "adafactor": Untuned(
        "Func r, c, out; In G, R, C; SIn beta; Var x, y; r[x] = beta * R[x] + (1 - beta) * rmean(G[x, y] * G[x, y] + 1e-30, y); c[y] = beta * C[y] + (1 - beta) * rmean(G[x, y] * G[x, y] + 1e-30, x);"
        "out[x, y] = G[x, y] * rsqrt(r[x] * c[y] / rmean(r[x], x)); r.compile(); c.compile(); out.compile();",
        adafactor, {"G": "xy", "R": "x", "C": "y"}, (dict(x=4096, y=4096), dict(x=3000, y=5003)), (dict(x=515, y=1027),), dict(x=19, y=61),
        scalars=(0.9,), kinds={"R": "positive", "C": "positive"}, dtypes=("fp32",)),
    "sgd_clipped": Untuned(
        "Func norm, d, v2, out; In p, g, v; SIn lr, mu, wd, most; Var x; norm[] = sqrt(rsum(g[x] * g[x], x)); d[x] = g[x] * minimum(1, most / (norm[] + 0.000001)) + wd * p[x];"
        "v2[x] = mu * v[x] + d[x]; out[x] = p[x] - lr * (d[x] + mu * v2[x]); v2.compile(); out.compile();",
        sgd_clipped, {"p": "x", "g": "x", "v": "x"}, **FLAT, scalars=(0.1, 0.9, 1e-4, 1.0), dtypes=("fp32",)),
    "ema_weights": Untuned(
        "Func d, out; In E, P; SIn decay, step; Var o, i; d[] = minimum(decay, (1 + step) / (10 + step)); out[o, i] = d[] * E[o, i] + (1 - d[]) * P[o, i];",
        ema_weights, {"E": "oi", "P": "oi"}, (dict(o=4096, i=4096), dict(o=3000, i=5003)), (dict(o=515, i=1027),), dict(o=5, i=77), kinds={"E": "fp32"}, scalars=(0.999, 100)),
}  # fmt: skip

LOOKUPS = {
    "bert_embeddings": Untuned(
        "Func h, mean, var, out; In W, P, U, t, k, g, z; SIn eps; Var b, s, y; h[b, s, y] = W[t[b, s], y] + P[s, y] + U[k[b, s], y]; mean[b, s] = rmean(h[b, s, y], y);"
        "var[b, s] = rmean((h[b, s, y] - mean[b, s]) * (h[b, s, y] - mean[b, s]), y); out[b, s, y] = (h[b, s, y] - mean[b, s]) * rsqrt(var[b, s] + eps) * g[y] + z[y];",
        bert_embeddings, {"W": "vy", "P": "sy", "U": "uy", "t": "bs", "k": "bs", "g": "y", "z": "y"}, (dict(v=30522, b=32, s=512, y=768, u=2), dict(v=21128, b=12, s=197, y=768, u=2)),
        (dict(v=1000, b=3, s=130, y=333, u=2),), dict(v=50, b=2, s=9, y=33, u=2), kinds={"t": "index:v", "k": "sorted:u", "W": "table"}, scalars=(1e-12,), grad=("W", "P", "U", "g", "z")),
    "sinusoid_embed": Untuned(
        "Func a, out; In W, t; Var b, s, y; a[s, y] = s * exp((y - y % 2) * (-9.210340371976184 / len(y)));"
        "out[b, s, y] = W[t[b, s], y] * sqrt(len(y)) + where(y % 2 == 0, sin(a[s, y]), cos(a[s, y]));",
        sinusoid_embed, {"W": "vy", "t": "bs"}, (dict(v=32000, b=8, s=1024, y=1024), dict(v=30522, b=12, s=197, y=768)), (dict(v=1000, b=3, s=130, y=334),), dict(v=50, b=2, s=9, y=33),
        kinds={"t": "index:v", "W": "table"}, grad=("W",)),
    "expert_load": Untuned(
        "Func out; In t, w, L; SIn d; Var e; RVar x, k; out[e] = d * L[e] + (1 - d) * rsum(where(t[x, k] == e, w[x, k], 0), x, k) / len(x);",
        expert_load, {"t": "xk", "w": "xk", "L": "e"}, (dict(x=262144, k=8, e=64), dict(x=100003, k=6, e=97)), (dict(x=5003, k=4, e=33),), dict(x=45, k=3, e=7),
        kinds={"t": "index:e", "L": "fp32"}, scalars=(0.9,), grad=("w",)),
    "shifted_windows": Untuned(
        "Func out; In A, g; Var b, u, v, i, j, c, h, l; Extent h = A[1]; Extent l = A[2]; Extent u = A[1] / 7; Extent v = A[2] / 7; Extent i = 7; Extent j = 7;"
        "out[b, u, v, i, j, c] = A[b, (7 * u + i + 3) % len(h), (7 * v + j + 3) % len(l), c] * g[c];",
        shifted_windows, {"A": "bhlc", "g": "c"}, (dict(b=32, h=56, l=56, c=96), dict(b=12, h=49, l=35, c=194)), (dict(b=3, h=14, l=21, c=33),), dict(b=2, h=14, l=7, c=5), grad=("A", "g")),
}  # fmt: skip

ALONG_TIME = {
    "running_mean": Untuned(
        "Func out; In A; Var b, t, c; out[b, t, c] = rscan(sum, A[b, t, c], t) / (t + 1);",
        running_mean, {"A": "btc"}, (dict(b=16, t=1024, c=1024), dict(b=12, t=197, c=768)), (dict(b=3, t=130, c=333),), dict(b=2, t=19, c=21), grad=("A",)),
    "gae": Untuned(
        "Func delta, adv, out; In R, V; SIn gamma, lam; Var b, t; delta[b, t] = R[b, t] + gamma * V[b, t + 1] - V[b, t];"
        "adv[b, t] = rrecur(gamma * lam, delta[b, t], t, reversed); out[b, t] = adv[b, t] + V[b, t]; adv.compile(); out.compile();",
        gae, {"R": "bt", "V": "bt"}, (dict(b=8192, t=512), dict(b=5003, t=333)), (dict(b=515, t=130),), dict(b=5, t=37), scalars=(0.99, 0.95), grad=("R", "V"), dtypes=("fp32",)),
    "token_shift": Untuned(
        "Func r, k, out; In A, mr, mk, mv; Var b, t, c; r[b, t, c] = A[b, t, c] + (A[b, t - 1, c] - A[b, t, c]) * mr[c]; k[b, t, c] = A[b, t, c] + (A[b, t - 1, c] - A[b, t, c]) * mk[c];"
        "out[b, t, c] = A[b, t, c] + (A[b, t - 1, c] - A[b, t, c]) * mv[c]; r.compile(); k.compile(); out.compile();",
        token_shift, {"A": "btc", "mr": "c", "mk": "c", "mv": "c"}, (dict(b=8, t=1024, c=2048), dict(b=12, t=197, c=771)), (dict(b=3, t=130, c=333),), dict(b=2, t=19, c=21),
        grad=("A", "mr", "mk", "mv")),
    "series_decomp": Untuned(
        "Func trend, out; In A; Var b, t, c; RVar k; Extent k = 25; Extent t = A[1];"
        "trend[b, t, c] = rsum(A[b, t + k - 12, c], k) / rsum(where(t + k - 12 >= 0 and t + k - 12 < len(t), 1, 0), k); out[b, t, c] = A[b, t, c] - trend[b, t, c]; trend.compile(); out.compile();",
        series_decomp, {"A": "btc"}, (dict(b=32, t=720, c=862), dict(b=12, t=337, c=321)), (dict(b=3, t=130, c=133),), dict(b=2, t=37, c=21), grad=("A",)),
    "state_update": Untuned(
        "Func S2, out; In S, g, K, V, Q; Var b, h, k, v; S2[b, h, k, v] = exp(-log(1 + exp(g[b, h, k]))) * S[b, h, k, v] + K[b, h, k] * V[b, h, v]; out[b, h, v] = rsum(S2[b, h, k, v] * Q[b, h, k], k);"
        "S2.compile(); out.compile();",
        state_update, {"S": "bhkv", "g": "bhk", "K": "bhk", "V": "bhv", "Q": "bhk"}, (dict(b=32, h=32, k=128, v=128), dict(b=7, h=12, k=80, v=100)), (dict(b=3, h=5, k=64, v=33),),
        dict(b=2, h=3, k=9, v=11), grad=("S", "g", "K", "V", "Q")),
    "convnext_depthwise": Untuned(
        "Func out; In A, W, z; Var b, h, l, c; RVar r, s; Extent h = A[1]; Extent l = A[2]; out[b, h, l, c] = rsum(A[b, h + r - 3, l + s - 3, c] * W[r, s, c], r, s) + z[c];",
        convnext_depthwise, {"A": "bhlc", "W": "rsc", "z": "c"}, (dict(b=16, h=56, l=56, c=96, r=7, s=7), dict(b=12, h=29, l=27, c=194, r=7, s=7)), (dict(b=2, h=14, l=15, c=33, r=7, s=7),),
        dict(b=2, h=9, l=8, c=5, r=7, s=7), grad=("A", "W", "z")),
    "glu_depthwise1d": Untuned(
        "Func u, out; In A, B, W; Var b, c, t; RVar r; u[b, c, t] = A[b, c, t] * sigmoid(B[b, c, t]); out[b, c, t] = rsum(u[b, c, t + r - 7] * W[c, r], r);",
        glu_depthwise1d, {"A": "bct", "B": "bct", "W": "cr"}, (dict(b=16, c=512, t=1024, r=15), dict(b=12, c=144, t=1997, r=15)), (dict(b=2, c=33, t=333, r=15),),
        dict(b=2, c=5, t=37, r=15), grad=("A", "B", "W")),
}  # fmt: skip

PROGRAMS: dict[str, Untuned] = NORMS | LOSSES | ROWWISE | QUANTISED | OPTIMIZERS | LOOKUPS | ALONG_TIME
