"""One small random model of each kind of attention: logits, gradients and generated tokens, patched and unpatched.

The op runs its torch reference here: what is tested is that every mask, cache, cap and sink of a model reaches it, and
that nothing takes another way. test_huggingface_models.py runs kernels.
"""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import patched, unpatched_calls

TOKENS = 97
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {"vocab_size": TOKENS, **SIZES, "max_position_embeddings": 64, **IDS}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
SLIDING = {**GROUPED, "sliding_window": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CAPPED = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
GPT2 = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BIRD = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
T5 = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
WHISPER = {side + key: n for side in ("encoder_", "decoder_") for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}
AUDIO = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 40, "suppress_tokens": None, "begin_suppress_tokens": None}


def of(name: str, kind: str = "ForCausalLM", **config):
    return getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**config))


MODELS = {
    "llama": lambda: of("Llama", **GROUPED),
    "mistral": lambda: of("Mistral", **SLIDING),
    "gemma2": lambda: of("Gemma2", **SLIDING, **CAPPED),
    "qwen2": lambda: of("Qwen2", **SLIDING, use_sliding_window=True, max_window_layers=1),
    "qwen3": lambda: of("Qwen3", **GROUPED),
    "qwen2_moe": lambda: of("Qwen2Moe", **GROUPED, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16),
    "gpt2": lambda: of("GPT2", "LMHeadModel", **GPT2, **IDS),
    "opt": lambda: of("OPT", **{k: v for k, v in SMALL.items() if k != "intermediate_size"}, ffn_dim=48, word_embed_proj_dim=32),
    "gpt_oss": lambda: of("GptOss", **SLIDING, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager"),
    "deepseek_v3": lambda: of("DeepseekV3", **SMALL, **LATENT, **EXPERTS, **GROUPS, num_key_value_heads=4),
    "t5": lambda: of("T5", "ForConditionalGeneration", **T5, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
    "bigbird_pegasus": lambda: of("BigBirdPegasus", **BIRD, vocab_size=TOKENS, max_position_embeddings=64, **IDS),
    "bert": lambda: of("Bert", "Model", **SMALL),
    "modernbert": lambda: of("ModernBert", "Model", **SMALL, local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    "bart": lambda: of(
        "Bart", "ForConditionalGeneration", vocab_size=TOKENS, d_model=32, **BART, max_position_embeddings=64, forced_eos_token_id=None, **IDS
    ),
    "swin": lambda: of("Swin", "ForImageClassification", **SWIN, num_labels=5),  # its position bias is a float mask
    "vit": lambda: of("ViT", "ForImageClassification", **SIZES, image_size=16, patch_size=4, num_labels=5),
    "whisper": lambda: of(
        "Whisper", "ForConditionalGeneration", vocab_size=TOKENS, d_model=32, **WHISPER, **AUDIO, decoder_start_token_id=1, **IDS
    ),
}
IMAGES = ("vit", "swin")
GENERATE = [name for name in MODELS if name not in ("bert", "modernbert", *IMAGES)]


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def made(name: str):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(2 if name == "t5" else 4)  # so that attention is far from uniform, and caps and sinks tell
    return model


def batch(name: str, padding: str, generating: bool = False) -> dict[str, torch.Tensor]:
    """Two sequences of nine tokens, padded as told: on the left, with holes on every side, or not."""
    generator = torch.Generator().manual_seed(1)
    if name in IMAGES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, TOKENS, (2, 9), generator=generator)
    if name == "whisper":
        features = {"input_features": torch.randn(2, 8, 24, generator=generator)}
        return features if generating else features | {"decoder_input_ids": ids}
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :3] = 0
    if padding == "holes":
        mask[0, :2], mask[1, 3], mask[1, 6:8] = 0, 0, 0
    extra = {"decoder_input_ids": ids[:, :6]} if name in ("t5", "bart") and not generating else {}
    return {"input_ids": ids, "attention_mask": mask, **extra}


def logits_and_gradients(model, given) -> dict[str, torch.Tensor]:
    """What a training step sees: positions that are padding enter no loss."""
    model.zero_grad()
    logits = model(**given)[0]
    mask = given.get("attention_mask")
    kept = mask if mask is not None and mask.shape == logits.shape[:2] else None
    shown = logits if kept is None else logits[kept.bool()]
    shown.float().square().mean().backward()
    return {"logits": shown.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def agree(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        scale = max(expected[name].abs().max().item(), 1e-3)
        named = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(found[name], expected[name], atol=5e-5 * scale, rtol=1e-4, msg=named)


PADDINGS = [(name, p) for name in MODELS for p in ("none", "left", "holes") if p == "none" or name not in ("whisper", *IMAGES)]


@pytest.mark.parametrize("name, padding", PADDINGS)
def test_logits_and_gradients_agree(name, padding):
    model, given = made(name), batch(name, padding)
    expected = logits_and_gradients(model, given)
    with patched(model) as report:
        agree(logits_and_gradients(model, given), expected)
    assert report.calls["attention"] >= 2 and not report.fallbacks and not report.skipped
    agree(logits_and_gradients(model, given), expected)


CACHES = {
    "dynamic": {},
    "none": {"use_cache": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 4},
}


FIRST = ("mistral", "gemma2", "gpt_oss")  # these through every cache, the others through the one that is usual


USES = [(name, cache) for name in GENERATE for cache in CACHES if name in FIRST or cache == "dynamic" or (name, cache) == ("t5", "static")]


@pytest.mark.parametrize("name, cache", USES)
def test_generated_tokens_are_the_same(name, cache):
    model, given = made(name), batch(name, "left", generating=True)

    def tokens():
        asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        return model.generate(**given, **asked, **CACHES[cache])

    expected = tokens()
    with patched(model) as report:
        found = tokens()
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.sequences, expected.sequences)
    assert report.calls["attention"] >= 12 and not report.fallbacks


def test_a_model_that_computes_attention_itself_gets_the_masks_it_adds():
    config = transformers.BloomConfig(vocab_size=TOKENS, hidden_size=32, n_layer=2, n_head=4, **IDS)
    results = []
    for name in ("eager", "dtkernels"):
        torch.manual_seed(0)
        model = transformers.BloomForCausalLM._from_config(config, attn_implementation=name).eval()
        results.append({p: logits_and_gradients(model, batch("bloom", p)) for p in ("none", "left", "holes")})
    found, counted = results[1], unpatched_calls.fallbacks
    for padding, expected in results[0].items():
        agree(found[padding], expected)
    assert counted["models of BloomConfig do not use transformers' AttentionInterface"] == 3


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences_do_not_see_each_other(name):
    """Two sequences in one row, told apart by position_ids alone."""
    model = made(name)
    ids = batch(name, "none")["input_ids"][:1]
    given = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]), "use_cache": False}
    expected = logits_and_gradients(model, given)
    alone = model(input_ids=ids[:, 5:], use_cache=False)[0]
    with patched(model) as report:
        agree(logits_and_gradients(model, given), expected)
        torch.testing.assert_close(model(**given)[0][:, 5:], alone, atol=1e-3, rtol=1e-3)
    assert not report.fallbacks
