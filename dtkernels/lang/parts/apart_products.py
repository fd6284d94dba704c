"""Name matrix products inside larger expressions, so that a schedule can store one before what is made of it element by element.

Before::

    y[m, n] = R[m, n] + where(M[m, n] > 0, rdot(A[m, k], W[n, k], k), 0);

After, with ``y_dot``, whose kernel reads nothing but operands::

    y_dot[m, n] = rdot(A[m, k], W[n, k], k);        y[m, n] = R[m, n] + where(M[m, n] > 0, y_dot[m, n], 0);
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..expr import Access, Dot, Label, free_labels

if TYPE_CHECKING:
    from ..algorithm import Algorithm


def apart_product_names(algorithm: Algorithm) -> dict[str, Dot]:
    """Map the names that such products have in a schedule to the products: ``f_dot``, the second of ``f`` ``f_dot2``."""
    taken, found = {*algorithm.names}, dict[str, Dot]()
    for d in algorithm.definitions:
        dots = [n for n in dict.fromkeys(d.expr.walk()) if isinstance(n, Dot) and n != d.expr and free_labels(n) == {*d.labels}]
        for i, dot in enumerate((n for n in dots if n not in found.values()), 1):
            name = f"{d.name}_dot{i if i > 1 else ''}"
            while name in taken:
                name += "_"
            found[name] = dot
    return found


def with_apart_product(algorithm: Algorithm, name: str, dot: Dot) -> Algorithm:
    """Return the algorithm with a Func of the product before the first Func that reads it; as it is where nothing has the product any more."""
    first = next((i for i, d in enumerate(algorithm.definitions) if dot in d.expr.walk()), None)
    if first is None:
        return algorithm
    labels = algorithm.definitions[first].labels
    access = Access(name, tuple(map(Label, labels)))
    changed = tuple(replace(d, expr=d.expr.transform(lambda n: access if n == dot else n)) for d in algorithm.definitions)
    made = replace(changed[first], name=name, labels=labels, expr=dot)
    return algorithm.with_definitions((*changed[:first], made, *changed[first:]))
