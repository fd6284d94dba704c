"""Small random Hugging Face models, patched and unpatched: same logits, gradients and generated tokens; same model after."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import PatchError, apply_to, patched

from dtkernels import ops

TOKENS = 97
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    **SPECIAL,
}


def bert():
    return transformers.BertModel(transformers.BertConfig(**TINY))


def llama(**more):
    config = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **more}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def mistral():
    config = {**TINY, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**config))


def opt():
    config = {key: value for key, value in TINY.items() if key != "intermediate_size"}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**config, ffn_dim=48, word_embed_proj_dim=32))


def gpt2():
    config = transformers.GPT2Config(vocab_size=TOKENS, n_embd=32, n_layer=2, n_head=2, n_positions=64, **SPECIAL)
    return transformers.GPT2LMHeadModel(config)


def t5():
    sizes = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def falcon():
    config = {key: value for key, value in TINY.items() if key != "intermediate_size"}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**config))


class Encoder(torch.nn.Module):
    """A transformers model inside a module of somebody else's."""

    def __init__(self):
        super().__init__()
        self.head, self.backbone = torch.nn.Linear(32, 3), bert()

    def forward(self, **batch):
        return self.head(self.backbone(**batch)[0]), None


def made(build):
    torch.manual_seed(0)
    return build().eval()


def batch(model, padded=True):
    """Two sequences: the first padded on the left, the second on the right."""
    ids = torch.randint(3, TOKENS, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2], mask[1, -3:] = 0, 0
    extra = {"decoder_input_ids": ids[:, :4]} if isinstance(model, transformers.T5ForConditionalGeneration) else {}
    return {"input_ids": ids, "attention_mask": mask, **extra}


def state(model):
    """What a patch might leave behind: every module's own attributes and every config's values."""
    modules = [{key: id(value) for key, value in vars(module).items()} for module in model.modules()]
    configs = [dict(vars(module.config)) for module in model.modules() if hasattr(module, "config")]
    return modules, configs


DECODERS = [llama, mistral, opt, gpt2]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("build", [bert, *DECODERS, Encoder])
def test_logits_agree_and_the_model_is_the_same_after(build, padded):
    model = made(build)
    given, before = batch(model, padded), state(model)
    with torch.no_grad():
        expected = model(**given)[0]
        with patched(model) as report:
            torch.testing.assert_close(model(**given)[0], expected, atol=1e-5, rtol=1e-5)
        assert report.calls["attention"] == 2 and not report.fallbacks and not report.skipped
        assert state(model) == before
        assert torch.equal(model(**given)[0], expected)


def test_relu_of_opt_and_t5_is_patched_if_asked_for():
    for build in (opt, t5):
        model = made(build)
        with patched(model, ops="relu") as report, torch.no_grad():
            model(**batch(model))
        assert report.calls["relu"] == (2 if build is opt else 4)


@pytest.mark.parametrize("build", [bert, llama])
def test_gradients_agree(build):
    model = made(build)
    given = batch(model)

    def gradients():
        model.zero_grad()
        model(**given)[0].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with patched(model) as report:
        found = gradients()
    assert report.calls["attention"] == 2 and not report.fallbacks
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("build", [opt, llama])
def test_generation_is_identical(build, cache):
    model = made(build)
    ids = batch(model)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # generation pads on the left
    more = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}

    def tokens():
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False, **more)
        return out.tolist()

    expected = tokens()
    with patched(model) as report:
        assert tokens() == expected
    assert report.calls["attention"] == 2 * 5 and not report.fallbacks


def test_training_with_dropout_gives_the_same_numbers():
    model = made(lambda: llama(attention_dropout=0.3)).train()
    given = batch(model)
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(model(**given)[0])
        report = apply_to(model, ops="attention")
    assert torch.equal(*outputs)
    assert report.fallbacks == {"dropout": 2} and "dropout: 2" in str(report)


def test_user_float_masks_are_passed_through():
    model = made(llama)
    ids = batch(model)["input_ids"]
    mask = torch.full((2, 1, 7, 7), torch.finfo(torch.float32).min).triu(1)
    mask[:, :, 3:, 0] = -1.5
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask)[0]
        with patched(model) as report:
            torch.testing.assert_close(model(input_ids=ids, attention_mask=mask)[0], expected, atol=1e-5, rtol=1e-5)
    assert not report.fallbacks


def test_attention_weights_on_request_come_from_eager():
    model = made(bert)
    with patched(model) as report, torch.no_grad():
        weights = model(**batch(model), output_attentions=True).attentions
    assert [tuple(w.shape) for w in weights] == [(2, 2, 7, 7)] * 2
    assert report.fallbacks == {"output_attentions": 2}


