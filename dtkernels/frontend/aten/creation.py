"""Translate tensor creation: constants, ranges, triangles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Value
from .elementwise import ZERO, choose, compare, minus, plus, times
from .table import op

CREATION = "constants and ranges"


def constant(b: Builder, value: Any) -> Value:
    """Return a tensor of the operation's shape, filled with a number."""
    filled = b.value(value)
    expr = b.numeric(filled)
    if b.dtype == torch.bool:
        expr = ex.Const(bool(expr.value)) if isinstance(expr, ex.Const) else b.condition(filled)
    return Value(tuple(b.index(n) for n in b.shape), expr, b.dtype)


@op("full", "full_like", "new_full", group=CREATION)
def full(b: Builder, first: Any, *given: Any, **named: Any) -> Value:
    return constant(b, named["fill_value"] if "fill_value" in named else given[-1] if given else 0)


@op("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", group=CREATION)
def zeros(b: Builder, *given: Any, **named: Any) -> Value:
    return constant(b, 0)


@op("ones", "ones_like", "new_ones", group=CREATION)
def ones(b: Builder, *given: Any, **named: Any) -> Value:
    return constant(b, 1)


@op("scalar_tensor", group=CREATION)
def scalar_tensor(b: Builder, value: Any, **named: Any) -> Value:
    return replace(b.value(value), dtype=b.dtype)


@op("arange", group=CREATION)
def arange(b: Builder, *bounds: Any, **named: Any) -> Value:
    """start + step * index."""
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    start, step = named.get("start", start), named.get("step", step)
    (dim,) = (b.index(n) for n in b.shape)
    expr = b.flat_index(dim)
    expr = expr if step == 1 else ex.Binary("*", expr, b.number(step))
    if not isinstance(start, int) or start != 0:
        expr = ex.Binary("+", expr, b.number(start))
    return Value((dim,), expr, b.dtype)


@op("linspace", "logspace", group=CREATION)
def linspace(b: Builder, start: Any, end: Any, steps: Any, *base: Any, **named: Any) -> Value:
    """start + index * (end - start) / (steps - 1), from the nearer end, as torch counts."""
    (dim,) = (b.index(n) for n in b.shape)
    first, last = b.value(start), b.value(end)
    if not dim:
        return replace(first, dims=((),), dtype=b.dtype)
    size, at = b.shape[0], b.flat_index(dim)
    step = ex.Binary("/", minus(last.expr, first.expr), b.number(b.sizes.of(size - 1)))
    back = minus(b.number(b.sizes.of(size - 1)), at)
    return Value((dim,), choose(compare("<", ex.Binary("*", at, ex.Const(2)), b.number(size)), plus(first.expr, times(step, at)), minus(last.expr, times(step, back))), b.dtype)


def logspace(b: Builder, start: Any, end: Any, steps: Any, base: float = 10.0, **named: Any) -> Value:
    made = linspace(b, start, end, steps)
    return replace(made, expr=ex.Call("pow", (ex.Const(float(base)), made.expr)))


@op("tril", "triu", group=CREATION)
def tril(b: Builder, x: Any, diagonal: Any = 0) -> Value:
    return triangle(b, x, diagonal, "<=")


def triu(b: Builder, x: Any, diagonal: Any = 0) -> Value:
    return triangle(b, x, diagonal, ">=")


def triangle(b: Builder, x: Any, diagonal: Any, operator: str) -> Value:
    """Keep what lies on one side of a diagonal."""
    x = b.value(x)
    row, column = (b.flat_index(x.dims[place]) for place in (-2, -1))
    row = row if isinstance(diagonal, int) and diagonal == 0 else ex.Binary("+", row, b.number(diagonal))
    inside = compare(operator, column, row)
    if x.dtype.is_floating_point or x.expr != ex.Const(True):
        found = ex.Binary("and", inside, x.expr) if not x.dtype.is_floating_point and x.dtype == b.dtype == torch.bool else None
        return replace(x, expr=found or choose(inside, x.expr, ZERO))
    return replace(x, expr=inside)


@op("eye", group=CREATION)
def eye(b: Builder, *given: Any, **named: Any) -> Value:
    rows, columns = (b.index(n) for n in b.shape)
    inside = compare("==", b.flat_index(rows), b.flat_index(columns))
    return Value((rows, columns), inside if b.dtype == torch.bool else choose(inside, ex.Const(1), ZERO), b.dtype)


@op("rand", "randn", "rand_like", "randn_like", "bernoulli", group=CREATION)
def random(b: Builder, *given: Any, **named: Any) -> Value:
    raise UnsupportedOperation("random numbers", why="kernels draw none", allowed="a tensor of them as an argument")


from .table import GROUPS, TABLE  # noqa: E402

TABLE["triu"] = triu
TABLE["logspace"] = logspace
for _name in ("rand", "randn", "rand_like", "randn_like", "bernoulli"):
    del TABLE[_name]
    GROUPS[CREATION].remove(_name)
