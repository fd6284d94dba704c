"""Name matrix products of which there is one for each place of the last dimension, so that a schedule can store them one after another.

Before::

    out[i, j, f] = sigmoid(G[i, j, f]) * rdot(A[i, k, f], B[j, k, f], k);

After, with ``out_product``, beside which the operands are stored as copies with the terms last::

    out_product[f, i, j] = rdot(A[i, k, f], B[j, k, f], k);        out[i, j, f] = sigmoid(G[i, j, f]) * out_product[f, i, j];

A tile of such a product holds one place of ``f``: of each sector of memory it would load, or store, one element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Dot, Expr, Label, accesses, free_labels, own_labels
from .product_funcs import product_names, with_product

if TYPE_CHECKING:
    from ..algorithm import Algorithm, Definition


def batched_product_names(algorithm: Algorithm) -> dict[str, Dot]:
    """Map the names that such products have in a schedule to the products: ``f_product``, the second of ``f`` ``f_product2``."""
    return product_names(algorithm, "product", _is_batched_last)


def lies_across(dot: Dot, side: Expr) -> bool:
    """Return whether the elements of an operand that lie side by side are of different products: ``A[i, k, f]`` beside ``B[j, k, f]``, summed over ``k``."""
    batch = (free_labels(dot.left) & free_labels(dot.right)) - {*dot.labels}
    last = [a.index[-1] for a in accesses(side) if a.index and free_labels(a) & {*dot.labels}]
    return all(own_labels(dot)) and bool(last) and all(isinstance(x, Label) and x.name in batch for x in last)


def with_batched_product(algorithm: Algorithm, name: str, dot: Dot) -> Algorithm:
    """Return the algorithm with a Func of the product, the labels that both operands have first, before the first Func that reads it."""
    batch = free_labels(dot.left) & free_labels(dot.right)
    return with_product(algorithm, name, dot, lambda d: tuple(sorted(_kept(dot, d), key=lambda label: label not in batch)))


def _is_batched_last(d: Definition, dot: Dot) -> bool:
    """Return whether ``d`` lies contiguous along a label of both operands, and all labels of the product are its own."""
    across = any(lies_across(dot, side) for side in (dot.left, dot.right))
    shared = free_labels(dot.left) & free_labels(dot.right)
    return across and bool(d.labels) and d.labels[-1] in shared and free_labels(dot) - {*dot.labels} <= {*d.labels}


def _kept(dot: Dot, d: Definition) -> list[str]:
    """Return the labels of a product, in the order of the Func that it is in."""
    return [label for label in d.labels if label in free_labels(dot) and label not in dot.labels]
