"""Check the arguments of ``ops.attention`` and translate them to those of its spec."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .op_decorator import compiling, only_tensors
from .option_checks import check_range

LOWEST = -2.3e38  #: scores above it, times log2(e), fit float32
FLAGS = "attention_flags"  #: the op behind a mask of one flag a key
EXACT = 2**24  #: largest key position that float32, the type of offsets in kernels, represents exactly

#: the arguments of further forms, with their defaults
FORM_ARGUMENTS: dict[str, object] = {
    "cu_seqlens_q": None, "cu_seqlens_k": None, "segments": None, "segments_k": None, "lengths": None, "block_table": None,
    "kv_layout": "NHD", "return_lse": False, "dropout_p": 0.0, "seed": None, "new_k": None, "new_v": None,
    "k_scale": None, "v_scale": None,
}  # fmt: skip


class AttentionArgs(NamedTuple):
    """The arguments of a call of ``attention``, in its order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    causal: bool = False
    scale: float | torch.Tensor | None = None
    window: tuple[int | None, int | None] | None = None
    offset: int | torch.Tensor = 0
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def spec_arguments(args: AttentionArgs) -> dict[str, object]:
    """Return the arguments of the op behind a call."""
    check_kinds(args)
    q, k, v, mask, bias, scale = args.q, args.k, args.v, args.mask, args.bias, args.scale
    groups = key_groups(q, k, v)
    given = _reach(q.shape[-2], k.shape[-2], args.causal, args.window, args.offset)
    if mask is not None and mask.dtype != torch.bool:
        mask = _hide_by_infinity(mask)
        for name, tensor in (("mask", mask), ("bias", bias)):
            if tensor is not None:
                _broadcast_to(name, tensor, (*q.shape[:-1], k.shape[-2]))
        bias = mask if bias is None else mask + bias
        mask = None
    if mask is not None and is_of_keys(mask, q):
        given |= {"flagged": True, "flags": _broadcast_to("mask", mask, (q.shape[0], 1, 1, k.shape[-2]))[:, 0, 0]}
        mask = None
    for name, on, tensor in (("mask", "masked", mask), ("bias", "biased", bias)):
        if tensor is not None:
            given |= {on: True, name: _broadcast_to(name, tensor, (*q.shape[:-1], k.shape[-2]))}
    if args.softcap is not None:
        check_range("attention", "softcap", args.softcap, 0, float("inf"), above=True)
        given |= {"capped": True, "cap": float(args.softcap)}
    if args.sinks is not None:
        heads = q.shape[-3] if q.dim() > 2 else 1
        if args.sinks.shape != (heads,):
            raise ValueError(f"attention: sinks has one number a head, shape ({heads},); got shape {tuple(args.sinks.shape)}")
        given |= {"sinks": True, "sink": args.sinks}
    if scale is None:
        scale = 1 / math.sqrt(max(q.shape[-1], 1))
    return {"Q": q, "K": k, "V": v, "scale": scale, "group": groups, **given}


def is_of_keys(mask: torch.Tensor, q: torch.Tensor) -> bool:
    """Return whether a mask has one flag a key, the same for all heads and queries, as padding has: shape (B or 1, 1, 1, L)."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == q.dim() == 4 and mask.shape[1] == mask.shape[2] == 1


def _hide_by_infinity(mask: torch.Tensor) -> torch.Tensor:
    """Replace hiding values of a floating-point mask, such as float32's lowest, by -inf: sums with them would overflow."""
    if mask.dtype == torch.float16:
        return mask
    if mask.requires_grad and torch.is_grad_enabled():  # each element has its own gradient
        return torch.nn.functional.threshold(mask, LOWEST, -math.inf)
    once = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]  # process expanded dimensions once
    return torch.nn.functional.threshold(once, LOWEST, -math.inf).expand(mask.shape)


