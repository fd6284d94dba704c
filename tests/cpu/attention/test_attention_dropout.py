"""Dropout inside attention: which weights are kept, their share, and results and gradients with them against float64."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from attention_forms_truth import cumulative, leaves, packed_pairs, same, truth, visible

import dtkernels
from dtkernels import ops

P, SEED = 0.3, 2**40 + 17


def drawn(batch, heads, queries, keys):
    """Which weights are kept, drawn by a program of its own."""
    draw = dtkernels.compile("Func f; In A; SIn seed; Var b, h, m, l; f[b, h, m, l] = A[b, h, m, l] + random(seed, b, h, m, l);"
                             " f.block(b:1, h:1, m:8, l:32); f.tensorize(m:8, l:32);")  # fmt: skip
    return draw(torch.zeros(batch, heads, queries, keys), SEED) >= P


def dropped(q, k, v, seen, kept):
    """Attention in float64 with some of the weights left out."""
    eye = torch.eye(k.shape[-2], dtype=torch.float64).expand(*k.shape[:-2], -1, -1)
    weights = truth(q, k, eye, seen)[0]
    return weights * kept / (1 - P) @ v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_one_matrix(options):
    ours, exact = leaves((2, 4, 21, 16), (2, 2, 37, 16), (2, 2, 37, 8))
    found = ops.attention(*ours, dropout_p=P, seed=SEED, **options)
    seen = visible(torch.arange(21), torch.arange(37), **options)
    same((found,), (dropped(*exact, seen, drawn(2, 4, 21, 37)),), ours, exact)


def test_with_segments_and_a_seed_on_the_device():
    ours, exact = leaves((2, 4, 21, 16), (2, 2, 21, 16), (2, 2, 21, 8))
    segments = torch.tensor([0] * 9 + [1] * 12)
    found, lse = ops.attention(*ours, dropout_p=P, seed=torch.tensor([SEED]), segments=segments, return_lse=True)
    seen = segments[:, None] == segments
    wanted = dropped(*exact, seen, drawn(2, 4, 21, 21)), truth(*exact, seen)[1]
    same((found, lse), wanted, ours, exact)


def test_packed_sequences_drop_by_head_and_position():
    ours, exact = leaves((14, 2, 16), (14, 2, 16), (14, 2, 8))
    found = ops.attention(*ours, dropout_p=P, seed=3, cu_seqlens_q=cumulative([5, 9]))
    again = ops.attention(*ours, dropout_p=P, seed=3, cu_seqlens_q=cumulative([5, 9]))
    other = ops.attention(*ours, dropout_p=P, seed=4, cu_seqlens_q=cumulative([5, 9]))
    assert torch.equal(found, again) and not torch.equal(found, other)
    q, k = torch.zeros(14, 2, 16), torch.zeros(14, 2, 16)
    eye = torch.eye(14)[:, None].expand(14, 2, 14).contiguous()
    kept = ops.attention(q, k, eye, dropout_p=P, seed=3, cu_seqlens_q=cumulative([5, 9])) > 0
    heads = [t.transpose(0, 1) for t in exact]
    wanted = dropped(*heads, packed_pairs([5, 9], [5, 9]), kept.transpose(0, 1).double()).transpose(0, 1)
    same((found,), (wanted,), ours, exact)


def test_the_share_that_is_dropped():
    q = torch.zeros(1, 4, 128, 16)
    eye = torch.eye(128).expand(1, 4, 128, 128).contiguous()
    kept = (ops.attention(q, q, eye, dropout_p=P, seed=1) > 0).double()
    assert abs(kept.mean() - (1 - P)) < 4 * (P * (1 - P) / kept.numel()) ** 0.5
    assert all(abs(kept.mean(dim) - (1 - P)).max() < 0.25 for dim in (-1, -2))


def test_nothing_dropped_is_the_same_call():
    q = torch.randn(1, 2, 5, 16)
    assert torch.equal(ops.attention(q, q, q, dropout_p=0.0), ops.attention(q, q, q))


@pytest.mark.parametrize("options, said", [({"dropout_p": 1.0, "seed": 1}, "dropout_p is 1.0; allowed: a number from 0 to below 1"), ({"dropout_p": 0.5}, "seed is missing")])
def test_bad_input(options, said):
    q = torch.zeros(1, 2, 5, 16)
    with pytest.raises(ValueError, match=said):
        ops.attention(q, q, q, **options)
