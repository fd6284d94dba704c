"""Replace attention, by sdpa or spelled out."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from dtkernels.ops.attention_arguments import FLAGS, LOWEST, is_of_keys
from dtkernels.runtime.torch_support.dtypes import KERNEL_DTYPES

from .builder import Builder, hint
from .canonical import HIDDEN, example, named, number_of, operation
from .mask_numbers import Numbers, numbers_of
from .matcher import Match, Number, Optional, either, stripped


def sdpa(query, key, value, mask: Optional):
    """torch's attention."""
    return F.scaled_dot_product_attention(query, key, value, mask)


def spelled_out(query, key, value, scale: Number, divisor: Number, cap: Number, by: Number, over: Number, bias, more, hidden, seen, low: Number):
    """softmax(scores) values, the scores scaled, capped, with tensors added and with keys hidden."""
    scores = either(query @ key.transpose(-1, -2), torch.einsum("bik,bjk->bij", query, key))
    scores = either(scores * scale, scores / divisor, scores)
    scores = either(torch.tanh(scores / by) * cap, torch.tanh(scores * over) * cap, scores)
    scores = either(scores + bias, scores)
    scores = either(scores + more, scores.masked_fill(hidden, low), torch.where(seen, scores, low), scores)
    return F.softmax(scores, -1) @ value


def refuse(match: Match, result: fx.Node) -> str | None:
    """Return why the op does not compute this attention; None if it does."""
    q, k, v = (example(match.get(n)) for n in ("query", "key", "value"))
    said = match.said.get("sdpa", {})
    if number_of(said.get("dropout_p", 0.0)) != 0:
        return "dropout"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in KERNEL_DTYPES:
        return f"dtypes {', '.join(str(t.dtype).removeprefix('torch.') for t in (q, k, v))}"
    if not q.dim() == k.dim() == v.dim() or not 3 <= q.dim() <= 4:
        return "q, k and v that are not all of 3 or of 4 dimensions"
    repeated = _repeated(q, k)
    if repeated is None or _repeated(q, v) != repeated or repeated > 1 and not said.get("enable_gqa"):
        return "heads that do not match"
    if any(not statically_known_true(n == m) for n, m in zip(q.shape[:-3] or q.shape[:1], k.shape[:-3] or k.shape[:1])):
        return "leading dimensions that are broadcast"
    if not isinstance(match.get("divisor"), (int, float, type(None))):
        return "scores over a number that is not known"
    if said and not isinstance(said.get("is_causal", False), bool):
        return "is_causal that is not known"
    if match.get("cap") is not None and not is_capped(match):
        return "a softcap of two numbers"
    return _refuse_masks(match, q, k)


def _repeated(q: torch.Tensor, k: torch.Tensor) -> int | None:
    """Return how many heads of q share one of k, for any symbolic sizes; None if that is not known."""
    if q.dim() < 4:
        return 1
    many, few = q.shape[-3], k.shape[-3]
    share = hint(many) // max(hint(few), 1)
    return share if share and statically_known_true(many == share * few) else None


def is_capped(match: Match) -> bool:
    """Return whether scores are capped as cap * tanh(scores / cap), by one number or symbol."""
    cap, by, over = (match.get(n) for n in ("cap", "by", "over"))
    if isinstance(cap, fx.Node):
        symbols = [example(n) for n in (cap, by)]
        return by is cap or all(isinstance(s, torch.SymFloat) for s in symbols) and statically_known_true(symbols[0] == symbols[1])
    return cap > 0 and (by == cap or isinstance(over, (int, float)) and math.isclose(over * cap, 1, rel_tol=1e-6))


def cap_of(match: Match) -> dict[str, Any]:
    """Return the arguments of a softcap; none where there is none."""
    cap = match.get("cap")
    return {} if cap is None else {"capped": True, "cap": cap if isinstance(cap, fx.Node) else float(cap)}


def _refuse_masks(match: Match, q: torch.Tensor, k: torch.Tensor) -> str | None:
    for name in MASKS:
        node = match.get(name)
        if node is None:
            continue
        mask = example(node)
        flags = name in ("hidden", "seen")
        if (mask.dtype != torch.bool) if flags else not (mask.dtype in KERNEL_DTYPES or name == "mask" and mask.dtype == torch.bool):
            return f"a mask of {mask.dtype}"
        if mask.dim() > q.dim():
            return "a mask of more dimensions"
    if match.get("hidden") is not None or match.get("seen") is not None:
        low = match.get("low")
        if not isinstance(low, (int, float)) or low > HIDDEN and low != torch.finfo(q.dtype).min:
            return "hidden scores that are not -inf"
    return None


