"""Distribute sums of products over differences of rows, where what is left are matrix products."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm
from ...smart_constructors import factors_of, product
from ..canonicalize import extract_nested_reductions
from .sums_as_products import split_into_sides, with_sums


def distribute_differences(algorithm: Algorithm) -> Algorithm:
    """Sum the two sides of a difference by themselves, where the difference has labels of both sides of what would be a matrix product.

    Before: ``d_Q[m, k] = rsum(w[m, n] * (Q[m, k] - X[n, k]), n);``
    After:  ``d_Q_sum[m] = rsum(w[m, n], n);
            d_Q[m, k] = (Q[m, k] - Q[0, k]) * d_Q_sum[m] - rdot(cast(w[m, n], fp32), cast(X[n, k] - Q[0, k], fp32), n);``

    So are gradients of distances, and forces between points. The two sides may cancel: the products are in float32, and both sides are relative to the
    first row, so that what is lost depends on how far rows lie from each other, not on how far from 0. Where both sides are rows of one tensor, a row's
    difference from itself is left out: weights are often largest there, and would cancel. A square is left alone.
    """
    integral = algorithm.integer_inputs()

    def change(node: ex.Reduce) -> ex.Expr:
        factors = factors_of(node.arg)
        sums = [f for f in factors if isinstance(f, ex.Binary) and f.op in "+-"]
        if len(sums) != 1 or next(split_into_sides(node), None) or any(a.tensor in integral for a in ex.accesses(node.arg)):
            return node
        both = _relative(sums[0], node.labels)
        rest = [_zero_where_equal(product([f for f in factors if f is not sums[0]]), sums[0], node.labels)] if len(factors) > 1 else []
        left, right = (_summed(node, rest, side) if rest else None for side in (both.left, both.right))
        if left is None or right is None or not (isinstance(left, ex.Dot) or isinstance(right, ex.Dot)):
            return node
        return replace(both, left=left, right=right)

    changed = with_sums(algorithm, change)
    return algorithm if changed == algorithm else extract_nested_reductions(changed, invariant=True)


def _relative(both: ex.Binary, summed: tuple[str, ...]) -> ex.Binary:
    """Return a difference with the first element along the labels that no sum goes over subtracted on both sides. Where there is a result, there is one."""
    apart = [side for side in (both.left, both.right) if not ex.free_labels(side) & {*summed}]
    if both.op != "-" or len(apart) != 1:
        return both
    other = both.right if apart[0] is both.left else both.left
    first = ex.substitute(apart[0], dict.fromkeys(ex.free_labels(apart[0]) - ex.free_labels(other), ex.Const(0)))
    return replace(both, left=ex.Binary("-", both.left, first), right=ex.Binary("-", both.right, first))


def _zero_where_equal(rest: ex.Expr, both: ex.Binary, summed: tuple[str, ...]) -> ex.Expr:
    """Return the factor of a difference, 0 where the difference is that of an element from itself."""
    apart, other = (both.left, both.right) if not ex.free_labels(both.left) & {*summed} else (both.right, both.left)
    pairs = [(x, y) for x in sorted(ex.free_labels(apart) - ex.free_labels(other)) for y in summed if ex.substitute(apart, {x: ex.Label(y)}) == other]
    if both.op != "-" or len(pairs) != 1:
        return rest
    x, y = pairs[0]
    return ex.Call("where", (ex.Binary("==", ex.Label(x), ex.Label(y)), ex.Const(0), rest))


def _summed(node: ex.Reduce, rest: list[ex.Expr], side: ex.Expr) -> ex.Expr | None:
    """Return the sum of ``rest`` times a side of the difference: a matrix product, or a plain sum times what it does not depend on; None where it is neither."""
    if not ex.free_labels(side) & {*node.labels}:
        return ex.Binary("*", side, replace(node, arg=product(rest)))
    found = next(split_into_sides(replace(node, arg=product([*rest, side]))), None)
    return ex.Dot(ex.Cast(found[0], "fp32"), ex.Cast(found[1], "fp32"), node.labels, pos=node.pos) if found else None
