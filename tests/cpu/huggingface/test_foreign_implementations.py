"""Attention and experts that somebody else registered with transformers: they may compute anything, so they are left alone unless asked for by name."""

import functools

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import PatchError, apply_to
from dtkernels.integrations.huggingface.attention.foreign_implementations import foreign_attention
from huggingface_models import GROUPED, SIZES, of, state
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
WHY = ", may compute something else; patched only if attention is asked for by name"


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    """And what is registered here is so for one test."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))


def near(module, query, key, value, mask, scaling=None, dropout=0.0, **others):
    """Nearer keys count more."""
    bias = -0.3 * (torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])).abs()
    bias = bias.masked_fill(torch.ones_like(bias).triu(1).bool(), -torch.inf)
    repeated = [x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value)]
    return F.scaled_dot_product_attention(query, *repeated, attn_mask=bias, scale=scaling).transpose(1, 2).contiguous(), None


@functools.wraps(sdpa_attention_forward)
def doubled(*args, **kwargs):
    out, weights = sdpa_attention_forward(*args, **kwargs)
    return 2 * out, weights


def llama(implementation="sdpa"):
    model = of("Llama", **GROUPED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else None
    model.set_attn_implementation(implementation)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def attention_rows(report):
    return [row for row in report.rows if row.op == "attention"]


@pytest.mark.parametrize("ops", ["auto", "all", ["auto", "rmsnorm"]])
def test_it_is_left_alone_and_the_report_says_why(ops):
    """It was replaced silently: 2.8 off, of logits up to 3.5."""
    AttentionInterface.register("near", near)
    model = llama("near")
    right, before = logits(model), state(model)
    assert not torch.allclose(right, logits(llama()), atol=1e-2)
    report = apply_to(model, ops=ops)
    assert {(row.state, row.reason) for row in attention_rows(report)} == {("skipped", "attention 'near', which transformers does not have" + WHY)}
    assert "attention 'near', which" in str(report) and report.patched and model.config._attn_implementation == "near"
    torch.testing.assert_close(logits(model), right, atol=1e-4, rtol=1e-4)
    report.undo()
    assert state(model) == before and torch.equal(logits(model), right)
    with pytest.raises(PatchError, match="^strict: skipped attention in model.layers.0.self_attn: attention 'near', which transformers does not have"):
        apply_to(model, ops=["auto"], strict=True)
    assert state(model) == before


@pytest.mark.parametrize("ops", ["attention", ["auto", "attention"]])
def test_it_is_replaced_if_attention_is_asked_for_by_name(ops):
    AttentionInterface.register("near", near)
    model, plain = llama("near"), llama()
    model(IDS, output_attentions=True)  # transformers adds its hooks in the first such call
    right, before = logits(model), state(model)
    assert {row.state for row in attention_rows(apply_to(model, ops=ops, dry_run=True))} == {"would patch"} and state(model) == before
    report = apply_to(model, ops=ops)
    said = "asked for by name in place of attention 'near', which transformers does not have; other calls take transformers' own"
    assert {(row.state, row.reason) for row in attention_rows(report)} == {("patched", said)} and said in str(report)
    torch.testing.assert_close(logits(model), logits(plain), atol=1e-4, rtol=1e-4)
    out = model(IDS, use_cache=False, output_attentions=True)
    torch.testing.assert_close(out.logits, logits(plain), atol=1e-4, rtol=1e-4)
    report.undo()
    assert state(model) == before and torch.equal(logits(model), right)


def masks_of_all(*args, **kwargs):
    return None


CHANGES = {
    "attention 'sdpa', which somebody else registered": (lambda patch: AttentionInterface.register("sdpa", doubled), "sdpa"),
    "attention 'sdpa', which somebody else registered ": (lambda patch: patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", functools.partial(doubled)), "sdpa"),
    "attention 'eager', which somebody else registered": (lambda patch: AttentionInterface.register("eager", doubled), "eager"),
    "another near in its modeling file": (lambda patch: patch.setattr(modeling_llama, "eager_attention_forward", near), "eager"),
    "masks for 'sdpa', which somebody else registered": (lambda patch: AttentionMaskInterface.register("sdpa", masks_of_all), "sdpa"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_name_of_transformers_that_means_something_else(what, monkeypatch):
    change, name = CHANGES[what]
    model = llama(name)
    change(monkeypatch)
    right = logits(model)
    report = apply_to(model)
    assert {(row.state, row.reason) for row in attention_rows(report)} == {("skipped", what.strip() + WHY)}
    torch.testing.assert_close(logits(model), right, atol=1e-4, rtol=1e-4)


def test_transformers_own_and_ours_may_be_replaced():
    cls = modeling_llama.LlamaAttention
    for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "dtkernels", None):
        assert foreign_attention(cls, name) is None and (name is None or foreign_attention(cls, f"paged|{name}") is None)
    for name in ("kernels-community/flash-attn", "sparse", "paged|mine"):
        assert foreign_attention(cls, name) == f"attention {name!r}, which transformers does not have"
    for build in ("eager", "sdpa"):
        assert {row.state for row in attention_rows(apply_to(llama(build)))} == {"patched"}


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_parts_with_a_config_of_their_own(part):
    """One part's attention is somebody else's: the other part is patched."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    parts = transformers.BertConfig(**sizes), transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    torch.manual_seed(0)
    model = transformers.EncoderDecoderModel(config=transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)).eval()
    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", transformers.masking_utils.sdpa_mask)
    getattr(model, part).set_attn_implementation("doubled")

    def run():
        with torch.no_grad():
            return model(input_ids=IDS, decoder_input_ids=IDS[:, :4]).logits

    right, before = run(), state(model)
    report = apply_to(model, ops="auto")
    found = {(row.module.partition(".")[0], row.state) for row in attention_rows(report)}
    assert found == {("encoder", "skipped" if part == "encoder" else "patched"), ("decoder", "skipped" if part == "decoder" else "patched")}
    assert getattr(model.config, part)._attn_implementation == "doubled"
    torch.testing.assert_close(run(), right, atol=1e-4, rtol=1e-4)
    report.undo()
    assert state(model) == before and torch.equal(run(), right)


