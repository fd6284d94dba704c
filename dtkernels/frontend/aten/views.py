"""Translate views: move, regroup or index dimensions without computing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Index, Value, flat, label
from .elementwise import choose, compare
from .table import op

VIEWED, JOINED = "views", "joining"


@op("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_copy", "_reshape_alias", "ravel", group=VIEWED, view=True)
def reshape(b: Builder, x: Any, *sizes: Any, **named: Any) -> Value:
    return b.reshaped(b.value(x), b.shape)


@op("permute", "movedim", "moveaxis", group=VIEWED, view=True)
def permute(b: Builder, x: Any, *dims: Any) -> Value:
    x = b.value(x)
    order = list(range(x.rank))
    if len(dims) == 1:
        order = [d % x.rank for d in dims[0]]
    else:
        source, target = ([d] if isinstance(d, int) else list(d) for d in dims)
        source, target = [d % x.rank for d in source], [d % x.rank for d in target]
        rest = iter([d for d in order if d not in source])
        order = [source[target.index(place)] if place in target else next(rest) for place in range(x.rank)]
    return replace(x, dims=tuple(x.dims[d] for d in order))


@op("transpose", "swapaxes", "swapdims", group=VIEWED, view=True)
def transpose(b: Builder, x: Any, first: int, second: int) -> Value:
    x = b.value(x)
    dims = list(x.dims)
    if dims:
        dims[first], dims[second] = dims[second], dims[first]
    return replace(x, dims=tuple(dims))


@op("t", "numpy_T", "mT", "matrix_H", "adjoint", "mH", group=VIEWED, view=True)
def turned(b: Builder, x: Any) -> Value:
    x = b.value(x)
    return replace(x, dims=x.dims[::-1] if x.rank < 3 else (*x.dims[:-2], x.dims[-1], x.dims[-2]))


@op("unsqueeze", group=VIEWED, view=True)
def unsqueeze(b: Builder, x: Any, dim: int) -> Value:
    x = b.value(x)
    place = dim % (x.rank + 1)
    return replace(x, dims=(*x.dims[:place], (), *x.dims[place:]))


@op("squeeze", group=VIEWED, view=True)
def squeeze(b: Builder, x: Any, dim: Any = None) -> Value:
    x = b.value(x)
    places = b.places(x.rank, dim) if dim is None or x.rank else []
    return replace(x, dims=tuple(d for place, d in enumerate(x.dims) if place not in places or flat(d)))


@op("expand", "broadcast_to", "expand_as", group=VIEWED)
def expand(b: Builder, x: Any, *sizes: Any, **named: Any) -> Value:
    return b.expand(b.value(x), b.shape)


@op("broadcast_tensors", group=VIEWED)
def broadcast_tensors(b: Builder, tensors: list) -> tuple[Value, ...]:
    return tuple(b.expand(b.value(t), b.shape) for t in tensors)


@op("select", group=VIEWED, view=True)
def select(b: Builder, x: Any, dim: int, index: Any) -> Value:
    x = b.value(x)
    place = dim % x.rank
    at = b.sizes.of(index)
    at = at + b.extent(x.dims[place]) if b.sizes.true(at < 0) else at
    found = b.taken(x, place, lambda _: b.number(b.sizes.of(at)), ())
    return replace(found, dims=(*x.dims[:place], *x.dims[place + 1 :]))


def sliced(b: Builder, x: Value, place: int, start: Any, size: Any, step: int = 1) -> Value:
    """Return ``size`` elements from ``start`` on along a dimension."""
    start, size, whole = b.sizes.of(start), b.sizes.of(size), b.extent(x.dims[place])
    if step == 1 and start == 0 and b.sizes.same(size, whole):
        return x
    own = flat(x.dims[place])
    inner = b.extent(own[1:])
    if step == 1 and len(own) > 1 and b.sizes.of(size - inner) == 0 and b.sizes.divides(inner, start):
        one = replace(x, dims=(*x.dims[:place], (own[0],), tuple(own[1:]), *x.dims[place + 1 :]))
        found = b.taken(one, place, lambda _: b.number(b.sizes.quotient(start, inner) if start != 0 else 0), ())
        return replace(found, dims=(*found.dims[:place], *found.dims[place + 1 :]))

    def at(index: ex.Expr) -> ex.Expr:
        index = index if step == 1 else ex.Binary("*", index, ex.Const(step))
        return index if start == 0 and size != 1 else ex.Binary("+", index, b.number(start))

    dim = b.index(size)
    if dim and step == 1 and start == 0:
        return b.taken(x, place, lambda index: ex.Binary("+", index, ex.Const(0)), dim)  # "+ 0": another extent than the whole's
    return b.taken(x, place, at if dim else lambda _: b.number(start), dim)


@op("slice", "narrow", group=VIEWED, view=True)
def cut(b: Builder, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    x = b.value(x)
    if not isinstance(step, int):
        raise UnsupportedOperation("a slice whose step is a size")
    place = dim % x.rank
    return sliced(b, x, place, first_of(b, x, place, start), b.shape[place], step)


def first_of(b: Builder, x: Value, place: int, start: Any) -> Any:
    """Return where a slice starts, counted from the front."""
    start, whole = b.sizes.of(0 if start is None else start), b.extent(x.dims[place])
    start = start + whole if b.sizes.true(start < 0) else start
    return b.sizes.of(0) if b.sizes.true(start < 0) else whole if b.sizes.true(start > whole) else b.sizes.of(start)


@op("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split", group=VIEWED, view=True)
def pieces(b: Builder, x: Any, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    x = b.value(x)
    place, start, found = dim % x.rank, sympy.Integer(0), []
    for result in b.results():
        size = b.sizes.of(result.shape[place])
        found.append(sliced(b, x, place, start, size))
        start = b.sizes.of(start + size)
    return tuple(found)


@op("unbind", group=VIEWED, view=True)
def unbind(b: Builder, x: Any, dim: int = 0) -> tuple[Value, ...]:
    return tuple(select(b, x, dim, k) for k in range(len(b.results())))


@op("flip", group=VIEWED)
def flip(b: Builder, x: Any, dims: Any) -> Value:
    x = b.value(x)
    for place in b.places(x.rank, dims):
        if not flat(x.dims[place]):
            continue
        size = b.extent(x.dims[place])
        last = b.number(b.sizes.of(size - 1))
        x = b.taken(x, place, lambda index, last=last: ex.Binary("-", last, index), b.index(size))  # type: ignore[misc]
    return x


@op("roll", group=VIEWED)
def roll(b: Builder, x: Any, shifts: Any, dims: Any = ()) -> Value:
    x = b.value(x)
    shifts, dims = ([v] if not isinstance(v, (list, tuple)) else v for v in (shifts, dims))
    if not dims:
        raise UnsupportedOperation("roll of a flattened tensor", allowed="roll along dims")
    for shift, dim in zip(shifts, dims):
        place = dim % x.rank
        size = b.extent(x.dims[place])
        back, n = b.number(b.sizes.of(size - b.sizes.of(shift))), b.number(size)
        x = b.taken(x, place, lambda i, back=back, n=n: ex.Binary("%", ex.Binary("+", i, back), n), b.index(size))  # type: ignore[misc]
    return x


@op("diagonal", "diag", group=VIEWED)
def diagonal(b: Builder, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    x = b.value(x)
    if x.rank < 2:
        raise UnsupportedOperation("diag of a vector")
    first, second = dim1 % x.rank, dim2 % x.rank
    dim = b.index(b.shape[-1])
    rows, columns = max(-offset, 0), max(offset, 0)

    def shifted(by: int) -> Any:
        return lambda index: ex.Binary("+", index, ex.Const(by))

    if b.sizes.same(b.extent(x.dims[first]), b.extent(x.dims[second])) and offset == 0 and len(flat(x.dims[first])) == 1:
        b.unify(x.dims[first], x.dims[second])
        x = replace(x, expr=b.moved(x.expr, [x.dims[second]], [x.dims[first]]))
        own: tuple[Index, ...] = x.dims[first]
        return replace(x, dims=(*(d for place, d in enumerate(x.dims) if place not in (first, second)), own))
    x = b.taken(x, first, shifted(rows), dim)
    x = b.taken(x, second, shifted(columns), tuple(Index(i.axis) for i in dim))
    x = replace(x, expr=b.moved(x.expr, [x.dims[second]], [dim]))
    return replace(x, dims=(*(d for place, d in enumerate(x.dims) if place not in (first, second)), dim))


# -- joining ------------------------------------------------------------------------------------------------------------


@op("stack", group=JOINED)
def stack(b: Builder, tensors: list, dim: int = 0) -> Value:
    values = [b.value(t) for t in tensors]
    place = dim % (values[0].rank + 1)
    dims, exprs = b.aligned([replace(v, expr=b.numeric(v)) for v in values])
    new = b.index(len(values))
    return Value((*dims[:place], new, *dims[place:]), _chosen(new, exprs), b.dtype)


def _chosen(dim: tuple[Index, ...], exprs: list[ex.Expr]) -> ex.Expr:
    """Return the expression of the piece that an index selects."""
    found = exprs[-1]
    for k in range(len(exprs) - 2, -1, -1):
        found = choose(compare("==", label(dim[0]), ex.Const(k)), exprs[k], found)
    return found


@op("cat", "concat", "concatenate", group=JOINED)
def cat(b: Builder, tensors: list, dim: int = 0) -> Value:
    values = [b.value(t) for t in tensors]
    values = [v for v in values if v.rank > 1 or flat(v.dims[0]) == [] or b.extent(v.dims[0]) != 0]
    place = dim % values[0].rank
    sizes = [b.extent(v.dims[place]) for v in values]
    if len(values) > 1 and all(_equal(b, n, sizes[0]) for n in sizes):
        joined = stack(b, [replace(v, dims=(*v.dims[:place], v.dims[place], *v.dims[place + 1 :])) for v in values], place)
        return replace(joined, dims=(*joined.dims[:place], (*joined.dims[place], *joined.dims[place + 1]), *joined.dims[place + 2 :]))
    rest = [replace(v, dims=tuple(() if k == place else d for k, d in enumerate(v.dims))) for v in values]
    dims, _ = b.aligned(rest)
    new = b.index(b.shape[place])
    start, found, exprs, ends = sympy.Integer(0), None, [], []
    for v, size in zip(values, sizes):
        first = b.number(b.sizes.of(start))
        v = replace(v, expr=b.numeric(v))
        piece = b.taken(v, place, lambda i, first=first: ex.Binary("-", i, first), new)  # type: ignore[misc]
        others = [d for k, d in enumerate(piece.dims) if k != place]
        exprs.append(b.moved(piece.expr, others, [d for k, d in enumerate(dims) if k != place]))
        start = b.sizes.of(start + size)
        ends.append(b.number(start))
    found = exprs[-1]
    for expr, end in zip(exprs[-2::-1], ends[-2::-1]):
        found = choose(compare("<", label(new[0]), end), expr, found)
    return Value((*dims[:place], new, *dims[place + 1 :]), found, b.dtype)


def _equal(b: Builder, a: Any, c: Any) -> bool:
    """Tell whether two sizes are equal for a reason: not by chance at this call."""
    return b.sizes.of(a - c) == 0 or bool(a.free_symbols & c.free_symbols) and b.sizes.same(a, c)


@op("constant_pad_nd", "pad", group=JOINED)
def pad(b: Builder, x: Any, padding: list, *mode: Any) -> Value:
    """Pad with a number; negative padding is not supported."""
    value = next((m for m in reversed(mode) if isinstance(m, (int, float))), 0)
    if any(isinstance(m, str) and m != "constant" for m in mode):
        raise UnsupportedOperation("pad in a mode other than constant")
    x = b.value(x)
    for k in range(0, len(padding), 2):
        place, (before, after) = x.rank - 1 - k // 2, padding[k : k + 2]
        if before == after == 0:
            continue
        own = b.extent(x.dims[place])
        first = b.number(b.sizes.of(before))
        dim = b.index(b.sizes.of(own + b.sizes.of(before) + b.sizes.of(after)))
        x = b.taken(x, place, lambda i, first=first: ex.Binary("-", i, first), dim)  # type: ignore[misc]
        at = label(dim[0])
        end = b.number(b.sizes.of(own + b.sizes.of(before)))
        inside = ex.Binary("and", compare(">=", at, first), compare("<", at, end))
        x = replace(x, expr=choose(inside, b.numeric(x), b.value(value).expr))
    return x


@op("repeat_interleave", group=JOINED)
def repeat_interleave(b: Builder, x: Any, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Value:
    if isinstance(repeats, Value) or dim is None:
        raise UnsupportedOperation("repeat_interleave without dim, or by a tensor", allowed="a number of repeats along dim")
    x = b.value(x)
    place = dim % x.rank
    return replace(x, dims=(*x.dims[:place], (*x.dims[place], *b.index(repeats)), *x.dims[place + 1 :]))


@op("repeat", "tile", group=JOINED)
def repeat(b: Builder, x: Any, repeats: Any) -> Value:
    x = b.value(x)
    dims = ((),) * (len(repeats) - x.rank) + x.dims
    return replace(x, dims=tuple((*b.index(n), *d) for n, d in zip(repeats, dims)))


