"""Masks that a graph computes by comparisons of places: attention takes them as numbers, and no matrix of queries and keys is left."""

import pytest
import torch
import torch.nn.functional as F
from dtkernels.integrations.torch_compile import report

import dtkernels

B, H, Q, K, D = 2, 2, 9, 9, 8
LOW = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The ops compute their reference; without this nothing is replaced on a CPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    torch._dynamo.reset()
    report.forget()


def places(keys=K, queries=Q):
    return torch.arange(queries)[:, None], torch.arange(keys)[None, :]


def by_index(b, q, k):
    return b[:, None, None, None], q[None, None, :, None], k[None, None, None, :]


def causal(flags, ids):
    q, k = places()
    return k <= q


def not_later(flags, ids):
    q, k = places()
    return ~(k > q)


def triangle(flags, ids):
    return torch.ones(Q, K, dtype=torch.bool).tril()


def triangle_added(flags, ids):
    return torch.triu(torch.full((Q, K), float("-inf")), diagonal=1)


def triangle_of_a_window(flags, ids):
    return torch.tril(torch.ones(Q, K, dtype=torch.bool), 1) & torch.triu(torch.ones((Q, K), dtype=torch.bool), -2)


def around(flags, ids):
    q, k = places()
    return (q - k).abs() < 3


def window_of_differences(flags, ids):
    q, k = places()
    return (q - k >= 0).logical_and(q - k < 4)


def shifted(flags, ids):
    q, k = torch.arange(5, 5 + Q).unsqueeze(1), torch.arange(3, 3 + K).view(1, -1)
    return torch.logical_not((k + 1 > q) | (k * 1 < q - 5))


def padded(flags, ids):
    q, k = places()
    return (k <= q) & flags[:, None, None, :]


def padded_added(flags, ids):
    q, k = places()
    mask = torch.zeros(1, 1, Q, K).masked_fill(k > q, LOW)
    return mask.expand(B, 1, Q, K)


def one_minus(flags, ids):
    return (1.0 - flags[:, None, None, :].to(torch.float32)) * LOW


def chosen(flags, ids):
    q, k = places()
    return torch.where((k > q - 4) & flags[:, None, None], 0.0, LOW)


def looked_up(flags, ids):
    b, q, k = by_index(torch.arange(B), torch.arange(Q), torch.arange(K) + 0)
    return q.new_ones((), dtype=torch.bool) & (k <= q) & flags[b, k]


def chunks(flags, ids):
    q, k = places()
    return ((k // 4 == q // 4) & (k <= q))[None, None].expand(B, 1, Q, K)


def segments(flags, ids):
    q, k = places()
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (k <= q) & (k > q - 3)


def chunks_of_segments(flags, ids):
    b, q, k = by_index(torch.arange(B), torch.arange(Q), torch.arange(K))
    return (k // 4 == q // 4) & (ids[b, q] == ids[b, k]) & flags[b, k]


def nothing(flags, ids):
    return (torch.ones(Q, K, dtype=torch.int64) == 1)[None, None]


CAUSAL = {"causal": True}
READ = {
    causal: CAUSAL,
    not_later: CAUSAL,
    triangle: CAUSAL,
    triangle_added: CAUSAL,
    padded_added: CAUSAL,
    triangle_of_a_window: {"starts": True, "first_number": -2.0, "ends": True, "last_number": 1.0},
    around: {"starts": True, "first_number": -2.0, "ends": True, "last_number": 2.0},
    window_of_differences: {"starts": True, "first_number": -3.0, **CAUSAL},
    shifted: {"starts": True, "first_number": -3.0, "ends": True, "last_number": 1.0},
    padded: {"flagged": True, **CAUSAL},
    one_minus: {"flagged": True},
    chosen: {"starts": True, "first_number": -3.0, "flagged": True},
    looked_up: {"flagged": True, **CAUSAL},
    chunks: {"segmented": True, "ranged": True, "keyed": True},
    segments: {"segmented": True, "ranged": True, "keyed": True},
    chunks_of_segments: {"segmented": True, "ranged": True, "keyed": True, "flagged": True},
    nothing: {},
}


def written(flags, ids):
    mask = torch.ones(Q, K, dtype=torch.bool).tril()
    mask[0, 3] = True
    return mask


def either(flags, ids):
    q, k = places()
    return (k <= q) | (k < 4)


def by_head(flags, ids):
    q, k = places()
    return k <= q + torch.arange(H)[:, None, None]


def upside_down(flags, ids):
    q, k = places()
    return k + q <= 9


def other_positions(flags, ids):
    b, q, k = by_index(torch.arange(B), torch.arange(Q), torch.arange(K))
    return ids[b, k] <= ids[b, q]


def twice(flags, ids):
    q, k = places()
    return 2 * k <= q + 1


LEFT = [written, either, by_head, upside_down, other_positions, twice]


def inputs(queries=Q, keys=K):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, n, D, generator=g).requires_grad_() for n in (queries, keys, keys))
    flags = torch.ones(B, keys, dtype=torch.bool)  # each query sees a key, whatever else a mask says
    flags[0, 1] = flags[1, 5] = False
    return q, k, v, flags, torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [7, 7, 7, 7, 7, 3, 3, 3, 3]])


def attended(make):
    return lambda q, k, v, flags, ids: F.scaled_dot_product_attention(q, k, v, attn_mask=make(flags, ids))


def spelled_out(make):
    def run(q, k, v, flags, ids):
        mask, scores = make(flags, ids), q @ k.mT * D**-0.5
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
        return F.softmax(scores, -1) @ v

    return run


