"""Define the attention function that transformers calls as "dtkernels": the op where it fits, the original path elsewhere.

It follows sdpa's conventions exactly; masks.py makes its masks. No mask and more
than one query means causal, upper-left aligned, if the module is causal; one query attends to all keys. A model that supports
eager attention only gets eager's masks, and no mask means that nothing is masked (see mask_conventions.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from dtkernels import ops
from dtkernels.runtime.path_counters import no_kernel
from dtkernels.runtime.torch_support.dtypes import KERNEL_DTYPES

from ..patching.call_stats import NAME, CallRecord, record_of
from ..patching.forward_patching import in_autocast, plain, transformed, without_autocast
from ..patching.source_inspection import eager_function
from .attention_call_cache import HARMLESS, known, remember
from .fallback import ignores, original_attention
from .mask_conventions import takes_eager_masks
from .masks import dtkernels_mask
from .visible_keys import REASON, KeyMask, as_matrix, in_numbers, visible_keys_of

if TYPE_CHECKING:
    from transformers.utils.output_capturing import CompileableContextVar

_active_collector: CompileableContextVar | None
try:
    from transformers.utils import output_capturing

    _active_collector = output_capturing._active_collector
except (ImportError, AttributeError):  # only newer releases record outputs by hooks
    _active_collector = None

_ADDED = (("s_aux", "sinks"), ("position_bias", "bias"))  # tensors added to the scores: transformers' name, the op's name
_NOT_SDPA = ("softcap", "s_aux", "position_bias")
_HANDLED = frozenset({"dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias"})


def register() -> None:
    """Register `attn_implementation="dtkernels"` with transformers: the attention function and its masks."""
    AttentionInterface.register(NAME, dtkernels_attention)
    AttentionMaskInterface.register(NAME, dtkernels_mask)  # without it padding and sliding windows would be ignored silently


def dtkernels_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute softmax(scaling * q k^T + mask) v, with softcap, sinks and position bias, for transformers' AttentionInterface.

    query [B, H, Tq, D], key [B, Hkv, Tk, D], value [B, Hkv, Tk, Dv], where Hkv divides H; attention_mask None, boolean
    (True = attend) or float (added), broadcastable to [B, H, Tq, Tk]. Returns ([B, Tq, H, Dv], None). The attention weights
    replace None if `output_attentions` asks for them or the original path is eager.

    A call that the op does not support takes the module's original path and is counted in the module's CallRecord. If no kernel
    runs on the device, every call does.
    """
    record = record_of(module)
    alone = attention_mask is not None and query.shape[2] > 1 and _is_causal_alone(attention_mask, query, key, kwargs.get("sliding_window"))
    if alone:
        attention_mask, kwargs["is_causal"] = None, True
    if (reason := _without_kernels(query)) is not None:
        record.count(reason)
        causal = alone or _is_causal(module, query, attention_mask, kwargs.get("is_causal"))
        return original_attention(record, module, query, key, value, as_matrix(attention_mask), causal, kwargs)
    if _collects_weights(module):
        kwargs["output_attentions"] = True
    seen = known(query, key, value, attention_mask, kwargs)
    if seen is not None and (again := seen.result(query, key, value, attention_mask, kwargs)) is not None:
        record.calls += 1
        return again, None
    causal = alone or _is_causal(module, query, attention_mask, kwargs.get("is_causal"))
    inputs = _autocast(query, key, value)
    others = _unknown_kwargs(kwargs)
    reason = _read(module, record, others) or _unsupported(*inputs, attention_mask, kwargs) or _why_sdpa_is_faster(record, inputs, attention_mask, kwargs)
    if reason is None:
        cast = in_autocast(query.device.type)
        mask, options = _op_arguments(inputs[0], key, attention_mask, causal, kwargs)
        try:
            with without_autocast(query.device.type):
                output = ops.attention(*inputs, mask, **options)
        except NotImplementedError as error:  # the op says in this way that no kernel takes these shapes
            reason = str(error)
    record.count(reason, query)
    if reason is not None:
        return original_attention(record, module, query, key, value, as_matrix(attention_mask), causal, kwargs)
    if mask is not None and not torch.compiler.is_compiling() and mask.shape[-2] > 1:
        record.count_matrix(_why_a_matrix(attention_mask))
    if not cast and not others:  # another module may read those
        added = {name: option for name, option in _ADDED if kwargs.get(name) is not None}
        remember(query, key, value, attention_mask, kwargs, mask, options, added)
    return output.transpose(1, 2).contiguous(), None


