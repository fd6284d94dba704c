"""Translate tensor creation: constants, ranges, triangles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation
from ..values import Value
from .elementwise import ZERO, choose, compare
from .table import op

CREATION = "constants and ranges"


def constant(b: Builder, value: Any) -> Value:
    """Return a tensor of the operation's shape, filled with a number."""
    filled = b.value(value)
    expr = b.numeric(filled)
    if str(b.dtype) == "torch.bool":
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
        found = ex.Binary("and", inside, x.expr) if not x.dtype.is_floating_point and x.dtype == b.dtype and str(x.dtype) == "torch.bool" else None
        return replace(x, expr=found or choose(inside, x.expr, ZERO))
    return replace(x, expr=inside)


@op("eye", group=CREATION)
def eye(b: Builder, *given: Any, **named: Any) -> Value:
    rows, columns = (b.index(n) for n in b.shape)
    return Value((rows, columns), choose(compare("==", b.flat_index(rows), b.flat_index(columns)), ex.Const(1), ZERO), b.dtype)


@op("rand", "randn", "rand_like", "randn_like", "bernoulli", group=CREATION)
def random(b: Builder, *given: Any, **named: Any) -> Value:
    raise UnsupportedOperation("random numbers", why="kernels draw none", allowed="a tensor of them as an argument")


from .table import GROUPS, TABLE  # noqa: E402

TABLE["triu"] = triu
for _name in ("rand", "randn", "rand_like", "randn_like", "bernoulli"):
    del TABLE[_name]
    GROUPS[CREATION].remove(_name)
