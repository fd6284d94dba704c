"""Replace a last layer with its loss, norms, gated units and low-rank updates."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from dtkernels.ops.losses.summed_rows import may_form_adjoint, name_of_sum
from dtkernels.runtime.torch_support.dtypes import KERNEL_DTYPES

from .attention import cap_of, is_capped
from .builder import Builder, hint, same_shape
from .canonical import example, number_of
from .matcher import Match, Number, Optional, either, rows, sliced


def _floating(match: Match, *names: str) -> str | None:
    wrong = [t.dtype for n in names if (node := match.get(n)) is not None and (t := example(node)).dtype not in KERNEL_DTYPES]
    return f"dtype {str(wrong[0]).removeprefix('torch.')}" if wrong else None


# -- a last layer and its cross entropy ---------------------------------------------------------------------------------


def last_layer_loss(hidden, weight, bias: Optional, target, cap: Number, by: Number, over: Number):
    """Cross entropy of a linear layer's rows, which may be capped, cut along the sequence and joined before."""
    product = hidden @ weight.t()
    logits = either(F.linear(hidden, weight, bias), product + bias, product)
    logits = either(torch.tanh(logits / by) * cap, torch.tanh(logits * over) * cap, logits)
    return F.cross_entropy(rows(sliced(logits)), target)


def refuse_loss(match: Match, result: fx.Node) -> str | None:
    """Return why the op does not compute this loss; None if it does."""
    said, hidden, weight, target = match.said["cross_entropy"], *(example(match.get(n)) for n in ("hidden", "weight", "target"))
    if said.get("weight") is not None or said.get("size_average") is not None or said.get("reduce") is not None:
        return "weights of classes, or an old reduction"
    if target.dtype != torch.int64 or target.dim() != 1 or example(said["input"]).dim() != 2:
        return "targets that are not one class for each row"
    if said.get("reduction", "mean") not in ("mean", "sum", "none") or not isinstance(said.get("ignore_index", -100), int):
        return "a reduction or an ignored class that is not known"
    if number_of(said.get("label_smoothing", 0.0)) is None or isinstance(number_of(said.get("label_smoothing", 0.0)), fx.Node):
        return "label smoothing that is not known"
    if weight.dim() != 2 or hidden.dim() < 2 or match.get("bias") is not None and example(match.get("bias")).dim() != 1:
        return "a layer that is not of a matrix"
    if match.get("cap") is not None and not is_capped(match):
        return "a softcap of two numbers"
    return _floating(match, "hidden", "weight", "bias")


def emit_loss(b: Builder, match: Match, result: fx.Node) -> fx.Node:
    """Add the op's call, and the reduction of its rows."""
    said, hidden = match.said["cross_entropy"], match.get("hidden")
    if match.get("index") is not None:
        hidden = b.call(operator.getitem, hidden, match.get("index"))
    if example(hidden).dim() > 2:
        hidden = b.method("reshape", hidden, -1, b.size(hidden, -1))
    ignored, smoothing = said.get("ignore_index", -100), number_of(said.get("label_smoothing", 0.0))
    given: dict[str, Any] = {"H": hidden, "W": match.get("weight"), "t": match.get("target"), "ignored": ignored}
    if match.get("bias") is not None:
        given |= {"biased": True, "b": match.get("bias")}
    given |= cap_of(match)
    if smoothing:
        given |= {"smoothed": True, "smoothing": float(smoothing)}  # type: ignore[arg-type]
    tensors = [example(n) for n in given.values() if isinstance(n, torch.fx.Node)]
    if said.get("reduction", "mean") != "none" and may_form_adjoint(tensors):
        total = b.op(name_of_sum("linear_cross_entropy"), **given)
    else:
        losses = b.op("linear_cross_entropy", **given)
        if said.get("reduction", "mean") == "none":
            return losses
        total = b.method("sum", losses)
    return total if said.get("reduction") == "sum" else b.call(torch.div, total, b.method("sum", b.call(torch.ne, match.get("target"), ignored)))


# -- norms --------------------------------------------------------------------------------------------------------------


def rms(x, weight, eps: Number):
    """torch's own."""
    return F.rms_norm(x, [], weight, eps)


def rms_spelled_out(x, weight, eps: Number):
    """x / sqrt(mean(x^2) + eps) * weight."""
    return _over_root(x, torch.square(x).mean(-1, keepdim=True) + eps) * weight


