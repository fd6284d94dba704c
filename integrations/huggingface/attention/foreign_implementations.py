"""Tell transformers' own attention from functions that somebody else registered, which may compute anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..patching.call_stats import NAME
from ..patching.source_inspection import OURS, eager_function_now, interface_of, package_of

# those that compute what the op computes, each also with "paged|" before it
_SAME = frozenset(["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", NAME])


def foreign_attention(cls: type, name: str | None) -> str | None:
    """Return what is foreign in the attention that modules of a class have under a name in their config; None if it is transformers' own, or ours."""
    name = "eager" if name is None else name
    if name.removeprefix("paged|") not in _SAME:
        return f"attention {name!r}, which transformers does not have"
    interface = cast("Mapping[str, Callable]", interface_of(cls) or ALL_ATTENTION_FUNCTIONS)
    function = interface.get(name)
    if function is None and name == "eager" and (eager := eager_function_now(cls)) is not None:
        return None if package_of(eager) in (*OURS, cls.__module__.partition(".")[0]) else f"another {eager.__name__} in its modeling file"
    if function is not None and package_of(function) not in OURS:
        return f"attention {name!r}, which somebody else registered"
    mask = cast("Mapping[str, Callable]", ALL_MASK_ATTENTION_FUNCTIONS).get(name)
    return f"masks for {name!r}, which somebody else registered" if mask is not None and package_of(mask) not in OURS else None
