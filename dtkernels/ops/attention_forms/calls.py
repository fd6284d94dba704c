"""Go from the arguments of a call of ``ops.attention`` to the op of a form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict

import torch

from ...runtime.path_counters import checking
from ..attention_arguments import EXACT, FLAGS, FORM_ARGUMENTS, AttentionArgs, check_kinds, spec_arguments, surely
from ..op_decorator import operator_called
from ..option_checks import check_integer
from ..registry import Interface, interfaces
from . import visible_keys
from .append import append
from .checks import CACHE, check_cache, check_packed, check_pages, check_segments, only_for, only_with_cache
from .scales import Scale, scale_of, spec_scales
from .specs import FORMS, PART


class FormArgs(TypedDict, total=False):
    """The arguments of a call beyond those of one matrix of queries and keys."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    segments: torch.Tensor | None
    segments_k: torch.Tensor | None
    lengths: torch.Tensor | None
    block_table: torch.Tensor | None
    kv_layout: str
    return_lse: bool
    dropout_p: float
    seed: int | torch.Tensor | None
    new_k: torch.Tensor | None
    new_v: torch.Tensor | None
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None


_NAMES = {"Q": "q (B, H, M, D)", "K": "k (B, G, L, D)", "V": "v (B, G, L, N)", "sink": "sinks (H)", "cap": "softcap"}
_PACKED = {"Q": "q (M, H, D)", "K": "k (L, G, D)", "V": "v (L, G, N)"}
_LONGER = {"Q": "q (..., H, M, D)", "K": "k (..., G, L, D)", "V": "v (..., G, L, N)", "mask": "mask (..., H, M, L)", "flags": "mask (..., L)", "bias": "bias (..., H, M, L)"}
_PAGES = {"K": "k (pages, G, slots, D)", "V": "v (pages, G, slots, N)", "table": "block_table (B, pages of an entry)"}
for _name in FORMS:
    _kind = _name.removesuffix("_lse").removeprefix("attention").strip("_")
    interfaces[_name] = Interface(_NAMES | {"varlen": _PACKED, "paged": _PAGES, "": _LONGER, "dropout": _LONGER, "flags": _LONGER}.get(_kind, {}), broadcast=True)

interfaces[PART] = Interface(_NAMES | {"lse": "lse (B, H, M)"})


def name_of(forms: dict) -> str:
    """Return the op that a call with the arguments ``forms`` reaches."""
    kinds = {"cu_seqlens_q": "varlen", "cu_seqlens_k": "varlen", "segments": "segments", "segments_k": "segments", "block_table": "paged", "lengths": "lengths"}
    given = [kind for n, kind in kinds.items() if forms.get(n) is not None]
    if not given and forms.get("dropout_p") and not forms.get("return_lse"):
        return "attention_dropout"
    return "_".join(["attention", *given[:1], *(["lse"] if forms.get("return_lse") else [])])


def operator_of(forms: dict):
    """Return the operator of a call with the arguments ``forms``."""
    return operator_called(name_of(forms))


def flags_operator():
    """Return the operator of a call with one flag a key for a mask."""
    return operator_called(FLAGS)