def rms_of_difference(x, weight, eps: Number):
    """x / sqrt(mean(x^2) + eps) * (1 + weight)."""
    return _over_root(x, torch.square(x).mean(-1, keepdim=True) + eps) * (weight + 1)


def _over_root(x, square):
    return either(x * torch.rsqrt(square), x / torch.sqrt(square))


def layer(x, weight, bias, eps: Number):
    """torch's own."""
    return F.layer_norm(x, [], weight, bias, eps)


def refuse_norm(match: Match, result: fx.Node) -> str | None:
    """Return why the op does not compute this norm; None if it does."""
    x = example(match.get("x"))
    for name in ("weight", "bias"):
        node = match.get(name)
        if node is not None and (example(node).dim() != 1 or not statically_known_true(example(node).shape[0] == x.shape[-1])):
            return "a norm over more than the last dimension"
    return _floating(match, "x", "weight", "bias")


def emit_rms(b: Builder, match: Match, result: fx.Node) -> fx.Node:
    """Add the op's call."""
    return b.op("rmsnorm", A=match.get("x"), w=match.get("weight"), eps=match.get("eps"))


def emit_rms_of_difference(b: Builder, match: Match, result: fx.Node) -> fx.Node:
    """Add the op's call."""
    return b.op("rmsnorm", A=match.get("x"), w=match.get("weight"), eps=match.get("eps"), offset=1)


def emit_layer(b: Builder, match: Match, result: fx.Node) -> fx.Node:
    """Add the op's call."""
    return b.op("layernorm", A=match.get("x"), w=match.get("weight"), b=match.get("bias"), eps=match.get("eps"))


# -- gated units and low-rank updates ------------------------------------------------------------------------------------


def silu_gate(gate, up):
    """silu(gate) * up."""
    return either(F.silu(gate), gate * torch.sigmoid(gate)) * up


def gelu_gate(gate, up):
    """gelu(gate) * up."""
    return F.gelu(gate) * up


def refuse_gate(match: Match, result: fx.Node) -> str | None:
    """Return why the op does not compute this unit; None if it does."""
    if not same_shape(example(match.get("gate")), example(match.get("up"))):
        return "gate and up of different shapes"
    return _floating(match, "gate", "up")


def emit_silu(b: Builder, match: Match, result: fx.Node) -> fx.Node:
    """Add the op's call."""
    return b.op("swiglu", A=match.get("gate"), B=match.get("up"))


def emit_gelu(b: Builder, match: Match, result: fx.Node) -> fx.Node:
    """Add the op's call."""
    return b.op("geglu", A=match.get("gate"), B=match.get("up"), exact=match.said["gelu"].get("approximate", "none") == "none")


LARGEST_RANK = 256


def low_rank(y, x, a, b, down, up, scale: Number):
    """y + (x a^T) b^T * scale, or with both matrices transposed."""
    update = either(F.linear(F.linear(x, a), b), x @ down @ up)
    return y + either(update * scale, update)


def refuse_low_rank(match: Match, result: fx.Node) -> str | None:
    """Return why the op does not compute this update; None if it does."""
    y, x = example(match.get("y")), example(match.get("x"))
    a = example(match.get("a") if match.get("a") is not None else match.get("down"))
    b = example(match.get("b") if match.get("b") is not None else match.get("up"))
    if a.dim() != 2 or b.dim() != 2 or x.dim() < 2 or x.dim() != y.dim() or not same_shape(y, example(result)):
        return "matrices with leading dimensions, or a sum that broadcasts"
    rank = hint(a.shape[0] if match.get("a") is not None else a.shape[1])
    if rank > LARGEST_RANK or rank >= min(hint(x.shape[-1]), hint(y.shape[-1])):
        return f"a rank of {rank}"
    return _floating(match, "y", "x", "a", "b", "down", "up")


def emit_low_rank(b: Builder, match: Match, result: fx.Node) -> fx.Node:
    """Add the op's call."""
    down, up = match.get("a"), match.get("b")
    if down is None:
        down, up = (b.method("transpose", match.get(n), 0, 1) for n in ("down", "up"))
    scale = 1.0 if match.get("scale") is None else match.get("scale")
    return b.op("lora", Y=match.get("y"), X=match.get("x"), A=down, B=up, scale=scale)
