"""Make the masks of "dtkernels" attention: sdpa's or eager's, with a note that describes simple ones in numbers.

A mask that is causal, a sliding window, padding, or a combination is cheaper as numbers than as a matrix: the kernel skips
tiles that no query sees, and reads one flag for each key instead of one for each score. The matrix is made anyway: code that
slices, copies, moves or changes it loses only the note.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from transformers import masking_utils
from transformers.masking_utils import eager_mask, sdpa_mask

from dtkernels.runtime.path_counters import no_kernel, without_kernels

from ..patching.call_stats import implementation_before, unpatched_calls
from .mask_conventions import knows_sdpa_by_name, takes_eager_masks, without_interface, writes_masks

NOTE = "_dtkernels_reach"  # the attribute of a mask that holds its VisibleKeys, and the mask's version at that time


@dataclass(frozen=True)
class VisibleKeys:
    """Query m is at key position p = m + offset and sees p - left <= l <= p + right (None: no limit) where padding[b, 0, 0, l]."""

    left: int | None = None
    right: int | None = None
    offset: int | torch.Tensor = 0
    padding: torch.Tensor | None = None

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        return None if self.left is None and self.right is None else (self.left, self.right)


def dtkernels_mask(*args, **kwargs) -> torch.Tensor | None:
    """Return sdpa's mask for the same arguments, [B, 1, Tq, Tk] boolean or None, with a VisibleKeys note where one describes it.

    A model that takes eager's masks only gets those. If it computes attention itself, that is counted as a fallback. If no
    kernel runs, a model that had eager attention gets eager's masks too, and no mask has a note.
    """
    config = type(kwargs.get("config"))
    if _eager_runs(kwargs.get("config"), args, kwargs):
        return eager_mask(*args, **kwargs)
    if takes_eager_masks(config):
        if without_interface(config):
            unpatched_calls.count(f"models of {config.__name__} do not use transformers' AttentionInterface")
        mask: torch.Tensor | None = eager_mask(*args, **kwargs)
    else:
        if kwargs.get("config") is not None and knows_sdpa_by_name(config):
            kwargs["allow_is_causal_skip"] = False  # Gemma 4 checks for the name "sdpa" if there is no mask to slice
        mask = None if not args and _implied(**kwargs) else sdpa_mask(*args, **kwargs)
    if mask is not None and not args and _may_note(config, **kwargs) and no_kernel(mask) is None and (reach := _reach(**kwargs)) is not None:
        setattr(mask, NOTE, (reach, None if torch.compiler.is_compiling() else _version(mask)))
    return mask


def _eager_runs(config: object, args: tuple, kwargs: dict) -> bool:
    """Return whether the mask will be read by the eager attention that the model had before it was patched."""
    if torch.compiler.is_compiling() or config is None or args or implementation_before(config) != "eager":
        return False
    return "device" in kwargs and without_kernels(torch.device(kwargs["device"]).type) is not None


def _may_note(kind: type, /, q_length: int | None = None, kv_length: int = 0, q_offset: int | torch.Tensor = 0, kv_offset: int = 0, **_) -> bool:
    """Return whether a note stays valid. torch.compile does not count writes while tracing, and specializes on numbers that are no tensor's."""
    if not torch.compiler.is_compiling():
        return True
    at_once = isinstance(q_offset, torch.Tensor) or kv_length == q_length and q_offset == 0
    return at_once and kv_offset == 0 and not _exporting() and not writes_masks(kind)


def _implied(
    attention_mask: torch.Tensor | None = None,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_,
) -> bool:
    """Return whether a mask traced by torch.compile can be omitted, by the conditions on which eager calls omit sdpa's.

    transformers makes the mask whenever anything traces, because torch.export's programs run at other lengths. A static cache, whose
    length is a tensor, may hold keys that no query has reached.
    """
    if not torch.compiler.is_compiling() or _exporting() or attention_mask is not None or q_length is None:
        return False
    if local_size is not None and kv_length >= local_size:
        return False
    if allow_is_bidirectional_skip:
        return True
    return allow_is_causal_skip and not isinstance(q_offset, torch.Tensor) and (q_length == 1 or kv_length == q_length or q_offset == 0)


def _exporting() -> bool:
    """Read the flag behind torch.compiler.is_exporting(): torch 2.11's compiler takes that function to be True in all that it traces."""
    return torch.compiler._is_exporting_flag


def noted_keys(mask: torch.Tensor) -> VisibleKeys | None:
    """Return the note on a mask if the mask has not changed since, else None."""
    noted = getattr(mask, NOTE, None)
    if noted is None:
        return None
    return noted[0] if torch.compiler.is_compiling() or noted[1] == _version(mask) else None  # torch.compile cannot read the version


def _version(mask: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; under inference_mode torch does not count."""
    return None if mask.is_inference() else mask._version


def visible_keys_of(mask: torch.Tensor | None, queries: int, keys: int) -> VisibleKeys | None:
    """Return the note on a mask of ``queries`` x ``keys``, or None."""
    reach = None if mask is None else noted_keys(mask)
    return reach if reach is not None and mask is not None and tuple(mask.shape[-2:]) == (queries, keys) else None


def _reach(
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    kv_length: int = 0,
    q_length: int | None = None,
    **_,
) -> VisibleKeys | None:
    limits = _limits(mask_function) if q_length is not None else None  # releases before 5 pass positions in another form
    if limits is None or isinstance(kv_offset, torch.Tensor):
        return None
    offset = q_offset - kv_offset
    if isinstance(offset, torch.Tensor):
        offset = offset.to(torch.float32).reshape(1)  # once for each mask, not for each layer
    padding = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.dtype != torch.bool:
            return None
        padding = attention_mask[:, kv_offset : kv_offset + kv_length]
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))[:, None, None]  # keys without a flag are not seen
    return VisibleKeys(*limits, offset, padding)


def _limits(function: Callable | None) -> tuple[int | None, int | None] | None:
    """Return how far (left, right) a mask function lets a query see; None if it is not known to be that simple."""
    if function is masking_utils.causal_mask_function:
        return None, 0
    if function is getattr(masking_utils, "bidirectional_mask_function", NOTE):
        return None, None
    if torch.compiler.is_compiling():
        return None  # it does not look into closures
    held = _closure_of(function, masking_utils.and_masks)
    if held is not None and isinstance(functions := held.get("mask_functions"), tuple):
        parts = [limits for part in functions if (limits := _limits(part)) is not None]
        return (_least(left for left, _ in parts), _least(right for _, right in parts)) if len(parts) == len(functions) else None
    for maker, both in (("sliding_window_overlay", False), ("sliding_window_bidirectional_overlay", True)):
        held = _closure_of(function, getattr(masking_utils, maker, None))
        if held is not None and type(window := held.get("sliding_window")) is int and window > 0:
            return (window, window) if both else (window - 1, None)
    return None


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _closure_of(function: Callable | None, maker: Callable | None) -> dict[str, object] | None:
    """Return the closure variables of ``function`` if ``maker`` returned it, else None."""
    if not isinstance(function, types.FunctionType) or maker is None:
        return None
    made = [c for c in maker.__code__.co_consts if isinstance(c, types.CodeType)]
    if function.__code__ not in made or function.__closure__ is None:
        return None
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__)))