def call(args: AttentionArgs, forms: Mapping[str, object]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a call of ``attention`` with arguments of ``FORM_ARGUMENTS``. Raises TypeError and ValueError, one line."""
    for name in forms:
        if name not in FORM_ARGUMENTS:
            raise TypeError(f"attention: unknown argument {name!r}; allowed: {', '.join((*AttentionArgs._fields, *FORM_ARGUMENTS))}")
    check_kinds(args)
    given_forms = {**FORM_ARGUMENTS, **forms}
    name = name_of(given_forms)
    kind = name.removesuffix("_lse").removeprefix("attention").strip("_")
    if kind in ("", "dropout"):
        only_with_cache(given_forms)
    given = {"": lambda a, _: spec_arguments(a), "dropout": lambda a, _: spec_arguments(a), "varlen": _packed, "segments": _segmented, "paged": _paged, "lengths": _cached}[kind](args, given_forms)
    return operator_called(FLAGS if name == "attention" and "flags" in given else name)(**given, **_dropout(args, given_forms))


def _dropout(args: AttentionArgs, forms: dict) -> dict[str, object]:
    """Return the arguments of dropout; none where nothing is dropped."""
    p, seed = forms["dropout_p"], forms["seed"]
    if not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ValueError(f"attention: dropout_p is {p!r}; allowed: a number from 0 to below 1")
    if not p:
        return {}
    if seed is None:
        raise ValueError("attention: dropout_p is given, seed is missing; allowed: both, the seed an integer or a one-element tensor of integers")
    if not isinstance(seed, torch.Tensor):
        check_integer("attention", "seed", seed, -(2**63), 2**64 - 1)
        seed = seed - 2**64 if seed >= 2**63 else seed  # the same 64 bits
    if forms["block_table"] is not None or args.q.dim() > 4:
        raise ValueError(f"attention: dropout_p with {'block_table' if forms['block_table'] is not None else 'more than 4 dimensions'}; allowed: other forms")
    return {"dropped": True, "drop": float(p), "seed": seed}


def _window(args: AttentionArgs) -> visible_keys.Window:
    """Return how many keys a query sees to the left and to the right of its place; None for no limit."""
    left, right = args.window if args.window is not None else (None, None)
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"attention: a window reaches 0 or more keys to either side, None for no limit; got {args.window}")
    return left, 0 if args.causal else right


def _scores(args: AttentionArgs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, object]:
    """Return the arguments of a form that do not say which keys are seen, for tensors (..., heads, length, width)."""
    return spec_arguments(args._replace(q=q, k=k, v=v, causal=False, window=None, offset=0))


def _differentiated(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _ranged(given: dict, ranges: visible_keys.Ranges, *tensors: torch.Tensor) -> dict[str, object]:
    """Add ranges to the arguments: those of keys only where a gradient loops over queries."""
    if surely(max(ranges.lo.shape[-1], ranges.stops.shape[-1]) >= EXACT):
        raise ValueError(f"attention: ranges of keys count up to {EXACT}; got {ranges.lo.shape[-1]} queries and {ranges.stops.shape[-1]} keys")
    given |= {"ranged": True, "lo": ranges.lo, "hi": ranges.hi}
    return given | ({"keyed": True, "begins": ranges.begins, "stops": ranges.stops} if _differentiated(*tensors) else {})


def _packed(args: AttentionArgs, forms: dict) -> dict[str, object]:
    only_for("cu_seqlens_q", forms, "cu_seqlens_k")
    cu_q, cu_k = check_packed(args, forms)
    heads_first = [t.transpose(0, 1) for t in (args.q, args.k, args.v)]
    given = _scores(args, *heads_first) | {"Q": args.q, "K": args.k, "V": args.v}
    ranges = visible_keys.of_sequences(cu_q, cu_k, args.q.shape[0], args.k.shape[0], _window(args))
    return _ranged(given, ranges, args.q, args.k, args.v)


def _segmented(args: AttentionArgs, forms: dict) -> dict[str, object]:
    only_for("segments", forms, "segments_k")
    of_q, of_k = check_segments(args, forms)
    given = _scores(args, args.q, args.k, args.v)
    of_q, of_k = visible_keys.ranks(of_q, of_k)
    batch = args.q.shape[0]
    of_q, of_k = (t.expand(batch, -1) for t in (of_q, of_k))
    ranges = visible_keys.of_segments(of_q, of_k, args.offset, _window(args))
    given |= {"segmented": True, "of_q": of_q.to(torch.int32), "of_k": of_k.to(torch.int32)}
    return _ranged(given, ranges, args.q, args.k, args.v)


def _scales(args: AttentionArgs, forms: dict, k: torch.Tensor, v: torch.Tensor, across: bool) -> tuple[Scale, Scale]:
    """Return the scales of keys and of values."""
    k_scale, v_scale = (scale_of(n, forms[n], t, args.q.shape[0], across) for n, t in (("k_scale", k), ("v_scale", v)))
    return k_scale, v_scale


def _scaled(args: AttentionArgs, k_scale: Scale) -> AttentionArgs:
    """Return the arguments with a number that keys are multiplied by in the scale of the scores."""
    if k_scale.kind != "number":
        return args
    scale = 1 / math.sqrt(max(args.q.shape[-1], 1)) if args.scale is None else args.scale
    return args._replace(scale=scale * k_scale.value)  # type: ignore[operator]


def _in_cache(args: AttentionArgs, lengths: torch.Tensor, new: int) -> dict[str, object]:
    """Return the arguments that say which keys of a cache each query sees: numbers, and the lengths as they are, which the kernel reads.

    lengths: (B), of the entries before ``new`` keys were appended. The last query is at the last key.
    """
    (left, right), queries = _window(args), args.q.shape[2]
    if surely(max(queries, args.k.shape[2]) >= EXACT):
        raise ValueError(f"attention: caches count up to {EXACT} keys; got {queries} queries and {args.k.shape[2]} keys")
    given: dict[str, object] = {"valid": True, "length": lengths if lengths.dtype.itemsize > 2 else lengths.to(torch.int32), "more": float(new)}
    if left is not None:
        given |= {"starts": True, "first": float(new - left)}
    if right is not None and not surely(queries - 1 - right <= 0):  # else the length ends them
        given |= {"ends": True, "last": float(new + right)}
    return given


def _cached(args: AttentionArgs, forms: dict) -> dict[str, object]:
    only_for("lengths", forms, *CACHE)
    keys = args.k.shape[-2] if args.k.dim() > 1 else 0
    lengths = check_cache(args, forms, keys)
    scales = _scales(args, forms, args.k, args.v, across=False)
    new = append(args, forms, args.k, args.v, lengths, scales)
    given = _scores(_scaled(args, scales[0]), args.q, args.k, args.v) | _in_cache(args, lengths, new) | spec_scales(*scales)
    if _differentiated(args.q, args.k, args.v):
        given |= {"keyed": True, "stops": visible_keys.stops(lengths.long() + new if new else lengths, args.q.shape[2], keys)}
    return given


def _paged(args: AttentionArgs, forms: dict) -> dict[str, object]:
    only_for("block_table", forms, "lengths", "kv_layout", *CACHE)
    table = forms["block_table"]
    k, v = check_pages(args, forms)
    slots, keys = k.shape[2], k.shape[2] * table.shape[1]
    if _differentiated(args.q, k, v):
        raise NotImplementedError("attention: block_table has no gradient; allowed: torch.no_grad(), or k and v without pages")
    scales = _scales(args, forms, k, v, across=forms["kv_layout"] == "NHD")
    lengths = check_cache(args, forms, keys)
    new = append(args, forms, k, v, lengths, scales)
    if checking():
        table = table.masked_fill(torch.arange(table.shape[1], device=table.device) * slots >= lengths.long()[:, None] + new, 0)  # they are not read
    of_entries = [t[:1, :, :1].expand(args.q.shape[0], -1, keys, -1) for t in (k, v)]
    args = args._replace(k=of_entries[0], v=of_entries[1])
    given = _scores(_scaled(args, scales[0]), args.q, args.k, args.v) | _in_cache(args, lengths, new) | spec_scales(*scales)
    return given | {"K": k, "V": v, "table": table, "page": slots}
