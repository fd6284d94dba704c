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
from .positions import from_the_end
from .table import op

INDEXING = "indexing"


def position(b: Builder, index: Value) -> Value:
    """Return an index tensor that can stand in an index: integers of an input and arithmetic on them, or a Func of integers."""
    if index.dtype == torch.bool:
        raise UnsupportedOperation("indexing by truth values", why="the size of the result depends on data", allowed="torch.where")
    funcs = {d.name for d in b.definitions}
    if all(_in_index(node, funcs, b) for node in index.expr.walk()):
        return index
    return b.define(replace(index, expr=ex.Cast(b.exact(index), "int64")), "index")


def _in_index(node: ex.Expr, funcs: set[str], b: Builder) -> bool:
    """Tell whether an index may have such a node: elements of integers, and + - * / % of them."""
    if isinstance(node, ex.Access) and node.tensor in funcs:
        return b.is_whole(node)
    return not isinstance(node, (ex.Call, ex.Cast)) and not (isinstance(node, ex.Binary) and node.op == "|" and node.right == ZERO)


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
    if scale_grad_by_freq or sparse:
        b.forbid_gradient("embedding with scale_grad_by_freq or sparse", "its gradient differs")
    indices = b.value(indices)
    found = along(b, b.value(weight), 0, indices)
    if padding_idx < 0:
        return found
    padded = compare("==", b.marked(b.numeric(indices)), b.number(padding_idx))  # that row gets no gradient
    return replace(found, expr=choose(padded, b.detached(found).expr, found.expr))


@op("bucketize", group=INDEXING)
def bucketize(b: Builder, x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Value:
    """The number of boundaries below an element, or with ``right`` not above it."""
    return searchsorted(b, boundaries, x, right=right)


@op("searchsorted", group=INDEXING)
def searchsorted(b: Builder, sorted_sequence: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None) -> Value:
    sequence, x = fresh(b, b.value(sorted_sequence)), b.value(x)
    if sorter is not None:
        raise UnsupportedOperation("searchsorted with a sorter")
    if sequence.rank == 1:
        sequence, x = replace(sequence, dims=(*[()] * x.rank, sequence.dims[0])), replace(x, dims=(*x.dims, ()))
    else:  # a sequence for each row
        sequence, x = replace(sequence, dims=(*sequence.dims[:-1], (), sequence.dims[-1])), replace(x, dims=(*x.dims, ()))
    operator = "<=" if right or side == "right" else "<"
    below = b.elementwise(lambda s, v: choose(compare(operator, s, v), ONE, ZERO), sequence, x, dtype=torch.int64)
    return b.reduce("sum", below, -1, False, "below", b.dtype)


@op("index_select", group=INDEXING)
def index_select(b: Builder, x: Any, dim: int, index: Any) -> Value:
    x, index = b.value(x), b.value(index)
    return along(b, x, dim % x.rank, index if index.rank else replace(index, dims=((),)))  # the dimension stays


@op("gather", group=INDEXING)
def gather(b: Builder, x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Value:
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


@op("take_along_dim", group=INDEXING)
def take_along_dim(b: Builder, x: Any, indices: Any, dim: int | None = None) -> Value:
    """Gather where other dimensions broadcast and negative positions count from the end."""
    x, index = fresh(b, b.value(x)), position(b, b.value(indices))
    if dim is None:
        x, index, dim = (*(replace(v, dims=(tuple(leaf for d in v.dims for leaf in flat(d)),)) for v in (x, index)), 0)
    place = dim % x.rank
    dims = list(index.dims)
    for k, (own, other) in enumerate(zip(x.dims, index.dims)):
        if k == place or not flat(own):
            continue
        if flat(other):
            b.unify(other, own)
            x = replace(x, expr=b.moved(x.expr, [own], [other]))
        else:
            dims[k] = own
    at = from_the_end(b, index.expr, b.extent(x.dims[place]))
    return Value(tuple(dims), b.taken(x, place, lambda _: at, ()).expr, x.dtype)


@op("index", "_unsafe_index", group=INDEXING)
def indexed(b: Builder, x: Any, indices: list) -> Value:
    """x[:, t]: one or several integer tensors, which broadcast. Negative ones count from the end."""
    x = fresh(b, b.value(x))
    given = {place: position(b, b.value(i)) for place, i in enumerate(indices) if i is not None}
    dims, exprs = b.aligned(list(given.values()))
    places = list(given)
    for place, expr in zip(places, exprs):
        at = from_the_end(b, expr, b.extent(x.dims[place]))
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
