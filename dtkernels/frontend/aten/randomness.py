"""Random numbers: dropout and new tensors of them. A call draws a seed from torch's generator; each number follows from it and from its place."""

from __future__ import annotations

from typing import Any

from ...lang import expr as ex
from ..builder import Builder
from ..unsupported import UnsupportedOperation, refuse_generator
from ..values import Dims, Value, label
from .elementwise import ONE, ZERO, choose, compare, number, times
from .table import op

RANDOM = "random numbers"
MOST_PLACES = 3  #: integers beside the number of the draw that ``random`` takes


def drawn(b: Builder, function: str, dims: Dims) -> ex.Expr:
    """Return a number for each element of ``dims``: "random", uniform in [0, 1), or "normal"."""
    places = [i for dim in dims for i in dim]
    first = len(places) - MOST_PLACES + 1
    counted: list[ex.Expr] = [b.flat_index(places[:first]), *map(label, places[first:])] if len(places) > MOST_PLACES else [label(i) for i in places]
    b.draws += 1
    return ex.Call(function, (b.seed(), *counted, ex.Const(b.draws)))


def dropped(b: Builder, x: Value, p: float, dims: Dims | None = None) -> Value:
    """Return ``x`` with elements 0 by probability ``p``, the others divided by ``1 - p``. ``dims``: () for dimensions that share a decision."""
    if p >= 1:
        return Value(x.dims, times(b.numeric(x), ZERO), x.dtype)
    below = compare("<", drawn(b, "random", x.dims if dims is None else dims), number(p))
    return Value(x.dims, choose(below, ZERO, times(b.numeric(x), number(1 / (1 - p)))), x.dtype)


@op("dropout", group=RANDOM)
def dropout(b: Builder, x: Any, p: float = 0.5, train: bool = True) -> Value:
    x = b.value(x)
    return dropped(b, x, p) if train and p else x


@op("feature_dropout", group=RANDOM)
def feature_dropout(b: Builder, x: Any, p: float = 0.5, train: bool = True) -> Value:
    x = b.value(x)
    return dropped(b, x, p, (*x.dims[:2], *[()] * (x.rank - 2))) if train and p else x


@op("alpha_dropout", group=RANDOM)
def alpha_dropout(b: Builder, x: Any, p: float = 0.5, train: bool = True) -> Value:
    if train and p:
        raise UnsupportedOperation("alpha_dropout in training", allowed="dropout, or training=False")
    return b.value(x)


def _filled(b: Builder, function: str) -> Value:
    dims = tuple(b.index(n) for n in b.shape)
    return Value(dims, drawn(b, function, dims), b.dtype)


@op("rand", "rand_like", group=RANDOM)
def rand(b: Builder, *given: Any, **named: Any) -> Value:
    return _filled(b, "random")


@op("randn", "randn_like", group=RANDOM)
def randn(b: Builder, *given: Any, **named: Any) -> Value:
    return _filled(b, "normal")


@op("bernoulli", group=RANDOM)
def bernoulli(b: Builder, x: Any, p: Any = None, *, generator: Any = None) -> Value:
    refuse_generator(generator)
    x = b.value(x)
    chance = b.numeric(x) if p is None else number(p)
    return Value(x.dims, choose(compare("<", drawn(b, "random", x.dims), chance), ONE, ZERO), b.dtype)
