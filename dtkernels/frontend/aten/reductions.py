"""Translate reductions over dimensions, and operations built on them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ..builder import Builder
from ..values import Size, Value
from .elementwise import ONE, ZERO, call, choose, compare, converted, minus, number, over, plus, times
from .table import op

REDUCTIONS, SOFTMAX = "reductions", "softmax and its kin"


def prepared(b: Builder, x: Any, dtype: torch.dtype | None) -> Value:
    """Return the value, converted first where the operation is asked to."""
    x = b.value(x)
    return x if dtype is None else converted(b, x, dtype)


def count_of(b: Builder, x: Value, dim: Any) -> ex.Expr:
    """Return the number of elements along dimensions."""
    return b.number(b.extent([i for place in b.places(x.rank, dim) for i in x.dims[place]]))


@op("sum", group=REDUCTIONS)
def total(b: Builder, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    return b.reduce("sum", prepared(b, x, dtype), dim, keepdim, dtype=b.dtype)


@op("mean", group=REDUCTIONS)
def mean(b: Builder, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    return b.reduce("mean", prepared(b, x, dtype), dim, keepdim, dtype=b.dtype)


@op("amax", group=REDUCTIONS)
def amax(b: Builder, x: Any, dim: Any = (), keepdim: bool = False) -> Value:
    return b.reduce("max", b.value(x), dim, keepdim)


@op("amin", group=REDUCTIONS)
def amin(b: Builder, x: Any, dim: Any = (), keepdim: bool = False) -> Value:
    return b.reduce("min", b.value(x), dim, keepdim)


def extreme(b: Builder, kind: str, x: Any, dim: Any, keepdim: bool) -> Any:
    if isinstance(dim, Value):
        return b.elementwise(lambda p, q: call(f"{kind}imum", p, q), x, dim)
    found = b.reduce(kind, b.value(x), dim, keepdim)
    return found if dim is None else (found, b.reduce(f"arg{kind}", b.value(x), dim, keepdim, "place", torch.int64))


@op("max", group=REDUCTIONS)
def largest(b: Builder, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return extreme(b, "max", x, dim, keepdim)


@op("min", group=REDUCTIONS)
def smallest(b: Builder, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return extreme(b, "min", x, dim, keepdim)


@op("argmax", group=REDUCTIONS)
def argmax(b: Builder, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return b.reduce("argmax", b.value(x), dim, keepdim, "place", torch.int64)


@op("argmin", group=REDUCTIONS)
def argmin(b: Builder, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return b.reduce("argmin", b.value(x), dim, keepdim, "place", torch.int64)


@op("prod", group=REDUCTIONS)
def prod(b: Builder, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    return b.reduce("prod", prepared(b, x, dtype), dim, keepdim, dtype=b.dtype)


@op("any", "all", group=REDUCTIONS)
def some(b: Builder, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return _truth(b, x, dim, keepdim, "max")


def every(b: Builder, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return _truth(b, x, dim, keepdim, "min")


def _truth(b: Builder, x: Any, dim: Any, keepdim: bool, kind: str) -> Value:
    x = b.value(x)
    found = b.reduce(kind, Value(x.dims, b.condition(x), torch.bool), dim, keepdim)
    return replace(found, expr=compare(">", found.expr, ZERO), dtype=torch.bool)


def deviations(b: Builder, x: Value, dim: Any) -> tuple[Value, Value]:
    """Return (the mean with its dimensions kept, x without it)."""
    middle = b.reduce("mean", x, dim, True, "mean", x.dtype)
    return middle, b.elementwise(minus, x, middle, dtype=x.dtype)


def variance(b: Builder, x: Value, dim: Any, correction: float, keepdim: bool, dtype: torch.dtype) -> Value:
    """Return the variance; ``correction`` is taken from the number of elements, as torch does."""
    _, apart = deviations(b, x, dim)
    squares = b.elementwise(lambda a: times(a, a), apart, dtype=dtype)
    if correction == 0:
        return b.reduce("mean", squares, dim, keepdim, "variance", dtype)
    summed = b.reduce("sum", squares, dim, keepdim, "squares", dtype)
    count = count_of(b, x, dim)
    less = ex.Const(int(correction)) if correction == int(correction) else number(correction)
    return replace(summed, expr=over(summed.expr, minus(count, less)))


def _corrected(args: tuple, unbiased: Any, correction: Any) -> tuple[Any, float, bool]:
    """Read the arguments of the overloads of var: (dim, correction, keepdim)."""
    dim, keepdim = None, False
    if args and isinstance(args[0], bool):
        unbiased, args = args[0], ()
    if args:
        dim = args[0]
        if len(args) > 1:
            unbiased = args[1]
        if len(args) > 2:
            keepdim = args[2]
    return dim, float(correction) if correction is not None else 1.0 if unbiased is None else float(unbiased), keepdim


@op("var", group=REDUCTIONS)
def var(b: Builder, x: Any, *args: Any, unbiased: Any = None, correction: Any = None, keepdim: bool = False, dim: Any = None) -> Value:
    given, less, kept = _corrected(args, unbiased, correction)
    return variance(b, b.value(x), given if dim is None else dim, less, kept or keepdim, b.dtype)


@op("std", group=REDUCTIONS)
def std(b: Builder, x: Any, *args: Any, unbiased: Any = None, correction: Any = None, keepdim: bool = False, dim: Any = None) -> Value:
    found = var(b, x, *args, unbiased=unbiased, correction=correction, keepdim=keepdim, dim=dim)
    return replace(found, expr=call("sqrt", found.expr))


@op("var_mean", "std_mean", group=REDUCTIONS)
def var_mean(b: Builder, x: Any, *args: Any, **named: Any) -> tuple[Value, Value]:
    given, less, kept = _corrected(args, named.get("unbiased"), named.get("correction"))
    dim, keepdim, x = named.get("dim", given), named.get("keepdim", kept), b.value(x)
    return variance(b, x, dim, less, keepdim, x.dtype), b.reduce("mean", x, dim, keepdim, "mean")


def std_mean(b: Builder, x: Any, *args: Any, **named: Any) -> tuple[Value, Value]:
    found, middle = var_mean(b, x, *args, **named)
    return replace(found, expr=call("sqrt", found.expr)), middle


@op("norm", "linalg_vector_norm", "frobenius_norm", group=REDUCTIONS)
def norm(b: Builder, x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, ord: Any = None, dtype: torch.dtype | None = None) -> Value:
    x, p = prepared(b, x, dtype), 2 if p is None else p
    p = p if ord is None else ord
    if p in (math.inf, -math.inf):
        return b.reduce("max" if p > 0 else "min", b.elementwise(lambda a: call("abs", a), x), dim, keepdim, "norm")
    if p == 0:
        return b.reduce("sum", b.elementwise(lambda a: choose(compare("!=", a, ZERO), ONE, ZERO), x), dim, keepdim, "count")
    forms = {1: lambda a: call("abs", a), 2: lambda a: times(a, a)}
    terms = b.elementwise(forms.get(p, lambda a: call("pow", call("abs", a), number(p))), x)
    found = b.reduce("sum", terms, dim, keepdim, {1: "norm", 2: "squares"}.get(p, "powers"))
    return found if p == 1 else replace(found, expr=call("sqrt", found.expr) if p == 2 else call("pow", found.expr, number(1 / p)))


@op("pairwise_distance", group=REDUCTIONS)
def pairwise_distance(b: Builder, x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Value:
    return norm(b, b.elementwise(lambda a, c: plus(minus(a, c), number(eps)), x, y), p, -1, keepdim)


@op("cdist", "_cdist_forward", group=REDUCTIONS)
def cdist(b: Builder, x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Value:
    """Distances of all pairs of rows, from differences: no digits cancel. The gradient at a distance of 0 is 0, as in torch."""
    x, y = b.value(x), b.value(y)
    x, y = replace(x, dims=(*x.dims[:-1], (), x.dims[-1])), replace(y, dims=(*y.dims[:-2], (), *y.dims[-2:]))
    apart = b.elementwise(minus, x, y)
    if p != 2:
        return norm(b, apart, p, -1)
    found = shared(b, b.reduce("sum", b.elementwise(lambda a: times(a, a), apart), -1, False, "squares"), "squares")
    positive = compare(">", found.expr, ZERO)
    return replace(found, expr=times(call("sqrt", choose(positive, found.expr, ONE)), choose(positive, ONE, ZERO)))


def frobenius_norm(b: Builder, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return norm(b, x, 2, dim, keepdim)


def shared(b: Builder, x: Value, hint: str) -> Value:
    """Give a value that is read several times a Func, unless it is short."""
    return b.define(x, hint) if sum(1 for _ in x.expr.walk()) > 4 else x


def exponentials(b: Builder, x: Value, dim: Any) -> tuple[Value, Value]:
    """Return (x, the sum of its exponentials). The algebra subtracts the maximum."""
    total = b.reduce("sum", b.elementwise(lambda a: call("exp", a), x, dtype=x.dtype), dim, True, "total", x.dtype)
    return x, total


@op("softmax", "_softmax", "special_softmax", group=SOFTMAX)
def softmax(b: Builder, x: Any, dim: int, dtype: Any = None) -> Value:
    x, total = exponentials(b, shared(b, prepared(b, x, dtype if isinstance(dtype, torch.dtype) else None), "scores"), dim)
    return b.elementwise(lambda a, t: over(call("exp", a), t), x, total)


@op("log_softmax", "_log_softmax", "special_log_softmax", group=SOFTMAX)
def log_softmax(b: Builder, x: Any, dim: int, dtype: Any = None) -> Value:
    x, total = exponentials(b, shared(b, prepared(b, x, dtype if isinstance(dtype, torch.dtype) else None), "scores"), dim)
    return b.elementwise(lambda a, t: minus(a, call("log", t)), x, total)


@op("logsumexp", "special_logsumexp", group=SOFTMAX)
def logsumexp(b: Builder, x: Any, dim: Any, keepdim: bool = False) -> Value:
    x = b.value(x)
    found = b.reduce("sum", b.elementwise(lambda a: call("exp", a), x), dim, keepdim, "total")
    return replace(found, expr=call("log", found.expr))


@op("count_nonzero", group=REDUCTIONS)
def count_nonzero(b: Builder, x: Any, dim: Any = None) -> Value:
    x = b.value(x)
    return b.reduce("sum", Value(x.dims, choose(b.condition(x), ONE, ZERO), torch.int64), dim)


@op("numel", "sym_numel", group=REDUCTIONS)
def numel(b: Builder, x: Any) -> Value:
    return Value((), Size(b.extent([i for dim in b.value(x).dims for i in dim])), torch.int64)


@op("cosine_similarity", group=REDUCTIONS)
def cosine_similarity(b: Builder, x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Value:
    x, y = b.value(x), b.value(y)
    rank = max(x.rank, y.rank)
    places = dim % rank - rank  # the same dimension of either, counted from the last one

    def length(v: Value) -> Value:
        found = b.reduce("sum", b.elementwise(lambda a: times(a, a), v), places, False, "squares")
        return replace(found, expr=call("maximum", call("sqrt", found.expr), number(eps)))

    both = b.reduce("sum", b.elementwise(times, x, y), places, False, "both")
    return b.elementwise(lambda s, p, q: over(s, times(p, q)), both, length(x), length(y))


@op("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", group=SOFTMAX)
def mse_loss(b: Builder, x: Any, y: Any, reduction: int = 1) -> Value:
    return reduced(b, b.elementwise(lambda p, q: times(minus(p, q), minus(p, q)), x, y), reduction)


def l1_loss(b: Builder, x: Any, y: Any, reduction: int = 1) -> Value:
    return reduced(b, b.elementwise(lambda p, q: call("abs", minus(p, q)), x, y), reduction)


def smooth_l1_loss(b: Builder, x: Any, y: Any, reduction: int = 1, beta: float = 1.0) -> Value:
    def made(p: ex.Expr, q: ex.Expr) -> ex.Expr:
        apart, far = minus(p, q), call("abs", minus(p, q))
        return choose(compare("<", far, number(beta)), times(number(0.5 / beta), times(apart, apart)), minus(far, number(0.5 * beta)))

    return reduced(b, b.elementwise(made, x, y), reduction)


def huber_loss(b: Builder, x: Any, y: Any, reduction: int = 1, delta: float = 1.0) -> Value:
    def made(p: ex.Expr, q: ex.Expr) -> ex.Expr:
        apart, far = minus(p, q), call("abs", minus(p, q))
        return choose(compare("<", far, number(delta)), times(number(0.5), times(apart, apart)), times(number(delta), minus(far, number(0.5 * delta))))

    return reduced(b, b.elementwise(made, x, y), reduction)


def reduced(b: Builder, value: Value, reduction: int) -> Value:
    """Apply torch's reduction of losses: 0 none, 1 mean, 2 sum."""
    return value if reduction == 0 else b.reduce("mean" if reduction == 1 else "sum", value, None, False, "loss")


@op("binary_cross_entropy_with_logits", group=SOFTMAX)
def binary_cross_entropy_with_logits(b: Builder, x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Value:
    def soft(a: ex.Expr) -> ex.Expr:  # log(1 + exp(-a))
        return plus(call("maximum", ex.Unary("-", a), ZERO), call("log1p", call("exp", ex.Unary("-", call("abs", a)))))

    def made(a: ex.Expr, t: ex.Expr, *heavier: ex.Expr) -> ex.Expr:
        factor = plus(ONE, times(minus(heavier[0], ONE), t)) if heavier else None
        return plus(times(minus(ONE, t), a), times(factor, soft(a)) if factor is not None else soft(a))

    loss = b.elementwise(made, x, target, *([] if pos_weight is None else [pos_weight]))
    return reduced(b, loss if weight is None else b.elementwise(times, loss, weight), reduction)


for _function in (every, std_mean, frobenius_norm, l1_loss, smooth_l1_loss, huber_loss):  # share a line of the table with another
    from .table import TABLE

    TABLE["all" if _function is every else _function.__name__] = _function
