# ruff: noqa: E501 (arguments read best on one line)
"""Attention that appends new keys and values to its cache, in pages or not, against float64 over a cache that was filled by hand."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from attention_forms_truth import leaves, same, seen_by, truth

from dtkernels import ops


def contiguous(lengths, queries, new, heads=(6, 2), width=(16, 16), room=40, dtype=torch.float32, atol=5e-6, **reach):
    b, (h, g), (d, n) = len(lengths), heads, width
    (q, k, v, new_k, new_v), (q64, k64, v64, *new64) = leaves((b, h, queries, d), (b, g, room, d), (b, g, room, n), (b, g, new, d), (b, g, new, n), dtype=dtype, grad=False)
    for i, at in enumerate(lengths):
        k64[i, :, at : at + new], v64[i, :, at : at + new] = new64[0][i], new64[1][i]
    found = ops.attention(q, k, v, lengths=torch.tensor(lengths), new_k=new_k, new_v=new_v, return_lse=True, **reach)
    assert torch.equal(k.double(), k64) and torch.equal(v.double(), v64)
    same(found, truth(q64, k64, v64, seen_by([at + new for at in lengths], queries, room, **reach)), (), (), atol)


def paged(lengths, queries, new, slots, layout, heads=(6, 2), width=(16, 16), dtype=torch.float32, atol=5e-6, seed=0, **reach):
    draw = torch.Generator().manual_seed(seed)
    b, (h, g), (d, n) = len(lengths), heads, width
    most = -(-(max(lengths) + new) // slots) + 1
    pages = b * most + 2
    table = torch.randperm(pages, generator=draw)[: b * most].view(b, most).int()
    (q, k, v, new_k, new_v), (q64, k64, v64, *new64) = leaves((b, h, queries, d), (pages, slots, g, d), (pages, slots, g, n), (b, g, new, d), (b, g, new, n), dtype=dtype, grad=False)
    for i, at in enumerate(lengths):
        for t in range(new):
            page, slot = int(table[i, (at + t) // slots]), (at + t) % slots
            k64[page, slot], v64[page, slot] = new64[0][i, :, t], new64[1][i, :, t]
    gathered = [t[table.long()].flatten(1, 2).transpose(1, 2) for t in (k64, v64)]
    for i, at in enumerate(lengths):
        table[i, -(-(at + new) // slots) :] = -1  # pages that no length reaches
    if layout == "HND":
        k, v, k64, v64 = (t.transpose(1, 2).contiguous() for t in (k, v, k64, v64))
    found = ops.attention(q, k, v, block_table=table, lengths=torch.tensor(lengths, dtype=torch.int32), kv_layout=layout, new_k=new_k, new_v=new_v, return_lse=True, **reach)
    assert torch.equal(k.double(), k64) and torch.equal(v.double(), v64)
    same(found, truth(q64, *gathered, seen_by([at + new for at in lengths], queries, most * slots, **reach)), (), (), atol)


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_a_step_of_decoding_appends_as_many_keys_as_queries(queries):
    contiguous([20, 0, 7], queries, queries, causal=True)


@pytest.mark.parametrize("width", [(64, 64), (80, 80), (24, 16)])
def test_head_sizes(width):
    contiguous([11, 3], 2, 2, heads=(5, 1), width=width, causal=True, window=(4, None))


def test_other_numbers_of_keys_than_queries():
    contiguous([11, 3, 0], 4, 1, heads=(28, 4), dtype=torch.float16, atol=4e-3)
    contiguous([11, 3, 0], 2, 7, causal=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("slots, queries", [(1, 1), (16, 3), (48, 16)])
def test_pages(slots, queries, layout):
    paged([33, 0, slots, slots - 1], queries, queries, slots, layout, heads=(10, 2), causal=True)


def test_pages_of_two_head_sizes_in_half_precision():
    paged([9, 30], 2, 2, 16, "NHD", width=(24, 16), dtype=torch.float16, atol=4e-3, causal=True)
    paged([9, 30], 1, 1, 16, "HND", heads=(7, 1), width=(80, 80), dtype=torch.float16, atol=4e-3)


def cache(new=2, room=8):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 2, 8), torch.randn(2, 2, room, 8), torch.randn(2, 2, room, 8)
    return (q, k, v), {"new_k": torch.randn(2, 2, new, 8), "new_v": torch.randn(2, 2, new, 8), "lengths": torch.tensor([3, 7])}


def test_what_has_no_room_is_left_out():
    (q, k, v), given = cache()
    before = k.clone(), v.clone()
    ops.attention(q, k, v, **given)
    assert torch.equal(k[1, :, 7], given["new_k"][1, :, 0])
    for t, old, new in ((k, before[0], "new_k"), (v, before[1], "new_v")):
        t[0, :, 3:5] = old[0, :, 3:5]
        t[1, :, 7] = old[1, :, 7]
        assert torch.equal(t, old), new


def test_pages_outside_the_table_are_not_written():
    (q, _, _), given = cache()
    k, v = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8)
    before = k.clone()
    ops.attention(q, k, v, block_table=torch.tensor([[3, 2], [1, -1]]), **given)  # key 8 of entry 1 has no page, key 7 has none that there is
    before[3, 3], before[2, 0] = given["new_k"][0, :, 0], given["new_k"][0, :, 1]
    assert torch.equal(k, before)


def test_the_reference_agrees(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    contiguous([20, 0, 7], 3, 3, causal=True)
    paged([20, 0, 7], 2, 2, 8, "HND", causal=True)


def test_a_compiled_graph_appends():
    (q, k, v), given = cache(room=12)
    other = k.clone(), v.clone()
    wanted = ops.attention(q, *other, causal=True, **given)
    found = torch.compile(lambda q, k, v, g: ops.attention(q, k, v, causal=True, **g), fullgraph=True, backend="aot_eager")(q, k, v, given)
    assert torch.equal(found, wanted) and torch.equal(k, other[0]) and torch.equal(v, other[1])


def test_one_launch_writes_both_caches():
    from dtkernels.ops.registry import shipped

    for name in ("append_cache", "append_pages"):
        assert shipped(name).source((4, 2, 1, 64, 8)[: 5 if name == "append_pages" else 4]).count("@triton.jit\ndef put") == 1


def test_autograd_learns_that_a_cache_has_changed():
    (q, k, v), given = cache()
    result = ops.attention(q.requires_grad_(), k, v, lengths=given["lengths"])
    ops.attention(q.detach(), k, v, **given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    with pytest.raises(NotImplementedError, match="new_k has no gradient"):
        ops.attention(q, k, v, **given | {"new_k": given["new_k"].requires_grad_()})


PAGES = {"block_table": torch.tensor([[3, 2], [1, 3]])}
WRONG = {
    "half of it": ({"new_v": None}, "new_k is given, new_v is missing; allowed: both"),
    "no lengths": ({"lengths": None}, "new_k is given, lengths is missing; allowed: both"),
    "another form": ({"segments": torch.zeros(2).int(), "segments_k": torch.zeros(8).int()}, "segments and lengths are given; allowed: one of the two"),
    "heads in the last place but one": ({"new_k": torch.zeros(2, 1, 2, 8), "new_v": torch.zeros(2, 1, 2, 8)}, r"new_k is \(2, 2, T, 8\), new_v \(2, 2, T, 8\), T new tokens; got shapes"),
    "integers": ({"new_v": torch.zeros(2, 2, 2, 8).int()}, "new_v is torch.int32; allowed: floating point"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_clear_line(name):
    tensors, given = cache()
    with pytest.raises((TypeError, ValueError), match=WRONG[name][1]) as error:
        ops.attention(*tensors, **given | WRONG[name][0])
    assert "\n" not in str(error.value)


def test_what_the_device_knows_is_checked_when_asked(monkeypatch):
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    (q, k, v), given = cache()
    with pytest.raises(ValueError, match=r"lengths\[1\] is 7; allowed: 0 to 6, the keys that the cache has room for beside 2 new ones"):
        ops.attention(q, k, v, **given)
    pages = torch.randn(4, 4, 2, 8)
    given["lengths"] = torch.tensor([3, 3])
    for table, said in (([[3, 4], [1, 0]], r"block_table\[0, 1\] is 4; allowed: 0 to 3"), ([[3, 2], [1, 2]], "new_k of entries 0 and 1 goes to slot 0 of page 2")):
        with pytest.raises((IndexError, ValueError), match=said):
            ops.attention(q, pages, pages.clone(), block_table=torch.tensor(table), **given)
    ops.attention(q, pages, pages.clone(), block_table=torch.tensor([[3, 2], [1, 0]]), **given)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_queries_that_need_a_gradient_see_the_new_keys(count, dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    new_k, new_v = torch.randn(2, 2, count, 8), torch.randn(2, 2, count, 8)
    lengths, wanted = torch.tensor([3, 6], dtype=dtype), []
    for b, length in enumerate((3, 6)):
        keys, values = (torch.cat([t[b, :, :length], new[b]], 1).repeat_interleave(2, 0).double() for t, new in ((k, new_k), (v, new_v)))
        hidden = torch.ones(5, length + count, dtype=torch.bool).tril(length + count - 5)
        wanted.append((q[b].double() @ keys.transpose(1, 2) / 8**0.5).masked_fill(~hidden, -torch.inf).softmax(-1).nan_to_num() @ values)
    for needs in (False, True):
        got = ops.attention(q.clone().requires_grad_(needs), k.clone(), v.clone(), lengths=lengths, new_k=new_k, new_v=new_v, causal=True)
        torch.testing.assert_close(got.double(), torch.stack(wanted), rtol=1e-5, atol=1e-5)
