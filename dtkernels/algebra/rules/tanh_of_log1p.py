"""Rewrite the tangent of a logarithm as a quotient: mish then takes one exponential and a division."""

from __future__ import annotations

from ...lang import expr as ex
from ...lang.algorithm import Algorithm

MOST = 40  #: exp(a) may be squared without overflow
ONE_FROM = 10  #: tanh(a) and tanh(log1p(exp(a))) are 1 in float32 from here on


def tanh_of_log1p(algorithm: Algorithm) -> Algorithm:
    """Rewrite ``tanh(log1p(exp(a)))`` by ``tanh(log(1 + u)) = n / (n + 2)`` with ``n = u * (u + 2)``, also in a softplus that is ``a`` from a bound on.

    Before: ``f[x] = tanh(log1p(exp(minimum(A[x], 9))));``
    After: ``f[x] = exp(minimum(A[x], 9)) * (exp(minimum(A[x], 9)) + 2) / (exp(minimum(A[x], 9)) * (exp(minimum(A[x], 9)) + 2) + 2);``
    """
    return algorithm.transform(_changed)


def _changed(e: ex.Expr) -> ex.Expr:
    match e:
        case ex.Call("tanh", (ex.Call("log1p", (ex.Call("exp", (a,)),)),)):
            return _quotient(a)
        case ex.Call("tanh", (ex.Call("where", (ex.Binary(">", x, ex.Const(bound)) as c, y, ex.Call("log1p", (ex.Call("exp", (a,)),)))),)) if x == y and bound >= ONE_FROM:
            return ex.Call("where", (c, ex.Const(1.0), _quotient(a)))
    return e


def _quotient(a: ex.Expr) -> ex.Expr:
    match a:
        case ex.Call("minimum", (_, ex.Const(most))) if most <= MOST:
            u = ex.Call("exp", (a,))
        case _:
            u = ex.Call("exp", (ex.Call("minimum", (a, ex.Const(2 * ONE_FROM))),))
    n = ex.Binary("*", u, ex.Binary("+", u, ex.Const(2)))
    return ex.Binary("/", n, ex.Binary("+", n, ex.Const(2)))
