"""Losses of masked language models and of encoder-decoders: the loss_function of the one, the CrossEntropyLoss that a forward writes of the other."""

import copy
import inspect
import pickle

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to, patched
from dtkernels.integrations.huggingface.generation import recorders
from graph_stand_in import TapeRecorder
from huggingface_models import IDS, SMALL, of, state
from torch import nn

T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0, "dropout_rate": 0.0}
BART = {"vocab_size": 97, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_position_embeddings": 64, **IDS}
MODELS = {
    "CrossEntropyLoss": ("T5", "ForConditionalGeneration", T5),
    "nn.CrossEntropyLoss": ("Electra", "ForMaskedLM", SMALL),
    "loss_function": ("ModernBert", "ForMaskedLM", {**SMALL, "cls_token_id": 1, "sep_token_id": 2}),
    "labels ignored": ("Bert", "ForMaskedLM", SMALL),
}
LABELS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def model_of(name: str):
    kind, head, config = MODELS[name]
    if not hasattr(transformers, kind + head):
        pytest.skip("this version of transformers has no such model")
    return of(kind, head, **config)


def given(name: str, **more) -> dict:
    labels = LABELS.masked_fill(torch.arange(9) % 3 == 1, -100) if name == "labels ignored" else LABELS
    return {"input_ids": LABELS.flip(1), "labels": labels, **more}


def loss_and_gradients(model, **inputs) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_agree_and_the_model_is_the_same_after(name):
    model = model_of(name)
    expected, before, signature = loss_and_gradients(model, **given(name)), state(model), inspect.signature(model.forward)
    with patched(model, ops="cross_entropy") as report:
        for found, wanted in zip(loss_and_gradients(model, **given(name)), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)
        assert report.calls == {"cross_entropy": 1} and not report.fallbacks and not report.skipped
        assert inspect.signature(model.forward) == signature  # a trainer reads which columns of its data a model takes
        assert [row.state for row in apply_to(model, ops="cross_entropy").rows] == ["already"]
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(copied(**given(name)).loss, expected[0], rtol=1e-4, atol=1e-6)
    assert state(model) == before and report.calls["cross_entropy"] == 1


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "loss_function"])
def test_in_bfloat16_and_under_autocast_the_loss_has_the_dtype_that_it_had(name):
    model = model_of(name)
    exact = model(**given(name)).loss
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(**given(name)).loss
        with patched(model, ops="cross_entropy") as report:
            found = model(**given(name)).loss
    assert found.dtype == wanted.dtype and abs(found - exact) <= 2 * abs(wanted - exact) + 1e-3 * exact
    model.bfloat16()
    wanted = model(**given(name)).loss
    with patched(model, ops="cross_entropy") as more:
        found = model(**given(name)).loss
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    assert not report.fallbacks and not more.fallbacks and more.calls["cross_entropy"] == 1


def test_a_masked_loss_is_divided_by_the_items_of_all_batches():
    model = model_of("loss_function")
    logits = model(input_ids=LABELS).logits.detach()
    wanted = model.loss_function(logits, LABELS, 97, num_items_in_batch=torch.tensor(50))
    with patched(model, ops="cross_entropy") as report:
        torch.testing.assert_close(model.loss_function(logits, LABELS, 97, num_items_in_batch=torch.tensor(50)), wanted)
        torch.testing.assert_close(model.loss_function(logits, LABELS.flatten(), 97), model_of("loss_function").loss_function(logits, LABELS.flatten(), 97))
    assert report.calls == {"cross_entropy": 2} and report.fallbacks == {"labels of another shape than the logits": 1}


class Weighted(nn.CrossEntropyLoss):
    def forward(self, logits, target):
        return 2 * super().forward(logits, target)


def test_a_loss_that_was_replaced_later_is_the_one_that_runs(monkeypatch):
    model = model_of("CrossEntropyLoss")
    with patched(model, ops="cross_entropy") as report:
        loss = model(**given("")).loss
        monkeypatch.setattr(transformers.models.t5.modeling_t5, "CrossEntropyLoss", Weighted)
        torch.testing.assert_close(model(**given("")).loss, 2 * loss)
        assert report.fallbacks == {"its modeling file has another CrossEntropyLoss now": 1}


def test_heads_without_a_vocabulary_are_left_alone():
    model = of("Bert", "ForSequenceClassification", **SMALL, num_labels=3)
    assert not apply_to(model, ops="cross_entropy").rows


def test_one_graph_holds_the_own_loss():
    model = model_of("CrossEntropyLoss")
    wanted = model(**given("")).loss
    try:
        torch.compile(model, backend="eager", fullgraph=True)(**given(""))
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"unpatched it is not one graph with these versions: {str(error).splitlines()[0]}")
    with patched(model, ops="cross_entropy"):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(**given("")).loss, wanted)


def test_graphs_come_on_top_of_a_loss(monkeypatch):
    monkeypatch.delenv("DTKERNELS_FALLBACK")
    monkeypatch.setitem(recorders._RECORDERS, "cpu", TapeRecorder())
    model = of("Bart", "ForCausalLM", **BART)
    before, asked = state(model), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    tokens, loss = model.generate(LABELS, **asked), model(**given("")).loss
    report = apply_to(model, ops="cross_entropy", graphs=True)
    torch.testing.assert_close(model(**given("")).loss, loss)
    assert torch.equal(model.generate(LABELS, **asked), tokens)
    assert report.calls["cross_entropy"] >= 1 and {row.op: row.state for row in report.rows}["graphs"] != "skipped"
    report.undo()
    assert state(model) == before
