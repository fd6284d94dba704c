"""Plain torch functions that ``dtkernels.fuse`` compiles, with arguments of several sizes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

Shape = tuple[int, ...]


class Case:
    """A function, its shapes at the first call and at later ones. A shape may be ("index", bound, *shape) or ("mask", *shape)."""

    def __init__(self, function, *calls, interpreted=False, compiled=False, programs=1, tolerance=1.0, gradient=True, name=""):
        self.function, self.calls, self.interpreted, self.compiled, self.programs = function, calls, interpreted, compiled, programs
        self.tolerance, self.gradient, self.name = tolerance, gradient, name


def arguments(shapes, dtype=torch.float64, seed=0) -> list[torch.Tensor]:
    """Random arguments of these shapes."""
    generator, found = torch.Generator().manual_seed(seed), []
    for shape in shapes:
        if shape and shape[0] == "index":
            found.append(torch.randint(0, shape[1], shape[2:], generator=generator))
        elif shape and shape[0] == "mask":
            found.append(torch.rand(shape[1:], generator=generator) > 0.4)
        elif shape and shape[0] == "positive":
            found.append(torch.rand(shape[1:], generator=generator, dtype=torch.float64).add(0.2).to(dtype))
        else:
            found.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
    return found


XY, XY2, XY3 = ((6, 8),), ((5, 12),), ((3, 7),)
CASES: dict[str, Case] = {}


def case(*calls, **settings):
    def entered(function):
        CASES[settings.get("name") or function.__name__] = Case(function, *calls, **settings)
        return function

    return entered


# -- elementwise ----------------------------------------------------------------------------------------------------------


@case(((6, 8), (6, 8)), ((5, 12), (5, 12)), interpreted=True, compiled=True)
def arithmetic(x, y):
    return (x + 2 * y - 1) * x / (y * y + 1) - (-x) ** 3


@case(((6, 8), (8,)), ((5, 12), (12,)))
def broadcast_row(x, w):
    return x * w + 1


@case(((6, 8), (6, 1)), ((5, 12), (5, 1)))
def broadcast_column(x, s):
    return x / (s.abs() + 1)


@case(((4, 1), (1, 5)), ((3, 1), (1, 7)), interpreted=True)
def outer_sum(x, y):
    return torch.tanh(x + y)


@case(((2, 3, 4), (4,), ()), ((5, 2, 6), (6,), ()))
def with_number(x, w, alpha):
    return alpha * x + w


@case(((6, 8), (1,)), ((5, 3), (1,)))
def one_element(x, alpha):
    return torch.tanh(alpha * x)


@case(XY, XY2)
def activations(x):
    return F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.relu(x) + F.softplus(x) + F.mish(x) + F.elu(x) + F.leaky_relu(x, 0.2)


@case(XY, XY2)
def more_activations(x):
    return F.relu6(x) + F.hardswish(x) + F.hardsigmoid(x) + F.selu(x) + F.logsigmoid(x) + F.softsign(x) + F.celu(x, 1.3) + F.softshrink(x) + F.hardtanh(x) + F.tanhshrink(x)


@case((("positive", 6, 8),), (("positive", 5, 12),))
def functions(x):
    return x.exp() + x.log() + x.sqrt() + x.rsqrt() + torch.erf(x) + x.sigmoid() + x.exp2() + x.log2() + x.reciprocal() + x**0.5 + x**-2 + x**1.7 + 2**x + torch.log1p(x) + torch.expm1(x)


@case((("positive", 6, 8), (6, 8)), (("positive", 5, 3), (5, 3)), interpreted=True)
def powers(x, y):
    return x**y + y.sin() * x.cos() + (x * 0.5).prod(-1, keepdim=True) + y**3 + 1.5**y


@case(XY, XY2, gradient=False)
def roundings(x):
    x = x * 3
    return x.floor() + x.ceil() + x.round() + x.trunc() + x.sign()


@case(((6, 8), (6, 8)), ((5, 3), (5, 3)))
def choices(x, y):
    return torch.where(x > y, x, y * 2) + torch.maximum(x, y) + torch.minimum(x, 0.5 * y) + x.clamp(-0.5, 0.5) + torch.clamp(y, min=0.1)


@case(((6, 8), ("mask", 6, 8)), ((5, 3), ("mask", 5, 3)), interpreted=True)
def filled(x, mask):
    return x.masked_fill(mask, 0.5) + torch.where(mask & (x > 0), x, -x) * mask + (~mask).float()


@case(XY, XY2, gradient=False)
def truth(x):
    return x > 0.3, ((x < 1) | (x == 2)).to(x.dtype)


@case(((6, 8), (6, 8)), ((5, 3), (5, 3)))
def several_results(x, y):
    total = x + y
    return total, (total * 2, {"sum": total.sum(-1)})


# -- reductions -----------------------------------------------------------------------------------------------------------


@case(XY, XY2, interpreted=True, compiled=True)
def sums(x):
    return x.sum(-1), x.sum(0, keepdim=True), x.sum(), x.mean(1)


@case(((2, 3, 4, 5),), ((3, 2, 5, 2),))
def over_dims(x):
    return x.mean((1, 3), keepdim=True) * x.sum((0, 2))[None, :, None] + x.amax((2, 3), keepdim=True)


@case(XY, XY2, interpreted=True)
def variances(x):
    return x.var(-1), x.std(0), x.var(-1, unbiased=False, keepdim=True), x.var()


@case(XY, XY2)
def extremes(x):
    return x.amax(-1), x.amin(0), x.max(), x.max(dim=1).values


@case(XY, XY2)
def norms(x):
    return x.norm(dim=-1), torch.linalg.vector_norm(x, ord=1, dim=0), x.norm(), F.normalize(x, dim=-1)


@case(XY, XY2, interpreted=True, compiled=True)
def softmaxes(x):
    return torch.softmax(x * 3, -1)


@case(((2, 6, 8),), ((3, 5, 2),))
def softmax_dims(x):
    return F.softmax(x, 1) + F.log_softmax(x, 0) + torch.logsumexp(x, (1, 2), keepdim=True)


@case(XY, XY2)
def manual_softmax(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@case(((6, 8), (6, 8)), ((5, 3), (5, 3)))
def losses(x, y):
    return F.mse_loss(x, y) + F.l1_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y) + F.binary_cross_entropy_with_logits(x, torch.sigmoid(y)) + F.cosine_similarity(x, y).sum()


@case(((6, 8), (6, 8)), ((5, 3), (5, 3)))
def divergence(x, y):
    return F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean")


# -- products ---------------------------------------------------------------------------------------------------------------


@case(((6, 8), (8, 5)), ((3, 4), (4, 7)), interpreted=True, compiled=True)
def product(x, w):
    return torch.sigmoid(x @ w)


@case(((2, 6, 8), (5, 8), (5,)), ((3, 4, 7), (2, 7), (2,)), interpreted=True)
def linear_bias(x, w, b):
    return F.gelu(F.linear(x, w, b))


@case(((2, 6, 8), (2, 8, 5)), ((3, 4, 7), (3, 7, 2)))
def batched(x, y):
    return torch.bmm(x, y) + (x @ y).mean(0)


@case(((4, 8), (8, 5), (5,)), ((3, 7), (7, 2), (2,)))
def addmm(x, w, b):
    return torch.addmm(b, x, w, beta=0.5, alpha=2.0)


@case(((2, 3, 4, 5), (2, 3, 6, 5)), ((1, 2, 3, 4), (1, 2, 5, 4)), programs=2)
def einsum_heads(q, k):
    return torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)


@case(((4, 5), (5, 6), (6, 3)), ((2, 3), (3, 4), (4, 5)))
def chain(a, b, c):
    return torch.einsum("ij,jk,kl->il", a, b, c) + a @ (b @ c)


@case(((4, 5), (5,)), ((3, 7), (7,)))
def vectors(x, v):
    return x @ v + torch.mv(x, v) * torch.dot(v, v) + torch.outer(x.sum(1), v).sum(1)


@case(((6, 4),), ((3, 5),))
def gram(x):
    return x @ x.T + (x.T @ x).sum()


@case(((2, 3, 6, 4), (2, 3, 7, 4), (2, 3, 7, 5)), ((1, 2, 4, 8), (1, 2, 3, 8), (1, 2, 3, 8)), programs=2, interpreted=True)
def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@case(((2, 3, 6, 4), (2, 3, 6, 4), (2, 3, 6, 4)), ((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)), interpreted=True)
def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@case(((2, 3, 6, 4), (2, 3, 7, 4), (2, 3, 7, 4), (6, 7), ("mask", 6, 7)), ((2, 2, 5, 8), (2, 2, 4, 8), (2, 2, 4, 8), (5, 4), ("mask", 5, 4)))
def masked_attention(q, k, v, bias, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias) + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


@case(((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)), ((2, 8, 3, 8), (2, 4, 9, 8), (2, 4, 9, 8)))
def grouped_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@case(((2, 6, 5, 4), (2, 6, 5, 4), (6, 5, 5), (6, 1, 5), ("mask", 6, 5, 5)), ((2, 4, 3, 8), (2, 4, 3, 8), (4, 3, 3), (4, 1, 3), ("mask", 4, 3, 3)), interpreted=True)
def masks_for_each_head(q, k, bias, row, mask):
    wide = F.scaled_dot_product_attention(q, k, k, attn_mask=bias) + F.scaled_dot_product_attention(q, k, k, attn_mask=row)
    return wide + F.scaled_dot_product_attention(q[0], k[0], k[0], attn_mask=mask)


@case(
    ((2, 6, 5, 4), (2, 2, 7, 4), (6, 5, 7), (2, 1, 5, 7), (1, 6, 1, 7), ("mask", 2, 6, 5, 7)),
    ((2, 8, 3, 8), (2, 4, 9, 8), (8, 3, 9), (2, 1, 3, 9), (1, 8, 1, 9), ("mask", 2, 8, 3, 9)),
)
def grouped_attention_with_masks(q, k, heads, batch, row, mask):
    return tuple(F.scaled_dot_product_attention(q, k, k, attn_mask=m, enable_gqa=True) for m in (heads, batch, row, mask))


@case(((6, 8),), ((5, 12),), interpreted=True)
def rounded_to_decimals(x):
    y = x * 40
    return y.round(decimals=1), y.round(decimals=-1) + x, (x * 1).round_(decimals=2), torch.round(y)


@case(((2, 6, 12), (36, 12), (12, 12)), ((3, 5, 8), (24, 8), (8, 8)), interpreted=True)
def self_attention(x, w, o):
    b, t, c = x.shape
    q, k, v = F.linear(x, w).split(c, dim=-1)
    q, k, v = (z.view(b, t, 2, c // 2).transpose(1, 2) for z in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).reshape(b, t, c), o)


@case(((2, 6, 4), (2, 7, 4)), ((3, 5, 8), (3, 4, 8)), programs=2)  # math.sqrt takes the size as a number
def manual_attention(q, k):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.tril(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool))
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ k


# -- norms ------------------------------------------------------------------------------------------------------------------


@case(((6, 8), (8,), (8,)), ((5, 12), (12,), (12,)), interpreted=True, compiled=True)
def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)


@case(((2, 3, 8), (2, 3, 8), (8,)), ((3, 5, 4), (3, 5, 4), (4,)), interpreted=True)
def add_rms_norm(x, r, w):
    h = x + r
    return F.rms_norm(h, (h.shape[-1],), w, 1e-6) + h


@case(((2, 3, 8), (8,)), ((3, 5, 4), (4,)), tolerance=1e3)  # float32 inside, which the reference in float64 does not round to
def llama_norm(x, w):
    h = x.to(torch.float32)
    variance = h.pow(2).mean(-1, keepdim=True)
    h = h * torch.rsqrt(variance + 1e-6)
    return w * h.to(x.dtype)


@case(((2, 6, 5), (6,), (6,)), ((3, 9, 4), (9,), (9,)))
def group_norm(x, w, b):
    return F.group_norm(x, 3, w, b)


@case(((2, 4, 3, 5), (4,), (4,)), ((3, 6, 4, 2), (6,), (6,)))
def group_norm_2d(x, w, b):
    return F.silu(F.group_norm(x, 2, w, b))


@case(((2, 4, 5), (4,), ("positive", 4)), ((3, 2, 4), (2,), ("positive", 2)))
def batch_norm(x, mean, var):
    return F.batch_norm(x, mean.detach(), var.detach())


@case(((2, 8),), ((5, 6),))
def glu(x):
    return F.glu(x)


@case(((2, 8),), ((5, 6),), interpreted=True)
def swiglu(x):
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


# -- losses and picked elements -----------------------------------------------------------------------------------------------


@case(((6, 8), ("index", 8, 6)), ((5, 12), ("index", 12, 5)), interpreted=True, compiled=True)
def cross_entropy(x, t):
    return F.cross_entropy(x, t)


@case(((2, 3, 8), ("index", 8, 2, 3)), ((4, 5, 12), ("index", 12, 4, 5)))
def language_loss(x, t):
    return F.cross_entropy(x.view(-1, x.size(-1)), t.view(-1), ignore_index=1, label_smoothing=0.1)


@case(((6, 8), ("index", 8, 6), ("positive", 8)), ((5, 12), ("index", 12, 5), ("positive", 12)))
def weighted_loss(x, t, w):
    return F.cross_entropy(x, t, w.detach()), F.nll_loss(F.log_softmax(x, -1), t), F.cross_entropy(x, torch.softmax(x, -1), reduction="sum")


@case(((6, 8), ("index", 8, 6), ("positive", 8)), ((5, 12), ("index", 12, 5), ("positive", 12)), programs=2)
def weighted_and_smoothed_loss(x, t, w):
    return F.cross_entropy(x, t, w.detach(), label_smoothing=0.2, ignore_index=2), F.cross_entropy(x, t, w.detach(), label_smoothing=0.1, reduction="none")


@case(((6, 8), ("index", 8, 6)), ((5, 12), ("index", 12, 5)))
def picked(x, t):
    return -torch.log_softmax(x, -1).gather(1, t[:, None]).squeeze(1)


@case(((9, 4), ("index", 9, 2, 3)), ((7, 5), ("index", 7, 4, 2)), interpreted=True)
def embedded(w, t):
    return F.embedding(t, w) * 2 + w[t]


@case(((9, 4), ("index", 9, 3), ("index", 4, 3)), ((7, 5), ("index", 7, 2), ("index", 5, 2)))
def indexed(x, rows, columns):
    return x.index_select(0, rows).sum(1) + x[rows, columns] + x[:, columns].sum(0)


@case(((6, 8), ("index", 8, 6)), ((5, 12), ("index", 12, 5)), programs=2)  # one_hot takes the size as a number
def one_hot(x, t):
    return (F.one_hot(t, x.shape[-1]) * x).sum(-1)


# -- views --------------------------------------------------------------------------------------------------------------------


@case(((2, 3, 4),), ((5, 2, 3),))
def transposes(x):
    return x.transpose(0, 1) + x.permute(1, 0, 2) * 2, x.mT.contiguous() + 1


@case(((2, 3, 4), (12,)), ((5, 2, 3), (6,)))
def flattened(x, w):
    return torch.tanh(x * 2).flatten(1) * w, x.reshape(-1) + 1


@case(((2, 12), (4,)), ((3, 20), (4,)))
def unflattened(x, w):
    h = torch.tanh(x)
    return h.view(x.shape[0], -1, 4) * w, h.unflatten(1, (2, -1)).sum(1)


@case(((4, 10),), ((3, 12),), interpreted=True)
def slices(x):
    h = torch.tanh(x)
    return h[:, 1:] - h[:, :-1], h[:, ::2] * 2, h[0], h[:, -1], h[1:3, 2:5]


@case(((4, 10),), ((3, 12),))
def splits(x):
    h = x * 2
    a, b = h.split([4, h.shape[1] - 4], dim=1)
    return a * 2, b.sum(), h.narrow(1, 1, 3), torch.stack(h[:2].unbind(0), 1)


@case(((4, 3), (4, 5)), ((2, 6), (2, 7)), interpreted=True)
def joined(x, y):
    return torch.cat([x, y * 2], dim=1) + 1, torch.stack([x, x * 2], 0), torch.cat([x, x.exp()], 0)


@case(((2, 3, 5, 8), (5, 8), (5, 8)), ((1, 2, 4, 6), (4, 6), (4, 6)), programs=2, interpreted=True)
def rotary(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


@case(((2, 3, 5, 8), (5, 4), (5, 4)), ((2, 2, 4, 6), (4, 3), (4, 3)))
def rotary_pairs(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


@case(((5, 5),), ((4, 4),))
def triangles(x):
    return x.tril(), torch.triu(x * 2, 1), x.tril(-1) + x.T, x.diagonal() * 2


@case(((5, 7),), ((4, 9),))
def padded(x):
    return F.pad(x * 2, (1, 2), value=0.5), x.flip(1) + x.roll(2, 1)


@case(((2, 4, 3),), ((3, 5, 2),))
def repeated(x):
    h = x * 2
    return h.repeat_interleave(3, dim=1), h.repeat(1, 2, 1), h[:, :, None].expand(-1, -1, 4, -1).sum(2)


@case(((6, 8),), ((5, 3),))
def positions(x):
    t = torch.arange(x.shape[1], device=x.device)
    return x * t + torch.where(t[None, :] % 2 == 0, x, 0), x + torch.zeros_like(x) + torch.full((x.shape[1],), 2.0, dtype=x.dtype)


# -- in-place, numbers, structure ---------------------------------------------------------------------------------------------


@case(((6, 8),), ((5, 3),))
def in_place(x):
    y = x * 2
    y.add_(1).mul_(x)
    y[:, 0] = 3
    z = y[1:]
    z += 1
    y.clamp_(max=2.5)
    return y, z.sum(), y.transpose(0, 1)


@case(((6, 8),), ((5, 3),))
def sizes(x):
    n, m = x.shape
    return x.sum(-1) / m + x.mean(0).sum() * n / (m * n) + (x * x).sum() / x.numel(), n


def helper(x, p=2.0):
    return x.abs() ** p


@case(((6, 8),), ((5, 3),))
def calls_others(x):
    total = 0
    for power in (1.0, 2.0, 3.0):
        total = total + helper(x, power)
    return total


@case(((2, 6, 8), (16, 8), (16, 8), (8, 16)), ((3, 4, 4), (6, 4), (6, 4), (4, 6)), interpreted=True, compiled=True)
def gated_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@case(((4, 6, 8), (8, 3)), ((2, 5, 4), (4, 2)))
def experts(x, w):
    gates = torch.softmax(x @ w, -1)
    best = gates.amax(-1, keepdim=True)
    return torch.where(gates == best, gates, 0).sum(1)


@case(((6, 8), (4, 8)), ((5, 3), (2, 3)))
def distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1).sqrt(), (x[:, None] * y).sum(-1)


@case(((6, 8),), ((5, 4),))
def quantised(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return x + (x / scale).round() * scale - x
