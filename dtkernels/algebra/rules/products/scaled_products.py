"""Multiply operands by the numbers that products are multiplied by, where products are added up: one accumulator then holds their sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm
from ...smart_constructors import factors_of, product


def scale_operands(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Multiply a Func by a number, where a product with it is multiplied by that and added to another product.

    Before: ``a[x, r] = rdot(X[x, k], A[r, k], k);  f[x, y] = rdot(X[x, k], W[y, k], k) + c0 * rdot(a[x, r], B[y, r], r);``
    After:  ``a[x, r] = rdot(X[x, k], A[r, k], k) * c0;  f[x, y] = rdot(X[x, k], W[y, k], k) + rdot(a[x, r], B[y, r], r);``

    The product must be the only one that reads the Func: the operand is computed, and rounded after that.
    """
    read = Counter(a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr))
    single = {f for f in algorithm.funcs if read[f] == 1 and f not in outputs and not isinstance(algorithm[f].expr, ex.Cast)}
    factors: dict[str, list[ex.Expr]] = {}

    def change(node: ex.Expr) -> ex.Expr:
        terms = ex.operands_of(node, "+") if isinstance(node, ex.Binary) and node.op == "+" else []
        found = [_scaled(term, single) for term in terms]
        if sum(isinstance(term, ex.Dot) or scaled is not None for term, scaled in zip(terms, found)) < 2:
            return node
        for scaled in filter(None, found):
            factors.setdefault(scaled[1], scaled[2])
        return ex.joined("+", [scaled[0] if scaled else term for term, scaled in zip(terms, found)])

    changed = [replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions]
    return algorithm.with_definitions(tuple(replace(d, expr=product([d.expr, *factors.get(d.name, ())])) for d in changed))


def _scaled(term: ex.Expr, funcs: set[str]) -> tuple[ex.Dot, str, list[ex.Expr]] | None:
    """Return the product in ``term``, one of ``funcs`` that is an operand of it, and the numbers that it is multiplied by; None of another term."""
    every = factors_of(term)
    dots = [f for f in every if isinstance(f, ex.Dot)]
    numbers: list[ex.Expr] = [f for f in every if isinstance(f, (ex.Const, ex.Scalar))]
    if len(dots) != 1 or not numbers or len(numbers) + 1 != len(every):
        return None
    name = next((s.tensor for s in (dots[0].left, dots[0].right) if isinstance(s, ex.Access) and s.tensor in funcs), None)
    return (dots[0], name, numbers) if name else None
