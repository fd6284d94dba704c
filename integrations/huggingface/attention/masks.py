"""Make the masks of "dtkernels" attention: numbers where they say it all, else sdpa's or eager's matrix.

transformers calls `dtkernels_mask` once for each kind of layers. The result goes through the model to the attention function. A mask in
numbers is a KeyMask: code of the model that computes with it gets the matrix (see visible_keys.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils
from transformers.masking_utils import eager_mask, sdpa_mask

from dtkernels.runtime.path_counters import no_kernel, without_kernels

from ..patching.call_stats import implementation_before, unpatched_calls
from .mask_conventions import knows_sdpa_by_name, takes_eager_masks, without_interface, writes_masks
from .mask_reading import Reading, read
from .visible_keys import REASON, VisibleKeys, key_mask, note

NONE = -(2**40)  # a segment's number below all others
OVERLAY = "a mask with an overlay of its own"
WRITTEN = "the model may write to its mask, which a compiled graph does not notice"


def dtkernels_mask(*args, **kwargs) -> torch.Tensor | None:
    """Return the mask for the arguments of transformers' `sdpa_mask`: [B, 1, Tq, Tk] boolean, or None where sdpa's would be None.

    It is a KeyMask, which holds no matrix, if it is causal or not, with a sliding window, chunks, padding or packed sequences. Any other is
    sdpa's matrix, which says why. A model that takes eager's masks only gets those, with a note of what they say. If it computes
    attention itself, that is counted as a fallback. If no kernel runs, masks are those of the implementation that the model had.
    """
    config = kwargs.get("config")
    if _eager_runs(config, args, kwargs):
        return eager_mask(*args, **kwargs)
    if takes_eager_masks(type(config)):
        if without_interface(type(config)):
            unpatched_calls.count(f"models of {type(config).__name__} do not use transformers' AttentionInterface")
        mask = eager_mask(*args, **kwargs)
        if mask is not None and not args and no_kernel(mask) is None and _may_note(config) and (reach := _reach(**kwargs)) is not None:
            note(mask, reach)
        return mask
    if config is not None and knows_sdpa_by_name(type(config)):
        kwargs["allow_is_causal_skip"] = False  # Gemma 4 checks for the name "sdpa" if there is no mask to slice
    if config is not None and _was_eager(id(config)):  # eager attention reads masks alone: what a module's is_causal says may differ
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if args or without_kernels(torch.device(kwargs.get("device", "cpu")).type) is not None:
        return sdpa_mask(*args, **kwargs)
    return _in_numbers(**kwargs)


@torch.compiler.assume_constant_result
def _was_eager(config_id: int) -> bool:
    return implementation_before(config_id) == "eager"


def _in_numbers(**kwargs: Any) -> torch.Tensor | None:
    """Return the mask for a device on which kernels run."""
    if _implied(**kwargs):
        return None
    reach = _reach(**kwargs) if _may_note(kwargs.get("config")) else None
    if reach is not None:
        return key_mask(reach, kwargs["batch_size"], kwargs["q_length"], kwargs["kv_length"], kwargs.get("device", "cpu"))
    mask = sdpa_mask(**kwargs)
    if mask is not None:
        setattr(mask, REASON, OVERLAY if _may_note(kwargs.get("config")) else WRITTEN)
    return mask


def _eager_runs(config: object, args: tuple, kwargs: dict) -> bool:
    """Return whether the mask will be read by the eager attention that the model had before it was patched."""
    if torch.compiler.is_compiling() or config is None or args or implementation_before(id(config)) != "eager":
        return False
    return "device" in kwargs and without_kernels(torch.device(kwargs["device"]).type) is not None


def _may_note(config: object) -> bool:
    """Return whether numbers stay valid. torch.compile does not count writes while tracing."""
    return not torch.compiler.is_compiling() or config is None or not writes_masks(type(config))


def _implied(
    attention_mask: torch.Tensor | None = None,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_,
) -> bool:
    """Return whether a mask can be omitted, by the conditions on which eager calls omit sdpa's.

    transformers makes the mask whenever anything traces, because torch.export's programs run at other lengths. A static cache, whose
    length is a tensor, may hold keys that no query has reached. A compiled call does not read the padding.
    """
    traced = torch.compiler.is_compiling()
    if q_length is None or traced and (_exporting() or attention_mask is not None):  # an exported program makes no demands on lengths
        return False
    if local_size is not None and kv_length >= local_size:
        return False
    if allow_is_bidirectional_skip:
        return attention_mask is None or _all_seen(attention_mask, kv_length, kv_offset)
    if not allow_is_causal_skip or traced and isinstance(q_offset, torch.Tensor):
        return False
    if (q_length == 1 or kv_length == q_length) and (attention_mask is None or _all_seen(attention_mask, kv_length, kv_offset)):
        return True
    return bool(q_offset == 0) and (attention_mask is None or _all_seen(attention_mask, q_length, 0) and not bool(attention_mask[:, q_length:].any()))


def _all_seen(flags: torch.Tensor, keys: int, first: int) -> bool:
    """Return whether a 2-d mask flags ``keys`` keys from ``first`` on; keys that it does not reach are not seen."""
    return flags.shape[-1] >= first + keys and bool(flags[:, first : first + keys].all())


def _exporting() -> bool:
    """Read the flag behind torch.compiler.is_exporting(): torch 2.11's compiler takes that function to be True in all that it traces."""
    return torch.compiler._is_exporting_flag


