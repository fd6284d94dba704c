"""Functions as engineers write them: stop-gradients, writes by index, borders, pooling, sorts, computed indices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fused_functions import case


@case(((4, 6),), ((3, 9),), interpreted=True)
def straight_through(x):
    scale = x.detach().abs().amax(-1, keepdim=True) / 7
    return x + ((x / scale).round().clamp(-8, 7) * scale - x).detach()


@case(((5, 4), (7, 4)), ((6, 3), (5, 3)), interpreted=True)
def vector_quantisation(z, codebook):
    with torch.no_grad():
        place = (z.pow(2).sum(1, keepdim=True) + codebook.pow(2).sum(1) - 2 * z @ codebook.t()).argmin(1)
    found = F.embedding(place, codebook)
    return z + (found - z).detach(), F.mse_loss(found, z.detach()) + F.mse_loss(found.detach(), z) / 4


@case(((5, 4), ("index", 3, 5)), ((7, 3), ("index", 4, 7)))
def supervised_contrastive(f, label):
    scores = F.normalize(f, dim=1) @ F.normalize(f, dim=1).T / 0.2
    scores = scores - scores.max(dim=1, keepdim=True)[0].detach()
    others = 1 - torch.eye(f.shape[0], dtype=f.dtype)
    alike = (label[:, None] == label[None, :]).to(f.dtype) * others
    logs = scores - (scores.exp() * others).sum(1, keepdim=True).log()
    return -(alike * logs).sum(1) / (alike.sum(1) + 1e-6)


@case(((5, 6), (4, 6), (4, 6, 3)), ((4, 5), (6, 5), (6, 5, 2)), interpreted=True)
def mixture_of_experts(x, gate, experts):
    weight, chosen = (x @ gate.t()).topk(2, dim=-1)
    gates = torch.zeros(x.shape[0], gate.shape[0], dtype=x.dtype).scatter(-1, chosen, weight.softmax(-1))
    return (torch.einsum("nd,edh->neh", x, experts) * gates.unsqueeze(-1)).sum(1)


@case(((4, 6), ("index", 6, 4, 3), (4, 3)), ((3, 5), ("index", 5, 3, 2), (3, 2)), ((3, 5), ("index", 5, 3, 1), (3, 1)), programs=2, interpreted=True)
def scatters(x, i, v):
    added, largest = x.scatter_add(1, i, v), x.scatter_reduce(1, i, v, "amax")
    return added, largest, x.scatter_reduce(1, i, v, "mean"), x.scatter_reduce(1, i, v, "sum", include_self=False), x.scatter(1, i, 7.0), x.scatter(1, i[:, :1], v[:, :1])


@case(((4, 6), ("index", 6, 4), (2, 6), (4,), ("mask", 4, 6)), ((5, 7), ("index", 7, 5), (2, 7), (5,), ("mask", 5, 7)))
def writes(x, i, rows, v, mask):
    a, b, c, d = (x.clone() for _ in range(4))
    a[torch.tensor([2, 0])] = rows
    b[torch.arange(x.shape[0]), i] = v
    c[mask] = -1.0
    d[:, i[:2]] = 0.5
    d.t()[i[:2] - 1, -1] = rows[0, :2]
    place = torch.tensor([1, 3])
    return a, b, c, d, x.index_add(0, place, rows, alpha=0.5), x.index_copy(0, place, rows), x.index_fill(1, place, 9.0), torch.index_put(x, (place,), rows, accumulate=True)


@case(((2, 3, 7),), ((1, 2, 5),), programs=2, interpreted=True)
def borders(x):
    return F.pad(x, (1, 2), mode="reflect"), F.pad(x, (0, 2), mode="replicate"), F.pad(x * 2, (2, 1), mode="circular"), F.pad(x, (-1, 0))


@case(((2, 3, 7, 6),), ((3, 2, 5, 6),))
def maxima_of_windows(x):
    return F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x * 2, (2, 3), (1, 2), ceil_mode=True), F.max_pool1d(x[:, 0], 3, dilation=2), F.adaptive_max_pool2d(x, 1)


@case(((2, 3, 8),), ((3, 4, 7),), interpreted=True)
def sliding(x):
    return x.unfold(-1, 3, 2).mean(-1), (x + 1).unfold(1, 2, 1).amax(-1), x.unfold(2, 3, 1)


@case(((2, 12, 3, 4),), ((3, 8, 2, 5),), programs=2)
def shuffled(x):
    return F.pixel_shuffle(x, 2), F.pixel_unshuffle(F.pixel_shuffle(x * 2, 2), 2), F.channel_shuffle(x, 4)


@case(((3, 7),), programs=1, interpreted=True)
def ordered(x):
    z = x.sort(dim=-1, descending=True).values
    support = (1 + torch.arange(1, 8, dtype=x.dtype) * z > z.cumsum(-1)).sum(-1, keepdim=True)
    sparse = (x - (z.cumsum(-1).gather(-1, support - 1) - 1) / support).clamp(min=0)
    return sparse, x.median(-1).values, x.kthvalue(2, dim=-1).values, x.argsort(0)


@case(((2, 3, 4, 5),), interpreted=True)
def bilinear(x):
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)


@case(((9, 4), ("index", 9, 3, 5)), ((7, 3), ("index", 7, 2, 4)))
def computed_indices(w, i):
    return w[torch.where(i > 2, i - 1, i)], F.embedding((i.float() * 0.5).long(), w), w[(i & 1)], w[-1 - i // 2], F.embedding(i, w, padding_idx=2)


@case(((4, 4), (3, 4, 4), (4, 3)), ((5, 5), (2, 5, 5), (5, 4)))
def diagonals(a, b, c):
    return torch.einsum("ii,ij->j", a, c), torch.einsum("bii->bi", b), a.trace(), torch.diag(a[0]), torch.addbmm(a, b, b, beta=0.5)


@case(((3, 5), ("positive", 3, 5)), ((4, 7), ("positive", 4, 7)))
def angles(x, y):
    return torch.atan2(x, y), x.atan(), (x / 9).asin(), (x / 9).acos(), x.asinh(), (y + 1).acosh(), (x / 9).atanh(), x.tan(), torch.xlogy(y, y), torch.sinc(x)


@case(((4, 6), (6,), (6,)), ((5, 3), (3,), (3,)))
def batch_statistics(x, weight, bias):
    return F.batch_norm(x, None, None, weight, bias, training=True), x.cummax(0).values, x.tile(2)


@case(((3, 4), ("positive", 5)), ((2, 6), ("positive", 4)), gradient=False, programs=2)
def grids(x, edges):
    edges = edges.sort().values
    rows, columns = torch.meshgrid(torch.arange(float(x.shape[0])), torch.linspace(-1, 1, 5), indexing="ij")
    return torch.bucketize(x, edges), torch.searchsorted(edges, x, right=True), rows, columns, torch.nan_to_num(torch.where(x > 0.5, float("nan"), x), nan=7.0)


def gates(x, h, c, w, u):
    i, f, g, o = (x @ w.t() + h @ u.t()).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@case(((3, 3, 6), (3, 4), (16, 6), (16, 4)), interpreted=True)
def recurrence(xs, h, w, u):
    c = torch.zeros_like(h)
    for x in xs.unbind(0):
        h, c = gates(x, h, c, w, u)
    return h, c


@case(((5, 6), (6, 4), (4,)), ((3, 5), (5, 7), (7,)), interpreted=True)
def sigmoid_router(x, gate, bias):
    scores = (x @ gate).sigmoid()
    places = torch.topk(scores + bias, 2, -1, sorted=False)[1]
    weight = scores.gather(1, places)  # its backward reads the places that forward saved
    return weight / (weight.sum(-1, keepdim=True) + 1e-20) * 2.5, places


@case(((4, 5), (4,)), ((3, 7), (3,)), interpreted=True)
def written_diagonals(x, v):
    a, b, c = x.clone(), x * 2, (x @ x.t()).fill_diagonal_(0.0)
    a.diagonal().copy_(v)
    b.diagonal(1).mul_(3.0)
    b.diagonal(-1)[1] = 5.0
    return a, b, c


@case(((2, 3, 3), (2, 3)), ((3, 4, 4), (3, 4)))
def written_diagonals_of_a_batch(x, v):
    a = x * 2
    a.diagonal(dim1=-2, dim2=-1).add_(v)
    return a


@case(((4, 6), (6, 4)), ((3, 10), (5, 6)))
def views_and_copies_written(x, y):
    kept, copied, turned, alike = x * 2, x * 3, x * 4, x * 5
    kept.expand(x.shape).mul_(2)
    kept.view_as(kept).add_(1)
    copied.t().reshape(-1).add_(1)  # a copy: ``copied`` stays
    turned.movedim(0, 1)[0] = 3.0
    turned.mT[1] = 4.0
    alike.type_as(x).mul_(2)
    return kept, copied, turned, alike, x.view_as(y) * y


@case(((4, 6), ("mask", 4, 6), (30,)), ((3, 5), ("mask", 3, 5), (17,)), interpreted=True)
def scattered_by_a_mask(x, mask, source):
    a = x * 2
    a.masked_scatter_(mask, source)
    return x.masked_scatter(mask, source), a


@case(((2, 3, 4), ("mask", 2, 3), (6, 4)), ((3, 5, 2), ("mask", 3, 5), (15, 2)))
def image_tokens(text, place, image):
    return text.masked_scatter(place.unsqueeze(-1).expand_as(text), image)


@case(((4, 6), (4, 6), ("positive", 4, 6), ("positive", 4), (3, 6, 6), (3,)), ((3, 5), (3, 5), ("positive", 3, 5), ("positive", 3), (2, 5, 5), (2,)))
def gaussian_losses_and_bilinear(x, y, var, own, w, b):
    return F.gaussian_nll_loss(x, y, var), F.gaussian_nll_loss(x, y, own[:, None], full=True, reduction="none"), F.bilinear(x, y, w, b)


@case(((4, 6), ("index", 9, 4, 6)), ((3, 5), ("index", 9, 3, 5)))
def powers_of_integers(x, i):
    return i**2, i.pow(3), x.data * x, x**2, torch.signbit(x)


@case(((2, 6, 8),), ((3, 4, 6),), tolerance=1e3)  # torch takes the cosines in float32
def rotary_from_positions(x):
    steps = torch.arange(x.shape[1], dtype=torch.float32)
    angles = torch.outer(steps, 1.0 / (100.0 ** (torch.arange(0, x.shape[2], 2).float() / x.shape[2])))
    cos, sin = torch.cat((angles, angles), -1).cos().to(x.dtype), torch.cat((angles, angles), -1).sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@case(((3, 6),), ((2, 7),))
def settings(x):
    return F.softplus(x, beta=2, threshold=0.5), F.softplus(x, threshold=1), torch.logit(x.sigmoid(), eps=0.3), x.clamp(0.2, -0.1), x.clamp(x.abs() - 1, x.mean())


@case(((1, 4), ("mask", 1, 1)), ((1, 3), ("mask", 1, 1)))
def masks_of_one_element(x, mask):
    return torch.where(mask, x, 0), x.masked_fill(~mask, 2.0), x * mask, (mask & True) | (x > 0)


@case(((9, 4), ("index", 9, 3, 5), (3, 5)), ((7, 3), ("index", 7, 2, 4), (2, 4)))
def bags(w, i, scale):
    padded = F.embedding_bag(i, w, padding_idx=-1), F.embedding_bag(i, w, mode="max", padding_idx=1)
    return F.embedding_bag(i, w), F.embedding_bag(i, w, mode="sum", per_sample_weights=scale), *padded


@case(((3, 9), (3,)), ((4, 10), (4,)), interpreted=True)
def columns_written_in_turn(x, v):
    y = x.clone()
    for t in range(1, 9):  # each reads what the one before it wrote
        y[:, t] += y[:, t - 1].clone() * v
    y[:, ::2] *= 2
    y[1:, 1:] = y[:-1, :-1].clone()
    y[-1] = 7.0
    return y


@case(((3, 6),), ((4, 5),))
def covariances(x):
    return x.cov(), torch.cov(x[0], correction=0), torch.corrcoef(x), x.nanmean(1)
