"""Translate views: move, regroup or index dimensions without computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Index, IndexLabel, Joined, Value, flat, label
from .elementwise import choose_as, compare
from .table import op

VIEWED, JOINED = "views", "joining"


@op("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_copy", "_reshape_alias", "ravel", group=VIEWED, view=True)
def reshape(b: Builder, x: Any, *sizes: Any, **named: Any) -> Value:
    return b.reshaped(b.value(x), b.shape)


@op("view_as", group=VIEWED)
def view_as(b: Builder, x: Any, other: Any) -> Value:
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


@op("meshgrid", group=VIEWED)
def meshgrid(b: Builder, tensors: list, *, indexing: str = "ij") -> tuple[Value, ...]:
    values = [b.value(t) for t in tensors]
    rows = [v.dims[0] if v.rank else () for v in values]
    order = [1, 0, *range(2, len(rows))] if indexing == "xy" and len(rows) > 1 else list(range(len(rows)))
    laid = [replace(v, dims=tuple(rows[j] if j == k else () for j in order)) for k, v in enumerate(values)]
    sizes = [b.extent(rows[j]) for j in order]
    return tuple(b.expand(v, sizes) for v in laid)


@op("atleast_1d", "atleast_2d", "atleast_3d", group=VIEWED)
def atleast(b: Builder, x: Any) -> Any:
    several = x if isinstance(x, list) else [x]
    found = tuple(b.reshaped(b.value(v), [b.sizes.of(n) for n in r.shape]) for v, r in zip(several, b.results()))
    return found if isinstance(x, list) else found[0]


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
    inner, product = b.extent(own[1:]), step == 1 and _is_of_product(b, x)
    if step == 1 and len(own) > 1 and (b.sizes.of(size - inner) == 0 or product and b.sizes.same(size, inner)) and b.sizes.divides(inner, start):
        one = replace(x, dims=(*x.dims[:place], (own[0],), tuple(own[1:]), *x.dims[place + 1 :]))
        number = b.sizes.quotient(start, inner) if start != 0 else 0
        return select(b, one, place, b.sizes.fixed(number) if product else number)
    if product and size != 1 and len(own) == 1 and b.sizes.divides(size, whole) and b.sizes.divides(size, start):
        count = b.sizes.fixed(b.sizes.quotient(whole, size))
        return select(b, parts(b, x, place, count, size), place, b.sizes.fixed(b.sizes.quotient(start, size)) if start != 0 else 0)

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
    lengths = [b.sizes.of(result.shape[place]) for result in b.results()]
    if len(lengths) > 1 and _is_of_product(b, x) and (least := _least(b, lengths)) is not None:
        counts = [1 if b.sizes.same(size, least) else b.sizes.fixed(b.sizes.quotient(size, least)) for size in lengths]
        parted, first = parts(b, x, place, sum(counts), least), 0
        for count in counts:
            one = sliced(b, parted, place, first, count)
            one = one if sum(counts) == len(counts) else _own_products(b, one)
            found.append(replace(one, dims=(*one.dims[:place], (*one.dims[place], *one.dims[place + 1]), *one.dims[place + 2 :])))
            first += count
        return tuple(found)
    for size in lengths:
        found.append(sliced(b, x, place, start, size))
        start = b.sizes.of(start + size)
    return tuple(found)


def _least(b: Builder, lengths: list) -> Any:
    """Return the shortest of the lengths, if all are multiples of it; None otherwise."""
    least = lengths[0]
    for size in lengths[1:]:
        if not b.sizes.divides(least, size):
            if not b.sizes.divides(size, least):
                return None
            least = size
    return least if least != 0 and all(b.sizes.divides(least, size) for size in lengths) else None


def parts(b: Builder, x: Value, place: int, count: Any, size: Any) -> Value:
    """Return a value with a dimension as two: that of its ``count`` parts, and that of the ``size`` elements of each."""
    sizes = [b.extent(d) for d in x.dims]
    return b.reshaped(x, [*sizes[:place], count, size, *sizes[place + 1 :]])


def _own_products(b: Builder, x: Value) -> Value:
    """Read products of their own in place of some columns of a product.

    The gradient of one Func that is read in pieces of several sizes would have a product for each of them at all of its columns.
    """
    made = {d.name: d for d in b.definitions}

    def change(node: ex.Expr) -> ex.Expr:
        d = made.get(node.tensor) if isinstance(node, ex.Access) else None
        if d is None or not isinstance(d.expr, ex.Dot):
            return node
        columns: dict[str, ex.Expr] = {}
        for own, at in zip(d.indices, node.index):  # type: ignore[attr-defined]
            leaves, places = own.leaves(), at.index.leaves() if isinstance(at, IndexLabel) else []
            positions = tuple(map(label, places)) if places else at.positions() if isinstance(at, Joined) else (at,)
            if len(positions) != len(leaves):
                return node
            columns |= {leaf.name: position for leaf, position in zip(leaves, positions)}
        return b.define(replace(x, expr=b.replaced(d.expr, columns)), d.hint).expr

    return replace(x, expr=x.expr.transform(change))


def _is_of_product(b: Builder, x: Value) -> bool:
    """Return whether a value is made of a product, element by element. Its columns then get labels of their own in each part, so that a gradient need not look for their places."""
    made, todo, seen = {d.name: d.expr for d in b.definitions}, [x.expr], set[str]()
    while todo:
        node = todo.pop()
        if isinstance(node, ex.Dot):
            return True
        if isinstance(node, ex.Access):
            todo += [made[node.tensor]] if node.tensor in made and node.tensor not in seen else []
            seen.add(node.tensor)
        elif not isinstance(node, (ex.Reduce, ex.Scan)):
            todo += node.children()
    return False


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
        one = replace(x, dims=(tuple(leaf for d in x.dims for leaf in flat(d)),))
        return b.reshaped(roll(b, one, shifts, [0]), [b.extent(d) for d in x.dims])
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
        return diag_embed(b, x, offset)
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
    dims, exprs = b.aligned([replace(v, expr=_piece(b, v)) for v in values])
    new = b.index(len(values))
    return Value((*dims[:place], new, *dims[place:]), _chosen(b.dtype, new, exprs), b.dtype)


def _piece(b: Builder, value: Value) -> ex.Expr:
    """Return an element of what is joined: a condition only where all pieces are truth values."""
    return b.condition(value) if b.dtype == torch.bool else b.numeric(value)


def _chosen(dtype: torch.dtype, dim: tuple[Index, ...], exprs: list[ex.Expr]) -> ex.Expr:
    """Return the expression of the piece that an index selects."""
    found = exprs[-1]
    for k in range(len(exprs) - 2, -1, -1):
        found = choose_as(dtype, compare("==", label(dim[0]), ex.Const(k)), exprs[k], found)
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
        v = replace(v, expr=_piece(b, v))
        piece = b.taken(v, place, lambda i, first=first: ex.Binary("-", i, first), new)  # type: ignore[misc]
        others = [d for k, d in enumerate(piece.dims) if k != place]
        exprs.append(b.moved(piece.expr, others, [d for k, d in enumerate(dims) if k != place]))
        start = b.sizes.of(start + size)
        ends.append(b.number(start))
    found = exprs[-1]
    for expr, end in zip(exprs[-2::-1], ends[-2::-1]):
        found = choose_as(b.dtype, compare("<", label(new[0]), end), expr, found)
    return Value((*dims[:place], new, *dims[place + 1 :]), found, b.dtype)


def _equal(b: Builder, a: Any, c: Any) -> bool:
    """Tell whether two sizes are equal for a reason: not by chance at this call."""
    return b.sizes.of(a - c) == 0 or bool(a.free_symbols & c.free_symbols) and b.sizes.same(a, c)


@op("constant_pad_nd", "pad", group=JOINED)
def pad(b: Builder, x: Any, padding: list, *mode: Any) -> Value:
    """Pad with a number, with the elements at the border (replicate), mirrored ones (reflect) or those of the other end (circular)."""
    value = next((m for m in reversed(mode) if isinstance(m, (int, float))), 0)
    word = next((m for m in mode if isinstance(m, str)), "constant")
    x = b.value(x)
    if word != "constant":
        return bordered(b, x, padding, word)
    value = value if x.dtype.is_floating_point else bool(value) if x.dtype == torch.bool else int(value)
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
        x = replace(x, expr=choose_as(x.dtype, inside, x.expr, b.value(value).expr))
    return x


def bordered(b: Builder, x: Value, padding: list, mode: str) -> Value:
    """Pad with elements of the tensor itself."""
    for k in range(0, len(padding), 2):
        before, after = (b.sizes.of(n) for n in padding[k : k + 2])
        if (before, after) != (0, 0):
            x = _bordered(b, x, x.rank - 1 - k // 2, before, after, mode)
    return x


def _bordered(b: Builder, x: Value, place: int, before: Any, after: Any, mode: str) -> Value:
    size = b.extent(x.dims[place])
    if len(flat(x.dims[place])) > 1:
        x = b.taken(x, place, lambda at: at, b.index(size))
    dim, first, last = b.index(b.sizes.of(size + before + after)), b.number(before), b.number(b.sizes.of(size - 1))
    twice = b.number(b.sizes.of(2 * size - 2 + before))

    def back(i: ex.Expr) -> ex.Expr:
        return ex.Binary("-", i, first)

    if mode == "circular":
        return b.taken(x, place, lambda i: ex.Binary("%", back(i), b.number(size)), dim)
    mirrored = mode == "reflect"
    low = b.taken(x, place, lambda i: ex.Binary("-", first, i) if mirrored else ex.Const(0), dim)
    high = b.taken(x, place, lambda i: ex.Binary("-", twice, i) if mirrored else last, dim)
    at = b.flat_index(dim)
    inner = choose_as(x.dtype, compare("<", at, b.number(b.sizes.of(size + before))), b.taken(x, place, back, dim).expr, high.expr)
    return replace(low, expr=choose_as(x.dtype, compare("<", at, first), low.expr, inner))


def _of_mode(mode: str) -> Callable[..., Value]:
    def entry(b: Builder, x: Any, padding: list) -> Value:
        return bordered(b, b.value(x), padding, mode)

    return entry


for _mode, _word in {"replication": "replicate", "reflection": "reflect"}.items():
    op(*(f"{_mode}_pad{n}d" for n in (1, 2, 3)), group=JOINED)(_of_mode(_word))
op("_pad_circular", group=JOINED)(_of_mode("circular"))


@op("unfold", group=VIEWED, view=True)
def unfold(b: Builder, x: Any, dim: int, size: int, step: int) -> Value:
    """Windows of ``size`` elements along a dimension, which becomes their number; the last dimension is the place in a window."""
    x = b.value(x)
    place = dim % max(x.rank, 1)
    if not x.rank or not flat(x.dims[place]):
        return replace(x, dims=(*x.dims, ()))
    outer, inner = b.index(b.shape[place]), b.index(size)
    start = b.flat_index(outer) if step == 1 or not outer else ex.Binary("*", b.flat_index(outer), b.number(step))
    at = start if not inner else ex.Binary("+", start, b.flat_index(inner)) if outer else ex.Binary("+", b.flat_index(inner), ex.Const(0))
    found = b.taken(x, place, lambda _: at, ())
    return replace(found, dims=(*x.dims[:place], outer, *x.dims[place + 1 :], inner))


@op("pixel_shuffle", group=VIEWED)
def pixel_shuffle(b: Builder, x: Any, factor: int) -> Value:
    x = b.value(x)
    *batch, channels, rows, columns = (b.extent(d) for d in x.dims)
    n = len(batch)
    apart = b.reshaped(x, [*batch, b.sizes.quotient(channels, factor * factor), factor, factor, rows, columns])
    c, up, left, y, z = apart.dims[n:]
    return replace(apart, dims=(*apart.dims[:n], c, (*y, *up), (*z, *left)))


@op("pixel_unshuffle", group=VIEWED)
def pixel_unshuffle(b: Builder, x: Any, factor: int) -> Value:
    x = b.value(x)
    *batch, channels, rows, columns = (b.extent(d) for d in x.dims)
    n = len(batch)
    apart = b.reshaped(x, [*batch, channels, b.sizes.quotient(rows, factor), factor, b.sizes.quotient(columns, factor), factor])
    c, y, up, z, left = apart.dims[n:]
    return replace(apart, dims=(*apart.dims[:n], (*c, *up, *left), y, z))


@op("channel_shuffle", "native_channel_shuffle", group=VIEWED)
def channel_shuffle(b: Builder, x: Any, groups: int) -> Value:
    x = b.value(x)
    batch, channels, *rest = (b.extent(d) for d in x.dims)
    apart = b.reshaped(x, [batch, groups, b.sizes.quotient(channels, groups), *rest])
    first, group, inner, *others = apart.dims
    return replace(apart, dims=(first, (*inner, *group), *others))


@op("diag_embed", group=VIEWED)
def diag_embed(b: Builder, x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """A matrix with a vector on its diagonal."""
    x = b.value(x)
    if offset or {dim1 % (x.rank + 1), dim2 % (x.rank + 1)} != {x.rank - 1, x.rank}:
        raise UnsupportedOperation("diag_embed off the main diagonal, or in other dimensions than the last two")
    rows = x.dims[-1]
    columns = tuple(Index(leaf.axis) for leaf in flat(rows))
    return Value((*x.dims, columns), choose_as(x.dtype, compare("==", b.flat_index(rows), b.flat_index(columns)), x.expr, ex.Const(x.dtype != torch.bool and 0)), x.dtype)


@op("repeat_interleave", group=JOINED)
def repeat_interleave(b: Builder, x: Any, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Value:
    if isinstance(repeats, Value):
        raise UnsupportedOperation("repeat_interleave by a tensor", why="the size of its result depends on data", allowed="a number of repeats")
    x = b.value(x)
    if dim is None:
        x, dim = replace(x, dims=(tuple(leaf for d in x.dims for leaf in flat(d)),)), 0
    place = dim % x.rank
    return replace(x, dims=(*x.dims[:place], (*x.dims[place], *b.index(repeats)), *x.dims[place + 1 :]))


@op("repeat", "tile", group=JOINED)
def repeat(b: Builder, x: Any, repeats: Any) -> Value:
    x = b.value(x)
    repeats = [1] * (x.rank - len(repeats)) + list(repeats)  # tile takes fewer than there are dimensions
    dims = ((),) * (len(repeats) - x.rank) + x.dims
    return replace(x, dims=tuple((*b.index(n), *d) for n, d in zip(repeats, dims)))


