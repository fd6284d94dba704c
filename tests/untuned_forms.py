"""The programs of untuned_programs.py as they would be written with torch: what checks them in float64 and what they are timed beside.

Sums and exponentials of 16-bit numbers are made in float32, as torch's own functions make them.
"""

import torch
import torch.nn.functional as F


def wide(x):
    """In float32, or in float64 where it is that."""
    return x if x.dtype == torch.float64 else x.float()


def linear(x, w):
    return x @ w.mT


def gelu(x):
    return F.gelu(x, approximate="tanh")


# -- rows and columns -----------------------------------------------------------------------------------------------------


def below(rows, columns, device):
    """True on and below the diagonal."""
    return torch.arange(columns, device=device) <= torch.arange(rows, device=device)[:, None]


def masked(scores, seen):
    return torch.where(seen, scores, float("-inf"))


def masked_softmax(a, tau):
    return torch.softmax(masked(a / tau, below(*a.shape[1:], a.device)), -1)


def group_norm(a, w, b, eps):
    n, g, c, s = a.shape
    return F.group_norm(a.reshape(n, g * c, s), g, w.reshape(-1), b.reshape(-1), eps).view_as(a)


def l2_normalise(a):
    return a * torch.rsqrt((a * a).sum(-1, keepdim=True) + 1e-12)


def add_rms(a, r, w, eps):
    h = a + r
    return h, F.rms_norm(h, h.shape[-1:], w, eps)


def norm_of_all(a):
    return wide(a).pow(2).sum().sqrt().to(a.dtype)


def mean_var(a):
    mean = a.mean(-1)
    return mean, ((a - mean[:, None]) ** 2).mean(-1)


def row_column(a, r, c):
    return torch.tanh(a * r[:, None] + c) * torch.sigmoid(a - c) + r[:, None]


def divergence(s, t):
    a, b = (torch.log_softmax(wide(x), -1) for x in (s, t))
    return (b.exp() * (b - a)).sum(-1).to(s.dtype)


def modulate(a, scale, shift, eps):
    return F.layer_norm(a, a.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]


def quantise(a):
    scale = a.abs().amax(-1) * (1 / 127)
    return scale, torch.floor(a / scale[:, None] + 0.5)


def adamw(p, g, m, v, lr, b1, b2, eps, wd):
    m2, v2 = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return m2, v2, p * (1 - lr * wd) - lr * m2 / (torch.sqrt(v2) + eps)


# -- neighbours -----------------------------------------------------------------------------------------------------------


def average3(a):
    x = F.pad(a, (1, 1))
    return (x[:, :-2] + x[:, 1:-1] + x[:, 2:]) / 3


def convolution(a, w, b=None):
    """Of each channel by its own weights, over what came before."""
    return F.conv1d(F.pad(a.mT, (w.shape[1] - 1, 0)), w[:, None], b, groups=len(w)).mT


def convolution_silu(a, w, b):
    return F.silu(convolution(a, w, b)).contiguous()


def convolution_reversed(a, w):
    return convolution(a, w.flip(-1)).contiguous()


def rope_pairs(a, c, s):
    turned = torch.stack((-a[..., 1::2], a[..., ::2]), -1).flatten(-2)
    return a * c + turned * s


# -- products -------------------------------------------------------------------------------------------------------------


def cosine(a, b):
    return linear(F.normalize(a, dim=-1), F.normalize(b, dim=-1))


def distances(a, b):
    return (a * a).sum(-1)[:, None] + (b * b).sum(-1) - 2 * linear(a, b)


def distances_by_torch(a, b):
    return torch.cdist(wide(a)[None], wide(b)[None])[0].pow(2).to(a.dtype)


def by_expert(a, w, e):
    return sum(torch.where(e[:, None] == i, a @ w[i], 0) for i in range(len(w)))


def grouped_mm(a, w, e):
    ends = (e[:, None] == torch.arange(len(w), device=e.device)).sum(0).cumsum(0)
    return F.grouped_mm(a, w, offs=ends.int())


# -- attentions -----------------------------------------------------------------------------------------------------------


def apart(q, k):
    """How far each key is behind its query, negative: l - m."""
    return torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None]


def attend(scores, v):
    return torch.softmax(wide(scores), -1).to(v.dtype) @ v


def sdpa(q, k, v, mask, scale):
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None], scale=scale)[0]


def alibi(q, k, v, slope, scale):
    behind = apart(q, k)  # thousands times a slope: 16 bits would leave a few of them
    return attend(masked(q @ k.mT * scale + wide(slope)[:, None, None] * behind, behind <= 0), v)


def alibi_sdpa(q, k, v, slope, scale):
    behind = apart(q, k)
    return sdpa(q, k, v, masked(slope[:, None, None] * behind.to(q.dtype), behind <= 0), scale)


def relative(q, k, v, r, scale):
    return attend(q @ k.mT * scale + r[:, apart(q, k) + q.shape[1] - 1], v)


def relative_sdpa(q, k, v, r, scale):
    return sdpa(q, k, v, r[:, apart(q, k) + q.shape[1] - 1], scale)


def in_window(q, k, w):
    return (apart(q, k) <= 0) & (apart(q, k) > -w)


def window(q, k, v, scale, w):
    return attend(masked(q @ k.mT * scale, in_window(q, k, w)), v)


def window_sdpa(q, k, v, scale, w):
    return sdpa(q, k, v, in_window(q, k, w), scale)


def within(k, n):
    return torch.arange(k.shape[1], device=k.device) < n[:, None, None]


def lengths(q, k, v, n, scale):
    return attend(masked(q @ k.mT * scale, within(k, n)), v)


def lengths_sdpa(q, k, v, n, scale):
    return sdpa(q, k, v, within(k, n), scale)


def of_one_sequence(g):
    return (g[:, None] == g) & below(len(g), len(g), g.device)


def packed(q, k, v, g, scale):
    return attend(masked(q @ k.mT * scale, of_one_sequence(g)), v)


def packed_sdpa(q, k, v, g, scale):
    return sdpa(q, k, v, of_one_sequence(g), scale)


def paged(q, k, v, table, n, scale):
    """One query a head, on keys and values gathered from their pages."""
    k, v = (pages[table].flatten(1, 2).transpose(1, 2) for pages in (k, v))
    seen = torch.arange(k.shape[2], device=k.device) < n[:, None, None, None]
    return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen, scale=scale, enable_gqa=True)[:, :, 0]


def one_query(q, k, v, scale):
    """One query a head, of heads that may share keys."""
    return F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0]


def sigmoid_attention(q, k, v, scale, bias):
    return torch.sigmoid(q @ k.mT * scale - bias) @ v
