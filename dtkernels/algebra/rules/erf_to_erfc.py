"""Rewrite ``1 + erf`` as the complementary error function, which loses no digits to cancellation."""

from __future__ import annotations

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..smart_constructors import is_one
from .tanh_to_sigmoid import scaled


def erf_to_erfc(algorithm: Algorithm) -> Algorithm:
    """Rewrite ``1 + erf(a)`` as ``erfc(-a)`` and ``1 - erf(a)`` as ``erfc(a)``.

    Before: ``y[x] = 0.5 * A[x] * (1 + erf(0.7 * A[x]));``  After: ``y[x] = 0.5 * A[x] * erfc(-0.7 * A[x]);``
    """
    return algorithm.transform(_changed)


def _changed(e: ex.Expr) -> ex.Expr:
    match e:
        case ex.Binary("+", one, ex.Call("erf", (a,))) | ex.Binary("+", ex.Call("erf", (a,)), one) if is_one(one):
            return ex.Call("erfc", (scaled(a, -1.0),))
        case ex.Binary("-", one, ex.Call("erf", (a,))) if is_one(one):
            return ex.Call("erfc", (a,))
    return e
