"""Random torch functions from the table of operations, fused, against torch in float64; at sizes of their own after the first call."""

import random

import pytest
import torch
import torch.nn.functional as F

import dtkernels

#: (name, function of one or two (B, M, N) tensors that keeps their shape)
STEPS = [
    ("add", lambda x, y: x + y), ("sub", lambda x, y: x - 0.5 * y), ("mul", lambda x, y: x * torch.tanh(y)), ("div", lambda x, y: x / (1 + y.abs())),
    ("where", lambda x, y: torch.where(x > y, x, y * 0.3)), ("softmax", lambda x, y: torch.softmax(x, -1) + y), ("softmax0", lambda x, y: F.softmax(x, 1) * y),
    ("norm", lambda x, y: F.layer_norm(x, x.shape[-1:])), ("rms", lambda x, y: F.rms_norm(x + y, x.shape[-1:], eps=1e-3)),
    ("silu", lambda x, y: F.silu(x)), ("gelu", lambda x, y: F.gelu(y)), ("mean", lambda x, y: x - x.mean((0, 2), keepdim=True)),
    ("scores", lambda x, y: torch.softmax(x @ y.mT, -1) @ y), ("gram", lambda x, y: x @ (x.mT @ y) * 0.1),
    ("flip", lambda x, y: x.flip(1)), ("roll", lambda x, y: torch.cat([y[:, 1:], y[:, :1]], 1)), ("halves", lambda x, y: torch.cat([x[..., 2:], -x[..., :2]], -1)),
    ("heads", lambda x, y: (x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2) * 2).transpose(1, 2).reshape(x.shape) + y),
    ("pairs", lambda x, y: torch.stack([x[..., 1::2], y[..., ::2]], -1).flatten(-2)), ("glue", lambda x, y: torch.stack([x, y], 1).sum(1)),
    ("causal", lambda x, y: (x @ y.mT).tril() @ y * 0.1), ("masked", lambda x, y: x.masked_fill(torch.arange(x.shape[-1]) > 2, 0.25) + y),
    ("flat", lambda x, y: (torch.softmax(x.flatten(1), -1) * y.flatten(1)).view(x.shape)), ("std", lambda x, y: x / (1 + x.std(-1, keepdim=True))),
    ("index", lambda x, y: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1]), ("clamp", lambda x, y: y.clamp(-0.7, 0.9)),
    ("inplace", lambda x, y: x.clone().add_(y).mul_(0.5)), ("row", lambda x, y: torch.cat([x[:, :1] * 2, y[:, 1:]], 1)), ("amax", lambda x, y: x / (1 + y.abs().amax(1, keepdim=True))),
    ("sdpa", lambda x, y: F.scaled_dot_product_attention(x[:, None], y[:, None], x[:, None], is_causal=True)[:, 0]),
    ("lse", lambda x, y: x - torch.logsumexp(y, -1, keepdim=True)), ("pow", lambda x, y: (x * x + 0.1) ** 0.7 - y**2),
]  # fmt: skip


def drawn(seed):
    """A random function of two tensors, and what it is made of."""
    draw = random.Random(seed)
    steps = [(draw.randrange(len(STEPS)), draw.randrange(k + 2), draw.randrange(k + 2)) for k in range(draw.randint(2, 6))]

    def function(x, y):
        values = [x, y]
        for which, first, second in steps:
            values.append(STEPS[which][1](values[first], values[second]))
        return values[-1], values[-2].sum(-1), values[len(values) // 2]

    return function, [STEPS[which][0] for which, _, _ in steps]


@pytest.mark.parametrize("seed", range(24))
def test_a_random_function(seed, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    function, made_of = drawn(seed)
    fused = dtkernels.fuse(function, name="random_function")
    generator = torch.Generator().manual_seed(seed)
    for shape in ((2, 5, 8), (3, 4, 6)):
        ours = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
        theirs = [t.detach().clone().requires_grad_() for t in ours]
        got, want = fused(*ours), function(*theirs)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8, msg=lambda m: f"{made_of}: {m}\n{fused.dt}")
        weights = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in want]
        pairs = [(g, w, a) for g, w, a in zip(got, want, weights) if w.requires_grad and w.grad_fn is not None]
        grads = [
            torch.autograd.grad([p[k] for p in pairs], given, [p[2] for p in pairs], allow_unused=True) for k, given in ((0, ours), (1, theirs))
        ]
        for g, w in zip(*grads):
            torch.testing.assert_close(torch.zeros(shape, dtype=torch.float64) if g is None else g, torch.zeros(shape, dtype=torch.float64) if w is None else w,
                                       rtol=1e-7, atol=1e-7, msg=lambda m: f"gradient of {made_of}: {m}\n{fused.dt}")  # fmt: skip
