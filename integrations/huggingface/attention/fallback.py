"""Compute attention calls that the op does not support.

sdpa takes what it can. The modeling file's own eager function takes softcap, sinks and other arguments that only it knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..patching.call_stats import CallRecord
from ..patching.source_inspection import eager_function
from .mask_conventions import takes_eager_masks

# Only the model's own eager function computes these.
_EAGER_ONLY = ("softcap", "s_aux", "output_attentions")
# Sparse attention passes indices only to implementations that it does not know; neither sdpa nor eager reads them.
SPARSE = ("indices", "block_indices")

_SDPA_NAMES = frozenset(inspect.signature(sdpa_attention_forward).parameters)


def original_attention(
    record: CallRecord,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    kwargs: dict,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute one attention call as transformers would have; arguments and result as in `dtkernels_attention`.

    Raises NotImplementedError if the caller passed an argument that no path of transformers supports.
    """
    eager = record.eager or eager_function(type(module))
    given = [name for name, value in kwargs.items() if value is not None and value is not False]
    for name in SPARSE:
        if name in given:
            raise NotImplementedError(f'{type(module).__name__} passes {name}: load it with attn_implementation="sdpa"')
    knows_eager_only = takes_eager_masks(type(getattr(module, "config", None)))
    if mask is not None or record.original == "sdpa":
        given = [name for name in given if name != "sliding_window"]  # the mask contains it, or sdpa was asked to work without it
    wants_eager = record.original == "eager" or knows_eager_only or _needs_eager(given, eager)
    if wants_eager and eager is not None:
        if mask is None and query.shape[2] == 1 and not knows_eager_only and getattr(module, "is_causal", False):
            mask = query.new_zeros(1, 1, 1, key.shape[2])  # sdpa needs no mask for one query; some eager functions do
        return eager(module, query, key, value, _float_mask(mask, query, key, causal), **kwargs)
    for name in ("softcap", "s_aux"):
        if name in given:
            raise NotImplementedError(f"{type(module).__name__} passes {name} and has no eager attention to fall back to")
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


@torch.compiler.assume_constant_result
def ignores(eager: Callable | None, name: str) -> bool:
    """Return whether both of transformers' paths ignore an argument; models pass on whatever they are called with.

    Without a known eager function the answer is no. Implementations for other kinds of attention may read more.
    """
    if eager is None or name in (*_EAGER_ONLY, *SPARSE, *_SDPA_NAMES):
        return False
    return name not in inspect.signature(eager).parameters and name not in inspect.unwrap(eager).__code__.co_consts


def _needs_eager(given: list[str], eager) -> bool:
    if any(name in _EAGER_ONLY for name in given):
        return True
    # An argument that the eager function names and sdpa would drop: only the eager function reads it.
    named = inspect.signature(eager).parameters if eager is not None else {}
    return any(name in named and name not in _SDPA_NAMES for name in given)


def _float_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor | None:
    """Return the mask as eager functions take it: added to the scores, the dtype's lowest number where nothing is attended."""
    if mask is None and causal:
        rows = torch.arange(query.shape[2], device=query.device)[:, None]
        columns = torch.arange(key.shape[2], device=query.device)[None, :]
        mask = (columns <= rows)[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)
