# ruff: noqa: E501 (arguments read best on one line)
"""Attention over packed sequences and segments, forward and backward, against float64; logsumexp."""

import random

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from attention_forms_truth import cumulative, leaves, packed_pairs, same, truth, visible

import dtkernels
from dtkernels import ops
from dtkernels.ops.attention_forms import visible_keys

OPTIONS = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (3, 2)}, "causal window": {"causal": True, "window": (4, None)},
    "ahead": {"window": (None, 1)}, "softcap": {"causal": True, "softcap": 2.0}, "sinks": {"causal": True, "sinks": True},
}  # fmt: skip


def reach(options):
    return {n: v for n, v in options.items() if n in ("causal", "window")}


def packed(lengths_q, lengths_k, options, heads=4, groups=2, dtype=torch.float32, lse=True, atol=5e-6):
    m, l = sum(lengths_q), sum(lengths_k)  # noqa: E741 (labels)
    shapes = [(m, heads, 16), (l, groups, 16), (l, groups, 24), *([(heads,)] if options.get("sinks") else [])]
    ours, exact = leaves(*shapes, dtype=dtype)
    more = dict(options)
    if "sinks" in more:
        more["sinks"] = ours[3]
    found = ops.attention(*ours[:3], cu_seqlens_q=cumulative(lengths_q), cu_seqlens_k=cumulative(lengths_k, torch.int64), return_lse=lse, **more)
    wanted = truth(*(t.transpose(0, 1) for t in exact[:3]), packed_pairs(lengths_q, lengths_k, **reach(options)), softcap=options.get("softcap"), sinks=exact[3] if "sinks" in more else None)
    wanted = (wanted[0].transpose(0, 1), wanted[1].T)
    same(found if lse else (found,), wanted if lse else wanted[:1], ours, exact, atol)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences(name):
    packed([5, 0, 17, 1, 40], [9, 3, 17, 0, 33], OPTIONS[name])


def test_packed_sequences_without_logsumexp_in_float16():
    packed([20, 1, 7], [20, 1, 7], {"causal": True}, dtype=torch.float16, lse=False, atol=3e-3)


@pytest.mark.parametrize("lengths", [[23], [1] * 9, [0, 0, 4, 0], [0]], ids=str)
def test_one_sequence_single_tokens_and_empty_ones(lengths):
    packed(lengths, lengths, {"causal": True}, heads=2, groups=1)


@pytest.mark.parametrize("seed", range(3))
def test_random_layouts_of_sequences(seed):
    draw = random.Random(seed)
    n = draw.randint(1, 6)
    lengths = [[draw.choice([0, 1, 2, draw.randint(3, 40)]) for _ in range(n)] for _ in range(2)]
    packed(*lengths, {"causal": draw.random() < 0.5, "window": draw.choice([None, (draw.randint(0, 9), draw.randint(0, 9))])}, heads=3, groups=draw.choice([1, 3]))


def segmented(of_q, of_k, options, atol=5e-6, offset=0, lse=False):
    b, m, l = of_q.shape[0], of_q.shape[1], of_k.shape[1]  # noqa: E741 (labels)
    ours, exact = leaves((b, 4, m, 16), (b, 2, l, 16), (b, 2, l, 8))
    given = {"segments": of_q} if of_q is of_k else {"segments": of_q, "segments_k": of_k}
    found = ops.attention(*ours, **given, **options, offset=offset, return_lse=lse)
    seen = (of_q[:, None, :, None] == of_k[:, None, None, :]) & visible(torch.arange(m) + offset, torch.arange(l), **reach(options))
    wanted = truth(*exact, seen, softcap=options.get("softcap"))
    same(found if lse else (found,), wanted if lse else wanted[:1], ours, exact, atol)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_segments(name):
    segmented(*[torch.tensor([[0] * 9 + [1] * 20 + [2] * 4, [3] * 33])] * 2, OPTIONS[name], lse=name == "causal")


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool])
def test_segments_of_any_integers(dtype):
    numbers = torch.randint(0, 2, (2, 33), generator=torch.Generator().manual_seed(0)).to(dtype)
    segmented(numbers, numbers, {"causal": True})


def test_segments_in_any_order_with_numbers_that_float32_does_not_hold():
    numbers = 2**40 + torch.randint(-2, 3, (2, 41), generator=torch.Generator().manual_seed(0))
    segmented(numbers, numbers.roll(3, 1)[:, :30], {}, lse=True)
    segmented(numbers, numbers[:, :30], {"causal": True}, offset=-5)


def test_the_ranges_of_segments_in_order_are_exact():
    of = torch.tensor([[0, 0, 1, 1, 1, 4, 7, 7]])
    ranges = visible_keys.of_segments(of, of, 0, (None, None))
    assert ranges.lo.tolist() == ranges.begins.tolist() == [[0, 0, 2, 2, 2, 5, 6, 6]]
    assert ranges.hi.tolist() == ranges.stops.tolist() == [[2, 2, 5, 5, 5, 6, 8, 8]]


def test_logsumexp_of_one_matrix():
    for options in ({"causal": True}, {"window": (3, 2), "offset": 4}):
        ours, exact = leaves((2, 4, 21, 16), (2, 2, 30, 16), (2, 2, 30, 8))
        found = ops.attention(*ours, return_lse=True, **options)
        seen = visible(torch.arange(21) + options.get("offset", 0), torch.arange(30), **reach(options))
        same(found, truth(*exact, seen, softcap=options.get("softcap")), ours, exact)
        assert torch.equal(found[0], ops.attention(*ours, **options)) and found[1].dtype == torch.float32


def test_the_reference_agrees(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    packed([5, 0, 17], [9, 3, 17], {"causal": True})
    segmented(*[torch.tensor([[0] * 9 + [1] * 20])] * 2, {"causal": True})


def test_one_sequence_is_as_accurate_as_one_matrix():
    (q, k, v), exact = leaves((40, 2, 16), (40, 2, 16), (40, 2, 16), grad=False)
    whole = truth(*(t.transpose(0, 1) for t in exact), visible(torch.arange(40), torch.arange(40), causal=True))[0]
    errors = [(t.double() - whole).abs().max() for t in (ops.attention(q, k, v, cu_seqlens_q=cumulative([40]), causal=True).transpose(0, 1),
                                                         ops.attention(*(t.transpose(0, 1) for t in (q, k, v)), causal=True))]  # fmt: skip
    assert errors[0] <= 1.5 * errors[1]


def test_paths_and_explain_say_which_form_runs():
    ours, _ = leaves((9, 2, 16), (9, 2, 16), (9, 2, 16), grad=False)
    cu = cumulative([4, 5])
    before = dtkernels.paths().get("attention_varlen", {"interpreter": 0})["interpreter"]
    ops.attention(*ours, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert dtkernels.paths()["attention_varlen"]["interpreter"] == before + 1
    assert "attention_varlen" in str(dtkernels.explain("attention", *ours, cu_seqlens_q=cu, cu_seqlens_k=cu, gpu="h200"))


def test_the_signature_lists_every_argument():
    import inspect

    assert {"cu_seqlens_q", "segments", "lengths", "block_table", "kv_layout", "return_lse", "dropout_p"} <= set(inspect.signature(ops.attention).parameters)