def test_attention_weights_come_where_the_model_does_not_hand_on_that_they_are_wanted():
    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 32}
    model = made(lambda: transformers.GPTBigCodeForCausalLM._from_config(transformers.GPTBigCodeConfig(**sizes), attn_implementation="eager"))
    given = {"input_ids": torch.arange(7)[None], "output_attentions": True}
    with torch.no_grad():
        expected = model(**given).attentions
        with patched(model) as report:
            found = model(**given).attentions
    assert len(expected) == 2 and report.fallbacks == {"output_attentions": 2}
    torch.testing.assert_close(found, expected)


def test_a_second_call_says_already_and_dry_run_changes_nothing():
    model = made(opt)
    before = state(model)
    assert {row.state for row in apply_to(model, dry_run=True).rows} == {"would patch"}
    assert state(model) == before
    first = apply_to(model)
    inside = state(model)
    second = apply_to(model)
    assert {row.state for row in second.rows} == {"already"} and len(second.rows) == 3
    second.undo()
    assert state(model) == inside
    first.undo()
    assert state(model) == before


def test_undo_leaves_a_later_choice_alone():
    model = made(llama)
    report = apply_to(model)
    model.set_attn_implementation("eager")
    report.undo()
    assert model.config._attn_implementation == "eager"


def test_models_that_cannot_switch_are_skipped_and_strict_says_so():
    model = made(falcon)
    before = state(model)
    report = apply_to(model, ops="attention")
    assert [row.reason for row in report.skipped] == ["FalconForCausalLM does not use transformers' AttentionInterface"]
    with pytest.raises(PatchError, match="^strict: skipped attention in the model: FalconForCausalLM does not use"):
        apply_to(model, ops="attention", strict=True)
    assert state(model) == before


def test_models_that_must_return_attention_weights_are_skipped():
    model = made(lambda: llama(attn_implementation="eager"))
    model.config.output_attentions = True
    assert "only eager" in apply_to(model, ops="attention", dry_run=True).skipped[0].reason
    assert {row.state for row in apply_to(model, ops="attention").rows} == {"skipped"}
    assert model.config._attn_implementation == "eager"


class SparseAttention(torch.nn.Module):
    def forward(self, x):
        return x if self.config._attn_implementation in ("eager", "sdpa") else -x


def test_code_that_treats_sdpa_specially_is_skipped():
    model = made(llama)
    model.model.sparse = SparseAttention()
    assert {row.reason for row in apply_to(model).skipped} == {"SparseAttention treats 'sdpa' unlike other names"}
    assert model.config._attn_implementation == "sdpa"


def test_sub_configs_are_switched_and_restored():
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**TINY), transformers.BertConfig(**TINY, is_decoder=True, add_cross_attention=True)
    )
    model = made(lambda: transformers.EncoderDecoderModel(config=config))

    def names():
        return [c._attn_implementation for c in (model.config, model.config.encoder, model.config.decoder)]

    before, old = state(model), names()
    report = apply_to(model, ops="attention")
    assert len(report.patched) == 6 and names()[1:] == ["dtkernels"] * 2
    report.undo()
    assert names() == old and state(model) == before


def test_copies_and_saved_models_are_as_before(tmp_path):
    model = made(opt)
    given = batch(model)
    model.generation_config.pad_token_id = 0
    with patched(model), torch.no_grad():
        twin = copy.deepcopy(model)
        torch.testing.assert_close(twin(**given)[0], model(**given)[0])
        model.save_pretrained(tmp_path)
    assert "dtkernels" not in (tmp_path / "config.json").read_text()
    again = transformers.OPTForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**given)[0], model(**given)[0])


def test_the_name_works_without_apply_to():
    model = made(lambda: llama(attn_implementation="dtkernels"))
    given = batch(model)
    with torch.no_grad():
        ours = model(**given)[0]
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(ours, model(**given)[0], atol=1e-5, rtol=1e-5)


def test_the_patch_breaks_no_graph(monkeypatch):
    """Traceable ops in place of ours: what is checked here is the way to the op and the counting around it."""

    def attention(q, k, v, mask=None, *, causal=False, scale=None, softcap=None, window=None, offset=0):
        if window is not None:
            assert window == (None, 0), "padding of a decoder"
            mask = mask & (torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + offset)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    monkeypatch.setattr(ops, "attention", attention)
    monkeypatch.setattr(ops, "relu", torch.relu)
    model = made(opt)
    given = batch(model)
    with torch.no_grad():
        expected = model(**given)[0]
        apply_to(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(**given)[0], expected, atol=1e-5, rtol=1e-5)
