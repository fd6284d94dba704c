"""Random numbers in ``dtkernels.fuse``: drawn anew by each call, the same in backward, decided by torch.manual_seed."""

import math

import pytest
import torch
import torch.nn.functional as F

import dtkernels


def seeded(function, *args):
    torch.manual_seed(7)
    return function(*args)


@pytest.mark.parametrize("shape", [(4000,), (40, 100), (2, 4, 20, 25), (2, 2, 5, 8, 25)])
def test_dropout_scales_what_it_keeps_and_backward_drops_the_same(shape):
    fused = dtkernels.fuse(lambda x: F.dropout(2 * x, 0.3) + 1)
    x = torch.ones(shape, requires_grad=True)
    first, again, other = seeded(fused, x), seeded(fused, x), fused(x)
    assert torch.equal(first, again) and not torch.equal(first, other)
    kept = first != 1
    assert abs(kept.float().mean().item() - 0.7) < 5 * math.sqrt(0.21 / x.numel())
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 1 + 2 / 0.7))
    (grad,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(grad != 0, kept)


def test_two_draws_of_one_call_differ():
    one, two = dtkernels.fuse(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)))(torch.ones(50, 40))
    assert abs((one == two).float().mean().item() - 0.5) < 5 * math.sqrt(0.25 / 2000)


def test_channels_are_dropped_whole_and_evaluation_drops_nothing():
    x = torch.randn(6, 50, 3, 4)
    out = dtkernels.fuse(lambda x: F.dropout2d(x, 0.5))(x)
    kept = (out != 0).flatten(2)
    assert torch.equal(kept.any(-1), kept.all(-1)) and 60 < kept.any(-1).sum() < 240
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5)).eval()
    torch.testing.assert_close(dtkernels.fuse(layer)(x), layer(x))


def test_everything_is_dropped_with_certainty():
    assert not dtkernels.fuse(lambda x: F.dropout(x, 1.0))(torch.ones(3, 4)).any()


def test_attention_drops_weights_after_they_are_normalised():
    q, k = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 64, 8)
    v = torch.eye(64).expand(2, 3, 64, 64)  # the result is the weights
    fused = dtkernels.fuse(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25))
    weights, plain = seeded(fused, q, k, v), torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
    kept = weights != 0
    assert abs(kept.float().mean().item() - 0.75) < 5 * math.sqrt(0.1875 / weights.numel())
    torch.testing.assert_close(weights[kept], (plain / 0.75)[kept], rtol=1e-4, atol=1e-6)


def test_new_random_tensors():
    uniform, normal, coin = dtkernels.fuse(lambda x: (torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x * 0 + 0.2)))(torch.ones(100, 60))
    assert 0 <= uniform.min() and uniform.max() < 1 and abs(uniform.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / 6000)
    assert abs(normal.mean().item()) < 5 / math.sqrt(6000) and abs(normal.std().item() - 1) < 5 / math.sqrt(12000)
    assert set(coin.unique().tolist()) == {0.0, 1.0} and abs(coin.mean().item() - 0.2) < 5 * math.sqrt(0.16 / 6000)


def test_kernels_and_the_reference_draw_the_same(monkeypatch):
    def noisy(x):
        return F.dropout(x, 0.4) + torch.rand_like(x)

    x = torch.randn(9, 33)
    kernels = seeded(dtkernels.fuse(noisy, name="noisy_kernels"), x)
    assert dtkernels.paths()["noisy_kernels"]["interpreter"] == 1
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.testing.assert_close(kernels, seeded(dtkernels.fuse(noisy, name="noisy_reference"), x))
    assert dtkernels.paths()["noisy_reference"]["reference"] == 1
