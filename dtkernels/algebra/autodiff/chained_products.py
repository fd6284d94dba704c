"""Find products whose values backward needs again. Eager execution keeps them; here it depends on the extents, see rematerialization.py.

A product that enters further products as it is, and nothing else::

    mm[m, l] = rdot(A[m, k], B[k, l], k);    y[m, n] = rdot(mm[m, l], C[l, n], l);

``d_C[l, n] = rdot(d_y[m, n], mm[m, l], m)`` reads it, and recomputing it takes all of A and B.

A product that passes through functions, or that is part of a larger expression, which then gets a Func for it::

    u[m, n] = rdot(A[m, k], W[k, n], k) + b[n];    y[m, n] = u[m, n] * sigmoid(u[m, n]) * rdot(A[m, k], V[k, n], k);

What is added to a product is saved with it: the sum keeps its sign when it is rounded, the product and a bias apart do not.

A product whose rows are reduced and that enters another product too, as the scores of attention do, is never saved: kernels stream it, so
that memory stays linear in the length of its rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..rules.canonicalize import extracted_func
from ..rules.products.sliced_products import slice_offset
from ..smart_constructors import product_of, reduces, sum_with_product, without_numbers
from .rematerialization import Product


def chained_products(algorithm: Algorithm, outputs: tuple[str, ...]) -> tuple[Product, ...]:
    """Return the Funcs, except outputs, that are a matrix product, perhaps times numbers, and that only products use, as operands."""
    inner = (d for d in algorithm.definitions if d.name not in outputs and _only_operand(d.name, algorithm))
    return tuple(_product(algorithm, d, dot, chained=True) for d in inner if (dot := product_of(d.expr)))


def inner_products(algorithm: Algorithm, outputs: tuple[str, ...]) -> tuple[Product, ...]:
    """Return those of ``chained_products``, and every other product that a gradient may need again, of ``with_named_products``.

    Without others where a result is cast to float32: what is kept is rounded to the dtype of the inputs, and such a result asks for more.
    """
    chained = {p.name: p for p in chained_products(algorithm, outputs)}
    if any(isinstance(e := algorithm[o].expr, ex.Cast) and e.dtype == "fp32" for o in outputs):
        return tuple(chained.values())
    named = with_named_products(algorithm)
    others = (d for d in named.definitions if d.name not in outputs and d.name not in chained and not _is_streamed(d, named))
    found = chained | {d.name: _product(algorithm, d, dot, chained=False) for d in others if (dot := sum_with_product(d.expr))}
    return tuple(found[d.name] for d in named.definitions if d.name in found)


def with_named_products(algorithm: Algorithm, only: Collection[str] | None = None) -> Algorithm:
    """Give products inside larger expressions a Func of their own, those named ``only`` if that is given.

    Before: ``y[m, n] = z[m, n] * (rdot(A[m, k], V[k, n], k) + b[n]);``
    After:  ``y_product[m, n] = rdot(A[m, k], V[k, n], k) + b[n];  y[m, n] = z[m, n] * y_product[m, n];``
    """
    definitions: list[Definition] = []
    taken = set(algorithm.names)
    for d in algorithm.definitions:
        made: list[Definition] = []
        parts = {} if sum_with_product(d.expr) else {n: extracted_func(n, "product", d, made, taken, d.labels) for n in _products_inside(d.expr, d.labels)}
        wanted = {n: e for n, e in parts.items() if only is None or isinstance(e, ex.Access) and e.tensor in only}
        definitions += [m for m in made if m.expr in wanted]
        definitions.append(replace(d, expr=d.expr.transform(lambda n, wanted=wanted: wanted.get(n, n))) if wanted else d)  # type: ignore[misc]
    return algorithm if len(definitions) == len(algorithm.definitions) else algorithm.with_definitions(tuple(definitions))


def _products_inside(e: ex.Expr, labels: tuple[str, ...]) -> list[ex.Expr]:
    """Return the products in ``e`` over two of its ``labels`` at least, with what is added to them, outside other reductions."""
    dot = e if isinstance(e, ex.Dot) else sum_with_product(e) if isinstance(e, ex.Binary) and e.op in ("+", "-") else None
    if dot is not None and len(ex.free_labels(dot)) > 1 and ex.free_labels(e) == ex.free_labels(dot) <= set(labels):
        return [e]
    return [] if isinstance(e, (ex.Reduce, ex.Dot, ex.Scan)) else [n for child in e.children() for n in _products_inside(child, labels)]


def _product(algorithm: Algorithm, d: Definition, dot: ex.Dot, chained: bool) -> Product:
    own = set(d.labels)
    sides = [ex.free_labels(side) for side in (dot.left, dot.right)] if chained else []
    against = tuple((tuple(sorted(own - side)), tuple(sorted(side - own))) for side in sides)
    return Product(d.name, against, d.labels, dot.labels, multiples(algorithm, d))


def multiples(algorithm: Algorithm, d: Definition) -> tuple[tuple[str, int, str], ...]:
    """Return the labels of a Func that others take slices of, each with their number and the label that counts the elements of one (sliced_products.py)."""
    found = []
    read = [a for e in algorithm.definitions for a in ex.accesses(e.expr) if a.tensor == d.name]
    for dim, label in enumerate(d.labels):
        slices = {(x, slice_offset(a.index[dim], x)) for a in read for x in ex.free_labels(a.index[dim])}
        offsets = [offset for _, offset in slices if offset is not None]
        if len(offsets) == len(slices) > 1 and len(taken := {x for x, _ in slices}) == 1:
            found.append((label, max(offsets) + 1, taken.pop()))
    return tuple(found)


def _only_operand(func: str, algorithm: Algorithm) -> bool:
    """Return whether every use of ``func`` is an operand of a product, element for element."""
    uses = sum(a.tensor == func for d in algorithm.definitions for a in ex.accesses(d.expr))
    dots = [n for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]
    sides = [without_numbers(side) for n in dots for side in (n.left, n.right)]
    taken = [s for s in sides if isinstance(s, ex.Access) and s.tensor == func and all(isinstance(i, ex.Label) for i in s.index)]
    return 0 < uses == len(taken)


def _is_streamed(d: Definition, algorithm: Algorithm) -> bool:
    """Return whether rows of ``d``, or of Funcs elementwise in it, are both reduced and operands of a product."""
    alike = [d.name]
    for other in algorithm.definitions:
        if any(a.tensor in alike for a in ex.accesses(other.expr)) and len(other.labels) >= len(d.labels) and not reduces(other.expr):
            alike.append(other.name)
    nodes = [n for other in algorithm.definitions for n in other.expr.walk()]
    reduced = [n for n in nodes if isinstance(n, ex.Reduce) and any(a.tensor in alike and _runs_over(a, n.labels) for a in ex.accesses(n.arg))]
    taken = [n for n in nodes if isinstance(n, ex.Dot) and any(a.tensor in alike and _runs_over(a, n.labels) for a in ex.accesses(n))]
    return bool(reduced and taken)


def _runs_over(access: ex.Access, labels: tuple[str, ...]) -> bool:
    return any(label in ex.free_labels(access) for label in labels)
