"""Run transformers' continuous batching (``model.generate_batch``) with dtkernels' attention over packed sequences and pages.

transformers takes three kinds of implementations there: "sdpa" with a mask for every pair, "paged|eager", and names that contain "flash". The last are
called with cumulative lengths, or with pages and a table of them, and no mask: this module registers such a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from dtkernels import ops

from ..patching.call_stats import record_of

PACKED_NAME = "dtkernels_flash"


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a step of continuous batching, for transformers' AttentionInterface.

    query [1, H, tokens, D], key [1, Hkv, keys, D], value [1, Hkv, keys, Dv], the sequences of a step one after another as cu_seq_lens_q and cu_seq_lens_k
    say. With block_table [entries, pages], k_cache and v_cache [pages, slots, Hkv, D], there is one token of each entry, and key and value are those
    that are appended. Returns ([1, tokens, H, Dv], None). Raises NotImplementedError for a call without cumulative lengths.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None or attention_mask is not None:
        raise NotImplementedError(f"{PACKED_NAME}: a call outside of continuous batching; allowed: model.generate_batch, or the implementation dtkernels")
    record_of(module).count(None, query)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None if sliding_window is None else (sliding_window - 1, None if causal else sliding_window - 1)
    options = {"causal": causal, "window": window, "scale": scaling, "softcap": softcap, "sinks": None if s_aux is None else s_aux.to(query.dtype)}
    if block_table is None:
        tokens = (t[0].transpose(0, 1) for t in (query, key, value))
        return ops.attention(*tokens, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k, **options)[None], None
    entries = query.shape[2]
    lengths = cu_seq_lens_k[1 : entries + 1] - cu_seq_lens_k[:entries] - 1  # of a step, its own token included
    one, new_k, new_v = (t[0].transpose(0, 1)[:, :, None] for t in (query, key, value))
    result = ops.attention(one, k_cache, v_cache, block_table=block_table[:entries], lengths=lengths, new_k=new_k, new_v=new_v, **options)
    return result[:, :, 0][None], None


def register() -> None:
    """Register the name with transformers; no masks are made for it."""
    AttentionInterface.register(PACKED_NAME, packed_attention)
    AttentionMaskInterface.register(PACKED_NAME, _no_mask)


def _no_mask(*args, attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
    return attention_mask


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let ``model.generate_batch`` and transformers' continuous batching run dtkernels' attention inside this block.

    Outside, the model has the implementation it had. Raises TypeError for what is no transformers model. Example::

        with continuous_batching(model):
            outputs = model.generate_batch(prompts, generation_config=config)
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"continuous_batching takes a model of transformers; found {type(model).__name__}")
    register()
    before = model.config._attn_implementation
    model.config._attn_implementation = PACKED_NAME  # set_attn_implementation would look for a package of that name
    try:
        yield model
    finally:
        model.config._attn_implementation = before
