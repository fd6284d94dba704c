# ruff: noqa: E501 (arguments read best on one line)
"""Attention over caches with room and caches in pages, against float64; bad input of every form."""

import random

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from attention_forms_truth import leaves, same, truth, visible

from dtkernels import ops

OPTIONS = {"full": {}, "causal": {"causal": True}, "causal window": {"causal": True, "window": (4, None)}, "softcap": {"causal": True, "softcap": 2.0}}


def reach(options):
    return {n: v for n, v in options.items() if n in ("causal", "window")}


def cached(lengths, queries, options, keys=40, grad=True, heads=4, lse=True):
    b = len(lengths)
    ours, exact = leaves((b, heads, queries, 16), (b, 2, keys, 16), (b, 2, keys, 8), grad=grad)
    found = ops.attention(*ours, lengths=torch.tensor(lengths), return_lse=lse, **options)
    seen = torch.stack([visible(torch.arange(queries) + n - queries, torch.arange(keys), **reach(options)) & (torch.arange(keys) < n) for n in lengths])[:, None]
    wanted = truth(*exact, seen, softcap=options.get("softcap"))
    same(found if lse else (found,), wanted if lse else wanted[:1], ours if grad else (), exact)


@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize("name", ["full", "causal", "causal window"])
def test_caches_that_are_longer_than_what_is_valid(name, queries):
    cached([40, 0, 7, 1, 23], queries, OPTIONS[name], grad=queries == 3 and name == "causal window")


def test_a_cache_of_many_keys_for_one_query():
    cached([700, 3, 0], 1, {"causal": True}, keys=900, grad=False)


