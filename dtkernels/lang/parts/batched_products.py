"""Name matrix products of which there is one for each place of the last dimension, so that a schedule can store them one after another.

Before::

    out[i, j, f] = sigmoid(G[i, j, f]) * rdot(A[i, k, f], B[j, k, f], k);

After, with ``out_product``, beside which the operands are stored as copies with the terms last::

    out_product[f, i, j] = rdot(A[i, k, f], B[j, k, f], k);        out[i, j, f] = sigmoid(G[i, j, f]) * out_product[f, i, j];

A tile of such a product holds one place of ``f``: of each sector of memory it would load, or store, one element.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..expr import Access, Dot, Expr, Label, accesses, free_labels, own_labels

if TYPE_CHECKING:
    from ..algorithm import Algorithm, Definition


def batched_product_names(algorithm: Algorithm) -> dict[str, Dot]:
    """Map the names that such products have in a schedule to the products: ``f_product``, the second of ``f`` ``f_product2``."""
    taken, found = {*algorithm.names}, dict[str, Dot]()
    for d in algorithm.definitions:
        own = [n for n in dict.fromkeys(d.expr.walk()) if isinstance(n, Dot) and _is_batched_last(d, n)]
        for i, dot in enumerate((n for n in own if n not in found.values()), 1):
            name = f"{d.name}_product{i if i > 1 else ''}"
            while name in taken:
                name += "_"
            found[name] = dot
    return found


def lies_across(dot: Dot, side: Expr) -> bool:
    """Return whether the elements of an operand that lie side by side are of different products: ``A[i, k, f]`` beside ``B[j, k, f]``, summed over ``k``."""
    batch = (free_labels(dot.left) & free_labels(dot.right)) - {*dot.labels}
    last = [a.index[-1] for a in accesses(side) if a.index and free_labels(a) & {*dot.labels}]
    return all(own_labels(dot)) and bool(last) and all(isinstance(x, Label) and x.name in batch for x in last)


def with_batched_product(algorithm: Algorithm, name: str, dot: Dot) -> Algorithm:
    """Return the algorithm with a Func of the product, the labels that both operands have first, before the first Func that reads it."""
    first = next(i for i, d in enumerate(algorithm.definitions) if dot in d.expr.walk())
    batch = free_labels(dot.left) & free_labels(dot.right)
    labels = tuple(sorted(_kept(dot, algorithm.definitions[first]), key=lambda label: label not in batch))
    access = Access(name, tuple(map(Label, labels)))
    changed = tuple(replace(d, expr=d.expr.transform(lambda n: access if n == dot else n)) for d in algorithm.definitions)
    made = replace(changed[first], name=name, labels=labels, expr=dot)
    return algorithm.with_definitions((*changed[:first], made, *changed[first:]))


def _is_batched_last(d: Definition, dot: Dot) -> bool:
    """Return whether ``d`` lies contiguous along a label of both operands, and all labels of the product are its own."""
    across = any(lies_across(dot, side) for side in (dot.left, dot.right))
    shared = free_labels(dot.left) & free_labels(dot.right)
    return across and bool(d.labels) and d.labels[-1] in shared and free_labels(dot) - {*dot.labels} <= {*d.labels}


def _kept(dot: Dot, d: Definition) -> list[str]:
    """Return the labels of a product, in the order of the Func that it is in."""
    return [label for label in d.labels if label in free_labels(dot) and label not in dot.labels]