def _is_causal_alone(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, window: int | None) -> bool:
    """Return whether a mask in numbers says key <= query and no more: kernels and sdpa need none for that."""
    queries, keys = query.shape[2], key.shape[2]
    reach = visible_keys_of(mask, queries, keys) if in_numbers(mask) else None
    if reach is None or not reach.causal or reach.padding is not None or reach.segments is not None:
        return False
    return queries == keys and (window is None or keys <= window)


def _without_kernels(query: torch.Tensor) -> str | None:
    return no_kernel(query) if isinstance(query, torch.Tensor) else None


def _collects_weights(module: nn.Module) -> bool:
    """Return whether transformers records the attention weights of the running model. Not every model passes `output_attentions` on.

    torch.compile traces this check only if it traces the whole model. A layer compiled by itself keeps the answer from tracing
    time. A hook that is added later causes a new trace, and a module with a hook is checked in each call.
    """
    if _active_collector is None:
        return False
    alone = torch.compiler.is_compiling() and not getattr(_active_collector, "compiling", False)
    return _collects_now() if alone and not module._forward_hooks else _weights_asked_for()


@torch.compiler.assume_constant_result
def _collects_now() -> bool:
    return _weights_asked_for()


def _weights_asked_for() -> bool:
    collected = None if _active_collector is None else _active_collector.get()
    return any(name.endswith("attentions") for name in collected or ())


def _op_arguments(query, key, mask, causal, kwargs) -> tuple[torch.Tensor | None, dict]:
    """Return the op's mask and keyword arguments."""
    options = {"causal": causal, "scale": kwargs.get("scaling"), "softcap": kwargs.get("softcap")}
    reach = visible_keys_of(mask, query.shape[2], key.shape[2])
    if reach is not None:
        options |= {"window": reach.window, "offset": reach.offset}
        if reach.causal:
            options |= {"causal": True, "window": None}
        mask = reach.padding
        if reach.segments is not None:
            options |= {"segments": reach.segments[0], "segments_k": reach.segments[1]}
    elif mask is not None:
        mask = as_matrix(mask)
        mask = _in_dtype_of(query, mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())])
    for name, option in _ADDED:
        if kwargs.get(name) is not None:
            options[option] = _in_dtype_of(query, kwargs[name])
    return mask, options


def _why_a_matrix(mask: torch.Tensor | None) -> str:
    """Return why the op was given one flag or number for each score."""
    if isinstance(mask, KeyMask):
        return "a mask that was written to"
    return getattr(mask, REASON, "a mask that was given, or changed by the model")