def test_text_and_vision():
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8, "patch_size": 4}
    parts = {"vision_config": transformers.CLIPVisionConfig(**vision), "text_config": transformers.LlamaConfig(**GROUPED)}
    config = transformers.LlavaConfig(**parts, image_token_index=96)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation({"vision_config": "doubled"})
    given = {"input_ids": torch.cat([torch.full((2, 4), 96), IDS.clamp(max=95)], 1), "pixel_values": torch.randn(2, 3, 8, 8)}
    with torch.no_grad():
        right, before = model(**given).logits, state(model)
        report = apply_to(model)
        states = {("vision" in row.module, row.state) for row in attention_rows(report)}
        assert states == {(True, "skipped"), (False, "patched")} and model.config.vision_config._attn_implementation == "doubled"
        torch.testing.assert_close(model(**given).logits, right, atol=1e-4, rtol=1e-4)
    report.undo()
    assert state(model) == before


def test_experts(monkeypatch):
    moe = pytest.importorskip("transformers.integrations.moe")
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, "half", lambda module, hidden, index, weights: hidden / 2)
    model = of("Mixtral", **GROUPED, num_local_experts=4)
    model.config._experts_implementation = "half"
    right, before = logits(model), state(model)
    report = apply_to(model, ops="all")
    (reason,) = {row.reason for row in report.skipped if row.op == "experts"}
    assert reason == "experts 'half', which somebody else registered, may compute something else; patched only if experts are asked for by name"
    torch.testing.assert_close(logits(model), right, atol=1e-4, rtol=1e-4)
    report.undo()
    report = apply_to(model, ops="experts")
    assert {row.reason for row in report.patched} == {"asked for by name in place of experts 'half', which somebody else registered"}
    assert not torch.allclose(logits(model), right, atol=1e-3)
    report.undo()
    assert state(model) == before
