"""Translate layers and losses: norms, cross entropy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ...runtime.torch_support.dtypes import rms_norm_eps
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Value
from .elementwise import ONE, ZERO, call, choose, compare, minus, negative, number, over, plus, times
from .indexing import gather
from .reductions import deviations, exponentials, reduced, shared
from .table import op

NORMS, LOSSES = "norms", "losses"


def normalized(b: Builder, x: Value, places: list[int], eps: float) -> Value:
    """(x - mean) / sqrt(variance + eps) over dimensions."""
    _, apart = deviations(b, x, places)
    variance = b.reduce("mean", b.elementwise(lambda a: times(a, a), apart, dtype=x.dtype), places, True, "variance", x.dtype)
    return b.elementwise(lambda a, v: times(a, call("rsqrt", plus(v, number(eps)))), apart, variance, dtype=x.dtype)


def affine(b: Builder, x: Value, weight: Any, bias: Any, dtype: torch.dtype) -> Value:
    """x * weight + bias, where they are given."""
    if weight is not None:
        x = b.elementwise(times, x, weight, dtype=dtype)
    return replace(x if bias is None else b.elementwise(plus, x, bias, dtype=dtype), dtype=dtype)


@op("layer_norm", group=NORMS)
def layer_norm(b: Builder, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Value:
    x = shared(b, b.value(x), "shifted")
    return affine(b, normalized(b, x, list(range(x.rank - len(shape), x.rank)), eps), weight, bias, b.dtype)


@op("rms_norm", group=NORMS)
def rms_norm(b: Builder, x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Value:
    x = shared(b, b.value(x), "shifted")
    eps = rms_norm_eps(x.dtype) if eps is None else eps
    places = list(range(x.rank - len(shape), x.rank))
    squares = b.reduce("mean", b.elementwise(lambda a: times(a, a), x, dtype=x.dtype), places, True, "mean_square", x.dtype)
    return affine(b, b.elementwise(lambda a, s: times(a, call("rsqrt", plus(s, number(eps)))), x, squares, dtype=x.dtype), weight, None, b.dtype)


def per_channel(b: Builder, given: Any, rank: int) -> Value | None:
    """Lay a vector of channels along dimension 1."""
    if given is None:
        return None
    value = b.value(given)
    return replace(value, dims=(value.dims[0], *[()] * (rank - 2)))


@op("group_norm", group=NORMS)
def group_norm(b: Builder, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True) -> Value:
    x = b.value(x)
    batch, channels, *rest = (b.extent(d) for d in x.dims)
    apart = b.reshaped(x, [batch, groups, b.sizes.quotient(channels, groups), *rest])
    found = normalized(b, apart, list(range(2, apart.rank)), eps)
    found = replace(found, dims=(found.dims[0], (*found.dims[1], *found.dims[2]), *found.dims[3:]))
    return affine(b, found, per_channel(b, weight, x.rank), per_channel(b, bias, x.rank), b.dtype)


@op("batch_norm", group=NORMS)
def batch_norm(b: Builder, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *rest: Any) -> Value:
    x = b.value(x)
    if training and mean is not None:
        raise UnsupportedOperation("batch_norm in training", why="it changes its running statistics", allowed="eval(), or no running statistics")
    if training or mean is None:
        found = normalized(b, shared(b, x, "shifted"), [0, *range(2, x.rank)], eps)
        return affine(b, found, per_channel(b, weight, x.rank), per_channel(b, bias, x.rank), b.dtype)
    mean, var = per_channel(b, mean, x.rank), per_channel(b, var, x.rank)
    found = b.elementwise(lambda a, m, v: times(minus(a, m), call("rsqrt", plus(v, number(eps)))), x, mean, var)
    return affine(b, found, per_channel(b, weight, x.rank), per_channel(b, bias, x.rank), b.dtype)


@op("instance_norm", group=NORMS)
def instance_norm(b: Builder, x: Any, weight: Any, bias: Any, mean: Any, var: Any, use_input_stats: bool, momentum: float, eps: float, *rest: Any) -> Value:
    x = b.value(x)
    if not use_input_stats or mean is not None:
        raise UnsupportedOperation("instance_norm with running statistics")
    found = normalized(b, x, list(range(2, x.rank)), eps)
    return affine(b, found, per_channel(b, weight, x.rank), per_channel(b, bias, x.rank), b.dtype)


@op("cross_entropy_loss", group=LOSSES)
def cross_entropy(b: Builder, x: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, label_smoothing: float = 0.0) -> Value:
    x, target = b.value(x), b.value(target)
    place = 1 if x.rank > 1 else 0
    scores, total = exponentials(b, shared(b, x, "scores"), place)
    logs = b.elementwise(lambda a, t: minus(a, call("log", t)), scores, total, dtype=x.dtype)
    if target.dtype.is_floating_point:
        return _of_probabilities(b, logs, target, weight, place, reduction, label_smoothing)
    smooth = None
    if label_smoothing:
        classes = b.number(b.extent(x.dims[place]))
        terms = logs if weight is None else b.elementwise(times, logs, per_channel(b, weight, logs.rank) if logs.rank > 1 else weight)
        summed = b.reduce("sum", terms, place, False, "smooth")
        smooth = (summed, over(ex.Const(float(label_smoothing)), classes))
    return negative_log_likelihood(b, logs, target, weight, reduction, ignore_index, smooth, 1.0 - label_smoothing)


def _of_probabilities(b: Builder, logs: Value, target: Value, weight: Any, place: int, reduction: int, smoothing: float) -> Value:
    classes = b.number(b.extent(logs.dims[place]))
    if smoothing:
        target = b.elementwise(lambda t: plus(times(t, number(1 - smoothing)), over(number(smoothing), classes)), target)
    terms = b.elementwise(times, logs, target, dtype=logs.dtype)
    if weight is not None:
        terms = b.elementwise(times, terms, per_channel(b, weight, logs.rank) if logs.rank > 1 else weight)
    loss = b.reduce("sum", terms, place, False, "loss")
    loss = replace(loss, expr=negative(loss.expr))
    if reduction != 1:
        return reduced(b, loss, reduction)
    count = b.number(b.extent([i for d in loss.dims for i in d]))
    return b.elementwise(lambda a: over(a, count), b.reduce("sum", loss, None, False, "loss"))


def negative_log_likelihood(b: Builder, logs: Value, target: Value, weight: Any, reduction: int, ignore: int, smooth: Any = None, share: float = 1.0) -> Value:
    """The loss of logarithms of probabilities, dimension 1 the classes, at integer targets."""
    place = 1 if logs.rank > 1 else 0
    at = replace(target, dims=(*target.dims[:place], (), *target.dims[place:]))
    picked = gather(b, logs, place, at)
    picked = replace(picked, dims=(*picked.dims[:place], *picked.dims[place + 1 :]))
    loss = b.elementwise(negative, picked, dtype=logs.dtype)
    kept = b.elementwise(lambda t: compare("!=", t, b.number(ignore)), target, dtype=torch.uint8)
    counts = replace(kept, expr=choose(kept.expr, ONE, ZERO))
    if weight is not None:
        weights = gather(b, b.value(weight), 0, replace(target, dims=(tuple(i for d in target.dims for i in d),)))
        weights = replace(weights, dims=target.dims)
        loss = b.elementwise(times, loss, weights)
        counts = b.elementwise(lambda k, w: choose(k, w, ZERO), kept, weights, dtype=logs.dtype)
    if smooth is not None:
        loss = b.elementwise(lambda a, s: minus(times(number(share), a), times(smooth[1], s)), loss, smooth[0], dtype=logs.dtype)
    loss = b.elementwise(lambda k, a: choose(k, a, ZERO), kept, loss, dtype=logs.dtype)
    if reduction == 0:
        return loss
    total = b.reduce("sum", loss, None, False, "loss")
    if reduction == 2:
        return total
    return b.elementwise(over, total, b.reduce("sum", counts, None, False, "count"), dtype=logs.dtype)


@op("nll_loss_nd", "nll_loss", "nll_loss2d", group=LOSSES)
def nll_loss(b: Builder, x: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100) -> Value:
    return negative_log_likelihood(b, b.value(x), b.value(target), weight, reduction, ignore_index)


@op("kl_div", group=LOSSES)
def kl_div(b: Builder, x: Any, target: Any, reduction: int = 1, *, log_target: bool = False) -> Value:
    def made(a: ex.Expr, t: ex.Expr) -> ex.Expr:
        if log_target:
            return times(call("exp", t), minus(t, a))
        return minus(choose(compare(">", t, ZERO), times(t, call("log", t)), ZERO), times(t, a))

    return reduced(b, b.elementwise(made, x, target), reduction)


@op("glu", group=NORMS)
def glu(b: Builder, x: Any, dim: int = -1) -> Value:
    from .views import sliced

    x = b.value(x)
    place = dim % x.rank
    half = b.sizes.quotient(b.extent(x.dims[place]), 2)
    left = sliced(b, x, place, 0, half)
    return b.elementwise(lambda a, g: times(a, call("sigmoid", g)), left, sliced(b, x, place, half, half))


@op("normalize", group=NORMS)
def normalize(b: Builder, x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Value:
    from .reductions import norm

    length = norm(b, x, p, dim, True)
    return b.elementwise(lambda a, n: over(a, call("maximum", n, number(eps))), x, length)
