"""Shapes of the causal language models that are timed, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import transformers

TOKENS = 32768  #: of the vocabulary
#: model types of transformers, each built as a decoder of four layers: norms with and without offsets, biases, softcaps, windows, parallel layers, learned positions
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "glm4", "gpt_neox", "gpt2", "cohere2", "starcoder2")


def _llama(length: int, hidden: int, layers: int, heads: int, key_heads: int) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "head_dim": hidden // heads}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": key_heads, "max_position_embeddings": length}


def _opt(length: int, hidden: int, layers: int, heads: int) -> dict:
    sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"word_embed_proj_dim": hidden, "max_position_embeddings": length, "dropout": 0.0}


def _family(model_type: str, length: int) -> dict:
    sizes = _llama(length, hidden=2048, layers=4, heads=16, key_heads=4) | {"intermediate_size": 5632}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if model_type == "gpt2" else {}
    return sizes | dropouts


#: name -> (model type, length -> config): small is for a CPU, toy for trying a script
SHAPES: dict[str, tuple[str, Callable[[int], dict]]] = {
    "llama": ("llama", lambda n: _llama(n, 2048, 16, 32, 8)),
    "opt": ("opt", lambda n: _opt(n, 2048, 24, 32)),
    "small": ("llama", lambda n: _llama(n, 512, 4, 8, 8) | {"vocab_size": 4096}),
    "small-opt": ("opt", lambda n: _opt(n, 512, 4, 8) | {"vocab_size": 4096}),
    "toy": ("llama", lambda n: _llama(n, 64, 2, 4, 2)),
    "toy-opt": ("opt", lambda n: _opt(n, 64, 2, 4)),
    **{f"{kind}-4": (kind, partial(_family, kind)) for kind in FAMILIES},
}


def build(name: str, length: int, device: str, dtype: torch.dtype):
    """Return a causal language model of a shape with random weights, the same in every call."""
    kind, config = SHAPES[name]
    sizes = {"vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **config(length + 128)}
    made = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(made).to(dtype)