def emit(b: Builder, match: Match, result: fx.Node) -> fx.Node:
    """Add the op's call."""
    q, k, v = (match.get(n) for n in ("query", "key", "value"))
    said = match.said.get("sdpa", {})
    once = _unrepeated(k), _unrepeated(v)
    shares = [_repeated(example(q), example(n)) for n in once]
    if shares[0] is not None and shares[0] == shares[1]:
        k, v = once
    given: dict[str, Any] = {"Q": q, "K": k, "V": v, "scale": _scale(b, match, said, q), "group": _repeated(example(q), example(k))}
    if said.get("is_causal"):
        given["causal"] = True
    given |= cap_of(match)
    learns = torch.is_grad_enabled() and any(example(n).requires_grad for n in (q, k, v))
    reached, flags = read.emit(b, q, learns) if (read := numbers_in(match)) is not None else ({}, None)
    given |= reached
    full = (*(b.size(q, d) for d in range(example(q).dim() - 1)), b.size(k, -2))
    others, added = _masks(b, match)
    flags = others if flags is None else flags if others is None else b.call(torch.logical_and, flags, others)
    if flags is not None and is_of_keys(example(flags), example(q)):
        keys = b.method("expand", b.method("reshape", flags, (b.size(flags, 0), b.size(flags, -1))), (full[0], full[-1]))
        given |= {"flagged": True, "flags": keys}
        flags = None
    for name, on, node in (("mask", "masked", flags), ("bias", "biased", added)):
        if node is not None:
            given |= {on: True, name: b.method("expand", node, full)}
    return b.op("attention_segments" if "segmented" in given else FLAGS if "flagged" in given else "attention", **given)


def _scale(b: Builder, match: Match, said: dict, q: fx.Node) -> Any:
    if said and said.get("scale") is None:
        columns = b.size(q, -1)
        return 1 / math.sqrt(max(columns, 1)) if isinstance(columns, int) else b.call(operator.truediv, 1.0, b.call(torch.sym_sqrt, columns))
    if said:
        return number_of(said["scale"])
    if match.get("divisor") is not None:
        return 1 / match.get("divisor")
    return 1.0 if match.get("scale") is None else match.get("scale")


def numbers_in(match: Match) -> Numbers | None:
    """Return what the one mask of an attention says in numbers, or None. Two masks, or is_causal beside one, stay as they are."""
    names = _in_numbers(match)
    return names[1] if names else None


def all_in_numbers(match: Match) -> Numbers | None:
    """Return the numbers if nothing else is added to the scores and hides keys."""
    found = _in_numbers(match)
    return found[1] if found and all(match.get(n) is None for n in MASKS if n != found[0]) else None


def without_matrix(match: Match, result: fx.Node) -> None:
    """Have torch's attention take a causal mask as ``is_causal``, and none where every key is seen: its fast backends take no matrix."""
    read = all_in_numbers(match)
    node = next((n for n in match.covered if operation(n).name == "sdpa"), None)
    if read is None or not (read.causal or read.nothing) or node is None:
        return
    said = {**named(node), "attn_mask": None, "is_causal": read.causal}
    node.args = tuple(said.pop(name) for name in ("query", "key", "value"))
    node.kwargs = said


def _in_numbers(match: Match) -> tuple[str, Numbers] | None:
    if match.said.get("sdpa", {}).get("is_causal"):
        return None
    for name in MASKS:
        node = match.get(name)
        if node is None:
            continue
        flags = name in ("hidden", "seen") or example(node).dtype == torch.bool
        read = numbers_of(node, added=not flags, hidden=name == "hidden")
        if read is not None and (not read.same or example(match.get("query")).dim() == 4):
            return name, read
    return None


MASKS = ("mask", "bias", "more", "hidden", "seen")


def _masks(b: Builder, match: Match) -> tuple[fx.Node | None, fx.Node | None]:
    """Return the flags of visible keys and what is added to the scores, but for what is said in numbers."""
    read = _in_numbers(match)
    given = {n: node for n in MASKS if (node := match.get(n)) is not None and (read is None or n != read[0])}
    flags, added = given.get("seen"), None
    if "hidden" in given:
        flags = b.call(torch.logical_not, given["hidden"])
    for name in ("mask", "bias", "more"):
        node = given.get(name)
        if node is None:
            continue
        if example(node).dtype == torch.bool:
            flags = node
            continue
        if example(node).dtype != torch.float16:  # float32's lowest would overflow in sums
            node = b.call(F.threshold, node, LOWEST, -math.inf)
        added = node if added is None else b.call(torch.add, added, node)
    return flags, added


def _unrepeated(node: fx.Node) -> fx.Node:
    """Return k or v before its heads were repeated for grouped-query attention; itself if they were not."""
    node, found = stripped(node), example(node)
    if found.dim() != 4 or operation(node).name != "reshape":
        return _repeats(node) or node
    wide = operation(node).operands[0]
    if not isinstance(wide, fx.Node) or wide.target != "expand" or example(wide).dim() != 5:
        return node
    once: Any = wide.args[0]
    shape = example(once).shape
    if len(shape) != 5 or not statically_known_true(shape[2] == 1) or operation(once).name != "getitem" and once.target not in ("unsqueeze", torch.unsqueeze):
        return node
    source = once.args[0]
    kept = example(source)
    fits = kept.dim() == 4 and statically_known_true(kept.shape[1] == shape[1]) and statically_known_true(shape[1] * example(wide).shape[2] == found.shape[1])
    return source if fits and all(statically_known_true(kept.shape[d] == found.shape[d]) for d in (0, 2, 3)) else node


def _repeats(node: fx.Node) -> fx.Node | None:
    """Return the argument of repeat_interleave along the heads."""
    if node.target not in (torch.repeat_interleave, "repeat_interleave"):
        return None
    given: dict[str, Any] = dict(zip(("input", "repeats", "dim"), node.args)) | node.kwargs
    return given["input"] if given.get("dim") in (1, -3) and isinstance(given.get("repeats"), int) else None
