"""Check the scales of quantized caches: one number, one for each head, or one for each key and head, multiplies the int8 or float8 codes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..op_decorator import only_tensors

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  #: code of each dtype of a cache


class Scale(NamedTuple):
    """A scale: a number or a one-element tensor; (B, G) by head; (B, G, L) or (page, G, slot) by token."""

    kind: str  #: "", "number", "head" or "token"
    value: object = None


def scale_of(name: str, given: object, cache: torch.Tensor, batch: int, across: bool) -> Scale:
    """Return the scale ``given`` as ``name`` for a cache (B, G, L, D) or pages (page, G, slot, D). ``across``: pages are given as (page, slot, G, D).

    Raises TypeError and ValueError, one line.
    """
    if given is None:
        return Scale("")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return Scale("number", float(given))
    only_tensors("attention", **{name: given})
    assert isinstance(given, torch.Tensor)
    if not given.is_floating_point() or given.dtype.itemsize == 1:
        raise TypeError(f"attention: {name} is {given.dtype}; allowed: a number, or floating point of 16 bits and more")
    if given.device != cache.device and given.numel() != 1:
        raise ValueError(f"attention: {name} is on {given.device}, the cache on {cache.device}; allowed: one device")
    heads, tokens = cache.shape[1], cache.shape[:3]
    shown = (tokens[0], tokens[2], heads) if across else tuple(tokens)
    if given.shape in (shown, (*shown, 1)):
        given = given[..., 0] if given.dim() == 4 else given
        return Scale("token", given.transpose(1, 2) if across else given)
    if given.numel() == 1:
        return Scale("number", given)
    if given.shape in ((heads,), (batch, heads)):
        return Scale("head", given.expand(batch, heads))
    allowed = f"a number, ({heads},) or ({batch}, {heads}) for one a head, {shown} for one a token"
    raise ValueError(f"attention: {name} has shape {tuple(given.shape)}; allowed: {allowed}")


def spec_scales(k_scale: Scale, v_scale: Scale) -> dict[str, object]:
    """Return the arguments of a form for these scales; that of a number for keys is part of ``scale``."""
    found: dict[str, object] = {}
    for of, scale in (("k", k_scale), ("v", v_scale)):
        if scale.kind and (of, scale.kind) != ("k", "number"):
            found |= {f"{of}_by_{scale.kind}": True, f"{of}_{scale.kind}": scale.value}
    return found