def _in_dtype_of(query: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Cast a tensor that is added to the scores to the query's dtype, which the result has. Finite values stay finite."""
    if added.dtype in (torch.bool, query.dtype):
        return added
    narrow = added.to(query.dtype)
    return torch.where(narrow.isinf() & ~added.isinf(), torch.finfo(query.dtype).min, narrow)


def _is_causal(module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, asked: bool | None) -> bool:
    if mask is not None or query.shape[2] <= 1 or takes_eager_masks(type(getattr(module, "config", None))):
        return False
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


def _autocast(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast inputs under autocast, as torch's own attention does; a custom function must do it itself."""
    device = query.device.type
    if not in_autocast(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = [x.to(dtype) if x.dtype in KERNEL_DTYPES else x for x in (query, key, value)]
    return query, key, value


def _unknown_kwargs(kwargs: dict) -> list[str]:
    """Return the arguments that the op does not know."""
    return [name for name, given in kwargs.items() if name not in HARMLESS and name not in _HANDLED and given is not None and given is not False]


def _read(module: nn.Module, record: CallRecord, names: list[str]) -> str | None:
    """Return the first of the names that the original path may read, or None."""
    eager = record.eager or eager_function(type(module)) if names else None
    return next((name for name in names if not ignores(eager, name)), None)


def _unsupported(query, key, value, mask, kwargs) -> str | None:
    """Return why the op cannot compute this call, or None if it can."""
    bias = kwargs.get("position_bias")
    return (
        _unsupported_kwargs(query, key, mask, kwargs)
        or _unsupported_tensors(query, key, value)
        or _unsupported_mask("mask", query, key, mask)
        or _unsupported_mask("position_bias", query, key, bias)
        or ("position_bias of dtype bool" if bias is not None and bias.dtype == torch.bool else None)
    )


def _why_sdpa_is_faster(record: CallRecord, inputs: tuple[torch.Tensor, ...], mask: torch.Tensor | None, kwargs: dict) -> str | None:
    """Return why sdpa is faster for a call that the op could compute, as measured on an H200; else None.

    cuDNN's attention forward and backward take 0.8 to 1.0 of the kernels' time, where it needs no mask. The kernels read a matrix mask
    whole: with one, a training step under torch.compile took 1.6 times sdpa's time. A mask in numbers is a matrix for sdpa alone.
    """
    if not record.as_measured or record.original != "sdpa" or any(kwargs.get(n) is not None for n in _NOT_SDPA) or not _on_gpu(inputs[0]):
        return None
    if mask is not None:
        reach = visible_keys_of(mask, inputs[0].shape[2], inputs[1].shape[2])
        return "a mask that is a matrix: sdpa is faster" if reach is None else None
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return "gradients without a mask: sdpa is faster" if learning else None


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _unsupported_kwargs(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict) -> str | None:
    if kwargs.get("dropout"):
        return "dropout"
    window = kwargs.get("sliding_window")
    # The mask contains the window. Without a mask, a window has no effect only if it reaches over all keys.
    if window is not None and mask is None and not (isinstance(window, int) and key.shape[2] <= window):
        return "sliding_window without a mask"
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is not None and not (type(softcap) in (int, float) and softcap > 0):
        return "softcap that is no number above 0"
    if sinks is not None and not (isinstance(sinks, torch.Tensor) and plain(sinks) and sinks.shape == query.shape[1:2]):
        return "s_aux that is not one number a head"
    return None


def _unsupported_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    if (reason := transformed()) is not None:
        return reason
    if not (plain(query) and plain(key) and plain(value)):
        return "tensor types " + ", ".join(type(x).__name__ for x in (query, key, value))
    if query.dtype not in KERNEL_DTYPES or not query.dtype == key.dtype == value.dtype:
        return "dtypes " + ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
    if not query.dim() == key.dim() == value.dim() == 4:
        return "q, k and v that are not all 4-d"
    batch, heads, _, width = query.shape
    key_batch, key_heads, keys, key_width = key.shape
    value_batch, value_heads, values, _ = value.shape
    fits = batch == key_batch == value_batch and width == key_width and keys == values and key_heads == value_heads
    if not fits or key_heads == 0 or heads % key_heads != 0:
        return "batch, head or width sizes of q, k and v that do not match"
    return None


def _unsupported_mask(name: str, query: torch.Tensor, key: torch.Tensor, mask: Any) -> str | None:
    if mask is None:
        return None
    if in_numbers(mask):
        return None if _broadcasts((mask.sizes[0], 1, *mask.sizes[1:]), query, key) else f"{name} that does not broadcast to [B, H, Tq, Tk]"
    if not isinstance(mask, torch.Tensor) or not plain(mask):
        return f"{name} of type {type(mask).__name__}"
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        return f"{name} of dtype {str(mask.dtype).removeprefix('torch.')}"
    if mask.dim() > 4 or not _broadcasts(mask.shape, query, key):
        return f"{name} that does not broadcast to [B, H, Tq, Tk]"
    return None


def _broadcasts(sizes: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> bool:
    whole = (*query.shape[:3], key.shape[2])
    return not any([size not in (1, full) for size, full in zip(sizes, whole[4 - len(sizes) :], strict=True)])
