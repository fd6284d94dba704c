"""Rewrite sums of products as matrix products, where each factor has a label of the result that the other lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm

MOST_FACTORS = 5  #: of a sum whose factors are told apart


def sums_to_matrix_products(algorithm: Algorithm) -> Algorithm:
    """Rewrite a sum of products of two inputs as a matrix product, where each input has a label that the other lacks.

    Before: ``f[x, y] = rsum(A[x, k] * B[k, y], k);``  After: ``f[x, y] = rdot(A[x, k], B[k, y], k);``

    Other factors are computed in float32, and so are their products:

    Before: ``f[i, j] = rsum((X[n, i] - m[i]) * (X[n, j] - m[j]), n);``
    After:  ``f[i, j] = rdot(cast(X[n, i] - m[i], fp32), cast(X[n, j] - m[j], fp32), n);``
    """
    integral = algorithm.integer_inputs()
    floating = set(algorithm.inputs) - integral

    def change(node: ex.Expr) -> ex.Expr:
        if not (isinstance(node, ex.Reduce) and node.kind == "sum" and isinstance(node.arg, ex.Binary) and node.arg.op == "*"):
            return node
        for left, right in _sides(node):
            if all(isinstance(s, ex.Access) and s.tensor in floating for s in (left, right)):
                return ex.Dot(left, right, node.labels, pos=node.pos)
            if not any(a.tensor in integral for a in ex.accesses(node.arg)):
                return ex.Dot(ex.Cast(left, "fp32"), ex.Cast(right, "fp32"), node.labels, pos=node.pos)
        return node

    return replace(algorithm, definitions=tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions))


def _sides(node: ex.Reduce) -> Iterator[tuple[ex.Expr, ex.Expr]]:
    """Yield ways to split the factors of a sum's terms into two operands, each of which has all summed labels and a label of its own."""
    factors = list(_factors(node.arg))
    if len(factors) > MOST_FACTORS:
        return
    summed = set(node.labels)
    for chosen in sorted(range(1, 2 ** len(factors) - 1, 2), key=lambda bits: bits.bit_count()):  # the first factor is on the left
        sides = [[f for i, f in enumerate(factors) if (chosen >> i & 1) == left] for left in (1, 0)]
        own = [set().union(*(ex.free_labels(f) for f in side)) for side in sides]
        if summed <= own[0] & own[1] and own[0] - own[1] and own[1] - own[0]:
            left, right = (_product(side) for side in sides)
            yield left, right


def _factors(e: ex.Expr) -> Iterator[ex.Expr]:
    if isinstance(e, ex.Binary) and e.op == "*":
        yield from _factors(e.left)
        yield from _factors(e.right)
    else:
        yield e


def _product(factors: list[ex.Expr]) -> ex.Expr:
    found = factors[0]
    for f in factors[1:]:
        found = ex.Binary("*", found, f)
    return found
