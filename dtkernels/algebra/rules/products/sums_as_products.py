"""Rewrite sums of products as matrix products, where each factor has a label of the result that the other lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm
from ...smart_constructors import factors_of, product

MOST_FACTORS = 5  #: of a sum whose factors are told apart


def sums_to_matrix_products(algorithm: Algorithm) -> Algorithm:
    """Rewrite a sum of products of two inputs as a matrix product, where each input has a label that the other lacks.

    Before: ``f[x, y] = rsum(A[x, k] * B[k, y], k);``  After: ``f[x, y] = rdot(A[x, k], B[k, y], k);``

    Only inputs qualify: a matrix product would round a computed operand to the inputs' dtype.
    """
    floating = set(algorithm.inputs) - algorithm.integer_inputs()

    def change(node: ex.Reduce) -> ex.Expr:
        sides = next(split_into_sides(node), None)
        plain = sides is not None and all(isinstance(s, ex.Access) and s.tensor in floating for s in sides)
        return ex.Dot(*sides, node.labels, pos=node.pos) if sides and plain else node

    return with_sums(algorithm, change)


def nest_contractions(algorithm: Algorithm) -> Algorithm:
    """Sum the two factors that share a label first, where a sum over several labels has three factors or more.

    Before: ``f[b, o] = rsum(x[b, i] * W[o, i, j] * y[b, j], i, j);``
    After:  ``f[b, o] = rsum(x[b, i] * rsum(W[o, i, j] * y[b, j], j), i);``

    Where both sums of three inputs are matrix products, they are in the inputs' dtype, as in ``einsum``:
    ``f[b, i, j] = rdot(H[b, i, k], rdot(W[k, l], D[b, j, l], l), k);``
    """
    floating = set(algorithm.inputs) - algorithm.integer_inputs() - {name for name, _ in algorithm.stands_for}

    def change(node: ex.Reduce) -> ex.Expr:
        factors = factors_of(node.arg)
        if len(node.labels) < 2 or len(factors) < 3:
            return node
        for label in reversed(node.labels):
            inner = [f for f in factors if label in ex.free_labels(f)]
            rest = [f for f in factors if label not in ex.free_labels(f)]
            sums = ex.Reduce("sum", product(inner), (label,), pos=node.pos) if len(inner) == 2 and rest else None
            if sums is not None and (sides := next(split_into_sides(sums), None)) is not None:
                outer = replace(node, arg=product([*rest, sums]), labels=tuple(x for x in node.labels if x != label))
                plain = len(rest) == 1 and all(isinstance(f, ex.Access) and f.tensor in floating for f in factors)
                is_product = plain and next(split_into_sides(outer), None) is not None
                return ex.Dot(rest[0], ex.Dot(*sides, (label,), pos=node.pos), outer.labels, pos=node.pos) if is_product else outer
        return node

    return with_sums(algorithm, change)


def sums_to_float32_products(algorithm: Algorithm) -> Algorithm:
    """Rewrite a sum of products of computed factors as a matrix product in float32, as ``sums_to_matrix_products`` does for inputs.

    Before: ``f[i, j] = rsum((X[n, i] - m[i]) * (X[n, j] - m[j]), n);``
    After:  ``f[i, j] = rdot(cast(X[n, i] - m[i], fp32), cast(X[n, j] - m[j], fp32), n);``

    A factor may be picked by data, ``E[t[n], j]``.
    """
    integral = algorithm.integer_inputs()

    def change(node: ex.Reduce) -> ex.Expr:
        sides = next(split_into_sides(node), None)
        if sides is None or any(tensor in integral for tensor in _value_tensors(node.arg)):
            return node
        if all(isinstance(s, ex.Access) and s.tensor in algorithm.inputs for s in sides):
            return ex.Dot(*sides, node.labels, pos=node.pos)
        return ex.Dot(ex.Cast(sides[0], "fp32"), ex.Cast(sides[1], "fp32"), node.labels, pos=node.pos)

    return with_sums(algorithm, change)


def with_sums(algorithm: Algorithm, change: Callable[[ex.Reduce], ex.Expr]) -> Algorithm:
    """Change each sum of products."""

    def each(node: ex.Expr) -> ex.Expr:
        sums = isinstance(node, ex.Reduce) and node.kind == "sum" and isinstance(node.arg, ex.Binary) and node.arg.op == "*"
        return change(node) if sums else node  # type: ignore[arg-type]

    return replace(algorithm, definitions=tuple(replace(d, expr=d.expr.transform(each)) for d in algorithm.definitions))


def _value_tensors(e: ex.Expr) -> Iterator[str]:
    """Yield the tensors whose elements enter a value, not only an index."""
    if isinstance(e, ex.Access):
        yield e.tensor
    else:
        for child in e.children():
            yield from _value_tensors(child)


def split_into_sides(node: ex.Reduce) -> Iterator[tuple[ex.Expr, ex.Expr]]:
    """Yield ways to split the factors of a sum's terms into two operands, each of which has all summed labels and a label of its own."""
    factors = factors_of(node.arg)
    if len(factors) > MOST_FACTORS:
        return
    summed = set(node.labels)
    for chosen in sorted(range(1, 2 ** len(factors) - 1, 2), key=lambda bits: bits.bit_count()):  # the first factor is on the left
        sides = [[f for i, f in enumerate(factors) if (chosen >> i & 1) == left] for left in (1, 0)]
        own = [set().union(*(ex.free_labels(f) for f in side)) for side in sides]
        if summed <= own[0] & own[1] and own[0] - own[1] and own[1] - own[0]:
            left, right = (product(side) for side in sides)
            yield left, right
