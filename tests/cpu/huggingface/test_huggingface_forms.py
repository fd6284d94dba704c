"""Rotary embeddings, norms and squared ReLUs of models that differ from Llama's: found by what they compute, same numbers, exact way back."""

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to, patched
from huggingface_models import GROUPED, IDS, SMALL, batch, of, outputs, state
from torch import nn

OPS = ("rmsnorm", "layernorm", "rope", "relu_squared")
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}

#: model -> its config, op -> how many modules of it are patched
MODELS = {
    "Glm": (GROUPED, {"rmsnorm": 5, "rope": 2}),  # neighbours, a part of each head
    "Cohere": ({**GROUPED, "use_qk_norm": True}, {"layernorm": 7, "rope": 2}),  # neighbours; layer norms without bias, of heads too
    "GptOss": ({**GROUPED, **EXPERTS}, {"rmsnorm": 5, "rope": 2}),  # a table of pairs
    "Olmo": (SMALL, {"layernorm": 5, "rope": 2}),  # layer norms without weight
    "Nemotron": ({**GROUPED, "hidden_act": "relu2"}, {"layernorm": 5, "rope": 2, "relu_squared": 2}),  # the weight minus 1, half of each head
    "NanoChat": (GROUPED, {"rmsnorm": 9, "rope": 2, "relu_squared": 2}),  # no weights, negative angles
    "Ernie4_5": (GROUPED, {"rmsnorm": 5, "rope": 2}),
    "DeepseekV2": ({**SMALL, **LATENT, **MIXTURE}, {"rmsnorm": 7, "rope": 2}),  # complex numbers
    "DeepseekV3": ({**SMALL, **LATENT, **MIXTURE}, {"rmsnorm": 7, "rope": 2}),  # neighbours that end in halves
    "Qwen3Next": ({**GROUPED, **EXPERTS, **DELTA}, {"rmsnorm": 8, "rope": 1}),  # a gated norm, a part of each head
    "GPTJ": ({"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64, **IDS}, {"layernorm": 3, "rope": 2}),  # heads last
}


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch, request):
    if "kernels" not in request.keywords:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def made(name):
    if not hasattr(transformers, name + "ForCausalLM"):
        pytest.skip("this version of transformers has no such model")
    return of(name, **MODELS[name][0])


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_agree_and_the_model_is_the_same_after(name):
    model = made(name)
    expected = outputs(model)
    model.zero_grad()
    before = state(model)
    with patched(model, ops=OPS) as report:
        found = outputs(model)
        assert Counter(row.op for row in report.patched) == MODELS[name][1]
        assert not report.skipped and not report.fallbacks
        assert all(report.calls[op] >= n for op, n in MODELS[name][1].items())
    model.zero_grad()
    assert state(model) == before
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=5e-4)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["Glm", "Nemotron", "DeepseekV3"])
def test_kernels_compute_what_the_model_did(name):
    import dtkernels

    model = made(name)
    with torch.no_grad():
        expected = model(**batch(model)).logits
        before = {op: dict(count) for op, count in dtkernels.paths().items()}
        with patched(model, ops=OPS) as report:
            found = model(**batch(model)).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)
    assert not report.fallbacks
    for op in ("rotary", "rotary_pairs", "normalize", "relu_squared"):
        ran, earlier = dtkernels.paths().get(op, {}), before.get(op, {})
        assert ran.get("reference", 0) == earlier.get("reference", 0), f"{op} ran its reference, not a kernel"


@pytest.mark.parametrize("name", ["Olmo", "Cohere"])
def test_in_bfloat16_patched_models_are_as_near_to_float32_as_unpatched_ones(name):
    """Olmo's tables stay in float32."""
    model = made(name)
    with torch.no_grad():
        exact = model(**batch(model)).logits
        model = model.bfloat16()
        theirs = model(**batch(model)).logits.float()
        with patched(model, ops=OPS) as report:
            ours = model(**batch(model)).logits.float()
    assert not report.fallbacks
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()


def test_rotary_functions_that_compute_something_else_are_left_alone(monkeypatch):
    modeling = transformers.models.llama.modeling_llama

    def wrong(q, k, cos, sin, unsqueeze_dim=1):
        """Turn q, and leave k."""
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + modeling.rotate_half(q) * sin, k

    wrong.__module__ = modeling.__name__
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", wrong)
    model = of("Llama", **GROUPED)
    expected = model(**batch(model)).logits
    assert not apply_to(model, ops="rope").rows
    torch.testing.assert_close(model(**batch(model)).logits, expected)


class _Norm(nn.Module):
    """A norm of an unusual kind, that looks like one of the others."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.eps, self.kind = nn.Parameter(torch.rand(8)), 1e-6, kind

    def forward(self, x):
        if self.kind == "median":
            x = x - x.median(-1, keepdim=True).values
        x = x * torch.rsqrt((x.square().sum(-1, keepdim=True) if self.kind == "sum" else x.square().mean(-1, keepdim=True)) + self.eps)
        return (x if self.kind != "training" or not self.training else 2 * x) * (self.weight if self.kind != "doubled" else 2 * self.weight)


class _Squared(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return self.scale * torch.relu(x).square()


@pytest.mark.parametrize("module", [_Norm("median"), _Norm("sum"), _Norm("doubled"), _Norm("training"), _Squared(2.0)], ids=str)
def test_modules_that_compute_nearly_the_same_are_left_alone(module):
    assert not apply_to(module, ops=OPS).rows


def test_calls_that_the_op_does_not_take_go_the_own_way_and_are_counted():
    gated = transformers.models.mamba2.modeling_mamba2.MambaRMSNormGated(16, 8)
    x, gate = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    squared = _Squared(1.0)
    expected = gated(x, gate), gated(x), gated(x.double(), gate.double()), squared(x.double())
    report = apply_to(nn.ModuleList([gated, squared]), ops=OPS)
    assert Counter(row.op for row in report.patched) == {"rmsnorm": 1, "relu_squared": 1}
    for found, wanted in zip((gated(x, gate=gate), gated(x), gated(x.double(), gate.double()), squared(x.double())), expected):
        torch.testing.assert_close(found, wanted)
    assert report.calls == {"rmsnorm": 3, "relu_squared": 1} and report.fallbacks.total() == 3
    report.undo()
    assert "forward" not in vars(gated) and "forward" not in vars(squared)
