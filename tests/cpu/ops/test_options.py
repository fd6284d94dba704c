# ruff: noqa: E501 (one call a line)
"""Options of ops that are out of range or of another type, integers of 8 bits as classes, and rows and tokens of nothing."""

import math
import re

import numpy as np
import pytest
import torch

import dtkernels
from dtkernels import ops


def z(*shape: int, **kind) -> torch.Tensor:
    return torch.zeros(shape, **kind)


Q, TWO, CLASSES = torch.ones(1, 2, 5, 8), torch.tensor([0, 1]), torch.tensor([0, 1, 2])
FLOAT8 = {"dtype": torch.float8_e5m2}
ROPE = (z(1, 1, 2, 4), z(1, 1, 2, 4), z(3, 1, 2, 4), z(3, 1, 2, 4))
TURN = (z(1, 1, 2, 4), z(2, 2), z(2, 2))
PAIR = (z(2, 3), z(2, 3), z(2, 3) > 0)
SCORES = (z(1, 2, 3, 3), z(2, 2, 1, 1))
EXPERTS = (z(3, 2), z(2, 4, 2), z(2, 4, 2), z(2, 2, 4), torch.tensor([[0], [1], [1]]), z(3, 1))

REFUSED = [
    (lambda: ops.attention(Q, Q, Q, dropout_p=0.5, seed=2**70), "attention: seed is 1180591620717411303424; allowed: -9223372036854775808 to 18446744073709551615"),
    (lambda: ops.attention(Q, Q, Q, dropout_p=0.5, seed="a"), "attention: seed is 'a'; allowed: an integer"),
    (lambda: ops.attention(Q, Q, Q, causal=True, offset=TWO), "attention: offset is a tensor of shape (2,); allowed: an integer or a one-element tensor"),
    (lambda: ops.attention(Q, Q, Q, causal=z(2)), "attention: causal is a tensor of shape (2,); allowed: True or False"),
    (lambda: ops.ring_attention(Q, Q, Q, causal="abc"), "ring_attention: causal is 'abc'; allowed: True or False"),
    (lambda: ops.ring_attention(Q, Q, Q, group="x"), "ring_attention: group is 'x'; allowed: a process group, or None for the world"),
    (lambda: ops.ring_attention(Q.long(), Q, Q), "ring_attention: q is torch.int64; allowed: floating point of 16 bits and more"),
    (lambda: ops.ring_positions(-4), "ring_positions: tokens is -4; allowed: 0 or more"),
    (lambda: ops.ring_positions(4.0), "ring_positions: tokens is 4.0; allowed: an integer"),
    (lambda: ops.ring_positions(2**70), "ring_positions: tokens is 1180591620717411303424; allowed: integers of at most 18 digits"),
    (lambda: ops.merge_attention(z(2, 4, **FLOAT8), z(2), z(2, 4, **FLOAT8), z(2)), "merge_attention: a is torch.float8_e5m2; allowed: floating point of 16 bits and more"),
    (lambda: ops.softmax(z(2, 3), dtype="meta"), "softmax: dtype is 'meta'; allowed: a floating-point torch.dtype, or None"),
    (lambda: ops.softmax(z(2, 3), dtype=torch.int64), "softmax: dtype is torch.int64; allowed: a floating-point torch.dtype, or None"),
    (lambda: ops.softmax(z(2, 3), dim=True), "softmax: dim is True; allowed: an integer"),
    (lambda: ops.rmsnorm(z(2, 3), z(3), offset=2**70), "rmsnorm: parameter offset is 1180591620717411303424; allowed: integers of at most 18 digits"),
    (lambda: ops.dyt(z(2, 3), np.zeros(2), z(3), z(3)), "dyt: alpha is a ndarray; allowed: a number or a one-element tensor"),
    (lambda: ops.jsd(z(2, 3), z(2, 3), beta=None), "jsd: beta is None; allowed: a number"),
    (lambda: ops.jsd(z(2, 3), z(2, 3), beta=1), "jsd: beta is 1; allowed: above 0 and below 1"),
    (lambda: ops.jsd(z(2, 3), z(2, 3), beta=z(2)), "jsd: beta is a tensor of shape (2,); allowed: a number"),
    (lambda: ops.kl_divergence(z(2, 3), z(2, 3), reverse=z(2)), "kl_divergence: reverse is a tensor of shape (2,); allowed: True or False"),
    (lambda: ops.kl_divergence(z(2, 3), z(2, 3), target=TWO, ignore_index=2**70), "kl_divergence: ignore_index is 1180591620717411303424; allowed: integers of at most 18 digits"),
    (lambda: ops.cross_entropy(z(2, 3), TWO, ignore_index=0.5), "cross_entropy: ignore_index is 0.5; allowed: an integer"),
    (lambda: ops.cross_entropy(z(2, 3), TWO.to(torch.int16)), "cross_entropy: target is torch.int16; allowed: int32, int64, int8 or uint8, as it stands in an index"),
    (lambda: ops.weighted_cross_entropy(z(2, 3), TWO, z_loss=-1.0), "weighted_cross_entropy: z_loss is -1.0; allowed: 0 to inf"),
    (lambda: ops.weighted_cross_entropy(z(2, 3), TWO, z(3, **FLOAT8)), "weighted_cross_entropy: weight is torch.float8_e5m2; allowed: floating point of 16 bits and more"),
    (lambda: ops.linear_cross_entropy(z(2, 3), z(4, 3), TWO, z_loss="a"), "linear_cross_entropy: z_loss is 'a'; allowed: a number"),
    (lambda: ops.linear_logsumexp(z(2, 3), z(4, 3), TWO, label_smoothing=0.1, classes=0), "linear_logsumexp: classes is 0; allowed: 1 or more"),
    (lambda: ops.linear_cross_entropy(z(2, 3).to_sparse(), z(4, 3), TWO), "linear_cross_entropy: hidden is of layout torch.sparse_coo; allowed: a tensor with strides"),
    (lambda: ops.cosine_distance(z(2, 3), z(2, 3), eps=None), "cosine_distance: eps is None; allowed: a number"),
    (lambda: ops.kto(*PAIR, z(2) > 0, beta=-1), "kto: beta is -1; allowed: 0 to inf"),
    (lambda: ops.grpo(*PAIR, z(2), epsilon_high=math.nan), "grpo: epsilon_high is nan; allowed: 0 to inf"),
    (lambda: ops.grpo(*PAIR, z(2), beta=None), "grpo: beta is None; allowed: a number"),
    (lambda: ops.packed_glu(z(2, 4), z(2), alpha=None), "packed_glu: alpha is None; allowed: a number"),
    (lambda: ops.packed_glu(z(2, 4), z(2), limit=-1), "packed_glu: limit is -1; allowed: 0 to inf"),
    (lambda: ops.packed_glu(z(2, 4), z(2), activation=[1]), "packed_glu: activation is [1]; allowed: silu, gelu_tanh, gelu"),
    (lambda: ops.groupnorm(z(2, 4, 3), True, z(4), z(4)), "groupnorm: groups is True; allowed: an integer"),
    (lambda: ops.groupnorm(z(2, 4, 3), 0, z(4), z(4)), "groupnorm: groups is 0; allowed: 1 or more"),
    (lambda: ops.multi_token_attention(*SCORES, dilation="a"), "multi_token_attention: dilation is 'a'; allowed: an integer"),
    (lambda: ops.multi_token_attention(*SCORES, padding=1), "multi_token_attention: padding keeps the size, dilation * (R - 1) / 2; got dilation 1, padding 1"),
    (lambda: ops.multimodal_rope(*ROPE, sections="abc"), "multimodal_rope: sections is 'abc'; allowed: three integers"),
    (lambda: ops.multimodal_rope(*ROPE, sections=(1, 1, 1)), "multimodal_rope: sections are three numbers that add up to D / 2, 2; got (1, 1, 1)"),
    (lambda: ops.rotary(*TURN, heads=torch.tensor(1.0)), "rotary: heads is tensor(1.); allowed: an integer"),
    (lambda: ops.rotary(*TURN, heads=3), "rotary: heads is 3; allowed: 1 to 2"),
    (lambda: ops.moe_mlp(EXPERTS[0].long(), *EXPERTS[1:]), "moe_mlp: hidden is torch.int64; allowed: floating point of 16 bits and more"),
    (lambda: ops.moe_mlp(*EXPERTS[:4], EXPERTS[4].to(torch.uint16), EXPERTS[5]), "moe_mlp: expert is torch.uint16; allowed: int32, int64, int8 or uint8"),
    (lambda: dtkernels.attention_spec(score="s", inputs=3), "inputs of attention_spec are names: found 3; allowed: a text, or a list of texts"),
    (lambda: dtkernels.register("/"), "register takes the path of a YAML spec: found the folder /; allowed: the path of a file"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED, ids=[m[:60] for _, m in REFUSED])
def test_refused_in_one_line_that_names_the_op(call, message):
    with pytest.raises((TypeError, ValueError, dtkernels.DTError), match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("ignored", [-100, 3, 300, -1000, 2**40])
def test_classes_of_every_integer_type(dtype, ignored):
    logits, weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([1.0, 2.0, 4.0, 8.0])
    target = torch.tensor([0, 0, 3])
    plain = torch.nn.functional.cross_entropy(logits, target, ignore_index=ignored)
    weighted = torch.nn.functional.cross_entropy(logits, target, weight, ignore_index=ignored)
    torch.testing.assert_close(ops.cross_entropy(logits, target.to(dtype), ignore_index=ignored), plain)
    torch.testing.assert_close(ops.weighted_cross_entropy(logits, target.to(dtype), weight, ignore_index=ignored), weighted)
    torch.testing.assert_close(ops.linear_cross_entropy(logits, torch.eye(4), target.to(dtype), ignore_index=ignored), plain)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_integers_of_8_bits_are_compared_with_what_they_cannot_hold(dtype):
    n = torch.tensor([1, 100, 127], dtype=dtype)
    for number in (-100, -1, 300, 2**31, -(2**40)):
        f = dtkernels.compile(f"Func f; In A, N; Var x; f[x] = where(N[x] == {number} or N[x] < {number}, 1, A[N[x] % 3]);")
        want = torch.ones(3) if number > 127 else torch.arange(3.0)[n.long() % 3]
        torch.testing.assert_close(f(torch.arange(3.0), n), want)


def test_rows_of_no_columns():
    third = math.log(5)
    torch.testing.assert_close(ops.linear_cross_entropy(z(3, 0), z(5, 0), CLASSES), torch.tensor(third))
    torch.testing.assert_close(ops.linear_logprobs(z(2, 3, 0), z(5, 0), CLASSES.expand(2, 3)).entropy, torch.full((2, 3), third))
    torch.testing.assert_close(ops.linear_logsumexp(z(0), z(5, 0), torch.tensor(1)).logsumexp, torch.tensor(third))
    assert float(ops.linear_kl(z(3, 0), z(5, 0), z(3, 2), z(5, 2))) == float(ops.linear_jsd(z(3, 0), z(5, 0), z(3, 2), z(5, 2))) == 0
    assert ops.moe_mlp(z(3, 0), z(2, 4, 0), z(2, 4, 0), z(2, 0, 4), EXPERTS[4], EXPERTS[5]).shape == (3, 0)
    for x, scale in ((z(4, 0), z(4, 0)), (z(4, 3, 0), z(4, 0)), (z(4, 3, 0), z(4, 3, 0)), (z(0, 3, 5), z(0, 5)), (z(4, 0, 5), z(4, 5)), (z(4, 0, 5), z(5))):
        assert ops.modulated_rmsnorm(x, z(x.shape[-1]), scale).shape == x.shape


@pytest.mark.parametrize("order", ["zigzag", "plain"])
def test_ring_attention_of_no_tokens(order):
    q = z(1, 2, 0, 8, requires_grad=True)
    out, lse = ops.ring_attention(q, q, z(1, 2, 0, 4), causal=True, order=order, return_lse=True)
    out.sum().backward()
    assert out.shape == (1, 2, 0, 4) and lse.shape == (1, 2, 0) and q.grad.shape == q.shape


def test_seeds_of_64_bits():
    given = {"dropout_p": 0.5}
    assert torch.equal(ops.attention(Q, Q, Q, seed=2**64 - 1, **given), ops.attention(Q, Q, Q, seed=-1, **given))