def paged(lengths, queries, slots, layout="NHD", options=None, dtype=torch.float32, groups=2, seed=0, entries=None, atol=5e-6):
    draw = torch.Generator().manual_seed(seed)
    b, most = len(lengths), entries or max(-(-max(lengths) // slots), 1)
    pages = b * most + 3
    table = torch.randperm(pages, generator=draw)[: b * most].view(b, most).int()
    (q, k, v), (q64, k64, v64) = leaves((b, 4, queries, 16), (pages, slots, groups, 16), (pages, slots, groups, 8), dtype=dtype, grad=False)
    gather = [t[table.long()].flatten(1, 2).transpose(1, 2) for t in (k64, v64)]
    for i, n in enumerate(lengths):
        table[i, -(-n // slots) :] = -1  # pages that no length reaches
    given = (k, v) if layout == "NHD" else (k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())
    found = ops.attention(q, *given, block_table=table, lengths=torch.tensor(lengths, dtype=torch.int32), kv_layout=layout, return_lse=True, **(options or {}))
    keys = torch.arange(most * slots)
    seen = torch.stack([visible(torch.arange(queries) + n - queries, keys, **reach(options or {})) & (keys < n) for n in lengths])[:, None]
    same(found, truth(q64, *gather, seen, softcap=(options or {}).get("softcap")), (), (), atol)


@pytest.mark.parametrize("slots", [1, 16, 24, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages(slots, layout):
    paged([40, 0, 7, 1], 1, slots, layout)


@pytest.mark.parametrize("name", ["causal", "causal window", "softcap"])
def test_several_queries_over_pages(name):
    paged([33, 2, 50], 5, 8, options=OPTIONS[name], dtype=torch.float16, atol=4e-3)


@pytest.mark.parametrize("seed", range(3))
def test_random_page_tables(seed):
    draw = random.Random(seed)
    paged([draw.choice([0, 1, draw.randint(2, 90)]) for _ in range(3)], draw.randint(1, 16), draw.choice([3, 8, 32]), draw.choice(["NHD", "HND"]), {"causal": True}, groups=draw.choice([1, 4]), seed=seed)


def test_no_keys_and_no_queries():
    for queries, keys in ((3, 0), (0, 5), (0, 0)):
        q, k, v = torch.ones(2, 4, queries, 8), torch.ones(2, 2, keys, 8), torch.ones(2, 2, keys, 8)
        for given in ({"lengths": torch.tensor([0, keys])}, {"segments": torch.zeros(queries).int(), "segments_k": torch.zeros(keys).int()}):
            result, lse = ops.attention(q, k, v, return_lse=True, causal=True, **given)
            assert result.shape == (2, 4, queries, 8) and not result.any() and (lse == -torch.inf).all()
        tokens = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
        found = ops.attention(*tokens, cu_seqlens_q=torch.tensor([0, queries]), cu_seqlens_k=torch.tensor([0, keys]))
        assert found.shape == (queries, 4, 8) and not found.any()


def test_more_keys_than_float32_counts_are_one_line():
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1).expand(1, 1, 2**24, 1)
    with pytest.raises(ValueError, match="caches count up to 16777216 keys"):
        ops.attention(q, k, k, lengths=torch.tensor([1]))


def test_the_reference_agrees(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    cached([40, 0, 7], 3, {"causal": True})
    paged([40, 0, 7], 2, 8, options={"causal": True})


HEADS = [torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 8)]
TOKENS = [torch.zeros(5, 4, 8), torch.zeros(6, 2, 8), torch.zeros(6, 2, 8)]
PAGES = [torch.zeros(2, 4, 1, 8), torch.zeros(7, 4, 2, 8), torch.zeros(7, 4, 2, 8)]
CU = torch.tensor([0, 2, 5])
TABLE, LENGTHS = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([3, 9])
WRONG = {
    "no tensor": ([HEADS[0], None, HEADS[2]], {"lengths": LENGTHS}, "k is None; allowed: a tensor"),
    "a window": (HEADS, {"lengths": LENGTHS, "window": 5}, r"window is 5; allowed: \(left, right\)"),
    "causal": (HEADS, {"segments": CU, "causal": "yes"}, "causal is 'yes'; allowed: True or False"),
    "an unknown argument": (HEADS, {"segment": CU}, "unknown argument 'segment'; allowed: q, k"),
    "two forms": (HEADS, {"segments": CU, "lengths": LENGTHS}, "segments and lengths are given; allowed: one of the two"),
    "no first half": (TOKENS, {"cu_seqlens_k": CU}, "cu_seqlens_k is given, cu_seqlens_q is missing"),
    "no second half": (TOKENS, {"cu_seqlens_q": CU}, "5 queries, 6 keys, and no cu_seqlens_k"),
    "heads first": (HEADS, {"cu_seqlens_q": CU, "cu_seqlens_k": CU}, "q is .M, H, D., k"),
    "another number of sequences": (TOKENS, {"cu_seqlens_q": CU, "cu_seqlens_k": CU[:2]}, "one number more than there are sequences"),
    "no integers": (TOKENS, {"cu_seqlens_q": CU.float(), "cu_seqlens_k": CU}, "cu_seqlens_q is torch.float32; allowed: integers"),
    "a mask": (TOKENS, {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "mask": torch.ones(5, 6) > 0}, "allowed: cu_seqlens_q without mask"),
    "segments of another length": (HEADS, {"segments": torch.zeros(2, 4).int(), "segments_k": torch.zeros(6).int()}, r"segments has shape \(2, 4\); allowed: \(5,\) or \(2, 5\)"),
    "no segments of keys": (HEADS, {"segments": torch.zeros(5).int()}, "5 queries, 6 keys, and no segments_k"),
    "lengths of another batch": (HEADS, {"lengths": torch.zeros(3).int()}, r"lengths has shape \(3,\); allowed: \(2,\)"),
    "no lengths": (PAGES, {"block_table": TABLE}, "block_table is given, lengths is missing"),
    "a layout": (PAGES, {"block_table": TABLE, "lengths": LENGTHS, "kv_layout": "NDH"}, "kv_layout is 'NDH'; allowed: 'NHD'"),
    "heads that divide nothing": (PAGES, {"block_table": TABLE, "lengths": LENGTHS, "kv_layout": "HND", "softcap": 0.0}, "softcap is 0.0; allowed: above 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_clear_line(name):
    tensors, options, said = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=said) as error:
        ops.attention(*tensors, **options)
    assert "\n" not in str(error.value)


CHECKED = {
    "a start": (TOKENS, {"cu_seqlens_q": CU + 1, "cu_seqlens_k": torch.tensor([0, 2, 6])}, "cu_seqlens_q goes from 1 to 6; allowed: from 0 to 5"),
    "an end": (TOKENS, {"cu_seqlens_q": CU, "cu_seqlens_k": CU}, "cu_seqlens_k goes from 0 to 5; allowed: from 0 to 6"),
    "a step back": (TOKENS, {"cu_seqlens_q": torch.tensor([0, 4, 2, 5]), "cu_seqlens_k": torch.tensor([0, 2, 4, 6])}, r"cu_seqlens_q\[2\] is 2 after 4"),
    "a step back of the keys": (TOKENS, {"cu_seqlens_q": torch.tensor([0, 2, 4, 5]), "cu_seqlens_k": torch.tensor([0, 5, 3, 6]), "return_lse": True}, r"cu_seqlens_k\[2\] is 3 after 5; allowed: numbers that do not decrease"),
    "a negative length": (HEADS, {"lengths": torch.tensor([-1, 2])}, r"lengths\[0\] is -1; allowed: 0 to 6, the keys that the cache has room for"),
    "a length beyond the table": (PAGES, {"block_table": TABLE, "lengths": torch.tensor([13, 2])}, r"lengths\[0\] is 13; allowed: 0 to 12"),
    "a negative page": (PAGES, {"block_table": torch.tensor([[1, 2, 3], [0, -1, 2]]), "lengths": LENGTHS, "return_lse": True}, r"block_table\[1, 1\] is -1; allowed: 0 to 6"),
    "a length": (HEADS, {"lengths": torch.tensor([6, 7])}, r"lengths\[1\] is 7; allowed: 0 to 6"),
    "a page": (PAGES, {"block_table": torch.tensor([[1, 9, 9], [0, 1, 7]]), "lengths": LENGTHS}, r"block_table\[1, 2\] is 7; allowed: 0 to 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_what_the_device_knows_is_checked_when_asked(name, monkeypatch):
    tensors, options, said = CHECKED[name]
    ops.attention(*tensors, **options)
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    with pytest.raises((ValueError, IndexError), match=said) as error:
        ops.attention(*tensors, **options)
    assert "\n" not in str(error.value)


def test_pages_that_no_length_reaches_are_not_checked(monkeypatch):
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    paged([9, 0, 17], 2, 8)


def test_pages_have_no_gradient():
    q = PAGES[0].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="block_table has no gradient"):
        ops.attention(q, *PAGES[1:], block_table=TABLE, lengths=LENGTHS)
