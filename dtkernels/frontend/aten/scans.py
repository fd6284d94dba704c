"""Translate cumulative operations and top-k."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Value, flat
from .elementwise import ZERO, call, choose, compare, converted, minus, negative, plus
from .reductions import prepared, shared
from .table import op

SCANS = "partial results and ranks"
MOST_RANKS = 32  #: of rtopk


def _by_position(b: Builder, x: Value, place: int) -> Value:
    """Return ``x`` with one index variable along a dimension: the position in it, if it was flattened."""
    return b.taken(x, place, lambda at: at, b.index(b.extent(x.dims[place]))) if len(flat(x.dims[place])) > 1 else x


def scanned(b: Builder, kind: str, x: Value, dim: int, hint: str, exclusive: bool = False) -> Value:
    """Return sums, products or extremes of the elements up to each one along a dimension."""
    place = dim % max(x.rank, 1)
    if not x.rank or not flat(x.dims[place]):
        return x
    x = _by_position(b, x, place)
    x = shared(b, replace(x, expr=b.numeric(x)), "terms")
    return b.define(replace(x, expr=ex.Scan(kind, (x.expr,), flat(x.dims[place])[0].name, exclusive=exclusive)), hint)


@op("cumsum", group=SCANS)
def cumsum(b: Builder, x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    return replace(scanned(b, "sum", prepared(b, x, dtype), dim, "sums"), dtype=b.dtype)


@op("cummax", group=SCANS)
def cummax(b: Builder, x: Any, dim: int) -> tuple[Value, None]:
    return scanned(b, "max", prepared(b, x, None), dim, "largest"), None


@op("cummin", group=SCANS)
def cummin(b: Builder, x: Any, dim: int) -> tuple[Value, None]:
    return scanned(b, "min", prepared(b, x, None), dim, "smallest"), None


@op("cumprod", group=SCANS)
def cumprod(b: Builder, x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    return replace(scanned(b, "prod", prepared(b, x, dtype), dim, "products"), dtype=b.dtype)


@op("logcumsumexp", group=SCANS)
def logcumsumexp(b: Builder, x: Any, dim: int) -> Value:
    """The logarithm of partial sums of exponentials, relative to the largest element so far."""
    x = shared(b, b.value(x), "scores")
    if not x.rank or not flat(x.dims[dim % x.rank]):
        return x
    top, before = scanned(b, "max", x, dim, "top"), scanned(b, "max", x, dim, "before", exclusive=True)
    kept = b.elementwise(lambda m, p: choose(compare(">", p, ex.NEG_INF), call("exp", minus(p, m)), ZERO), top, before, dtype=x.dtype)
    terms = b.elementwise(lambda a, m: choose(compare(">", m, ex.NEG_INF), call("exp", minus(a, m)), ZERO), x, top, dtype=x.dtype)
    dims, (kept_expr, terms_expr) = b.aligned([kept, terms])
    along = flat(dims[dim % x.rank])[0].name
    sums = b.define(Value(dims, ex.Scan("recur", (kept_expr, terms_expr), along), x.dtype), "sums")
    return b.elementwise(lambda s, m: plus(call("log", s), m), sums, top)


@op("topk", group=SCANS)
def topk(b: Builder, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, Value]:
    """The k largest elements and their places. Equal ones come in the order of their places."""
    if not isinstance(k, int) or k > MOST_RANKS:
        raise UnsupportedOperation(f"topk of {k} elements", allowed=f"a number up to {MOST_RANKS}")
    return ranked(b, b.value(x), k, dim, largest)


def ranked(b: Builder, x: Value, k: int, dim: int, largest: bool) -> tuple[Value, Value]:
    """Return the k largest or smallest elements along a dimension, and their places."""
    place = dim % max(x.rank, 1)
    if not x.rank or not flat(x.dims[place]):
        return x, Value(x.dims, ZERO, torch.int64)
    dtype = x.dtype
    x = _by_position(b, x if dtype != torch.bool else replace(x, expr=b.numeric(x), dtype=torch.uint8), place)
    x, ranks, over = shared(b, x, "scores"), b.index(k), b.binding(list(x.dims[place]))
    dims = (*x.dims[:place], ranks, *x.dims[place + 1 :])
    terms = x.expr if largest else negative(x.expr)
    values, places = (b.define(Value(dims, ex.Reduce(kind, terms, over, b.flat_index(ranks)), x.dtype), hint) for kind, hint in (("topk", "values"), ("argtopk", "places")))
    return converted(b, replace(values, expr=values.expr if largest else negative(values.expr)), dtype), replace(places, dtype=torch.int64)


@op("sort", group=SCANS)
def sort(b: Builder, x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> tuple[Value, Value]:
    """All elements along a short dimension in order, and their places. The size selects the program."""
    x = b.value(x)
    size = b.sizes.fixed(b.extent(x.dims[dim])) if x.rank else 1
    if size > MOST_RANKS:
        raise UnsupportedOperation(f"sort of {size} elements", allowed=f"a dimension of {MOST_RANKS} at most")
    return ranked(b, x, size, dim, descending)


@op("argsort", group=SCANS)
def argsort(b: Builder, x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Value:
    return sort(b, x, dim, descending)[1]


@op("msort", group=SCANS)
def msort(b: Builder, x: Any) -> Value:
    return sort(b, x, 0)[0]


@op("kthvalue", group=SCANS)
def kthvalue(b: Builder, x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """The k-th smallest element along a dimension, and its place."""
    if not isinstance(k, int) or not 1 <= k <= MOST_RANKS:
        raise UnsupportedOperation(f"kthvalue of rank {k}", allowed=f"a number up to {MOST_RANKS}")
    return _of_rank(b, b.value(x), k - 1, dim, keepdim)


def _of_rank(b: Builder, x: Value, rank: int, dim: int, keepdim: bool) -> tuple[Value, Value]:
    place = dim % max(x.rank, 1)
    found = ranked(b, x, rank + 1, dim, False)
    dims = [d for k, d in enumerate(found[0].dims) if k != place]
    kept = tuple([*dims[:place], (), *dims[place:]] if keepdim and x.rank else dims)
    at = [b.taken(v, place, lambda _: b.number(rank), ()) if x.rank and flat(v.dims[place]) else v for v in found]
    return replace(at[0], dims=kept), replace(at[1], dims=kept)


@op("median", group=SCANS)
def median(b: Builder, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower one of the elements in the middle of a short dimension, without regard to NaNs."""
    x = b.value(x)
    one = replace(x, dims=(tuple(leaf for d in x.dims for leaf in flat(d)),)) if dim is None else x
    size = b.sizes.fixed(b.extent(one.dims[dim or 0])) if one.rank else 1
    if (size - 1) // 2 >= MOST_RANKS:
        raise UnsupportedOperation(f"the median of {size} elements", allowed=f"{2 * MOST_RANKS} at most")
    found = _of_rank(b, one, (size - 1) // 2, dim or 0, keepdim)
    return found[0] if dim is None else found
