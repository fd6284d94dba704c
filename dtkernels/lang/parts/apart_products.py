"""Name matrix products inside larger expressions, so that a schedule can store one before what is made of it element by element.

Before::

    y[m, n] = R[m, n] + where(M[m, n] > 0, rdot(A[m, k], W[n, k], k), 0);

After, with ``y_dot``, whose kernel reads nothing but operands::

    y_dot[m, n] = rdot(A[m, k], W[n, k], k);        y[m, n] = R[m, n] + where(M[m, n] > 0, y_dot[m, n], 0);
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..expr import Dot, free_labels
from .product_funcs import product_names, with_product

if TYPE_CHECKING:
    from ..algorithm import Algorithm


def apart_product_names(algorithm: Algorithm) -> dict[str, Dot]:
    """Map the names that such products have in a schedule to the products: ``f_dot``, the second of ``f`` ``f_dot2``."""
    return product_names(algorithm, "dot", lambda d, dot: dot != d.expr and free_labels(dot) == {*d.labels})


def with_apart_product(algorithm: Algorithm, name: str, dot: Dot) -> Algorithm:
    """Return the algorithm with a Func of the product, with the labels of the first Func that reads it."""
    return with_product(algorithm, name, dot, lambda d: d.labels)
