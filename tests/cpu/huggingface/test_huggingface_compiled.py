"""Under torch.compile: masks that say no more than none are left out."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import patched
from dtkernels.integrations.huggingface.attention import masks
from dtkernels.integrations.huggingface.attention.mask_conventions import writes_masks
from dtkernels.integrations.huggingface.attention.masks import dtkernels_mask
from dtkernels.integrations.huggingface.attention.traced_places import counts_up, is_uniform
from functorch.compile import make_boxed_func
from huggingface_calls import IDS, MODELS, PADDED, SIZES, matrices, training
from torch._dynamo.backends.common import aot_autograd
from transformers.masking_utils import bidirectional_mask_function


def parameters_of(model, **given) -> tuple[torch.Tensor, list[dict]]:
    """The logits of a compiled model, and the parameters of each call of attention in its graph."""
    found = []

    def compiler(graph, _):
        for node in graph.graph.nodes:
            if "dtkernels.attention" in str(node.target):
                found.append(json.loads(next(a for a in node.args if isinstance(a, str)))["params"])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    return compiled(IDS, **given)[0], found


@pytest.mark.parametrize(("name", "expected"), [("causal", {"causal": True}), ("bert", {}), ("llama", {"causal": True})])
def test_a_mask_that_says_nothing_more_is_not_made(name, expected):
    """Llama makes its positions by arange: they are those of one sequence, though transformers cannot see that while it is traced."""
    torch.manual_seed(0)
    # OPT would be causal too, but some versions of transformers make it flags of ones where it is given none
    model = transformers.BertModel(transformers.BertConfig(**SIZES, is_decoder=True)).eval() if name == "causal" else training(name)
    given = {} if name == "bert" else {"use_cache": False}
    right = model(IDS, **given)[0]
    with patched(model, ops=["attention"]):
        logits, found = parameters_of(model, **given)
    torch.testing.assert_close(logits, right, atol=1e-5, rtol=1e-5)
    assert found == [expected, expected]


@pytest.mark.parametrize("packed", [False, True])
def test_positions_that_are_given_may_be_those_of_packed_sequences(packed):
    model = training("llama")
    length = IDS.shape[1]
    positions = (torch.arange(length) % (3 if packed else length)).expand(IDS.shape)
    right = model(IDS, use_cache=False, position_ids=positions)[0]
    with patched(model, ops=["attention"]):
        logits, found = parameters_of(model, use_cache=False, position_ids=positions)
    torch.testing.assert_close(logits, right, atol=1e-5, rtol=1e-5)
    assert found == 2 * [{"keyed": True, "ranged": True, "segmented": True}]


def made(n: int) -> torch.Tensor:
    return torch.arange(n)[None].expand(2, n)


def written(n: int) -> torch.Tensor:
    numbers = torch.arange(n)[None]
    numbers[:, 2:] = 0
    return numbers


@pytest.mark.parametrize(
    ("numbers", "uniform", "counting"),
    [
        (lambda n, given: made(n), False, True),
        (lambda n, given: made(n) + 3, False, False),
        (lambda n, given: 2 * made(n), False, False),
        (lambda n, given: (torch.diff(made(n), prepend=made(n)[:, :1] - 1) != 1).cumsum(-1), True, False),
        (lambda n, given: written(n), False, False),
        (lambda n, given: given, False, False),
        (lambda n, given: given - given, False, False),
    ],
    ids=["arange", "shifted", "even", "segments of one sequence", "written to", "given", "unknown"],
)
def test_what_the_graph_tells_of_positions(numbers, uniform, counting):
    def ask(given: torch.Tensor) -> tuple[bool, bool, torch.Tensor]:
        asked = numbers(5, given)
        return is_uniform(asked), counts_up(asked), asked

    torch._dynamo.reset()
    given = torch.tensor([[0, 1, 2, 3, 4]])
    *found, asked = torch.compile(ask, backend="eager", fullgraph=True)(given)
    assert found == [uniform, counting] and torch.equal(asked, numbers(5, given))
    assert (is_uniform(asked), counts_up(asked)) == (False, False), "nothing is known of a tensor that is not traced"


@pytest.mark.parametrize("name", MODELS)
def test_padding_is_a_mask(name):
    torch.manual_seed(0)
    model = training(name)
    expected = model(IDS, **PADDED)[0]
    with patched(model, ops=["attention"]):
        logits, found = parameters_of(model, **PADDED)
    torch.testing.assert_close(logits[:, :8], expected[:, :8], atol=1e-5, rtol=1e-5)
    seen = {"bert": {}, "mistral": {"starts": True, "ends": True}}.get(name, {"causal": True})
    assert found == 2 * [{"flagged": True, **seen}], "a flag a key, and where a query begins and ends: no matrix"


def test_a_mask_that_a_model_may_write_to_is_read_as_it_is():
    """torch.compile counts no writes, so that a note could be of what a mask said before."""
    importlib.import_module("transformers.models.xlnet.modeling_xlnet")
    made = [writes_masks(type(MODELS[name]().config)) for name in MODELS]
    assert made == [False, False, False, False] and writes_masks(transformers.XLNetConfig) and writes_masks(SimpleNamespace)


NEEDED = {
    "some keys were there before": {"q_length": 3, "q_offset": 4, "kv_length": 7},
    "a window that cuts": {"q_length": 5, "kv_length": 5, "local_size": 4},
    "a query of a cache that is not full": {"q_length": 1, "kv_length": 9, "q_offset": 3, "allow_is_causal_skip": False},
    "padding": {"q_length": 5, "kv_length": 5, "attention_mask": torch.tensor([[True, True, True, True, False]])},
}
NOT_NEEDED = {
    "as many keys as queries": {"q_length": 5, "kv_length": 5},
    "a window that reaches over all": {"q_length": 5, "kv_length": 5, "local_size": 6},
    "keys of a cache that come later": {"q_length": 5, "kv_length": 9, "q_offset": 0},
    "the last query": {"q_length": 1, "kv_length": 9, "q_offset": 8},
    "all see all": {"q_length": 3, "kv_length": 7, "mask_function": bidirectional_mask_function, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": True},
}


@pytest.mark.parametrize("name", [*NEEDED, *NOT_NEEDED])
def test_it_is_left_out_where_it_is_in_eager_calls(name):
    given = {"batch_size": 1, **({**NEEDED, **NOT_NEEDED}[name])}
    eager = dtkernels_mask(**given)
    torch._dynamo.reset()
    traced = torch.compile(lambda: dtkernels_mask(**given), backend="eager", fullgraph=True)()
    assert (eager is None) == (traced is None) == (name in NOT_NEEDED)
    assert eager is None or torch.equal(eager, traced)


@pytest.mark.parametrize("given", [{}, PADDED], ids=["no mask", "padded"])
@pytest.mark.parametrize(("name", "strict"), [("opt", True), ("mistral", False), ("llama", False)])
def test_an_exported_program_runs_at_other_lengths_and_makes_no_matrix(name, strict, given, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    model, other = MODELS[name]().eval(), torch.cat([IDS, IDS], 1)
    longer = {key: torch.cat([flags, flags], 1) for key, flags in given.items()}
    length = torch.export.Dim("length", min=2, max=64)
    sizes = {"input_ids": {1: length}, "use_cache": None, **{key: {1: length} for key in given}}
    with torch.no_grad(), patched(model, ops=["attention"]):
        exported = torch.export.export(model, (IDS,), {"use_cache": False, **given}, strict=strict, dynamic_shapes=sizes)
        right = model(other, use_cache=False, **longer)[0]
    calls = [node for node in exported.graph.nodes if "dtkernels.attention" in str(node.target)]
    assert len(calls) == 2 and not matrices(exported.graph)
    torch.testing.assert_close(exported.module()(other, use_cache=False, **longer)[0], right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_it_is_left_out_too_where_the_compiler_says_that_all_is_exported(name, monkeypatch):
    """As torch 2.11's does of whatever it traces."""
    compiler = SimpleNamespace(is_compiling=torch.compiler.is_compiling, is_exporting=lambda: True, _is_exporting_flag=False)
    monkeypatch.setattr(masks, "torch", SimpleNamespace(Tensor=torch.Tensor, compiler=compiler))
    torch._dynamo.reset()
    assert torch.compile(lambda: masks._implied(**NOT_NEEDED[name]), backend="eager", fullgraph=True)()


