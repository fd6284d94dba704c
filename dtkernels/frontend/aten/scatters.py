"""Elements replaced or added at places that an index or a mask says: each element of the result looks for what is written to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Index, IndexLabel, Value, flat
from .elementwise import ONE, ZERO, choose, compare, converted, over, plus, times, where
from .indexing import fresh, position
from .positions import from_the_end
from .table import op

SCATTERED = "writes by index"


def written(b: Builder, x: Value, match: ex.Expr, value: ex.Expr, over_: Sequence[Index], adds: bool) -> Value:
    """Return ``x`` where nothing matches, else ``value``: of several matches along ``over_`` the last one, or ``x`` and the sum of all."""
    if x.dtype == torch.bool:
        found = written(b, replace(x, expr=b.numeric(x), dtype=torch.uint8), match, value, over_, adds)
        return converted(b, found, x.dtype)
    if not over_:
        return replace(x, expr=choose(match, plus(x.expr, value) if adds else value, x.expr))
    names, dtype = b.binding(list(over_)), x.dtype if x.dtype.is_floating_point else torch.float32

    def func(kind: str, terms: ex.Expr, hint: str) -> ex.Expr:
        return b.define(Value(x.dims, ex.Reduce(kind, terms, names), dtype), hint).expr

    if adds:
        return replace(x, expr=plus(x.expr, func("sum", choose(match, value, ZERO), "added")))
    if not {n.name for n in value.walk() if isinstance(n, ex.Label)} & set(names):
        return replace(x, expr=choose(compare(">", func("max", choose(match, ONE, ZERO), "hit"), ZERO), value, x.expr))
    place = ex.Binary("+", b.flat_index(over_), ONE)
    last = func("max", choose(match, place, ZERO), "last")
    picked = func("sum", choose(ex.Binary("and", match, compare("==", place, last)), value, ZERO), "picked")
    return replace(x, expr=choose(compare(">", last, ZERO), picked, x.expr))


def both(conditions: Sequence[ex.Expr]) -> ex.Expr:
    """Return whether all conditions hold."""
    found = conditions[0]
    for one in conditions[1:]:
        found = ex.Binary("and", found, one)
    return found


def laid(b: Builder, given: Value, x: Value, place: int, bounds: list[ex.Expr]) -> Value:
    """Lay a tensor like ``x`` along the dimensions of ``x``, but ``place``. ``bounds`` gets what must hold where it is smaller."""
    for k, (own, other) in enumerate(zip(x.dims, given.dims)):
        if k == place or not flat(own):
            continue
        size = b.extent(other)
        if not flat(other):
            bounds.append(compare("==", b.flat_index(own), ZERO))
            given = replace(given, dims=(*given.dims[:k], own, *given.dims[k + 1 :]))
        elif b.sizes.same(b.extent(own), size):
            b.unify(own, other)
            given = replace(given, expr=b.moved(given.expr, [other], [own]), dims=(*given.dims[:k], own, *given.dims[k + 1 :]))
        else:
            if b.sizes.true(size < b.extent(own)):
                bounds.append(compare("<", b.flat_index(own), b.number(size)))
            given = b.taken(given, k, lambda at: ex.Binary("+", at, ZERO), own)
    return given


Scattered = tuple[Value, ex.Expr, ex.Expr, list[Index]]


def matched(b: Builder, x: Any, dim: int, index: Any, src: Any) -> Scattered:
    """Return (x, the condition that an element is written, what is written, index variables along the index) of a scatter."""
    x, index = fresh(b, b.value(x)), fresh(b, position(b, b.value(index)))
    if not x.rank:
        x, index = replace(x, dims=((),)), replace(index, dims=((),) if not index.rank else index.dims)
    place, bounds = dim % x.rank, list[ex.Expr]()
    src = b.value(src)
    if src.rank:
        src = fresh(b, src)
        leaves = index.dims[place]
        if flat(leaves) and b.sizes.same(b.extent(leaves), b.extent(src.dims[place])):
            b.unify(leaves, src.dims[place])
            src = replace(src, expr=b.moved(src.expr, [src.dims[place]], [leaves]))
        else:
            src = b.taken(src, place, lambda at: ex.Binary("+", at, ZERO) if flat(leaves) else ZERO, leaves)
        src = laid(b, src, x, place, [])
    index = laid(b, index, x, place, bounds)
    match = both([*bounds, compare("==", index.expr, b.flat_index(x.dims[place]))])
    return x, match, b.numeric(converted(b, src, x.dtype)), flat(index.dims[place])


def _finished(b: Builder, x: Value) -> Value:
    return replace(x, dims=x.dims[: len(b.shape)], dtype=b.dtype)


@op("scatter", group=SCATTERED)
def scatter(b: Builder, x: Any, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: str | None = None) -> Value:
    if reduce is not None:
        return scatter_reduce(b, x, dim, index, src if value is None else value, {"add": "sum", "multiply": "prod"}[reduce])
    x, match, written_value, along = matched(b, x, dim, index, src if value is None else value)
    return _finished(b, written(b, x, match, written_value, along, False))


@op("scatter_add", group=SCATTERED)
def scatter_add(b: Builder, x: Any, dim: int, index: Any, src: Any) -> Value:
    x, match, value, along = matched(b, x, dim, index, src)
    return _finished(b, written(b, x, match, value, along, True))


@op("scatter_reduce", group=SCATTERED)
def scatter_reduce(b: Builder, x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Value:
    x, match, value, along = matched(b, x, dim, index, src)
    names = b.binding(along) if along else ()

    def func(kind: str, terms: ex.Expr, neutral: ex.Expr) -> ex.Expr:
        found = choose(match, terms, neutral)
        return b.define(Value(x.dims, ex.Reduce(kind, found, names), x.dtype), "scattered").expr if along else found

    count = func("sum", ONE, ZERO)
    if reduce in ("sum", "mean"):
        total = func("sum", value, ZERO)
        total = plus(total, x.expr if include_self else choose(compare(">", count, ZERO), ZERO, x.expr))
        if reduce == "mean":
            total = over(total, plus(count, ONE) if include_self else choose(compare(">", count, ZERO), count, ONE))
    elif reduce in ("amax", "amin", "prod"):
        neutral = {"amax": ex.NEG_INF, "amin": ex.INF, "prod": ONE}[reduce]
        combined: Callable[[ex.Expr, ex.Expr], ex.Expr] = times if reduce == "prod" else lambda p, q: ex.Call("maximum" if reduce == "amax" else "minimum", (p, q))
        found = func(reduce.removeprefix("a"), value, neutral)
        total = combined(x.expr, found) if include_self else choose(compare(">", count, ZERO), found, x.expr)
    else:
        raise UnsupportedOperation(f"scatter_reduce by {reduce}", allowed="sum, mean, amax, amin, prod")
    return _finished(b, replace(x, expr=total))


def by_vector(b: Builder, x: Any, dim: int, index: Any, source: Any, adds: bool, negative: bool = False) -> Value:
    """Write slices along a dimension at the places that a vector names: index_add, index_copy, index_fill. ``negative``: places may count from the end."""
    x, index, source = fresh(b, b.value(x)), position(b, b.value(index)), b.value(source)
    place = dim % max(x.rank, 1)
    vector = fresh(b, index if index.rank else replace(index, dims=((),)))
    if source.rank:
        source = fresh(b, source)
        leaves = vector.dims[0]
        if flat(leaves):
            b.unify(leaves, source.dims[place])
            source = replace(source, expr=b.moved(source.expr, [source.dims[place]], [leaves]))
        source = laid(b, source, x, place, [])
    at = b.marked(from_the_end(b, vector.expr, b.extent(x.dims[place]))) if negative and x.rank else vector.expr
    match = compare("==", at, b.flat_index(x.dims[place]) if x.rank else ZERO)
    return _finished(b, written(b, x, match, b.numeric(converted(b, source, x.dtype)), flat(vector.dims[0]), adds))


@op("index_add", group=SCATTERED)
def index_add(b: Builder, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Value:
    source = b.value(source)
    return by_vector(b, x, dim, index, source if alpha == 1 else b.elementwise(times, source, alpha, dtype=source.dtype), True)


@op("index_copy", group=SCATTERED)
def index_copy(b: Builder, x: Any, dim: int, index: Any, source: Any) -> Value:
    return by_vector(b, x, dim, index, source, False)


@op("index_fill", group=SCATTERED)
def index_fill(b: Builder, x: Any, dim: int, index: Any, value: Any) -> Value:
    return by_vector(b, x, dim, index, value, False, negative=True)


@op("index_put", "_unsafe_index_put", "_index_put_impl", group=SCATTERED)
def index_put(b: Builder, x: Any, indices: list, values: Any, accumulate: bool = False, unsafe: bool = False) -> Value:
    """x[i, j] = values, x[mask] = values."""
    x, values = fresh(b, b.value(x)), b.value(values)
    given = {place: b.value(i) for place, i in enumerate(indices) if i is not None}
    masks = [place for place, i in given.items() if i.dtype == torch.bool]
    if masks:
        return masked_put(b, x, masks, given, values, accumulate)
    given = {place: position(b, i) for place, i in given.items()}
    dims, exprs = b.aligned(list(given.values()))
    places = list(given)
    matches, taken = list[ex.Expr](), dict[str, ex.Expr]()
    free = [leaf for d in dims for leaf in flat(d)]
    for place, expr in zip(places, exprs):
        own = x.dims[place]
        at = b.flat_index(own)
        if isinstance(expr, IndexLabel) and expr.name not in taken and b.sizes.same(expr.index.axis.root().size, b.extent(own)):
            taken[expr.name] = at  # arange over the dimension: no search
            free = [leaf for leaf in free if leaf.name != expr.name]
            continue
        matches.append(compare("==", b.marked(from_the_end(b, expr, b.extent(own))), at))
    together = places == list(range(places[0], places[0] + len(places)))
    first = places[0] if together else 0
    rest = [d for place, d in enumerate(x.dims) if place not in given]
    like = Value((*rest[:first], *dims, *rest[first:]), ZERO, x.dtype)
    values = converted(b, values, x.dtype)
    target, (_, value) = b.aligned([like, replace(values, expr=b.numeric(values))])
    value = b.moved(value, target, like.dims)
    value = b.replaced(value, taken)
    if matches:
        return written(b, x, b.replaced(both(matches), taken), value, free, accumulate)
    found = replace(x, expr=plus(b.numeric(x), value) if accumulate else value, dtype=torch.uint8 if x.dtype == torch.bool else x.dtype)
    return converted(b, found, x.dtype)


def masked_put(b: Builder, x: Value, masks: list[int], given: dict[int, Value], values: Value, adds: bool) -> Value:
    """x[mask] = number: a choice."""
    if len(given) > 1 or any(flat(d) for d in values.dims):
        raise UnsupportedOperation("writing several values at a mask", why="which one goes where depends on data", allowed="one value, or torch.where")
    place, mask = masks[0], given[masks[0]]
    if place:
        raise UnsupportedOperation("writing at a mask after other dimensions", allowed="a mask of the leading dimensions, or torch.where")
    mask = replace(mask, dims=(*mask.dims, *[()] * (x.rank - mask.rank)))
    value = replace(converted(b, values, x.dtype), dims=())
    return where(b, mask, b.elementwise(plus, x, value, dtype=x.dtype) if adds else value, x)

