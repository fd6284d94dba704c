"""Products of packed weights, as of queries, keys and values: each part reads columns that have labels of their own, so that no gradient looks for their places."""

import pytest
import torch
from torch.nn import functional as F

import dtkernels

HEADS, GROUPS, TOKENS = 4, 2, 5


def heads_of(*parts, heads=HEADS):
    return tuple(t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in parts)


def unbound(x, w):
    return (x @ w.T).view(*x.shape[:2], 3, HEADS, x.shape[2] // HEADS).unbind(2)


def permuted(x, w):
    q, k, v = F.linear(x, w).view(*x.shape[:2], 3, HEADS, x.shape[2] // HEADS).permute(2, 0, 3, 1, 4)
    return q, k, v


def chunked(x, w):
    return heads_of(*(x @ w.T).chunk(3, -1))


def chunks_of_heads(x, w):
    return (x @ w.T).view(*x.shape[:2], HEADS, 3 * x.shape[2] // HEADS).transpose(1, 2).chunk(3, -1)


def split(x, w):
    return heads_of(*F.linear(x, w, w.sum(1)).split(x.shape[2], -1))


def sliced(x, w):
    y, size = x @ w.T, x.shape[2]
    return heads_of(y[..., :size], y[..., size : 2 * size], y[..., 2 * size :])


@pytest.mark.parametrize("parts", [unbound, permuted, chunked, chunks_of_heads, split, sliced])
def test_equal_parts(parts):
    fused = dtkernels.fuse(lambda x, w: (lambda q, k, v: torch.sigmoid(q) * k + v)(*parts(x, w)))
    for size in (8, 12):
        _check(fused, lambda x, w: (lambda q, k, v: torch.sigmoid(q) * k + v)(*parts(x, w)), (2, TOKENS, size), (3 * size, size))
    assert "/" not in fused.dt.partition("];")[2] and "%" not in fused.dt, fused.dt


@pytest.mark.parametrize("biased", [False, True])
def test_fewer_heads_of_keys_than_of_queries(biased):
    def attend(x, w):
        size = x.shape[2]
        q, k, v = F.linear(x, w, w.sum(1) if biased else None).split([size, size * GROUPS // HEADS, size * GROUPS // HEADS], -1)
        (q,), (k, v) = heads_of(q), heads_of(k, v, heads=GROUPS)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    fused = dtkernels.fuse(attend)
    for size in (8, 12):
        _check(fused, attend, (2, TOKENS, size), (size * 2, size))
    assert fused.dt.count("rdot(x") == 3 and "%" not in fused.dt, fused.dt


def test_parts_of_lengths_that_do_not_divide_each_other():
    def parts(x, w):
        a, b = (x @ w.T).split([w.shape[0] - 3, 3], -1)
        return a * b.sum(-1, keepdim=True)

    for size in (8, 11):
        _check(dtkernels.fuse(parts), parts, (2, TOKENS, size), (size, size))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (y[:, :0], y[:, :4] * 2, y[:, 4:8] * 2, y[:, -4:] * 2, y[:, ::2] * 2, y[2:4, 3:9] * 2),
        lambda y: (y[1:] - y[:-1], y.chunk(2, 0)[1] * y[: y.shape[0] // 2]),
        lambda y: tuple(t * 2 for sizes in ([0, 4, y.shape[1] - 4], [y.shape[1], 0]) for t in y.split(sizes, 1)),
        lambda y: tuple(t * 2 for count in (2, 3, 5) for t in (*y.chunk(count, 1), *y.tensor_split(count, 1))),
        lambda y: (torch.cat([-y.chunk(2, 1)[1], y.chunk(2, 1)[0]], 1) + y, torch.relu(y).chunk(2, 1)[0].softmax(1)),
    ],
)
def test_slices_of_a_product(function):
    fused = dtkernels.fuse(lambda x, w: function(x @ w))
    for columns in (12, 14):
        x, w = _random(6, 8), _random(8, columns)
        for got, want in zip(fused(x, w), function(x @ w), strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_split_index_that_data_shifts_is_no_part():
    """16 i + j of a dimension of (H, 16) may pass the end of a head: the place is that of the whole dimension."""

    def picked(x, w, place):
        return (x @ w.T).view(*x.shape[:2], HEADS, -1).sum(2) + (x @ w.T)[..., place]

    x, w, place = _random(2, TOKENS, 8), _random(16, 8), torch.tensor([3, 15, 4, 7])
    torch.testing.assert_close(dtkernels.fuse(picked)(x, w, place), picked(x, w, place), atol=1e-5, rtol=1e-5)


def _random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 2


def _check(fused, function, *shapes):
    given = [_random(*shape).requires_grad_() for shape in shapes]
    result, want = fused(*given), function(*(t.double() for t in given))
    torch.testing.assert_close(result, want.float(), atol=1e-5, rtol=1e-5)
    d = _random(*result.shape)
    for got, grad in zip(torch.autograd.grad(result, given, d), torch.autograd.grad(want, given, d.double())):
        torch.testing.assert_close(got, grad.float(), atol=1e-4, rtol=1e-4)