@pytest.mark.parametrize(("queries", "keys", "offset"), [(1, 9, 3), (5, 5, 0)])
def test_a_static_cache_keeps_its_mask(queries, keys, offset):
    """Keys behind the last one written are zeros, not absent; only a mask says so, and the length is a tensor that nothing may read."""
    torch._dynamo.reset()
    made = torch.compile(lambda q: dtkernels_mask(batch_size=1, q_length=queries, kv_length=keys, q_offset=q), backend="eager", fullgraph=True)
    mask = made(torch.tensor(offset))
    assert mask is not None and torch.equal(mask[0, 0], torch.ones(queries, keys, dtype=torch.bool).tril(offset))


@pytest.mark.parametrize("given", [{}, PADDED], ids=["no mask", "padded"])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_layers_compiled_by_themselves(name, given):
    """Nothing around them is traced: neither the mask nor what transformers was asked to record."""
    model = MODELS[name]().eval()
    layers = (model.model.decoder if name == "opt" else model.model).layers
    with torch.no_grad(), patched(model, ops=["attention"]):
        expected = model(IDS, **given, use_cache=False).logits
        torch._dynamo.reset()
        for layer in layers:
            layer.compile(backend="eager", fullgraph=True)
        logits = model(IDS, **given, use_cache=False).logits
    torch.testing.assert_close(logits[:, :8], expected[:, :8], atol=1e-5, rtol=1e-5)


def test_layers_compiled_by_themselves_return_weights_that_are_asked_for():
    model = MODELS["llama"]().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, use_cache=False, output_attentions=True).attentions
        with patched(model, ops=["attention"]):
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer.compile(backend="eager")
            model(IDS, use_cache=False)
            weights = model(IDS, use_cache=False, output_attentions=True).attentions
    for found, right in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
