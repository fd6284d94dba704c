"""Translate operations on sliding windows: convolutions, pooling, nearest upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Index, IndexLabel, Value, flat
from .elementwise import ZERO, call, choose, compare, over, plus, times
from .networks import per_channel
from .table import op

WINDOWS = "convolutions and windows"
Dim = tuple[Index, ...]


def each(given: Any, rank: int) -> list[int]:
    """Return one number for each spatial dimension; torch takes one for all."""
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(n, int) for n in found):
        raise UnsupportedOperation("a window whose stride, padding or dilation is a size", allowed="numbers")
    return found * rank if len(found) == 1 else found


def scaled(at: ex.Expr, by: int, more: int = 0) -> ex.Expr:
    """Return ``at * by + more`` without neutral terms."""
    at = at if by == 1 or at == ZERO else ex.Binary("*", ex.Const(by), at)
    return at if more == 0 else ex.Binary("+" if more > 0 else "-", at, ex.Const(abs(more)))


def joined(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    """Return the sum of two positions."""
    return b if a == ZERO else a if b == ZERO else ex.Binary("+", a, b)


def inside(b: Builder, at: ex.Expr, size: Any) -> ex.Expr:
    """Return whether a position lies in a dimension of ``size``."""
    return ex.Binary("and", compare(">=", at, ZERO), compare("<", at, b.number(size)))


def windows(b: Builder, x: Value, outer: Sequence[Dim], inner: Sequence[Dim], stride: list[int], padding: list[int], dilation: list[int],
            outside: ex.Expr = ZERO) -> Value:
    """Read ``x`` at ``stride * outer + dilation * inner - padding`` of its last dimensions, which are replaced by ``outer``, then ``inner``."""
    first, bounds = x.rank - len(outer), list[ex.Expr]()
    kept = x.dims[:first]
    for k, (o, i) in enumerate(zip(outer, inner)):
        at = scaled(joined(scaled(b.flat_index(o), stride[k]), scaled(b.flat_index(i), dilation[k])), 1, -padding[k])
        size = b.extent(x.dims[first])
        last = (b.extent(o) - 1) * stride[k] + (b.extent(i) - 1) * dilation[k] - padding[k]
        if (outside != ZERO or not _reads_zero_outside(x, first)) and (padding[k] or not b.sizes.true(b.sizes.of(last) < size)):
            bounds.append(inside(b, at, size))
        x = _without(b, x, first, at)
    return Value((*kept, *outer, *inner), _where_all(bounds, b.numeric(x), outside), x.dtype)


def _where_all(bounds: Sequence[ex.Expr], expr: ex.Expr, outside: ex.Expr) -> ex.Expr:
    """Return ``expr`` where all bounds hold, else ``outside``."""
    for bound in bounds:
        expr = choose(bound, expr, outside)
    return expr


def _reads_zero_outside(x: Value, place: int) -> bool:
    """Return whether a dimension is one of a tensor as it lies in memory: no part of it, no single element, and nothing computed."""
    leaves = flat(x.dims[place])
    named = {leaf.name for i in x.expr.index if isinstance(i, IndexLabel) for leaf in i.index.leaves()} if isinstance(x.expr, ex.Access) else set()
    return bool(leaves) and {leaf.name for leaf in leaves} <= named


def _without(b: Builder, x: Value, place: int, at: ex.Expr) -> Value:
    """Return the elements at one position of a dimension, without that dimension."""
    found = b.taken(x, place, lambda _: at, ())
    return replace(found, dims=(*found.dims[:place], *found.dims[place + 1 :]))


@op("convolution", group=WINDOWS)
def convolution(b: Builder, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int) -> Value:
    x, weight = b.value(x), b.value(weight)
    rank = weight.rank - 2
    stride, padding, dilation = each(stride, rank), each(padding, rank), each(dilation, rank)
    outer = [b.index(n) for n in b.shape[-rank:]]
    shape = [b.extent(d) for d in (*x.dims[:2], *weight.dims[:2])]
    x = replace(x, dims=(*b.reshaped(replace(x, dims=x.dims[:2]), [shape[0], groups, b.sizes.quotient(shape[1], groups)]).dims, *x.dims[2:]))
    weight = replace(weight, dims=(*b.reshaped(replace(weight, dims=weight.dims[:1]), [groups, b.sizes.quotient(shape[2], groups)]).dims, *weight.dims[1:]))
    group, rows, columns, *inner = weight.dims
    taken = transposed_windows(b, x, outer, inner, stride, padding, dilation) if transposed else windows(b, x, outer, inner, stride, padding, dilation)
    batch, own, channels = taken.dims[:3]
    made, summed = (columns, rows) if transposed else (rows, columns)
    left = replace(taken, dims=(batch, own, (), channels, *taken.dims[3:]))
    right = replace(weight, dims=((), group, made, summed, *[()] * rank, *inner))
    found = b.product(left, right, [3, *range(4 + rank, 4 + 2 * rank)], "" if bias is None else "product")
    found = replace(found, dims=(found.dims[0], (*found.dims[1], *found.dims[2]), *found.dims[3:]), dtype=b.dtype)
    return found if bias is None else b.elementwise(plus, found, per_channel(b, bias, rank + 2))


@op("conv1d", "conv2d", "conv3d", group=WINDOWS)
def conv(b: Builder, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Value:
    weight = b.value(weight)
    rank = weight.rank - 2
    if padding == "same":  # the result's shape says what is read after the last element
        padding = [d * (b.sizes.fixed(b.extent(k)) - 1) // 2 for k, d in zip(weight.dims[2:], each(dilation, rank))]
    return _batched(b, x, weight, bias, stride, 0 if padding == "valid" else padding, dilation, False, groups)


@op("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", group=WINDOWS)
def conv_transpose(b: Builder, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1,
                   dilation: Any = 1) -> Value:  # fmt: skip
    return _batched(b, x, b.value(weight), bias, stride, padding, dilation, True, groups)


def _batched(b: Builder, x: Any, weight: Value, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int) -> Value:
    """Convolve; an input without a dimension for the batch is one of a batch of 1."""
    x = b.value(x)
    if x.rank == weight.rank:
        return convolution(b, x, weight, bias, stride, padding, dilation, transposed, 0, groups)
    found = convolution(b, replace(x, dims=((), *x.dims)), weight, bias, stride, padding, dilation, transposed, 0, groups)
    return replace(found, dims=found.dims[1:])


def transposed_windows(b: Builder, x: Value, outer: list[Dim], inner: list[Dim], stride: list[int], padding: list[int], dilation: list[int]) -> Value:
    """Read ``x`` at ``(outer + padding - dilation * inner) / stride`` of its last dimensions, 0 where that is no whole number or lies outside."""
    first, bounds = x.rank - len(outer), list[ex.Expr]()
    kept = x.dims[:first]
    for k, (o, i) in enumerate(zip(outer, inner)):
        ahead, size = scaled(b.flat_index(o), 1, padding[k]), b.extent(x.dims[first])
        back = b.flat_index(i)
        at = ahead if back == ZERO else ex.Binary("-", ahead, scaled(back, dilation[k]))
        if stride[k] != 1:
            bounds.append(compare("==", ex.Binary("%", at, ex.Const(stride[k])), ZERO))
            at = ex.Binary("/", at, ex.Const(stride[k]))
        if not _reads_zero_outside(x, first):
            bounds.append(inside(b, at, size))
        x = _without(b, x, first, at)
    expr = b.numeric(x)
    if bounds:
        together = bounds[0]
        for bound in bounds[1:]:
            together = ex.Binary("and", together, bound)
        expr = choose(together, expr, ZERO)
    return Value((*kept, *outer, *inner), expr, x.dtype)


@op("avg_pool1d", "avg_pool2d", "avg_pool3d", group=WINDOWS)
def avg_pool(b: Builder, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True,
             divisor_override: int | None = None) -> Value:  # fmt: skip
    x = b.value(x)
    rank = len(kernel) if isinstance(kernel, (list, tuple)) else x.rank - 2
    kernel, padding = each(kernel, rank), each(padding, rank)
    stride = each(stride, rank) if stride not in ((), [], None) else kernel
    outer, inner = [b.index(n) for n in b.shape[-rank:]], [b.index(n) for n in kernel]
    sizes = [b.extent(d) for d in x.dims[-rank:]]
    taken = windows(b, x, outer, inner, stride, padding, [1] * rank)
    total = b.reduce("sum", taken, list(range(taken.rank - rank, taken.rank)), False, "total")
    if divisor_override:
        return replace(total, expr=over(total.expr, ex.Const(divisor_override)))
    count: ex.Expr = ex.Const(1)
    for o, n, size, step, before in zip(outer, kernel, sizes, stride, padding):
        most = b.sizes.of((b.extent(o) - 1) * step + n)
        whole = b.sizes.true(most <= size + 2 * before) and (count_include_pad or before == 0)
        start = scaled(b.flat_index(o), step)
        if whole:
            one: ex.Expr = ex.Const(n)
        elif count_include_pad:  # a window that ceil_mode adds ends where the padding does
            one = call("minimum", ex.Const(n), ex.Binary("-", b.number(b.sizes.of(size + 2 * before)), start))
        else:
            end = call("minimum", scaled(start, 1, n - before), b.number(size))
            one = ex.Binary("-", end, call("maximum", scaled(start, 1, -before), ZERO))
        count = one if count == ex.Const(1) else times(count, one)
    return replace(total, expr=over(total.expr, count))


def max_pool(b: Builder, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Value:
    """The largest element of each window. Padding counts as -inf."""
    x = b.value(x)
    rank = len(kernel) if isinstance(kernel, (list, tuple)) else x.rank - 2
    kernel, padding, dilation = each(kernel, rank), each(padding, rank), each(dilation, rank)
    stride = each(stride, rank) if stride not in ((), [], None) else kernel
    outer, inner = [b.index(n) for n in b.shape[-rank:]], [b.index(n) for n in kernel]
    taken = windows(b, x, outer, inner, stride, padding, dilation, outside=ex.NEG_INF)
    return b.reduce("max", taken, list(range(taken.rank - rank, taken.rank)), False, "largest")


op("max_pool1d", "max_pool2d", "max_pool3d", group=WINDOWS)(max_pool)


@op(*(f"max_pool{n}d_with_indices" for n in (1, 2, 3)), group=WINDOWS)
def max_pool_with_indices(b: Builder, *given: Any, **named: Any) -> tuple[Value, None]:
    return max_pool(b, *given, **named), None


@op("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", group=WINDOWS)
def adaptive_max_pool(b: Builder, x: Any, size: Any) -> tuple[Value, None]:
    return adaptive_pool(b, x, size, "max"), None


@op("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", group=WINDOWS)
def adaptive_avg_pool(b: Builder, x: Any, size: Any) -> Value:
    return adaptive_pool(b, x, size, "mean")


def adaptive_pool(b: Builder, x: Any, size: Any, kind: str) -> Value:
    """Reduce windows that cover the input. Their number is the result's size; where it divides the input's, they do not overlap."""
    x, rank = b.value(x), len(size)
    shape, pieces = [b.extent(d) for d in x.dims[-rank:]], list[Any]()
    for own, wanted in zip(shape, b.shape[-rank:]):
        if not b.sizes.divides(wanted, own):
            return _uneven_pool(b, x, [b.sizes.fixed(n) for n in shape], [b.sizes.fixed(n) for n in b.shape[-rank:]], kind)
        pieces += [wanted, b.sizes.quotient(own, wanted)]
    first = x.rank - rank
    apart = b.reshaped(x, [*(b.extent(d) for d in x.dims[:first]), *pieces])
    return b.reduce(kind, apart, list(range(first + 1, apart.rank, 2)), False, "mean" if kind == "mean" else "largest")


def _uneven_pool(b: Builder, x: Value, shape: list[int], wanted: list[int], kind: str) -> Value:
    """Reduce windows from ``o * size / n`` to ``(o + 1) * size / n``, rounded down and up."""
    rank = len(shape)
    kept, bounds, lengths = x.dims[: x.rank - rank], list[ex.Expr](), list[ex.Expr]()
    longest = [max(-(-(o + 1) * own // n) - o * own // n for o in range(n)) for own, n in zip(shape, wanted)]
    outer, inner = [b.index(n) for n in wanted], [b.index(n) for n in longest]
    for o, i, own, n in zip(outer, inner, shape, wanted):
        first, last = scaled(b.flat_index(o), own), scaled(b.flat_index(o), own, own + n - 1)
        lengths.append(over(ex.Binary("-", *(ex.Binary("-", p, ex.Binary("%", p, ex.Const(n))) for p in (last, first))), ex.Const(n)))
        bounds.append(compare("<", b.flat_index(i), lengths[-1]))
        x = _without(b, x, len(kept), joined(ex.Binary("/", first, ex.Const(n)), b.flat_index(i)))
    taken = Value((*kept, *outer, *inner), _where_all(bounds, b.numeric(x), ZERO if kind == "mean" else ex.NEG_INF), x.dtype)
    places = list(range(taken.rank - rank, taken.rank))
    if kind != "mean":
        return b.reduce(kind, taken, places, False, "largest")
    total = b.reduce("sum", taken, places, False, "total")
    for length in lengths:
        total = replace(total, expr=over(total.expr, length))
    return total


@op("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", group=WINDOWS)
def upsample_nearest(b: Builder, x: Any, size: Any, *scales: Any) -> Value:
    """Read element ``i * size / n`` of each dimension, rounded down, ``n`` the result's size."""
    x = b.value(x)
    for place in range(2, x.rank):
        own, wanted = b.extent(x.dims[place]), b.shape[place]
        if not flat(x.dims[place]):
            x = replace(x, dims=(*x.dims[:place], b.index(wanted), *x.dims[place + 1 :]))
            continue
        if not b.sizes.divides(own, wanted):
            scale = scales[place - 2] if place - 2 < len(scales) else None
            if scale is not None:  # torch rounds a position over the factor, which need not be the ratio of sizes
                raise UnsupportedOperation("nearest interpolation by a factor that is no whole number", allowed="size=")
            new = b.index(wanted)
            read = _without(b, x, place, ex.Binary("/", ex.Binary("*", b.flat_index(new), b.number(own)), b.number(wanted)))
            x = replace(read, dims=(*read.dims[:place], new, *read.dims[place:]))
            continue
        x = replace(x, dims=(*x.dims[:place], (*x.dims[place], *b.index(b.sizes.quotient(wanted, own))), *x.dims[place + 1 :]))
    return x
