"""Translate cumulative operations and top-k."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Value, flat
from .elementwise import ZERO, call, choose, compare, minus, negative, plus
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
    x = b.value(x)
    if not isinstance(k, int) or k > MOST_RANKS:
        raise UnsupportedOperation(f"topk of {k} elements", allowed=f"a number up to {MOST_RANKS}")
    place = dim % max(x.rank, 1)
    if not x.rank or not flat(x.dims[place]):
        return x, Value(x.dims, ZERO, torch.int64)
    x = _by_position(b, x, place)
    x, ranks, over = shared(b, x, "scores"), b.index(k), b.binding(list(x.dims[place]))
    dims = (*x.dims[:place], ranks, *x.dims[place + 1 :])
    terms = x.expr if largest else negative(x.expr)
    values, places = (b.define(Value(dims, ex.Reduce(kind, terms, over, b.flat_index(ranks)), x.dtype), hint) for kind, hint in (("topk", "values"), ("argtopk", "places")))
    return replace(values, expr=values.expr if largest else negative(values.expr)), replace(places, dtype=torch.int64)
