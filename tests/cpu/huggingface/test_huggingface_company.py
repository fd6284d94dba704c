"""Patched models in company: accelerate's offload, gradient checkpointing, Liger's patches, torch's own copies."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to, patched

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def llama(**more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, **IDS, **more)).eval()


def opt():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64, **IDS)).eval()


GIVEN = {"input_ids": torch.arange(3, 21).view(2, 9)}


@pytest.mark.parametrize("first", ["hooks", "patch"])
def test_offloaded_models_run_patched_whichever_came_first(first):
    accelerate = pytest.importorskip("accelerate")
    model = opt()
    with torch.no_grad():
        expected = model(**GIVEN).logits
        if first == "patch":
            report = apply_to(model, ops=["attention", "relu"])
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        if first == "hooks":
            report = apply_to(model, ops=["attention", "relu"])
        assert {p.device.type for p in model.parameters()} == {"meta"}  # weights come and go
        torch.testing.assert_close(model(**GIVEN).logits, expected, atol=1e-5, rtol=1e-5)
        assert report.calls["attention"] == report.calls["relu"] == 2 and not report.fallbacks
        report.undo()
        torch.testing.assert_close(model(**GIVEN).logits, expected, atol=1e-5, rtol=1e-5)
        assert report.calls["attention"] == 2


def test_gradient_checkpointing_gives_the_same_gradients():
    model = llama().train()
    model.gradient_checkpointing_enable()

    def gradients():
        model.zero_grad()
        model(**GIVEN, labels=GIVEN["input_ids"]).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with patched(model) as report:
        found = gradients()
    assert report.calls["attention"] == 4 and not report.fallbacks  # each layer's forward twice
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.fixture
def modeling(monkeypatch):
    """Liger changes the modeling file too: all of it comes back after the test."""
    file = transformers.models.llama.modeling_llama
    for name, value in dict(vars(file)).items():
        if getattr(value, "__module__", None) == file.__name__:
            monkeypatch.setattr(file, name, value)
    return file


def replaced_by(model) -> dict[str, object]:
    return {name: vars(module)["forward"] for name, module in model.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize("ops", ["auto", "all"])
def test_liger_and_the_patch_stand_beside_each_other(modeling, ops):
    """Liger's kernels need a GPU; here it is seen that neither patch touches what the other one replaced."""
    liger = pytest.importorskip("liger_kernel.transformers")
    model = llama()
    liger.apply_liger_kernel_to_llama(model=model)
    theirs, rotary = replaced_by(model), modeling.apply_rotary_pos_emb
    assert theirs and rotary.__module__.startswith("liger"), "Liger replaces forwards of instances and a function of the file"
    report = apply_to(model, ops=ops)
    patched_ops = [row.op for row in report.patched]
    assert patched_ops.count("attention") == 2 and set(patched_ops) == {"attention"}
    for name, forward in theirs.items():
        assert vars(model.get_submodule(name))["forward"] is forward
    if ops == "all":
        reasons = {row.op: row.reason for row in report.skipped}
        assert {row.op for row in report.skipped} == {"rmsnorm", "swiglu", "rope", "cross_entropy"}  # Liger's forward of the model has a loss of its own
        assert all("replaced by somebody else" in reason for reason in reasons.values()), reasons
    report.undo()
    assert model.config._attn_implementation == "sdpa" and replaced_by(model) == theirs and modeling.apply_rotary_pos_emb is rotary
