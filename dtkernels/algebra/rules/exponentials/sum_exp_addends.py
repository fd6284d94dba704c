"""Handle addends of a sum of exponentials: the sink of an attention head, or the 1 of a softmax that may choose nothing.

Shifting the exponentials by mu scales their sum by exp(-mu). The whole keeps a degree if the addend is scaled too. An exponential can be
scaled without overflow: ``exp(x - mu)``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ..canonicalize import fresh_name
from ..constant_folding import constant


def extract_sum_exp_addends(algorithm: Algorithm) -> Algorithm:
    """Name each exponential or positive constant that is added to a sum of exponentials, as a Func over the labels of that sum.

    Before: ``t[x] = 1 + rsum(exp(A[x, y]), y);``  After: ``t_rest[x] = exp(0);  t[x] = t_rest[x] + rsum(exp(A[x, y]), y);``
    """
    definitions: list[Definition] = []
    taken = set(algorithm.names)
    for d in algorithm.definitions:
        if _sums_exponentials(d, algorithm):
            d = replace(d, expr=_named(d.expr, d, definitions, taken))
        definitions.append(d)
    return algorithm.with_definitions(tuple(definitions))


def shifted_alike(owner: Definition, algorithm: Algorithm) -> tuple[str, ...]:
    """Return the Funcs over the labels of ``owner`` that are one exponential each, and that it adds to a sum of exponentials."""
    if not _sums_exponentials(owner, algorithm):
        return ()
    own = tuple(map(ex.Label, owner.labels))
    named = [a for a in addends(owner.expr) if isinstance(a, ex.Access) and a.tensor in algorithm and a.index == own]
    return tuple(a.tensor for a in named if _is_exp(algorithm[a.tensor].expr) and algorithm[a.tensor].labels == owner.labels)


def addends(expr: ex.Expr) -> list[ex.Expr]:
    """Return the terms of a sum written with ``+``."""
    if isinstance(expr, ex.Binary) and expr.op == "+":
        return addends(expr.left) + addends(expr.right)
    return [expr]


def _sums_exponentials(d: Definition, algorithm: Algorithm) -> bool:
    """Return whether ``d`` is a sum plus further addends, where the terms of the sum contain an exponential."""
    parts = addends(d.expr)
    nodes = [n for a in parts if isinstance(a, ex.Reduce) and a.kind == "sum" for n in a.walk()]
    named = [algorithm[n.tensor].expr for n in nodes if isinstance(n, ex.Access) and n.tensor in algorithm]
    return len(parts) > 1 and any(_is_exp(n) for n in nodes + named)


def _is_exp(expr: ex.Expr) -> bool:
    return isinstance(expr, ex.Call) and expr.fn == "exp"


def _named(expr: ex.Expr, owner: Definition, made: list[Definition], taken: set[str]) -> ex.Expr:
    if isinstance(expr, ex.Binary) and expr.op == "+":
        return expr.rebuild(lambda child: _named(child, owner, made, taken))
    if isinstance(expr, ex.Const) and not isinstance(expr.value, bool) and 0 < expr.value < math.inf:
        expr = ex.Call("exp", (constant(math.log(expr.value) or 0),))
    if not _is_exp(expr):
        return expr
    name = fresh_name(f"{owner.name}_rest", taken)
    made.append(Definition(name, owner.labels, expr, owner.pos))
    return ex.Access(name, tuple(map(ex.Label, owner.labels)))
