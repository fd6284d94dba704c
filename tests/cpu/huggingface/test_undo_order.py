"""Several reports on one model, undone in any order: each takes out what it put in, and at the end the model is what it was."""

import copy
import pickle
import types
from itertools import permutations

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to
from dtkernels.integrations.huggingface.patching.call_stats import implementation_before
from huggingface_models import GROUPED, IDS, batch, llama, of, outputs
from torch import nn


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def bart():
    """A forward that writes its loss itself."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0}
    return transformers.BartForCausalLM(transformers.BartConfig(**sizes, **IDS, forced_eos_token_id=None)).eval()


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False))


AUTO, LAST = {"ops": "auto"}, {"ops": ["auto", "linear_cross_entropy"]}
CASES = {
    "two losses": (llama, [AUTO, LAST]),
    "two losses, graphs": (llama, [AUTO, LAST, {"ops": "auto", "graphs": True}]),
    "one by one": (llama, [{"ops": op} for op in ("cross_entropy", "rmsnorm", "linear_cross_entropy", "attention")]),
    "a loss in the forward, graphs": (bart, [AUTO, {"ops": "auto", "graphs": True}]),
    "lora, the last layer": (adapted, [{"ops": "lora"}, {"ops": "cross_entropy"}, LAST]),
}


def held(model):
    """Every module's own attributes and every config's values, the objects themselves: their ids may come again."""
    return [dict(vars(module)) for module in model.modules()], [dict(vars(module.config)) for module in model.modules() if hasattr(module, "config")]


def is_as(model, before) -> bool:
    now = held(model)
    same = all(a.keys() == b.keys() and all(a[key] is b[key] for key in a) for a, b in zip(now[0], before[0], strict=True))
    return same and now[1] == before[1]


@pytest.mark.parametrize("name", CASES)
def test_reports_of_one_model_are_undone_in_any_order(name):
    build, given = CASES[name]
    for order in permutations(range(len(given))):
        model = build()
        before, right = held(model), outputs(model)
        model.zero_grad()
        reports = [apply_to(model, **one) for one in given]
        assert not is_as(model, before)
        for place in order:
            reports[place].undo()
            for ours, theirs in zip(outputs(model), right, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)
            model.zero_grad()
        assert is_as(model, before), order


def test_a_report_that_is_undone_counts_no_more():
    """The last layer's loss had called the loss of the report before, for every call that it did not take itself."""
    model = llama().eval()
    first, second = apply_to(model, ops="cross_entropy"), apply_to(model, ops="linear_cross_entropy")
    outputs(model)
    assert first.calls == {"cross_entropy": 1}
    first.undo()
    outputs(model)
    assert first.calls == {"cross_entropy": 1} and model.loss_function.args[1] is transformers.loss.loss_utils.ForCausalLMLoss
    again = apply_to(model, ops="cross_entropy")
    second.undo()
    again.undo()
    assert "_loss_function" not in vars(model) and "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_of_a_model_with_several_reports(clone):
    model = llama()
    right = outputs(model)
    reports = apply_to(model, ops="cross_entropy"), apply_to(model, ops="linear_cross_entropy")
    twin = clone(model)
    for report in reports:
        report.undo()
    for ours, theirs in zip(outputs(twin), right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)
    assert "_loss_function" in vars(twin) and "_loss_function" not in vars(model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("hooked", ["never", "before", "between"])
def test_two_ops_of_one_sequential(order, hooked):
    """The forward that a hook of accelerate keeps came back only if the first report was undone last."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8), nn.Sigmoid())

    def hook():
        model._hf_hook, model._old_forward = object(), model.forward
        model.forward = types.MethodType(lambda self, *args: self._old_forward(*args), model)

    if hooked == "before":
        hook()
    before = dict(vars(model))
    reports = [apply_to(model, ops="two_mm")]
    if hooked == "between":
        hook()
    reports.append(apply_to(model, ops="gate"))
    for place in order:
        reports[place].undo()
    if hooked == "between":
        assert isinstance(vars(model)["_old_forward"], types.MethodType)
    else:
        assert vars(model).keys() == before.keys() and all(vars(model)[key] is value for key, value in before.items())


def test_a_model_inside_another_one():
    """The outer report had noted that the inner model's attention was ours before."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = transformers.BertConfig(**sizes), transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    model = transformers.EncoderDecoderModel(config=transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts))
    before = held(model)
    inner, outer = apply_to(model.encoder, ops="attention"), apply_to(model, ops="attention")
    assert implementation_before(id(model.config.encoder)) == "sdpa" and {row.state for row in outer.rows} == {"already", "patched"}
    inner.undo()
    outer.undo()
    assert is_as(model, before)


def test_what_others_put_there_meanwhile_stays():
    model = of("Llama", **GROUPED)
    first, second = apply_to(model, ops="cross_entropy"), apply_to(model, ops="linear_cross_entropy")
    model.loss_function = own = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    first.undo()
    second.undo()
    assert vars(model)["_loss_function"] is own
    assert torch.isfinite(model(**batch(model)).loss)
