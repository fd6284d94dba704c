# ruff: noqa: E501
"""Programs of an outsider: losses, numerics, quantisation, optimizers, lookups, each written from the documentation alone. None has a schedule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from untuned_forms import masked, wide
from untuned_layers import recurrence
from untuned_products import times
from untuned_program import Untuned, along
from untuned_rows import as_integers

# -- the same in torch ------------------------------------------------------------------------------------------------------


def siglip_loss(image, text, scale, shift):
    z = wide(scale * image @ text.mT + shift)
    same = torch.eye(len(image), dtype=torch.bool, device=image.device)
    return F.softplus(torch.where(same, -z, z)).sum(-1).mean().to(image.dtype)


def batch_hard_triplet(x, g, margin):
    f = wide(x)
    sq = f.square().sum(-1)
    d = torch.sqrt((sq[:, None] + sq - 2 * f @ f.mT).clamp(min=0) + 1e-3)
    alike = g[:, None] == g
    return F.relu(torch.where(alike, d, 0).amax(1) - masked(-d, ~alike).amax(1).neg() + margin).to(x.dtype)


def quantile_huber(q, t, kappa):
    u = wide(t)[:, None] - wide(q)[..., None]
    tau = (torch.arange(q.shape[1], device=q.device, dtype=u.dtype) + 0.5)[:, None] / q.shape[1]
    huber = torch.where(u.abs() <= kappa, 0.5 * u * u, kappa * (u.abs() - 0.5 * kappa))
    return ((tau - (u < 0).to(u.dtype)).abs() * huber).mean(-1).sum(-1).to(q.dtype)


def crps_ensemble(x, y):
    f = wide(x)
    skill = (f - wide(y)[:, None]).abs().mean(1)
    return (skill - 0.5 * (f[:, :, None] - f[:, None]).abs().mean((1, 2))).to(x.dtype)


def wasserstein_histograms(a, b):
    p, q = (torch.softmax(wide(t), -1) for t in (a, b))
    return (p - q).cumsum(-1).abs().sum(-1).to(a.dtype)


def mixture_density_nll(logits, mu, log_sigma, y):
    z = (wide(y)[:, None] - wide(mu)) * torch.exp(-wide(log_sigma))
    logp = (-0.5 * z * z - wide(log_sigma)).sum(-1) + torch.log_softmax(wide(logits), -1)
    return -torch.logsumexp(logp, -1).to(logits.dtype)


def hsic(x, y, gx, gy):
    def centred(t, gamma):
        f = wide(t)
        sq = f.square().sum(-1)
        k = torch.exp(-gamma * (sq[:, None] + sq - 2 * f @ f.mT))
        return k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()

    return (centred(x, gx) * centred(y, gy)).mean().to(x.dtype)


def pearson_matrix(a, eps):
    f = wide(a) - wide(a).mean(0)
    c = f.mT @ f / len(a)
    return (c * torch.rsqrt(c.diagonal()[:, None] + eps) * torch.rsqrt(c.diagonal() + eps)).to(a.dtype)


def mean_shift(x, gamma):
    f = wide(x)
    sq = f.square().sum(-1)
    return torch.softmax(-gamma * (sq[:, None] + sq - 2 * f @ f.mT), -1).to(x.dtype) @ x


def heat_step_3d(u, alpha):
    f = wide(u)
    p = F.pad(f, (1, 1, 1, 1, 1, 1))
    mid = slice(1, -1)
    around = sum(
        p[:, i, j, k]
        for i, j, k in (
            (slice(2, None), mid, mid),
            (slice(-2), mid, mid),
            (mid, slice(2, None), mid),
            (mid, slice(-2), mid),
            (mid, mid, slice(2, None)),
            (mid, mid, slice(-2)),
        )
    )
    return (f + alpha * (around - 6 * f)).to(u.dtype)


def gray_scott(u, v, du, dv, feed, kill):
    def laplacian(f):
        return torch.roll(f, 1, 1) + torch.roll(f, -1, 1) + torch.roll(f, 1, 2) + torch.roll(f, -1, 2) - 4 * f

    a, b = wide(u), wide(v)
    made = a * b * b
    return (a + du * laplacian(a) - made + feed * (1 - a)).to(u.dtype), (b + dv * laplacian(b) + made - (feed + kill) * b).to(v.dtype)


def coulomb_forces(r, q, eps):
    d = wide(r)[:, :, None] - wide(r)[:, None]
    weight = wide(q)[:, None] * (d.square().sum(-1) + eps) ** -1.5
    return (wide(q)[..., None] * (weight[..., None] * d).sum(2)).to(r.dtype)


def lennard_jones(r, cut):
    d2 = (wide(r)[:, :, None] - wide(r)[:, None]).square().sum(-1) + 0.5
    near = (d2 < cut * cut) & ~torch.eye(r.shape[1], dtype=torch.bool, device=r.device)
    s6 = d2**-3
    return torch.where(near, 2 * (s6 * s6 - s6), 0).sum(-1).to(r.dtype)


def segment_mean(x, g, w):
    total = torch.zeros(len(w), x.shape[1], dtype=wide(x).dtype, device=x.device).index_add(0, g, wide(x))
    count = torch.zeros(len(w), dtype=wide(x).dtype, device=x.device).index_add(0, g, torch.ones_like(wide(x[:, 0])))
    return (wide(w)[:, None] * total / count.clamp(min=1)[:, None]).to(x.dtype)


def sinkhorn_step(c, f, eps):
    g = -eps * torch.logsumexp((wide(f)[:, :, None] - wide(c)) / eps, 1)
    return g.to(c.dtype), (-eps * torch.logsumexp((g[:, None] - wide(c)) / eps, 2)).to(c.dtype)


def kalman_step(x, p, f, q, h, z, r):
    x = torch.einsum("ij,bj->bi", f, x)
    p = f @ p @ f.mT + q
    ph = p @ h
    gain = ph / (ph @ h + r)[:, None]
    return x + gain * (z - x @ h)[:, None], p - gain[:, :, None] * ph[:, None]


def ema_bands(x, a, eps):
    f = wide(x)
    keep = torch.full_like(f, 1 - a)
    m = recurrence(keep, a * f)
    v = recurrence(keep, a * (f - m).square())
    return ((f - m) * torch.rsqrt(v + eps)).to(x.dtype)


def drawdown(x):
    value = wide(x).cumsum(1)
    return (value.cummax(1).values - value).amax(1)


def histogram_rows(a, bins, low, step):
    k = torch.floor((a - low) / step)
    return torch.stack([(k == i).to(a.dtype).sum(1) for i in range(len(bins))], 1) + bins


def block_int8(w):
    x = wide(w).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    s = x.abs().amax((1, 3)) / 127
    q = torch.clamp(torch.round(x / s[:, None, :, None]), -127, 127).flatten(2).flatten(0, 1)
    return s, as_integers(q.to(torch.int8), w)


def pack_int4(a):
    x = a.unflatten(1, (-1, 32))
    s = x.abs().amax(-1) / 7
    q = torch.clamp(torch.round(x / s[..., None]), -8, 7).long().flatten(1) + 8
    return s, as_integers((q[:, ::2] | (q[:, 1::2] << 4)).to(torch.uint8), a)


def int4_linear_gelu(x, w, s, z):
    low, high = ((w >> k & 15) - 8 for k in (0, 4))
    full = torch.stack((low, high), -1).flatten(1).to(x.dtype).unflatten(1, (s.shape[1], -1)) * s[..., None]
    return F.gelu(F.linear(x, full.flatten(1), z))


def stochastic_int8(a, seed, noise):
    s = wide(a).abs().amax(1) / 127
    u = 0.5 + noise * (torch.rand_like(wide(a)) - 0.5)
    return s.to(a.dtype), as_integers(torch.clamp(torch.floor(wide(a) / s[:, None] + u), -127, 127).to(torch.int8), a)


def soap_step(g, left, right, m, v, lr, b1, b2):
    r = left.mT @ g @ right
    m2, v2 = b1 * m + (1 - b1) * r, b2 * v + (1 - b2) * r * r
    return m2, v2, -lr * (left @ (m2 * torch.rsqrt(v2 + 1e-8)) @ right.mT)


def shampoo_statistics(g, left, right, beta):
    return beta * left + (1 - beta) * wide(g) @ wide(g).mT, beta * right + (1 - beta) * wide(g).mT @ wide(g)


def lamb_rows(p, g, m, v, lr, b1, b2, wd):
    m2, v2 = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    u = m2 / (v2.sqrt() + 1e-6) + wd * p
    trust = p.square().sum(1, keepdim=True).sqrt() / (u.square().sum(1, keepdim=True).sqrt() + 1e-6)
    return m2, v2, p - lr * trust * u


def momentum_8bit(p, g, q, s, lr, beta):
    m = beta * (q * s[:, None]) + (1 - beta) * g
    s2 = m.abs().amax(1) / 127
    return s2, torch.round(m / s2[:, None]).to(p.dtype), p - lr * m


def gat_softmax(a, g, t):
    e = torch.exp(F.leaky_relu(wide(a), 0.2))
    total = torch.zeros(len(t), a.shape[1], dtype=e.dtype, device=a.device).index_add(0, g, e)
    return (e / total[g]).to(a.dtype)


def bag_means(w, t, n):
    seen = torch.arange(t.shape[1], device=t.device) < n[:, None]
    return (torch.where(seen[..., None], wide(w)[t], 0).sum(1) / n[:, None]).to(w.dtype)


def hashed_embedding(w, t, z):
    rows = len(w)
    first, second = ((t ^ (t >> 3)) * 40503) % rows, (t * 2654435761 + 7) % rows
    return wide(z) * (wide(w)[first] + wide(w)[second]).to(w.dtype)


def graph_convolution(x, w, src, dst, c):
    h = torch.zeros_like(wide(x)).index_add(0, dst, wide(x)[src] * wide(c)[:, None])
    return F.relu(F.linear(h.to(x.dtype), w))


def cost_volume(a, b):
    return torch.stack([(wide(a) * F.pad(wide(b), (k, 0))[..., : a.shape[-1]]).mean(1) for k in range(24)], -1).to(a.dtype)


def log_mel(a, window, c, s, mel):
    frames = wide(a).unfold(1, 256, 128) * wide(window)
    power = (frames @ wide(c).mT).square() + (frames @ wide(s).mT).square()
    return torch.log(power @ wide(mel).mT + 1e-3).to(a.dtype)


def volume_rendering(sigma, delta, color):
    x = F.softplus(wide(sigma)) * wide(delta)
    w = torch.exp(x - x.cumsum(1)) * (1 - torch.exp(-x))
    return w.sum(1).to(color.dtype), (w[..., None] * wide(color)).sum(1).to(color.dtype)


def ssim_map(a, b, c1, c2):
    def local(x):
        return F.avg_pool2d(x, 7, 1)

    x, y = wide(a), wide(b)
    mx, my = local(x), local(y)
    vx, vy, xy = local(x * x) - mx * mx, local(y * y) - my * my, local(x * y) - mx * my
    return ((2 * mx * my + c1) * (2 * xy + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))).mean((2, 3)).to(a.dtype)


def median_filter(a):
    return F.pad(a, (1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1).flatten(-2).sort(-1).values[..., 4]


def viterbi_step(a, t, e):
    best, place = (a[:, :, None] + t).max(1)
    return as_integers(place, a), best + e


def crf_step(a, t, e):
    return (torch.logsumexp(wide(a)[:, :, None] + wide(t), 1) + wide(e)).to(a.dtype)


def black_scholes(s, k, t, r, vol):
    s, k, t, kind = wide(s), wide(k), wide(t), s.dtype
    root = vol * torch.sqrt(t)
    d1 = (torch.log(s / k) + (r + 0.5 * vol * vol) * t) / root
    paid = k * torch.exp(-r * t)
    call = s * torch.special.ndtr(d1) - paid * torch.special.ndtr(d1 - root)
    return call.to(kind), (call - s + paid).to(kind)


def list_mle(a):
    f = wide(a)
    return (torch.logcumsumexp(f.flip(1), 1).flip(1) - f).sum(1).to(a.dtype)


def approximate_ndcg(s, g, tau):
    f, gain = wide(s), torch.exp2(wide(g)) - 1
    rank = 0.5 + torch.sigmoid((f[:, None] - f[:, :, None]) / tau).sum(-1)
    return (gain / torch.log2(1 + rank)).sum(1).to(s.dtype)


def poincare_distances(a, b):
    x, y = (wide(t) * 0.5 / torch.sqrt(1 + wide(t).square().sum(-1, keepdim=True)) for t in (a, b))
    d = x.square().sum(-1)[:, None] + y.square().sum(-1) - 2 * x @ y.mT
    z = 2 * d.clamp(min=0) / ((1 - x.square().sum(-1))[:, None] * (1 - y.square().sum(-1)))
    return torch.log(1 + z + torch.sqrt(z * (z + 2) + 1e-6)).to(a.dtype)


def beam_power(a, b, c, d):
    a, b, c, d = map(wide, (a, b, c, d))
    return (
        ((a.mT @ c + b.mT @ d).square() + (a.mT @ d - b.mT @ c).square())
        .mean(-1)
        .to(torch.float32 if a.dtype != torch.float64 else a.dtype)
    )


def harmonics(r):
    x, y, z = F.normalize(wide(r), dim=-1).unbind(-1)
    one = torch.ones_like(x)
    made = (
        0.28209479 * one,
        0.48860251 * y,
        0.48860251 * z,
        0.48860251 * x,
        1.09254843 * x * y,
        1.09254843 * y * z,
        0.31539157 * (3 * z * z - 1),
        1.09254843 * x * z,
        0.54627422 * (x * x - y * y),
    )
    return torch.stack(made, -1).to(r.dtype)


# -- programs ---------------------------------------------------------------------------------------------------------------

LOSSES = {
    "siglip_loss": Untuned(
        "Func z, out; In I, T; SIn scale, shift; RVar i, j, k; z[i, j] = scale * rdot(I[i, k], T[j, k], k) + shift;"
        " out[] = rmean(rsum(where(i == j, maximum(-z[i, j], 0), maximum(z[i, j], 0)) + log1p(exp(-abs(z[i, j]))), j), i);",
        siglip_loss, {"I": "ik", "T": "jk"}, (dict(i=4096, j=4096, k=512), dict(i=1501, j=1501, k=700)), (dict(i=333, j=333, k=200),), dict(i=37, j=37, k=29), scalars=(0.1, -2.0),
        products=along("i", "j", "k"), grad=("I", "T")),
    "batch_hard_triplet": Untuned(
        "Func q, d, p, n, out; In X, g; SIn margin; Var i; RVar j, k; q[i] = rsum(X[i, k] * X[i, k], k); d[i, j] = sqrt(maximum(q[i] + q[j] - 2 * rdot(X[i, k], X[j, k], k), 0) + 1e-3);"
        " p[i] = rmax(where(g[i] == g[j], d[i, j], 0), j); n[i] = rmin(where(g[i] == g[j], inf, d[i, j]), j); out[i] = maximum(p[i] - n[i] + margin, 0);",
        batch_hard_triplet, {"X": "ik", "g": "i"}, (dict(i=4096, k=256, v=64), dict(i=1501, k=100, v=20)), (dict(i=333, k=64, v=20),), dict(i=37, k=19, v=5), scalars=(0.3,),
        products=along("i", "i", "k"), grad=("X",), kinds={"g": "index:v"}),
    "quantile_huber": Untuned(
        "Func u, h, out; In Q, T; SIn kappa; Var b; RVar i, j; u[b, i, j] = T[b, j] - Q[b, i]; h[b, i, j] = where(abs(u[b, i, j]) <= kappa, 0.5 * u[b, i, j] * u[b, i, j], kappa * (abs(u[b, i, j]) - 0.5 * kappa));"
        " out[b] = rsum(rmean(abs((i + 0.5) / len(i) - where(u[b, i, j] < 0, 1, 0)) * h[b, i, j], j), i);",
        quantile_huber, {"Q": "bi", "T": "bj"}, (dict(b=4096, i=200, j=200), dict(b=1501, i=51, j=333)), (dict(b=130, i=51, j=64),), dict(b=5, i=11, j=13), scalars=(1.0,), grad=("Q",)),
    "crps_ensemble": Untuned(
        "Func out; In X, Y; Var b; RVar i, j; out[b] = rmean(abs(X[b, i] - Y[b]), i) - 0.5 * rmean(abs(X[b, i] - X[b, j]), i, j);",
        crps_ensemble, {"X": "bi", "Y": "b"}, (dict(b=65536, i=50), dict(b=3001, i=333)), (dict(b=515, i=51),), dict(b=7, i=21), grad=("X",), dtypes=("fp32",)),
    "wasserstein_histograms": Untuned(
        "Func a, b, out; In A, B; Var x; RVar y; a[x, y] = exp(A[x, y]) / rsum(exp(A[x, y]), y); b[x, y] = exp(B[x, y]) / rsum(exp(B[x, y]), y);"
        " out[x] = rsum(abs(rscan(sum, a[x, y] - b[x, y], y)), y);",
        wasserstein_histograms, {"A": "xy", "B": "xy"}, (dict(x=8192, y=1024), dict(x=3001, y=777)), (dict(x=515, y=333),), dict(x=7, y=61), grad=("A", "B")),
    "mixture_density_nll": Untuned(
        "Func l, out; In G, M, S, Y; Var b; RVar k, d; l[b, k] = rsum(-0.5 * pow((Y[b, d] - M[b, k, d]) * exp(-S[b, k, d]), 2) - S[b, k, d], d) + G[b, k] - log(rsum(exp(G[b, k]), k));"
        " out[b] = -log(rsum(exp(l[b, k]), k));",
        mixture_density_nll, {"G": "bk", "M": "bkd", "S": "bkd", "Y": "bd"}, (dict(b=16384, k=8, d=64), dict(b=3001, k=5, d=111)), (dict(b=515, k=5, d=33),), dict(b=7, k=5, d=9),
        grad=("G", "M", "S"), kinds={"S": "small"}),
    "hsic": Untuned(
        "Func p, q, a, b, u, v, out; In X, Y; SIn gx, gy; RVar i, j, k, l; p[i] = rsum(X[i, k] * X[i, k], k); q[i] = rsum(Y[i, l] * Y[i, l], l);"
        " a[i, j] = exp(-gx * (p[i] + p[j] - 2 * rdot(X[i, k], X[j, k], k))); b[i, j] = exp(-gy * (q[i] + q[j] - 2 * rdot(Y[i, l], Y[j, l], l)));"
        " u[i] = rmean(a[i, j], j); v[i] = rmean(b[i, j], j); out[] = rmean((a[i, j] - u[i] - u[j] + rmean(u[i], i)) * (b[i, j] - v[i] - v[j] + rmean(v[i], i)), i, j);",
        hsic, {"X": "ik", "Y": "il"}, (dict(i=2048, k=128, l=64), dict(i=1111, k=50, l=77)), (dict(i=333, k=64, l=33),), dict(i=29, k=19, l=17), scalars=(0.02, 0.02),
        products=times("iik", "iil"), grad=("X", "Y")),
}  # fmt: skip

NUMERICS = {
    "pearson_matrix": Untuned(
        "Func m, c, out; In A; SIn eps; Var i, j; RVar n; m[i] = rmean(A[n, i], n); c[i, j] = rmean((A[n, i] - m[i]) * (A[n, j] - m[j]), n);"
        " out[i, j] = c[i, j] * rsqrt(c[i, i] + eps) * rsqrt(c[j, j] + eps);",
        pearson_matrix, {"A": "ni"}, (dict(n=8192, i=512), dict(n=3001, i=333)), (dict(n=515, i=130),), dict(n=41, i=19), scalars=(1e-6,), products=along("n", "i", "i"), grad=("A",),
        dtypes=("fp32",)),
    "mean_shift": Untuned(
        "Func q, w, t, out; In X; SIn gamma; Var i, c; RVar j, k; q[i] = rsum(X[i, k] * X[i, k], k); w[i, j] = exp(-gamma * (q[i] + q[j] - 2 * rdot(X[i, k], X[j, k], k)));"
        " t[i] = rsum(w[i, j], j); out[i, c] = rdot(w[i, j], X[j, c], j) / t[i];",
        mean_shift, {"X": "ik"}, (dict(i=4096, k=64), dict(i=3001, k=80)), (dict(i=777, k=48),), dict(i=41, k=19), scalars=(0.05,), products=times("iik", "iik"), grad=("X",)),
    "heat_step_3d": Untuned(
        "Func out; In U; SIn alpha; Var b, z, y, x; out[b, z, y, x] = U[b, z, y, x] + alpha * (U[b, z + 1, y, x] + U[b, z - 1, y, x] + U[b, z, y + 1, x] + U[b, z, y - 1, x]"
        " + U[b, z, y, x + 1] + U[b, z, y, x - 1] - 6 * U[b, z, y, x]);",
        heat_step_3d, {"U": "bzyx"}, (dict(b=2, z=256, y=256, x=256), dict(b=3, z=99, y=101, x=133)), (dict(b=2, z=17, y=33, x=65),), dict(b=2, z=5, y=6, x=7), scalars=(0.1,), grad=("U",)),
    "gray_scott": Untuned(
        "Func w, a, out; In U, V; SIn du, dv, feed, kill; Var b, h, l; Extent h = U[1]; Extent l = U[2]; w[b, h, l] = U[b, h, l] * V[b, h, l] * V[b, h, l];"
        " a[b, h, l] = U[b, h, l] + du * (U[b, (h + 1) % len(h), l] + U[b, (h - 1) % len(h), l] + U[b, h, (l + 1) % len(l)] + U[b, h, (l - 1) % len(l)] - 4 * U[b, h, l]) - w[b, h, l] + feed * (1 - U[b, h, l]);"
        " out[b, h, l] = V[b, h, l] + dv * (V[b, (h + 1) % len(h), l] + V[b, (h - 1) % len(h), l] + V[b, h, (l + 1) % len(l)] + V[b, h, (l - 1) % len(l)] - 4 * V[b, h, l]) + w[b, h, l]"
        " - (feed + kill) * V[b, h, l]; a.compile(); out.compile();",
        gray_scott, {"U": "bhl", "V": "bhl"}, (dict(b=8, h=1024, l=1024), dict(b=5, h=333, l=501)), (dict(b=2, h=65, l=99),), dict(b=2, h=6, l=7), scalars=(0.16, 0.08, 0.035, 0.065),
        grad=("U", "V"), dtypes=("fp32",)),
    "coulomb_forces": Untuned(
        "Func d2, out; In R, q; SIn eps; Var b, i, c; RVar j, k; d2[b, i, j] = rsum(pow(R[b, i, k] - R[b, j, k], 2), k) + eps;"
        " out[b, i, c] = q[b, i] * rsum(q[b, j] * pow(d2[b, i, j], -1.5) * (R[b, i, c] - R[b, j, c]), j);",
        coulomb_forces, {"R": "bic", "q": "bi"}, (dict(b=4, i=2048, c=3), dict(b=3, i=1111, c=3)), (dict(b=2, i=333, c=3),), dict(b=2, i=19, c=3), scalars=(0.1,), grad=("R", "q"), dtypes=("fp32",)),
    "lennard_jones": Untuned(
        "Func d2, s6, out; In R; SIn cut; Var b, i; RVar j, k; d2[b, i, j] = rsum(pow(R[b, i, k] - R[b, j, k], 2), k) + 0.5; s6[b, i, j] = pow(d2[b, i, j], -3);"
        " out[b, i] = rsum(where(i != j and d2[b, i, j] < cut * cut, 2 * (s6[b, i, j] * s6[b, i, j] - s6[b, i, j]), 0), j);",
        lennard_jones, {"R": "bic"}, (dict(b=8, i=2048, c=3), dict(b=3, i=1111, c=3)), (dict(b=2, i=333, c=3),), dict(b=2, i=19, c=3), scalars=(1.8,), grad=("R",), dtypes=("fp32",)),
    "sinkhorn_step": Untuned(
        "Func g, out; In C, f; SIn eps; Var b, i, j; g[b, j] = -eps * log(rsum(exp((f[b, i] - C[b, i, j]) / eps), i)); out[b, i] = -eps * log(rsum(exp((g[b, j] - C[b, i, j]) / eps), j));"
        " g.compile(); out.compile();",
        sinkhorn_step, {"C": "bij", "f": "bi"}, (dict(b=16, i=1024, j=1024), dict(b=7, i=501, j=777)), (dict(b=3, i=130, j=222),), dict(b=2, i=19, j=23), scalars=(0.5,), grad=("C", "f")),
    "kalman_step": Untuned(
        "Func y, s, ph, k, u, out; In X, P, A, Q, h, z; SIn r; Var b, i, j; RVar l, m; y[b, i] = rsum(A[i, l] * X[b, l], l); s[b, i, j] = rsum(A[i, l] * P[b, l, m] * A[j, m], l, m) + Q[i, j];"
        " ph[b, i] = rsum(s[b, i, j] * h[j], j); k[b, i] = ph[b, i] / (rsum(ph[b, l] * h[l], l) + r); u[b, i] = y[b, i] + k[b, i] * (z[b] - rsum(h[l] * y[b, l], l));"
        " out[b, i, j] = s[b, i, j] - k[b, i] * ph[b, j]; u.compile(); out.compile();",
        lambda x, p, a, q, h, z, r: kalman_step(x, p, a, q, h, z, r), {"X": "bi", "P": "bij", "A": "ii", "Q": "ij", "h": "j", "z": "b"},
        (dict(b=16384, i=16, j=16), dict(b=5003, i=9, j=9)), (dict(b=515, i=6, j=6),), dict(b=7, i=4, j=4), scalars=(400.0,), products=times("biij", "bijj"), grad=("X", "P", "A", "z"), dtypes=("fp32",)),
    "ema_bands": Untuned(
        "Func m, v, out; In X; SIn a, eps; Var b, t, c; m[b, t, c] = rrecur(1 - a, a * X[b, t, c], t); v[b, t, c] = rrecur(1 - a, a * pow(X[b, t, c] - m[b, t, c], 2), t);"
        " out[b, t, c] = (X[b, t, c] - m[b, t, c]) * rsqrt(v[b, t, c] + eps);",
        ema_bands, {"X": "btc"}, (dict(b=32, t=512, c=512), dict(b=11, t=333, c=201)), (dict(b=3, t=130, c=99),), dict(b=2, t=19, c=11), scalars=(0.1, 0.01), grad=("X",)),
    "drawdown": Untuned(
        "Func value, out; In X; Var b; RVar t; value[b, t] = rscan(sum, X[b, t], t); out[b] = rmax(rscan(max, value[b, t], t) - value[b, t], t);",
        drawdown, {"X": "bt"}, (dict(b=16384, t=1024), dict(b=3001, t=777)), (dict(b=515, t=333),), dict(b=7, t=61), grad=("X",), dtypes=("fp32",)),
    "histogram_rows": Untuned(
        "Func out; In A, B; SIn low, step; Var x, k; RVar y; out[x, k] = rsum(where(floor((A[x, y] - low) / step) == k, 1, 0), y) + B[k];",
        histogram_rows, {"A": "xy", "B": "k"}, (dict(x=4096, y=4096, k=64), dict(x=1501, y=3001, k=50)), (dict(x=130, y=1111, k=50),), dict(x=5, y=301, k=10), scalars=(-2.0, 0.0625),
        small_scalars=(-2.0, 0.5), kinds={"B": "fp32"}, dtypes=("fp32",)),
    "segment_mean": Untuned(
        "Func out; In X, g, w; Var s, d; RVar n; out[s, d] = w[s] * rsum(where(g[n] == s, X[n, d], 0), n) / maximum(rsum(where(g[n] == s, 1, 0), n), 1);",
        segment_mean, {"X": "nd", "g": "n", "w": "s"}, (dict(n=65536, d=256, s=256), dict(n=5003, d=77, s=333)), (dict(n=1111, d=33, s=65),), dict(n=61, d=19, s=7),
        kinds={"g": "sorted:s"}, grad=("X", "w")),
}  # fmt: skip

QUANTISED = {
    "block_int8": Untuned(
        "Func s, out; In W; Var o, i, p, q; RVar r, c; Extent p = W[0] / 128; Extent q = W[1] / 128; Extent r = 128; Extent c = 128; s[p, q] = cast(rmax(abs(W[128 * p + r, 128 * q + c]), r, c) / 127, fp32);"
        " out[o, i] = cast(clamp(round(W[o, i] / s[o / 128, i / 128]), -127, 127), int8); s.compile(); out.compile();",
        block_int8, {"W": "oi"}, (dict(o=4096, i=4096), dict(o=1408, i=5504)), (dict(o=384, i=512),), dict(o=128, i=256), dtypes=("fp32",)),
    "pack_int4": Untuned(
        "Func s, q, out; In A; Var x, g, y, z; RVar k; Extent g = A[1] / 32; Extent k = 32; Extent z = A[1] / 2; s[x, g] = rmax(abs(A[x, 32 * g + k]), k) / 7;"
        " q[x, y] = cast(clamp(round(A[x, y] / s[x, y / 32]), -8, 7), int32) + 8; out[x, z] = cast(q[x, 2 * z] | (q[x, 2 * z + 1] << 4), uint8); s.compile(); out.compile();",
        pack_int4, {"A": "xy"}, (dict(x=4096, y=4096), dict(x=1501, y=1056)), (dict(x=130, y=544),), dict(x=5, y=96), dtypes=("fp32",)),
    "int4_linear_gelu": Untuned(
        "Func u, out; In X, W, s, z; Var t, o; RVar k; Extent k = X[1]; u[t, o] = rdot(X[t, k], (((W[o, k / 2] >> (4 * (k % 2))) & 15) - 8) * s[o, k / 64], k) + z[o];"
        " out[t, o] = 0.5 * u[t, o] * (1 + erf(u[t, o] * 0.7071067811865476));",
        int4_linear_gelu, {"X": "tk", "W": "oh", "s": "og", "z": "o"}, (dict(t=16, k=4096, h=2048, g=64, o=11008), dict(t=2048, k=1536, h=768, g=24, o=3000)),
        (dict(t=130, k=512, h=256, g=8, o=333),), dict(t=9, k=128, h=64, g=2, o=37), products=along("t", "k", "o"), grad=("X", "z"), kinds={"W": "int8", "s": "small"}),
    "stochastic_int8": Untuned(  # noise is 0, for torch draws other numbers
        "Func s, out; In A; SIn seed, noise; Var x, y; s[x] = rmax(abs(A[x, y]), y) / 127;"
        " out[x, y] = cast(clamp(floor(A[x, y] / s[x] + 0.5 + noise * (random(seed, x, y) - 0.5)), -127, 127), int8); s.compile(); out.compile();",
        stochastic_int8, {"A": "xy"}, (dict(x=4096, y=4096), dict(x=1501, y=3001)), (dict(x=130, y=1111),), dict(x=5, y=61), scalars=(7, 0.0), dtypes=("fp32",)),
}  # fmt: skip

OPTIMIZERS = {
    "soap_step": Untuned(
        "Func a, r, m, v, n, c, out; In G, L, R, M, V; SIn lr, b1, b2; Var i, j, x, y; a[x, j] = rdot(L[i, x], G[i, j], i); r[x, y] = rdot(a[x, j], R[j, y], j); m[x, y] = b1 * M[x, y] + (1 - b1) * r[x, y];"
        " v[x, y] = b2 * V[x, y] + (1 - b2) * r[x, y] * r[x, y]; n[x, y] = m[x, y] * rsqrt(v[x, y] + 1e-8); c[i, y] = rdot(L[i, x], n[x, y], x); out[i, j] = -lr * rdot(c[i, y], R[j, y], y);"
        " m.compile(); v.compile(); out.compile();",
        soap_step, {"G": "ij", "L": "ii", "R": "jj", "M": "ij", "V": "ij"}, (dict(i=1024, j=2048), dict(i=701, j=1111)), (dict(i=130, j=222),), dict(i=19, j=23), scalars=(1e-3, 0.9, 0.99),
        products=times("iij", "ijj", "iij", "ijj"), kinds={"V": "positive"}, dtypes=("fp32",)),
    "shampoo_statistics": Untuned(
        "Func l, out; In G, L, R; SIn beta; Var i, j, x, y; l[i, x] = beta * L[i, x] + (1 - beta) * rdot(G[i, j], G[x, j], j); out[j, y] = beta * R[j, y] + (1 - beta) * rdot(G[i, j], G[i, y], i);"
        " l.compile(); out.compile();",
        shampoo_statistics, {"G": "ij", "L": "ii", "R": "jj"}, (dict(i=1024, j=4096), dict(i=701, j=1111)), (dict(i=130, j=222),), dict(i=19, j=23), scalars=(0.95,),
        products=times("iij", "ijj"), kinds={"L": "fp32", "R": "fp32"}),
    "lamb_rows": Untuned(
        "Func m, v, u, trust, out; In P, G, M, V; SIn lr, b1, b2, wd; Var x, y; m[x, y] = b1 * M[x, y] + (1 - b1) * G[x, y]; v[x, y] = b2 * V[x, y] + (1 - b2) * G[x, y] * G[x, y];"
        " u[x, y] = m[x, y] / (sqrt(v[x, y]) + 1e-6) + wd * P[x, y]; trust[x] = sqrt(rsum(P[x, y] * P[x, y], y)) / (sqrt(rsum(u[x, y] * u[x, y], y)) + 1e-6);"
        " out[x, y] = P[x, y] - lr * trust[x] * u[x, y]; m.compile(); v.compile(); out.compile();",
        lamb_rows, {"P": "xy", "G": "xy", "M": "xy", "V": "xy"}, (dict(x=4096, y=2048), dict(x=1501, y=1111)), (dict(x=130, y=333),), dict(x=5, y=61), scalars=(1e-3, 0.9, 0.99, 0.1),
        kinds={"V": "positive"}, dtypes=("fp32",)),
    "momentum_8bit": Untuned(
        "Func m, s, q, out; In P, G, Q, S; SIn lr, beta; Var b, x; m[b, x] = beta * Q[b, x] * S[b] + (1 - beta) * G[b, x]; s[b] = rmax(abs(m[b, x]), x) / 127; q[b, x] = round(m[b, x] / s[b]);"
        " out[b, x] = P[b, x] - lr * m[b, x]; s.compile(); q.compile(); out.compile();",
        momentum_8bit, {"P": "bx", "G": "bx", "Q": "bx", "S": "b"}, (dict(b=65536, x=256), dict(b=5003, x=333)), (dict(b=515, x=100),), dict(b=7, x=61), scalars=(0.1, 0.9),
        kinds={"Q": "int8", "S": "positive"}, dtypes=("fp32",)),
}  # fmt: skip

LOOKUPS = {
    "gat_softmax": Untuned(
        "Func e, t, out; In A, g, T; Var n, h, v; Extent v = T[0]; e[n, h] = exp(where(A[n, h] > 0, A[n, h], 0.2 * A[n, h])); t[v, h] = rsum(where(g[n] == v, e[n, h], 0), n); out[n, h] = e[n, h] / t[g[n], h];",
        gat_softmax, {"A": "nh", "g": "n", "T": "v"}, (dict(n=65536, h=8, v=1024), dict(n=5003, h=5, v=333)), (dict(n=1111, h=3, v=65),), dict(n=61, h=3, v=7), kinds={"g": "sorted:v"}, grad=("A",)),
    "bag_means": Untuned(
        "Func out; In W, t, N; Var b, y; RVar s; out[b, y] = rsum(where(s < N[b], W[t[b, s], y], 0), s) / N[b];",
        bag_means, {"W": "vy", "t": "bs", "N": "b"}, (dict(v=100000, b=4096, s=64, y=256), dict(v=50000, b=1501, s=41, y=100)), (dict(v=1000, b=130, s=21, y=33),), dict(v=31, b=5, s=9, y=19),
        kinds={"t": "index:v", "N": "index:s", "W": "table"}, grad=("W",)),
    "hashed_embedding": Untuned(
        "Func first, out; In W, t, z; Var b, s, y, v; Extent v = W[0]; first[b, s] = ((t[b, s] ^ (t[b, s] >> 3)) * 40503) % len(v);"
        " out[b, s, y] = z[y] * (W[first[b, s], y] + W[(t[b, s] * 2654435761 + 7) % len(v), y]);",
        hashed_embedding, {"W": "vy", "t": "bs", "z": "y"}, (dict(v=65536, u=1000000, b=16, s=1024, y=512), dict(v=9973, u=1000000, b=7, s=333, y=300)), (dict(v=997, u=100000, b=3, s=61, y=33),),
        dict(v=31, u=1000, b=2, s=9, y=19), kinds={"t": "index:u", "W": "table"}, grad=("W", "z")),
    "graph_convolution": Untuned(
        "Func h, out; In X, W, src, dst, c; Var i, o; RVar e, k; Extent i = X[0]; h[i, k] = rsum(where(dst[e] == i, X[src[e], k] * c[e], 0), e); out[i, o] = maximum(rdot(h[i, k], W[o, k], k), 0);",
        graph_convolution, {"X": "vk", "W": "ok", "src": "e", "dst": "e", "c": "e"}, (dict(v=4096, e=65536, k=128, o=128), dict(v=1501, e=9001, k=70, o=99)), (dict(v=333, e=1111, k=33, o=41),),
        dict(v=11, e=37, k=9, o=13), products=along("v", "k", "o"), grad=("X", "W", "c"), kinds={"src": "index:v", "dst": "sorted:v", "W": "small"}),
}  # fmt: skip

WINDOWS = {
    "cost_volume": Untuned(
        "Func out; In A, B; Var b, y, x, k; RVar c; Extent k = 24; out[b, y, x, k] = rmean(A[b, c, y, x] * B[b, c, y, x - k], c);",
        cost_volume, {"A": "bcyx", "B": "bcyx"}, (dict(b=2, c=64, y=128, x=256), dict(b=3, c=33, y=65, x=131)), (dict(b=2, c=17, y=21, x=65),), dict(b=2, c=5, y=3, x=31), grad=("A", "B")),
    "log_mel": Untuned(
        "Func re, im, power, out; In A, w, C, S, M; Var b, t, j; RVar n, k; Extent t = (A[1] - 256) / 128 + 1; Extent n = 256; re[b, t, k] = rdot(A[b, 128 * t + n] * w[n], C[k, n], n);"
        " im[b, t, k] = rdot(A[b, 128 * t + n] * w[n], S[k, n], n); power[b, t, k] = re[b, t, k] * re[b, t, k] + im[b, t, k] * im[b, t, k]; out[b, t, j] = log(rdot(power[b, t, k], M[j, k], k) + 1e-3);",
        log_mel, {"A": "bs", "w": "n", "C": "kn", "S": "kn", "M": "jk"}, (dict(b=16, s=65536, n=256, k=129, j=80), dict(b=5, s=16001, n=256, k=129, j=64)), (dict(b=2, s=5000, n=256, k=129, j=64),),
        dict(b=2, s=700, n=256, k=17, j=9), products=lambda s: (2 * along("b", "s", "k")(s) * 2 + along("b", "s", "k", "j")(s) / 128), grad=("A", "w"), dtypes=("fp32",), kinds={"M": "positive", "C": "small", "S": "small"}),
    "ssim_map": Untuned(
        "Func mx, my, vx, vy, xy, out; In A, B; SIn c1, c2; Var b, c; RVar y, x, r, s; Extent y = A[2] - 6; Extent x = A[3] - 6; Extent r = 7; Extent s = 7; mx[b, c, y, x] = rmean(A[b, c, y + r, x + s], r, s);"
        " my[b, c, y, x] = rmean(B[b, c, y + r, x + s], r, s); vx[b, c, y, x] = rmean(pow(A[b, c, y + r, x + s], 2), r, s) - pow(mx[b, c, y, x], 2);"
        " vy[b, c, y, x] = rmean(pow(B[b, c, y + r, x + s], 2), r, s) - pow(my[b, c, y, x], 2); xy[b, c, y, x] = rmean(A[b, c, y + r, x + s] * B[b, c, y + r, x + s], r, s) - mx[b, c, y, x] * my[b, c, y, x];"
        " out[b, c] = rmean((2 * mx[b, c, y, x] * my[b, c, y, x] + c1) * (2 * xy[b, c, y, x] + c2) / ((pow(mx[b, c, y, x], 2) + pow(my[b, c, y, x], 2) + c1) * (vx[b, c, y, x] + vy[b, c, y, x] + c2)), y, x);",
        ssim_map, {"A": "bcyx", "B": "bcyx"}, (dict(b=8, c=3, y=256, x=256), dict(b=5, c=3, y=131, x=203)), (dict(b=2, c=3, y=41, x=65),), dict(b=2, c=2, y=11, x=13), scalars=(0.01, 0.03), grad=("A", "B"),
        dtypes=("fp32",)),
    "median_filter": Untuned(
        "Func out; In A; Var b, y, x; RVar k; Extent k = 9; Extent y = A[1]; Extent x = A[2]; out[b, y, x] = rtopk(A[b, y + k / 3 - 1, x + k % 3 - 1], k, 4);",
        median_filter, {"A": "byx"}, (dict(b=8, y=512, x=512), dict(b=5, y=333, x=501)), (dict(b=2, y=65, x=99),), dict(b=2, y=6, x=9), grad=("A",), dtypes=("fp32",)),
    "volume_rendering": Untuned(
        "Func x, w, a, out; In S, D, C; Var b, c; RVar t; x[b, t] = (maximum(S[b, t], 0) + log1p(exp(-abs(S[b, t])))) * D[b, t]; w[b, t] = exp(-rscan(sum, x[b, t], t, exclusive)) * (1 - exp(-x[b, t]));"
        " a[b] = rsum(w[b, t], t); out[b, c] = rsum(w[b, t] * C[b, t, c], t); a.compile(); out.compile();",
        volume_rendering, {"S": "bt", "D": "bt", "C": "btc"}, (dict(b=16384, t=128, c=3), dict(b=5003, t=97, c=3)), (dict(b=333, t=61, c=3),), dict(b=5, t=21, c=3), grad=("S", "C"),
        kinds={"D": "positive"}, dtypes=("fp32",)),
}  # fmt: skip

MORE = {
    "viterbi_step": Untuned(
        "Func place, out; In A, T, E; Var b, j; RVar i; place[b, j] = rargmax(A[b, i] + T[i, j], i); out[b, j] = rmax(A[b, i] + T[i, j], i) + E[b, j]; place.compile(); out.compile();",
        viterbi_step, {"A": "bi", "T": "ij", "E": "bj"}, (dict(b=4096, i=256, j=256), dict(b=1501, i=111, j=111)), (dict(b=130, i=50, j=50),), dict(b=7, i=19, j=19), dtypes=("fp32",)),
    "crf_step": Untuned(
        "Func out; In A, T, E; Var b, j; RVar i; out[b, j] = log(rsum(exp(A[b, i] + T[i, j]), i)) + E[b, j];",
        crf_step, {"A": "bi", "T": "ij", "E": "bj"}, (dict(b=4096, i=256, j=256), dict(b=1501, i=111, j=111)), (dict(b=130, i=50, j=50),), dict(b=7, i=19, j=19), grad=("A", "T", "E")),
    "black_scholes": Untuned(
        "Func root, d, paid, c, out; In S, K, T; SIn r, vol; Var x; root[x] = vol * sqrt(T[x]); d[x] = (log(S[x] / K[x]) + (r + 0.5 * vol * vol) * T[x]) / root[x]; paid[x] = K[x] * exp(-r * T[x]);"
        " c[x] = 0.5 * S[x] * erfc(-0.7071067811865476 * d[x]) - 0.5 * paid[x] * erfc(-0.7071067811865476 * (d[x] - root[x])); out[x] = c[x] - S[x] + paid[x]; c.compile(); out.compile();",
        black_scholes, {"S": "x", "K": "x", "T": "x"}, (dict(x=1 << 23), dict(x=3_000_017)), (dict(x=100_003,),), dict(x=1000), scalars=(0.03, 0.4), grad=("S", "K", "T"),
        kinds={"S": "positive", "K": "positive", "T": "positive"}, dtypes=("fp32",)),
    "list_mle": Untuned(
        "Func m, out; In A; Var b; RVar t; m[b] = rmax(A[b, t], t); out[b] = rsum(m[b] + log(rscan(sum, exp(A[b, t] - m[b]), t, reversed)) - A[b, t], t);",
        list_mle, {"A": "bt"}, (dict(b=16384, t=512), dict(b=3001, t=777)), (dict(b=515, t=333),), dict(b=7, t=61), grad=("A",)),
    "approximate_ndcg": Untuned(
        "Func rank, out; In S, G; SIn tau; Var b; RVar i, j; rank[b, i] = 0.5 + rsum(sigmoid((S[b, j] - S[b, i]) / tau), j); out[b] = rsum((exp2(G[b, i]) - 1) / log2(1 + rank[b, i]), i);",
        approximate_ndcg, {"S": "bi", "G": "bi"}, (dict(b=4096, i=256), dict(b=1501, i=111)), (dict(b=130, i=61),), dict(b=5, i=21), scalars=(0.5,), grad=("S",)),
    "poincare_distances": Untuned(
        "Func p, q, x, y, d, z, out; In A, B; Var i, j; RVar k; p[i] = rsum(A[i, k] * A[i, k], k); q[j] = rsum(B[j, k] * B[j, k], k); x[i] = 0.25 * p[i] / (1 + p[i]); y[j] = 0.25 * q[j] / (1 + q[j]);"
        " d[i, j] = x[i] + y[j] - 0.5 * rdot(A[i, k], B[j, k], k) * rsqrt(1 + p[i]) * rsqrt(1 + q[j]); z[i, j] = 2 * maximum(d[i, j], 0) / ((1 - x[i]) * (1 - y[j]));"
        " out[i, j] = log(1 + z[i, j] + sqrt(z[i, j] * (z[i, j] + 2) + 1e-6));",
        poincare_distances, {"A": "ik", "B": "jk"}, (dict(i=4096, j=4096, k=64), dict(i=1501, j=3001, k=50)), (dict(i=333, j=222, k=33),), dict(i=19, j=23, k=11), products=along("i", "j", "k"), grad=("A", "B")),
    "beam_power": Untuned(
        "Func re, im, out; In A, B, C, D; Var f; RVar t, m; re[f, t] = rdot(A[m, f], C[m, t], m) + rdot(B[m, f], D[m, t], m); im[f, t] = rdot(A[m, f], D[m, t], m) - rdot(B[m, f], C[m, t], m);"
        " out[f] = cast(rmean(re[f, t] * re[f, t] + im[f, t] * im[f, t], t), fp32);",
        beam_power, {"A": "mf", "B": "mf", "C": "mt", "D": "mt"}, (dict(m=128, f=1024, t=4096), dict(m=61, f=777, t=3001)), (dict(m=33, f=130, t=333),), dict(m=9, f=19, t=37),
        products=lambda s: 4 * along("m", "f", "t")(s), grad=("A", "B")),
    "harmonics": Untuned(
        "Func n, x, y, z, out; In R; Var b, j; RVar k; Extent j = 9; n[b] = rsqrt(rsum(R[b, k] * R[b, k], k) + 1e-24); x[b] = R[b, 0] * n[b]; y[b] = R[b, 1] * n[b]; z[b] = R[b, 2] * n[b];"
        " out[b, j] = where(j == 0, 0.28209479, where(j == 1, 0.48860251 * y[b], where(j == 2, 0.48860251 * z[b], where(j == 3, 0.48860251 * x[b], where(j == 4, 1.09254843 * x[b] * y[b],"
        " where(j == 5, 1.09254843 * y[b] * z[b], where(j == 6, 0.31539157 * (3 * z[b] * z[b] - 1), where(j == 7, 1.09254843 * x[b] * z[b], 0.54627422 * (x[b] * x[b] - y[b] * y[b])))))))));",
        harmonics, {"R": "bk"}, (dict(b=1 << 20, k=3), dict(b=300_017, k=3)), (dict(b=10_003, k=3),), dict(b=37, k=3), grad=("R",), dtypes=("fp32",)),
}  # fmt: skip

PROGRAMS: dict[str, Untuned] = LOSSES | NUMERICS | QUANTISED | OPTIMIZERS | LOOKUPS | WINDOWS | MORE
