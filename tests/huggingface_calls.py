"""Calls of the attention function that transformers calls, beside sdpa's; and small models to compile."""

import torch
import transformers
from dtkernels.integrations.huggingface.attention.attention_function import dtkernels_attention
from dtkernels.integrations.huggingface.patching.call_stats import ATTRIBUTE, CallRecord
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class Attention(torch.nn.Module):
    """What the interface sees of a model's attention module."""

    def __init__(self, groups=1, is_causal=True, original="sdpa", eager=None):
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal
        setattr(self, ATTRIBUTE, CallRecord(original=original, eager=eager))

    @property
    def record(self):
        return getattr(self, ATTRIBUTE)


def inputs(batch=2, heads=4, kv_heads=4, queries=5, keys=5, width=16, value_width=16, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (batch, heads, queries, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, value_width)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def agrees_with_sdpa(module, qkv, mask=None, fallbacks=(), **kwargs):
    """Both functions on the same call; then what was counted."""
    ours, weights = dtkernels_attention(module, *qkv, mask, **kwargs)
    theirs, _ = sdpa_attention_forward(module, *qkv, mask, **kwargs)
    assert weights is None
    assert ours.shape == theirs.shape and ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    assert module.record.calls == 1
    assert sorted(module.record.fallbacks) == sorted(fallbacks)


def inline_access(query, key, value, mask, softcap=None, sinks=None):
    """Attention as modeling files write it."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores + torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
}


def training(name: str):
    """A model in training. OPT stays in eval mode: in training some versions of transformers drop layers by a random tensor, which no single graph holds."""
    return MODELS[name]().train(name != "opt")


IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(2))
PADDED = {"attention_mask": torch.ones(2, 9, dtype=torch.long).index_fill_(1, torch.tensor([8]), 0)}


def matrices(graph) -> list[str]:
    """The nodes of a graph that make a flag for each query and key; views of less are none."""
    found = []
    for node in graph.nodes:
        made = node.meta.get("val")
        if isinstance(made, torch.Tensor) and made.dtype == torch.bool and made.dim() >= 2 and str(made.shape[-1]) == str(made.shape[-2]):
            found += [] if "expand" in str(node.target) else [node.name]
    return found
