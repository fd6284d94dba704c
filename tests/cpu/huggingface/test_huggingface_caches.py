"""Caches of transformers with dtkernels' attention: sliding, quantized, and continuous batching over packed sequences and pages."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import continuous_batching, patched
from dtkernels.integrations.huggingface.attention import attention_function
from dtkernels.integrations.huggingface.attention.continuous_batching import packed_attention
from dtkernels.integrations.huggingface.attention.masks import dtkernels_mask
from dtkernels.integrations.huggingface.attention.visible_keys import visible_keys_of
from dtkernels.integrations.huggingface.generation.static_arguments import put_together, take_apart
from transformers.masking_utils import sdpa_mask

import dtkernels

try:
    from transformers.generation import ContinuousBatchingConfig
except ImportError:
    ContinuousBatchingConfig = None

SMALL = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
         "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
PROMPTS = [[5, 9, 11, 23, 8, 31, 7], [17, 3], [44, 45, 46, 47]]


def model_of(name: str, **more):
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SMALL, **more)).eval()


CACHES = {
    "sliding": ("Mistral", {"sliding_window": 4}, {}),
    "sliding and static": ("Mistral", {"sliding_window": 4}, {"cache_implementation": "static", "disable_compile": True}),
    "static": ("Llama", {}, {"cache_implementation": "static", "disable_compile": True}),
    "dynamic": ("Llama", {}, {}),
    "quantized": ("Llama", {}, {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}),
}


@pytest.mark.parametrize("name", CACHES)
def test_generated_tokens_are_the_same(name, monkeypatch):
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    kind, sizes, more = CACHES[name]
    if name == "quantized" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip(f"transformers {transformers.__version__} has no quantized cache in float8 without another package")
    model, ids = model_of(kind, **sizes), torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    flags = torch.ones_like(ids)
    flags[0, :2] = 0  # padding
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, "attention_mask": flags, **more}
    expected = model.generate(ids, **asked)
    numbers, read = [], attention_function.visible_keys_of
    monkeypatch.setattr(attention_function, "visible_keys_of", lambda mask, *sizes: numbers.append(mask is None or read(mask, *sizes) is not None) or read(mask, *sizes))
    with patched(model) as report:
        found = model.generate(ids, **asked)
    assert len(numbers) >= 12 and all(numbers)  # no layer's mask is a matrix to the op
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.sequences, expected.sequences)
    assert report.calls["attention"] >= 12 and not report.fallbacks


@pytest.mark.parametrize("queries", [1, 8])
def test_a_static_caches_mask_says_it_still_after_generate_made_it_contiguous(queries):
    """Of one query the place is a tensor, which a graph of a step reads; a compiled model takes the matrix. A write takes what it says away."""
    flags = torch.ones(2, 8, dtype=torch.bool).index_put_((torch.tensor([0, 1]), torch.tensor([0, 5])), torch.tensor(False))
    given = {"batch_size": 2, "q_length": queries, "kv_length": 8, "q_offset": 8 - queries, "attention_mask": flags, "allow_is_causal_skip": False}
    mask, right = dtkernels_mask(**given).contiguous(), sdpa_mask(**given)
    reach = visible_keys_of(mask, queries, 8)
    assert type(mask) is torch.Tensor and mask.is_contiguous() and torch.equal(mask, right)
    assert torch.equal(reach.matrix(2, queries, 8, "cpu"), right) and isinstance(reach.offset, torch.Tensor) == (queries == 1)
    assert not torch.compile(lambda m: visible_keys_of(m, queries, 8) is not None, backend="eager", fullgraph=True)(mask)
    held: list[torch.Tensor] = []
    structure = take_apart({"attention_mask": mask}, None, held)
    assert [t.shape for t in held] == [*([(1,)] if queries == 1 else []), (2, 1, 1, 8)]
    again = put_together(structure, held, None)["attention_mask"]
    assert visible_keys_of(again, queries, 8) is not None and torch.equal(again, right)
    mask[..., 2] = False
    written: list[torch.Tensor] = []
    take_apart(mask, None, written)
    assert visible_keys_of(mask, queries, 8) is None and len(written) == 1 and written[0] is mask


@pytest.mark.skipif(ContinuousBatchingConfig is None, reason=f"this transformers, {transformers.__version__}, has another continuous batching")
@pytest.mark.parametrize("kind, more", [("Llama", {}), ("Mistral", {"sliding_window": 4})])
def test_continuous_batching_generates_what_sdpa_does(kind, more):
    model = model_of(kind, **more)
    config = transformers.GenerationConfig(max_new_tokens=4, eos_token_id=-1, pad_token_id=0, do_sample=False)

    def tokens():
        small = ContinuousBatchingConfig(num_blocks=8, page_size=16)
        outputs = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=small, progress_bar=False)
        return [outputs[key].generated_tokens for key in sorted(outputs)]

    expected, before = tokens(), dtkernels.paths().get("attention_varlen", {}).get("interpreter", 0)
    with continuous_batching(model):
        found = tokens()
    assert found == expected and len(found) == 3
    assert dtkernels.paths()["attention_varlen"]["interpreter"] - before >= 8
    assert model.config._attn_implementation == "sdpa"


def test_a_step_over_pages_appends_its_tokens():
    """What transformers passes where it decodes over a table of pages."""
    torch.manual_seed(0)
    module, lengths = torch.nn.Module(), torch.tensor([5, 9, 1])  # the token of the step included
    query, key, value = torch.randn(1, 6, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    pages_k, pages_v = torch.randn(8, 4, 2, 16), torch.randn(8, 4, 2, 16)
    table = torch.tensor([[3, 1, -1], [0, 5, 7], [2, -1, -1], [6, 6, 6]], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]).int()
    given = {"cu_seq_lens_q": torch.arange(4).int(), "cu_seq_lens_k": starts, "scaling": 0.25, "sliding_window": None}
    found, weights = packed_attention(module, query, key, value, None, block_table=table, k_cache=pages_k, v_cache=pages_v, **given)
    rows = [torch.arange(3).repeat_interleave(lengths), torch.cat([torch.arange(n) for n in lengths])]
    k, v = (pages[table[rows[0], rows[1] // 4].long(), rows[1] % 4] for pages in (pages_k, pages_v))
    assert torch.equal(k[lengths.cumsum(0) - 1], key[0].transpose(0, 1)) and weights is None
    wanted, _ = packed_attention(module, query, *(t.transpose(0, 1)[None] for t in (k, v)), None, **given)
    assert found.shape == (1, 3, 6, 16)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_call_outside_of_continuous_batching_is_one_line():
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="a call outside of continuous batching; allowed: model.generate_batch"):
        packed_attention(torch.nn.Module(), q, q, q, None)
    with pytest.raises(TypeError, match="continuous_batching takes a model of transformers; found Linear"), continuous_batching(torch.nn.Linear(2, 2)):
        pass
