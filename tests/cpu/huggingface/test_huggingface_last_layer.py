"""The loss from hidden states: the same losses and gradients, and logits only where they are read."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to, patched
from dtkernels.integrations.huggingface.layers.last_layer import LazyLogits

from dtkernels import ops

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(2))
LABELS = IDS.clone().index_fill_(1, torch.tensor([0, 4]), -100)
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=3.0)),
    "granite": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=4.0)),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.25)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES)),  # its last layer has a bias
}


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def made(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(0.1)
    return model


def step(model, **given):
    model.zero_grad()
    outputs = model(IDS, labels=LABELS, use_cache=False, **given)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": torch.tensor(11)}, {"num_items_in_batch": 7}], ids=["mean", "tensor", "number"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_same_without_logits(name, given):
    model = made(name)
    right, gradients = step(model, **given)
    with patched(model, ops=["linear_cross_entropy"]) as report:
        found, ours = step(model, **given)
        assert type(found.logits) is LazyLogits and found.logits.made is None and isinstance(found.logits, torch.Tensor)
        assert (found.logits.shape, found.logits.dtype) == (right.logits.shape, right.logits.dtype) and found.logits.requires_grad
        torch.testing.assert_close(found.logits.sum(-1), right.logits.sum(-1))  # made when read
    torch.testing.assert_close(found.loss, right.loss)
    assert ours.keys() == gradients.keys() and report.calls == {"linear_cross_entropy": 1} and not report.fallbacks
    for key, wanted in gradients.items():
        torch.testing.assert_close(ours[key], wanted, atol=1e-5, rtol=1e-4)
    assert "forward" not in vars(model.lm_head) and "_loss_function" not in vars(model)
    assert torch.equal(step(model, **given)[0].loss, right.loss)


def test_logits_that_are_read_have_their_gradient():
    model = made("gemma2")
    model(IDS, use_cache=False).logits.square().mean().backward()
    right = model.lm_head.weight.grad.clone()
    model.zero_grad()
    with patched(model, ops=["linear_cross_entropy"]):
        model(IDS, use_cache=False).logits.square().mean().backward()
    torch.testing.assert_close(model.lm_head.weight.grad, right)


def test_inference_and_models_on_a_cpu_keep_their_path(monkeypatch):
    model = made("llama")
    right = model(IDS, labels=LABELS)
    with patched(model, ops=["linear_cross_entropy"]) as report:
        with torch.no_grad():
            assert type(model(IDS, labels=LABELS).logits) is torch.Tensor
        assert type(model.eval()(IDS).logits) is torch.Tensor
        model.train()
        monkeypatch.delenv("DTKERNELS_FALLBACK")
        found = model(IDS, labels=LABELS)
        assert type(found.logits) is torch.Tensor and torch.equal(found.loss, right.loss)
    assert list(report.fallbacks) == ["no kernel runs on a CPU"]


def test_all_and_auto_leave_the_outputs_as_they_are():
    model = made("llama")
    for asked in ("all", "auto"):
        with patched(model, ops=asked):
            assert type(model(IDS, labels=LABELS).logits) is torch.Tensor
    with patched(model, ops=["auto", "linear_cross_entropy"]) as report:
        step(model)
        assert report.calls["linear_cross_entropy"] == 1
        assert apply_to(model, ops=["linear_cross_entropy"]).already


def test_copies_and_hooks_and_autocast():
    model = made("llama")
    report = apply_to(model, ops=["linear_cross_entropy"])
    right, gradients = step(model)
    _, ours = step(copy.deepcopy(model))
    for key, wanted in gradients.items():
        torch.testing.assert_close(ours[key], wanted)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = step(model)
    assert found.logits.dtype == torch.bfloat16
    torch.testing.assert_close(found.loss, right.loss, atol=0.05, rtol=0.05)
    report.undo()


def adapted(base="llama", adapters=("default",), **more):
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": ["lm_head"], "init_lora_weights": False, **more}
    model = peft.get_peft_model(made(base), peft.LoraConfig(**config))
    for name in adapters[1:]:
        model.add_adapter(name, peft.LoraConfig(**{**config, "r": 3}))
    model.base_model.set_adapter(list(adapters))
    return model


@pytest.mark.parametrize("asked", [["linear_cross_entropy"], ["lora", "linear_cross_entropy"]], ids=["alone", "and lora"])
@pytest.mark.parametrize("given", [{}, {"base": "gemma2"}, {"adapters": ("default", "other")}, {"lora_dropout": 0.5}], ids=["one", "capped", "two", "dropout"])
def test_an_adapter_on_the_last_layer(given, asked):
    """Gradients reach the adapters and the layers before, and the weight has none."""
    model, head = adapted(**given), "base_model.model.lm_head"
    torch.manual_seed(1)
    right, gradients = step(model)
    with patched(model, ops=asked) as report:
        torch.manual_seed(1)
        found, ours = step(model)
        assert type(found.logits) is LazyLogits and found.logits.made is None
        torch.testing.assert_close(found.logits.sum(-1), right.logits.sum(-1))
    torch.testing.assert_close(found.loss, right.loss)
    assert report.calls["linear_cross_entropy"] == 1 and not report.fallbacks and ours.keys() == gradients.keys()
    assert any("lora_A" in key for key in ours) and not any("base_layer" in key for key in ours)
    for key, wanted in gradients.items():
        torch.testing.assert_close(ours[key], wanted, atol=1e-5, rtol=1e-4)
    assert "forward" not in vars(model.get_submodule(head))


def test_adapters_that_are_merged_disabled_or_of_another_kind():
    model = adapted()
    model.get_base_model().model.embed_tokens.weight.requires_grad_()  # without adapters something must learn

    def agrees():
        found = step(model)[0]
        assert type(found.logits) is LazyLogits and found.logits.made is None
        torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten()))

    with patched(model, ops=["linear_cross_entropy"]) as report:
        with model.disable_adapter():
            agrees()
        model.merge_adapter()
        agrees()
    assert not report.fallbacks
    model = adapted(use_dora=True)
    right = step(model)[0].loss
    with patched(model, ops=["linear_cross_entropy"]) as report:
        assert torch.equal(step(model)[0].loss, right)
    assert "a variant of LoRA such as DoRA" in str(report) and not report.patched


def test_what_the_op_is_given(monkeypatch):
    seen, op = [], ops.linear_cross_entropy
    monkeypatch.setattr(ops, "linear_cross_entropy", lambda *args, **given: seen.append(given) or op(*args, **given))
    with patched(made("gemma2"), ops=["linear_cross_entropy"]) as _:
        pass
    model = made("gemma2")
    with patched(model, ops=["linear_cross_entropy"]):
        step(model)
    assert seen == [{"softcap": pytest.approx(3.0), "ignore_index": -100, "reduction": "mean", "shift": True}]