def _reach(
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    kv_length: int = 0,
    q_length: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_,
) -> VisibleKeys | None:
    """Return a mask as numbers, or None if numbers cannot express it."""
    if q_length is None or use_vmap or isinstance(kv_offset, torch.Tensor):  # releases before 5 pass positions in another form
        return None
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.dtype != torch.bool):
        return None
    reading = read(mask_function)
    if reading is None:
        return None
    segments = _segments(reading, q_length, kv_length, q_offset, kv_offset, device)
    if segments is None and (reading.numbered or reading.chunks):
        return None
    padding = _padding(reading, attention_mask, kv_length, kv_offset)
    if segments is not None and q_length == 1:  # one flag a key says it
        same = (segments[0] == segments[1])[:, None, None]
        padding, segments = same if padding is None else padding & same, None
    elif segments is not None and padding is not None:  # keys that are padding are of a segment without queries
        segments, padding = (segments[0], segments[1].masked_fill(~padding[:, 0, 0], NONE)), None
    windowed = reading.left is not None
    return VisibleKeys(reading.left, reading.right, _offset(q_offset, kv_offset, device, windowed), padding, segments)


def _offset(q_offset: int | torch.Tensor, kv_offset: int, device: torch.device | str, windowed: bool) -> int | torch.Tensor:
    """Return the position of the first query among the keys. A kernel reads a tensor on the device, a number is part of a graph.

    With a number the op asks whether a window cuts anything off, which would be a demand on the lengths of an exported program.
    """
    if isinstance(q_offset, torch.Tensor):
        return (q_offset - kv_offset).to(torch.float32).reshape(1)  # once for each mask, not for each layer
    if torch.compiler.is_compiling() and not (not (windowed and _exporting()) and type(q_offset) is type(kv_offset) is int and q_offset == kv_offset):
        return torch.full((1,), q_offset - kv_offset, dtype=torch.float32, device=device)
    return q_offset - kv_offset


def _padding(reading: Reading, attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int) -> torch.Tensor | None:
    """Return the flags of the keys [B, 1, 1, Tk], or None for no padding; keys that a 2-d mask does not reach are not seen."""
    padding = None
    for flags in reading.flags if attention_mask is None else [attention_mask, *reading.flags]:
        flags = flags[:, kv_offset : kv_offset + kv_length]
        flags = torch.nn.functional.pad(flags, (0, kv_length - flags.shape[1]))[:, None, None]
        padding = flags if padding is None else padding & flags
    return padding


def _segments(
    reading: Reading, q_length: int, kv_length: int, q_offset: int | torch.Tensor, kv_offset: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the numbers of the queries' and keys' segments, or None if there are none or they are not known for all positions."""
    ids = None
    if reading.numbered or reading.positions is not None:
        moved = isinstance(q_offset, torch.Tensor) or q_offset != 0 or kv_offset != 0 or kv_length != q_length
        if moved or len(reading.numbered) != 1:
            return None
        ids = (reading.numbered[0], reading.numbered[0])
    for size, first in reading.chunks:
        positions = [torch.arange(n, device=device)[None] + start for n, start in ((q_length, q_offset), (kv_length, kv_offset))]
        if reading.positions is not None:
            positions = [reading.positions, reading.positions]
        query, key = [(p - first[:, None]) // size for p in positions]
        if ids is None:
            ids = (query, key)
        else:  # one number for both: chunks lie within -Tk and Tk
            ids = (ids[0] * (2 * kv_length + 1) + query, ids[1] * (2 * kv_length + 1) + key)
    return ids
