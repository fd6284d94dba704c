"""Translate indexing by integer tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Index, Value, flat
from .elementwise import ONE, ZERO, choose, compare
from .table import op

INDEXING = "indexing"


def position(b: Builder, index: Value) -> Value:
    """Check that an index tensor can stand in an index: integers of an input, and arithmetic on them."""
    if index.dtype == torch.bool:
        raise UnsupportedOperation("indexing by truth values", why="the size of the result depends on data", allowed="torch.where")
    for node in index.expr.walk():
        computed = isinstance(node, ex.Access) and any(d.name == node.tensor and not _places(d.expr) for d in b.definitions)
        if computed or isinstance(node, (ex.Call, ex.Cast)):
            raise UnsupportedOperation("an index that is computed", why=f"it contains {node.fn if isinstance(node, ex.Call) else 'a Func' if computed else 'a conversion'}",
                                       allowed="an integer argument, and + - * of it")  # fmt: skip
    return index


def _places(expr: ex.Expr) -> bool:
    return isinstance(expr, ex.Reduce) and expr.kind in ex.PLACES


def along(b: Builder, x: Value, place: int, index: Value) -> Value:
    """Pick along a dimension; the dimensions of ``index`` take its place: index_select, embedding."""
    index = position(b, index)
    x = fresh(b, x)
    found = b.taken(x, place, lambda _: index.expr, ())
    return Value((*x.dims[:place], *index.dims, *x.dims[place + 1 :]), found.expr, x.dtype)


def fresh(b: Builder, x: Value) -> Value:
    """Return the value over index variables of its own."""
    target = [tuple(Index(leaf.axis) for leaf in flat(d)) for d in x.dims]
    return Value(tuple(target), b.moved(x.expr, x.dims, target), x.dtype)


@op("embedding", group=INDEXING)
def embedding(b: Builder, weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Value:
    if padding_idx >= 0 or scale_grad_by_freq or sparse:
        b.forbid_gradient("embedding with padding_idx, scale_grad_by_freq or sparse", "its gradient differs")
    return along(b, b.value(weight), 0, b.value(indices))


@op("index_select", group=INDEXING)
def index_select(b: Builder, x: Any, dim: int, index: Any) -> Value:
    x = b.value(x)
    return along(b, x, dim % x.rank, b.value(index))


@op("gather", "take_along_dim", group=INDEXING)
def gather(b: Builder, x: Any, dim: Any, index: Any, sparse_grad: bool = False) -> Value:
    if isinstance(dim, Value):
        dim, index = index, dim
    x, index = fresh(b, b.value(x)), position(b, b.value(index))
    place = dim % x.rank
    for k, (own, other) in enumerate(zip(x.dims, index.dims)):
        if k == place or not flat(own):
            continue
        if not b.sizes.same(b.extent(own), b.extent(other)):
            moved = b.taken(x, k, lambda i: ex.Binary("+", i, ex.Const(0)), b.index(b.extent(other)))
            x, own = moved, moved.dims[k]
        if flat(other):
            b.unify(other, own)
            x = replace(x, expr=b.moved(x.expr, [own], [other]))
    return Value(index.dims, b.taken(x, place, lambda _: index.expr, ()).expr, x.dtype)


@op("index", group=INDEXING)
def indexed(b: Builder, x: Any, indices: list) -> Value:
    """x[:, t]: one or several integer tensors, which broadcast. Negative ones count from the end."""
    x = fresh(b, b.value(x))
    given = {place: position(b, b.value(i)) for place, i in enumerate(indices) if i is not None}
    dims, exprs = b.aligned(list(given.values()))
    places = list(given)
    for place, expr in zip(places, exprs):
        counted = all(isinstance(n, (ex.Label, ex.Const)) or not isinstance(n, (ex.Access, ex.Scalar)) for n in expr.walk())
        at = expr if counted else ex.Binary("%", expr, b.number(b.extent(x.dims[place])))
        x = replace(x, expr=b.taken(x, place, lambda _, at=at: at, ()).expr)  # type: ignore[misc]
    together = places == list(range(places[0], places[0] + len(places)))
    rest = [d for place, d in enumerate(x.dims) if place not in given]
    first = places[0] if together else 0
    return Value((*rest[:first], *dims, *rest[first:]), x.expr, x.dtype)


@op("one_hot", group=INDEXING)
def one_hot(b: Builder, x: Any, num_classes: int = -1) -> Value:
    if num_classes == -1:
        raise UnsupportedOperation("one_hot without num_classes", why="the size of its result depends on data")
    x, dim = b.value(x), b.index(num_classes)
    return Value((*x.dims, dim), choose(compare("==", x.expr, b.flat_index(dim)), ONE, ZERO), torch.int64)