def _broadcast_to(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return tensor.expand(shape)
    except (RuntimeError, ValueError):  # ValueError for tensors without data
        raise ValueError(f"attention: {name} broadcasts to {shape}; got shape {tuple(tensor.shape)}") from None


def check_kinds(args: AttentionArgs, op: str = "attention") -> None:
    """Raise TypeError for arguments that would be misread, or fail without a clear message."""
    mask, causal, window, offset = args.mask, args.causal, args.window, args.offset
    optional = {n: t for n, t in (("mask", mask), ("sinks", args.sinks), ("bias", args.bias)) if t is not None}
    only_tensors(op, q=args.q, k=args.k, v=args.v, **optional)
    if mask is not None and not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise TypeError(f"{op}: mask is {mask.dtype}; allowed: bool or floating point")
    if args.bias is not None and not args.bias.dtype.is_floating_point:
        raise TypeError(f"{op}: bias is {args.bias.dtype}; allowed: floating point; mask is what hides keys")
    if not isinstance(causal, (bool, int, torch.Tensor, torch.SymBool)) and type(causal).__name__ not in ("bool", "bool_"):  # NumPy's bool
        raise TypeError(f"{op}: causal is {causal!r}; allowed: True or False")
    if not isinstance(offset, (int, torch.Tensor, torch.SymInt)):
        raise TypeError(f"{op}: offset is {offset!r}; allowed: an integer or a one-element tensor")
    if isinstance(offset, torch.Tensor) and offset.numel() != 1:
        raise ValueError(f"{op}: offset is a tensor of shape {tuple(offset.shape)}; allowed: an integer or a one-element tensor")
    if isinstance(causal, torch.Tensor) and causal.numel() != 1:
        raise TypeError(f"{op}: causal is a tensor of shape {tuple(causal.shape)}; allowed: True or False")
    if window is not None and not (
        isinstance(window, (tuple, list)) and len(window) == 2 and all(w is None or _is_whole(w) for w in window)
    ):
        raise TypeError(f"{op}: window is {window!r}; allowed: (left, right), each a whole number of keys or None")


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")  # torch.compile cannot ask a symbol for its attributes


def key_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the number of query heads per head of k and v. Raises ValueError."""
    if not (2 <= q.dim() == k.dim() == v.dim()):
        raise ValueError(f"attention: q, k and v have one rank, 2 or more; got shapes {_shapes(q, k, v)}")
    heads, groups = (t.shape[-3] if t.dim() > 2 else 1 for t in (q, k))
    if groups == 0 or heads % groups or (v.shape[-3] if v.dim() > 2 else 1) != groups:
        raise ValueError(f"attention: the heads of k and v divide those of q; got shapes {_shapes(q, k, v)}")
    return heads // groups


def _shapes(*tensors: torch.Tensor) -> str:
    """Format shapes for an error. Called only there: torch.compile cannot format symbolic shapes."""
    return ", ".join(str(tuple(t.shape)) for t in tensors)


def _reach(
    queries: int, keys: int, causal: bool, window: tuple[int | None, int | None] | None, offset: int | torch.Tensor
) -> dict[str, object]:
    """Return the spec's parameters and scalars for the visible keys; nothing where all keys are visible."""
    left, right = window if window is not None else (None, None)
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"attention: a window reaches 0 or more keys to either side, None for no limit; got {window}")
    right = 0 if causal else right
    if causal and left is None and isinstance(offset, int) and offset == 0:
        return {"causal": True}
    if surely(max(queries, keys) >= EXACT) and (left is not None or right is not None):
        raise ValueError(f"attention: windows and offsets count up to {EXACT} keys; got {queries} queries and {keys} keys")
    given: dict[str, object] = {}
    fixed = isinstance(offset, int)
    if not isinstance(offset, int):
        offset = offset.to(torch.float32)
    if left is not None and not (fixed and surely(queries - 1 + offset - left <= 0)):
        given |= {"starts": True, "first": _number(offset - left if left else offset)}
    if right is not None and not (fixed and surely(offset + right >= keys - 1)):
        given |= {"ends": True, "last": _number(offset + right if right else offset)}  # a tensor: an addition of 0 would be a launch
    return given


def surely(condition: Any) -> bool:
    """Return whether a condition on sizes holds. Where sizes are symbols: for every size, so that a compiled graph serves them all."""
    if not compiling() and not isinstance(condition, torch.SymBool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _number(value: int | torch.Tensor) -> float | torch.Tensor:
    return value if isinstance(value, torch.Tensor) else float(value)
