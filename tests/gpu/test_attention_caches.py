"""Caches on a GPU: new keys and values are appended, in pages or not, codes of int8 and float8 have scales; against float64."""

import pytest
import torch
from attention_forms_truth import seen_by, truth

import dtkernels
from dtkernels import ops

LENGTHS = (1000, 0, 37, 511)
CODES = {"none": None, "int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def contiguous(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Pages (page, slot, G, D) as a cache (B, G, L, D)."""
    return pages[table.long()].flatten(1, 2).transpose(1, 2)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("slots, layout", [(None, "NHD"), (1, "NHD"), (16, "HND"), (48, "NHD")])
@pytest.mark.parametrize("heads, width", [((28, 4), 128), ((5, 1), 80)])
def test_appended_and_attended_to(heads, width, slots, layout, queries, code):
    torch.manual_seed(0)
    b, (h, g), dtype, room = len(LENGTHS), heads, torch.bfloat16, 1056
    q, new_k, new_v = (torch.randn(b, n, queries, width, device="cuda", dtype=dtype) for n in (h, g, g))
    lengths = torch.tensor(LENGTHS, device="cuda")
    shape, more = (b, g, room, width), {}
    if slots is not None:
        most = room // slots
        table = torch.randperm(b * most, device="cuda").view(b, most).int()
        shape, more = (b * most, slots, g, width), {"block_table": table, "kv_layout": layout}
    values = [torch.randn(shape, device="cuda") for _ in "kv"]
    scales = {}
    if code != "none":
        largest = 127 if code == "int8" else torch.finfo(CODES[code]).max
        scales = {n: t.abs().amax(-1) / largest for n, t in zip(("k_scale", "v_scale"), values)}
        values = [t / s[..., None] for t, s in zip(values, scales.values())]
    caches = [(t.round() if code == "int8" else t).to(CODES[code] or dtype) for t in values]
    if slots is not None and layout == "HND":
        caches = [t.transpose(1, 2).contiguous() for t in caches]
        scales = {n: s.transpose(1, 2).contiguous() for n, s in scales.items()}
    for t in (*caches, *scales.values()):
        if slots is None and t.dtype.itemsize > 1:
            for i, n in enumerate(LENGTHS):
                t[i, :, n:] = float("nan")  # what no length reaches
    for _ in range(3):  # a repeated call, from bound kernels, writes the same
        found = ops.attention(q, *caches, lengths=lengths, new_k=new_k, new_v=new_v, causal=True, **more, **scales)
    exact = [t.double() for t in caches]
    if scales:
        exact = [t * s.double()[..., None] for t, s in zip(exact, scales.values())]
    if slots is not None:
        exact = [contiguous(t.transpose(1, 2) if layout == "HND" else t, table) for t in exact]
    for t, new in zip(exact, (new_k, new_v)):
        for i, n in enumerate(LENGTHS):
            step = 0.0 if code == "none" else {"int8": 0.5 / 127, "e4m3": 1 / 16, "e5m2": 1 / 8}[code]
            apart = (t[i, :, n : n + queries] - new[i].double()).abs()
            assert (apart <= (step + 1e-3) * new[i].double().abs().amax(-1, keepdim=True)).all()
            t[i, :, n + queries :] = 0
    seen = seen_by([n + queries for n in LENGTHS], queries, room, causal=True).to("cuda")
    wanted, _ = truth(q.double(), *exact, seen)
    torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=2e-2)
    assert dtkernels.paths()["attention_lengths" if slots is None else "attention_paged"]["gpu"] >= 3


def test_nothing_waits_for_the_device():
    """A step can be captured in a CUDA graph and replayed at other lengths."""
    torch.manual_seed(0)
    q, step = torch.randn(2, 8, 1, 64, device="cuda", dtype=torch.float16), torch.randn(2, 2, 1, 64, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(2, 2, 128, 64, device="cuda", dtype=torch.float16) for _ in "kv")
    lengths = torch.tensor([3, 60], device="cuda")

    def run():
        return ops.attention(q, k, v, lengths=lengths, new_k=step, new_v=step)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    lengths += 5
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(k[0, :, 8], step[0, :, 0]) and torch.equal(v[1, :, 65], step[1, :, 0])
    torch.testing.assert_close(found, ops.attention(q, k, v, lengths=lengths + 1), atol=1e-3, rtol=1e-3)


def test_rows_are_written_where_data_says():
    text = "Func put; In N, K, t; Var x, y; put[x, y] = write(2 * N[x, y], K[t[x], y]); put.block(x:8, y:128); put.tensorize(x:8, y:128);"
    values, target, place = torch.randn(100, 333, device="cuda"), torch.randn(400, 333, device="cuda"), torch.randperm(400, device="cuda")[:100]
    wanted = target.index_copy(0, place, 2 * values)
    assert dtkernels.compile(text)(N=values, K=target, t=place) is target and torch.equal(target, wanted)
