"""Find products that enter further products. Backward needs their values again, and eager execution keeps them.

Before::

    mm[m, l] = rdot(A[m, k], B[k, l], k);    y[m, n] = rdot(mm[m, l], C[l, n], l);

``mm`` is one such product. ``d_C[l, n] = rdot(d_y[m, n], mm[m, l], m)`` reads it, and recomputing it takes all of A and B. It is saved if it
is no larger than one of its operands. A product that passes through another function first, as attention's scores pass through exp, is
never saved.
"""

from __future__ import annotations

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from .rematerialization import Product


def chained_products(algorithm: Algorithm, outputs: tuple[str, ...]) -> tuple[Product, ...]:
    """Return the Funcs, except outputs, that are a matrix product, perhaps times numbers, and that only products use, as operands."""
    inner = (d for d in algorithm.definitions if d.name not in outputs and _only_operand(d.name, algorithm))
    return tuple(_product(d, dot) for d in inner if (dot := _dot(d.expr)))


def _product(d: Definition, dot: ex.Dot) -> Product:
    own = set(d.labels)
    sides = [ex.free_labels(side) for side in (dot.left, dot.right)]
    return Product(d.name, tuple((tuple(sorted(own - side)), tuple(sorted(side - own))) for side in sides))


def _only_operand(func: str, algorithm: Algorithm) -> bool:
    """Return whether every use of ``func`` is an operand of a product, element for element."""
    uses = sum(a.tensor == func for d in algorithm.definitions for a in ex.accesses(d.expr))
    dots = [n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    sides = [_without_numbers(side) for n in dots for side in (n.left, n.right)]
    taken = [s for s in sides if isinstance(s, ex.Access) and s.tensor == func and all(isinstance(i, ex.Label) for i in s.index)]
    return 0 < uses == len(taken)


def _dot(e: ex.Expr) -> ex.Dot | None:
    inner = _without_numbers(e)
    return inner if isinstance(inner, ex.Dot) else None


def _without_numbers(e: ex.Expr) -> ex.Expr:
    """Drop the scalar and constant factors of ``e``."""
    match e:
        case ex.Binary("*", ex.Const() | ex.Scalar(), inner) | ex.Binary("*" | "/", inner, ex.Const() | ex.Scalar()) | ex.Unary("-", inner):
            return _without_numbers(inner)
    return e
