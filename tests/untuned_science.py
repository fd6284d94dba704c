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
    around = sum(p[:, i, j, k] for i, j, k in ((slice(2, None), mid, mid), (slice(-2), mid, mid), (mid, slice(2, None), mid), (mid, slice(-2), mid), (mid, mid, slice(2, None)), (mid, mid, slice(-2))))
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
        "Func w, a, c, out; In U, V; SIn du, dv, feed, kill; Var b, y, x, h, l; Extent h = U[1]; Extent l = U[2]; w[b, h, l] = U[b, h, l] * V[b, h, l] * V[b, h, l];"
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

PROGRAMS: dict[str, Untuned] = LOSSES | NUMERICS
