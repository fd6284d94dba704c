# ruff: noqa: E501 (arguments read best on one line)
"""Attention over caches in float8 and int8 with scales, against float64 over the values that the codes stand for."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from attention_forms_truth import leaves, same, seen_by, truth

from dtkernels import ops

CODES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}


def codes(shape, name, draw):
    values = torch.randn(shape, generator=draw)
    return (values * 30).round().clamp(-127, 127).to(torch.int8) if name == "int8" else values.to(CODES[name])


def scale(kind, shape, draw):
    """A scale for codes (B, G, L, D) or (page, slot, G, D), and the same to multiply them with."""
    if kind == "number":
        return 0.375, 0.375
    cut = {"one element": (1,), "heads": (shape["g"],), "entries": (shape["b"], shape["g"]), "tokens": shape["tokens"]}[kind]
    made = 0.1 + torch.rand(cut, generator=draw)
    return made, made.double()


def run(name, kinds, lengths=(33, 0, 7), queries=1, heads=(6, 2), width=(16, 16), slots=None, layout="NHD", dtype=torch.float32, atol=2e-5, seed=0, **options):
    draw = torch.Generator().manual_seed(seed)
    b, (h, g), (d, n) = len(lengths), heads, width
    (q,), (q64,) = leaves((b, h, queries, d), dtype=dtype, grad=False)
    keys = 40 if slots is None else slots * -(-40 // slots)
    given = {"lengths": torch.tensor(lengths), "return_lse": True, **options}
    if slots is None:
        k, v = codes((b, g, keys, d), name, draw), codes((b, g, keys, n), name, draw)
        tokens = (b, g, keys)
    else:
        most, pages = keys // slots, b * (keys // slots) + 2
        table = torch.randperm(pages, generator=draw)[: b * most].view(b, most)
        k, v = codes((pages, slots, g, d), name, draw), codes((pages, slots, g, n), name, draw)
        tokens = (pages, slots, g) if layout == "NHD" else (pages, g, slots)
        given |= {"block_table": table.int(), "kv_layout": layout}
    exact = []
    for t, kind, of in ((k, kinds[0], "k_scale"), (v, kinds[1], "v_scale")):
        given[of], wide = scale(kind, {"b": b, "g": g, "tokens": tokens}, draw)
        values = t.double()
        if slots is not None:
            values = values[table].flatten(1, 2).transpose(1, 2)
            if kind == "tokens":
                wide = (wide if layout == "NHD" else wide.transpose(1, 2))[table].flatten(1, 2).transpose(1, 2)
        wide = {"heads": lambda t: t[None, :, None, None], "entries": lambda t: t[:, :, None, None], "tokens": lambda t: t[..., None]}.get(kind, lambda t: t)(wide)
        exact.append(values * wide)
    if layout == "HND" and slots is not None:
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    given["scale"] = 0.02 if name == "int8" else 0.3
    reach = {x: y for x, y in options.items() if x in ("causal", "window")}
    found = ops.attention(q, k, v, **given)
    assert found[0].dtype == dtype
    wanted = truth(q64, *exact, seen_by(lengths, queries, keys, **reach), scale=given["scale"], softcap=options.get("softcap"))
    largest = max(float(t.abs().max()) for t in exact)
    same([found[0] / largest, found[1]], [wanted[0] / largest, wanted[1]], (), (), atol)


@pytest.mark.parametrize("name, kinds", [
    ("int8", ("number", "number")), ("int8", ("heads", "entries")), ("int8", ("tokens", "tokens")), ("int8", ("one element", "tokens")), ("int8", ("tokens", "heads")),
    ("e4m3", ("number", "number")), ("e4m3", ("entries", "heads")), ("e4m3", ("tokens", "tokens")), ("e5m2", ("heads", "tokens")),
])  # fmt: skip
def test_every_scale_of_a_cache_with_room(name, kinds):
    run(name, kinds, queries=2, causal=True)


@pytest.mark.parametrize("name, slots, layout, kinds", [
    ("int8", 1, "NHD", ("number", "number")), ("e4m3", 16, "HND", ("heads", "heads")), ("e5m2", 48, "NHD", ("number", "entries")),
    ("int8", 16, "HND", ("tokens", "tokens")), ("e4m3", 1, "HND", ("tokens", "tokens")), ("int8", 48, "NHD", ("tokens", "tokens")),
])  # fmt: skip
def test_every_scale_of_pages(kinds, name, slots, layout):
    run(name, kinds, slots=slots, layout=layout)


@pytest.mark.parametrize("queries, heads, width", [(1, (28, 4), (64, 64)), (16, (5, 1), (80, 80)), (3, (7, 1), (24, 16))])
def test_half_precision_beside_codes(queries, heads, width):
    for dtype, atol in ((torch.float16, 4e-3), (torch.bfloat16, 4e-2)):
        run("e4m3", ("tokens", "tokens"), (33, 9), queries, heads, width, dtype=dtype, atol=atol, causal=True)
    run("int8", ("heads", "tokens"), (33, 9), queries, heads, width, slots=16, dtype=torch.float16, atol=6e-3, causal=True)


def test_softcap_sees_scores_that_are_scaled():
    run("int8", ("heads", "number"), queries=2, softcap=2.0, causal=True, window=(9, None))


def test_the_reference_agrees(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    run("int8", ("tokens", "heads"), queries=2, causal=True)
    run("e4m3", ("tokens", "tokens"), slots=16, layout="HND")


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_what_lies_behind_the_length_may_be_no_number(garbage):
    torch.manual_seed(0)
    q, k, v, lengths = torch.randn(2, 6, 2, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16), torch.tensor([7, 0])
    scales = torch.ones(2, 2, 40)
    wanted = ops.attention(q, k, v, lengths=lengths, causal=True)
    for t in (k, v, scales):
        for b, n in enumerate(lengths):
            t[b, :, n:] = garbage
    assert torch.equal(ops.attention(q, k, v, lengths=lengths, causal=True), wanted)
    assert torch.equal(ops.attention(q, k, v, lengths=lengths, causal=True, k_scale=scales, v_scale=scales), wanted)
    pages = [t.reshape(2, 2, 5, 8, 16).permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous() for t in (k, v)]
    assert torch.equal(ops.attention(q, *pages, block_table=torch.arange(10).view(2, 5), lengths=lengths, causal=True), wanted)


@pytest.mark.parametrize("name, kind, slots", [
    ("int8", "number", 16), ("int8", "heads", None), ("int8", "tokens", 16), ("int8", "tokens", None), ("e4m3", "number", None), ("e4m3", "heads", 16),
    ("e4m3", "tokens", 16), ("e5m2", "tokens", None),
])  # fmt: skip
def test_new_tokens_become_codes(slots, kind, name):
    torch.manual_seed(0)
    b, g, new, d, lengths = 2, 3, 2, 16, torch.tensor([5, 30])
    new_k, new_v = torch.randn(b, g, new, d), 3 * torch.randn(b, g, new, d)
    shape = (b, g, 32, d) if slots is None else (5, slots, g, d)
    k, v = (torch.zeros(shape, dtype=CODES[name]) for _ in "kv")
    scales = [{"number": 0.05, "heads": 0.05 + torch.rand(g), "tokens": torch.zeros(shape[:3])}[kind] for _ in "kv"]
    more = {} if slots is None else {"block_table": torch.tensor([[4, 1], [0, 2]])}
    found = ops.attention(torch.randn(b, 6, new, d), k, v, lengths=lengths, new_k=new_k, new_v=new_v, k_scale=scales[0], v_scale=scales[1], causal=True, **more)
    assert found.isfinite().all()
    for cache, fresh, step in zip((k, v), (new_k, new_v), scales):
        for i in range(b):
            for t in range(new):
                at = int(lengths[i]) + t
                place = (i, slice(None), at) if slots is None else (int(more["block_table"][i, at // slots]), at % slots)
                wanted, one = fresh[i, :, t], step if kind == "number" else step[:, None] if kind == "heads" else step[place][:, None]
                if kind == "tokens":
                    torch.testing.assert_close(one, wanted.abs().amax(-1, keepdim=True) / LARGEST[name], rtol=1e-6, atol=0)
                quotient = wanted / one
                right = quotient.round().clamp(-127, 127) if name == "int8" else quotient.to(CODES[name]).float()
                step_of_code = 1.0 if name == "int8" else right.abs() * (0.125 if name == "e4m3" else 0.25) + 1e-2
                assert ((cache[place].float() - right).abs() <= step_of_code).all()  # a quotient may lie on either side of a boundary
                assert (cache[place].float() == right).float().mean() > 0.9


PAGES = [torch.zeros(2, 4, 1, 8), torch.zeros(7, 4, 2, 8, dtype=torch.int8), torch.zeros(7, 4, 2, 8, dtype=torch.int8)]
HEADS = [torch.zeros(2, 4, 1, 8), torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 8)]
TABLE, LENGTHS = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([3, 4])
NEW = {"new_k": torch.zeros(2, 2, 1, 8), "new_v": torch.zeros(2, 2, 1, 8)}
WRONG = {
    "a shape": (PAGES, {"block_table": TABLE, "k_scale": torch.ones(7, 2, 4)}, r"k_scale has shape \(7, 2, 4\); allowed: a number, \(2,\) or \(2, 2\) for one a head, \(7, 4, 2\) for one a token"),
    "integers": (HEADS, {"v_scale": torch.ones(2).int()}, "v_scale is torch.int32; allowed: a number, or floating point"),
    "no tensor": (HEADS, {"k_scale": "large"}, "k_scale is a str; allowed: a tensor"),
    "no cache": (HEADS, {"lengths": None, "k_scale": 2.0}, "k_scale is given, lengths is missing; allowed: both"),
    "one of two": (PAGES, {"block_table": TABLE, "k_scale": torch.ones(7, 4, 2), **NEW}, "one of k_scale and v_scale has one scale a token; allowed beside new_k and new_v: both or none"),
    "tokens of a cache in float32": (HEADS, {"k_scale": torch.ones(2, 2, 6), "v_scale": torch.ones(2, 2, 6), **NEW}, "k_scale has one scale a token, and k is torch.float32; allowed beside new_k: a cache in int8 or float8"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_clear_line(name):
    tensors, options, said = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=said) as error:
        ops.attention(*tensors, **{"lengths": LENGTHS, **options})
    assert "\n" not in str(error.value)
