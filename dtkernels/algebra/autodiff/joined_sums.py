"""Join a sum of products to the sum that reads it, where only factors stand between them.

Before, where the derivative of ``exp2(g[h] * (m - l))`` sums along what the exponential lacks first::

    d_g[h] = rsum(rsum(rdot(Q[b, h, m, d], K[b, h, l, d], d), b) * exp2(g[h] * (m - l)) * (m - l), m, l);

After::

    d_g[h] = rsum(rdot(Q[b, h, m, d], K[b, h, l, d], d) * exp2(g[h] * (m - l)) * (m - l), b, m, l);

The inner sum has elements for all pairs of rows and is made of whole matrices for each. The joined one goes over these matrices one after the
other and keeps a number. The factors are computed more often, which costs less than the product that they multiply.
"""

from __future__ import annotations

from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..smart_constructors import factors_of, product


def join_sums(algorithm: Algorithm) -> Algorithm:
    """Join each sum over elements made of products that is a factor of another sum's terms, and of nothing else."""
    return algorithm.transform(_joined)


def _joined(node: ex.Expr) -> ex.Expr:
    if not _is_sum(node):
        return node
    factors = factors_of(node.arg)  # type: ignore[attr-defined]
    inner = next((f for f in factors if _is_sum(f) and _is_made_of_products(f)), None)
    rest = [f for f in factors if f is not inner]
    if inner is None or not rest or any({*inner.labels} & {n.name for n in f.walk() if isinstance(n, ex.Label)} for f in rest) or {*inner.labels} & {*node.labels}:  # type: ignore[attr-defined]
        return node
    return _joined(replace(node, arg=product([inner.arg, *rest]), labels=(*inner.labels, *node.labels)))  # type: ignore[attr-defined, call-arg]


def _is_sum(node: ex.Expr) -> bool:
    return isinstance(node, ex.Reduce) and node.kind == "sum"


def _is_made_of_products(node: ex.Expr) -> bool:
    """Return whether terms of a sum have products with labels beside the sum's own on both sides: matrices, not rows."""
    own = {*node.labels}  # type: ignore[attr-defined]
    dots = (n for n in node.walk() if isinstance(n, ex.Dot))
    return any(all(labels - own for labels in ex.own_labels(n)) for n in dots)