def compiled(function, ops="attention", dynamic=None):
    """Return the compiled function, and the list in which its graphs will be."""
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return module

    return torch.compile(function, backend=dtkernels.compile_backend.using(ops, backend=keep), fullgraph=True, dynamic=dynamic), graphs


def results(call, given):
    found = call(*given)
    return [found.detach(), *torch.autograd.grad(found.sin().sum(), given[:3])]


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def calls(graph) -> list:
    return [node for node in graph.nodes if node.op == "call_function" and "dtkernels.attention" in str(node.target)]


def matrices(graph) -> list:
    """Return what has an element for each pair of a query and a key in memory."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == K and value.shape[-2] == Q and all(value.stride()[-2:]):
            found.append(node.format_node())
    return found


SPELLED_OUT = (not_later, triangle_added, padded_added, chosen, segments)


@pytest.mark.parametrize(("make", "form"), [*((make, attended) for make in READ), *((make, spelled_out) for make in SPELLED_OUT)], ids=lambda f: f.__name__)
def test_read(make, form):
    call, graphs = compiled(form(make))
    same(results(call, inputs()), results(form(make), inputs()))
    (node,) = calls(graphs[0])
    said = {name: value for name, value in node.kwargs.items() if name not in ("dt_spec", "scale_number", "group")}
    assert said == READ[make] and not matrices(graphs[0]), (said, graphs[0])


@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__)
def test_what_numbers_do_not_say_stays_a_matrix(make):
    call, graphs = compiled(attended(make))
    same(results(call, inputs()), results(attended(make), inputs()))
    (node,) = calls(graphs[0])
    assert node.kwargs["masked"] and not {"causal", "starts", "ends", "segmented"} & set(node.kwargs) and matrices(graphs[0])


def test_lengths_and_offsets_that_are_symbols_make_one_graph():
    def step(q, k, v, flags, ids):
        past = k.shape[2] - q.shape[2]
        places = torch.arange(q.shape[2]) + past
        keys = torch.arange(k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(keys[None] <= places[:, None]) & (keys[None] > places[:, None] - 5) & flags[:, None, None])

    call, graphs = compiled(step, dynamic=True)
    for queries, keys in ((4, 9), (3, 12), (6, 11)):
        same(results(call, inputs(queries, keys)), results(step, inputs(queries, keys)))
    (node,) = calls(graphs[0])
    assert len(graphs) == 1 and node.kwargs["starts"] and node.kwargs["ends"]


def test_an_offset_on_the_device():
    """A static cache counts its tokens in a tensor."""

    def step(q, k, v, seen):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(K)[None] <= (torch.arange(4) + seen)[:, None])

    call, graphs = compiled(step)
    for seen in (0, 3):
        given = (*inputs(4)[:3], torch.tensor(seen))
        same(results(call, given), results(step, given))
    assert len(graphs) == 1 and calls(graphs[0])[0].kwargs["ends"]


def test_auto_takes_what_was_measured():
    """Causal in inference, as is_causal is, and other masks in numbers; the rest is left, with the reason."""
    given = [t.detach() for t in inputs()]
    for make, state in ((causal, "replaced"), (padded, "replaced"), (either, "a mask that is a matrix: sdpa was faster")):
        report.forget()
        call, _ = compiled(attended(make), ops="auto")
        torch.testing.assert_close(call(*given), attended(make)(*given))
        assert {op: dict(states) for op, states in dtkernels.replacements().items()} == {"attention": {state: 1}}


@pytest.mark.parametrize(("make", "is_causal"), [(causal, True), (nothing, False), (either, None)])
def test_attention_that_is_left_to_torch_needs_no_matrix(make, is_causal):
    """With gradients torch's is faster, without a matrix."""
    call, graphs = compiled(attended(make), ops="auto")
    same(results(call, inputs()), results(attended(make), inputs()))
    (node,) = [node for node in graphs[0].nodes if node.target is F.scaled_dot_product_attention]
    if is_causal is None:
        assert node.kwargs["attn_mask"] is not None and matrices(graphs[0])
    else:
        assert "arange" not in graphs[0].owning_module.code, "what runs is the changed graph"
        assert node.kwargs["attn_mask"] is None and node.kwargs["is_causal"] is is_causal and not matrices(graphs[0])


MODELS = {"Llama": {}, "Mistral": {"sliding_window": 4}, "Gemma2": {"sliding_window": 4}}
GIVEN = [("Llama", "nothing"), ("Mistral", "padding"), ("Gemma2", "padding"), ("Mistral", "positions")]


@pytest.mark.parametrize(("name", "given"), GIVEN)
def test_models_that_nobody_patched(name, given):
    pytest.importorskip("transformers")
    from huggingface_models import GROUPED, of

    model = of(name, **GROUPED, **MODELS[name])
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    seen, more = torch.ones_like(ids), {}
    if given == "padding":
        seen[0, :3] = 0
        more = {"attention_mask": seen}
    if given == "positions":
        more = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])}
    labels = {"labels": ids.masked_fill(seen.roll(1, -1) * seen == 0, -100)}  # none after padding, whose queries see no key

    def run(call):
        model.zero_grad()
        out = call(input_ids=ids, use_cache=False, **more, **labels)
        out.loss.backward()
        return [out.loss.detach(), out.logits.detach()[seen == 1], *(p.grad.clone() for p in model.parameters())]

    wanted = run(model)
    call, graphs = compiled(model)
    for found, right in zip(run(call), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    (graph,) = graphs
    assert len(calls(graph)) == 2 and not matrices(graph), matrices(graph)
    segmented = ["segmented" in node.kwargs for node in calls(graph)]
    assert segmented == [given == "positions"] * 2 and ("starts" in calls(graph)[0].kwargs) == ("sliding_window" in MODELS[name] and given != "positions")
