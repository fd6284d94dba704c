"""Rewrite ``1 + tanh`` as a sigmoid, which takes one exponential; a tanh computes two forms and selects one."""

from __future__ import annotations

import math
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..smart_constructors import factors_of, is_one, product
from .constant_folding import constant

SMALL = 2.0**-60  #: products of constants below this, or above its inverse, are not folded: float32 has 2**-126 to 2**128


def tanh_to_sigmoid(algorithm: Algorithm) -> Algorithm:
    """Rewrite ``1 + tanh(a)`` as ``2 * sigmoid(2 * a)``, which loses no digits to cancellation, and combine constant factors.

    Before: ``y[x] = 0.5 * A[x] * (1 + tanh(3 * B[x]));``  After: ``y[x] = A[x] * sigmoid(6 * B[x]);``
    """
    return algorithm.with_definitions(tuple(replace(d, expr=_changed(d.expr)) for d in algorithm.definitions))


def _changed(e: ex.Expr) -> ex.Expr:
    factors = factors_of(e)
    if not any(_tangent(f) for f in factors):
        return e.rebuild(_changed)
    parts: list[ex.Expr] = []
    times = 1.0
    for f in factors:
        if (found := _tangent(f)) is not None:
            parts.append(ex.Call("sigmoid", (scaled(_changed(found[1]), 2.0 * found[0]),)))
            times *= 2.0
        else:
            parts.append(_changed(f))
    return scaled(product(parts), times)


def _tangent(e: ex.Expr) -> tuple[float, ex.Expr] | None:
    """Return (1 or -1, a) for ``1 + tanh(a)`` or ``1 - tanh(a)``; None for anything else."""
    match e:
        case ex.Binary("+", one, ex.Call("tanh", (a,))) | ex.Binary("+", ex.Call("tanh", (a,)), one) if is_one(one):
            return 1.0, a
        case ex.Binary("-", one, ex.Call("tanh", (a,))) if is_one(one):
            return -1.0, a
    return None


def _number(e: ex.Expr) -> float | None:
    """Return the value of a finite constant."""
    match e:
        case ex.Const(value) if not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        case ex.Unary("-", inner) if (found := _number(inner)) is not None:
            return -found
    return None


def scaled(e: ex.Expr, times: float) -> ex.Expr:
    """Return ``times * e``, folded into the constant factor of a product."""
    rest = []
    for f in factors_of(e):
        value = _number(f)
        if value is not None and SMALL < abs(times * value) < 1 / SMALL:
            times *= value
        else:
            rest.append(f)
    number = constant(int(times) if times.is_integer() and abs(times) < 1 << 24 else times)
    return product(rest if times == 1 else [number, *rest])
