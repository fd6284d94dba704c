"""Read sums over a product from the gradient that is made anyway, by exchanging the order of summation.

Before::

    d_a[x] = rsum(d_y[x, y] * s[y] * rdot(A[x, k], B[y, k], k), y);    d_A[x, k] = rdot(d_y[x, y] * s[y] * r[x], B[y, k], y);

After::

    B_scaled[y, k] = B[y, k] * s[y];    B_sum[x, k] = rdot(d_y[x, y], B_scaled[y, k], y);
    d_a[x] = rsum(A[x, k] * B_sum[x, k], k);    d_A[x, k] = B_sum[x, k] * r[x];

The product itself is then not needed: neither made again nor kept. Gradients of products that are scaled by norms of their operands' rows,
as cosines are, have such sums, and those of a number that a product is multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..rules.canonicalize import fresh_name, inline_access
from ..smart_constructors import factors_of


def exchange_sums(backward: Algorithm) -> Algorithm:
    """Replace each sum of weights times a product that a product in another definition allows to read."""
    for d in backward.definitions:
        for node in d.expr.walk():
            if isinstance(node, ex.Reduce) and node.kind == "sum" and len(node.labels) == 1 and (found := _exchange(backward, node)):
                return exchange_sums(found.apply(backward, node))
    return backward


@dataclass(frozen=True)
class _Exchange:
    """The weights that both share, apart from what varies with the row or with the summed label alone, and what is left of each."""

    dot: ex.Dot  #: the product that is read
    shared: tuple[ex.Expr, ...]
    of_sum: tuple[ex.Expr, ...]  #: factors that the sum has besides, without the summed label
    of_dot: tuple[ex.Expr, ...]  #: factors that the product has besides
    row: ex.Expr  #: the operand of the summed product without the summed label
    column: ex.Access  #: the operand with it
    terms: tuple[str, ...]

    def apply(self, backward: Algorithm, total: ex.Reduce) -> Algorithm:
        """Return the algorithm with the Funcs that both read."""
        (label,) = total.labels
        taken = set(backward.names)
        made: list[Definition] = []

        def named(wish: str, e: ex.Expr) -> ex.Access:
            free = tuple(x for x in backward.labels if x in ex.free_labels(e))
            made.append(Definition(fresh_name(wish, taken), free, e))
            return ex.Access(made[-1].name, tuple(map(ex.Label, free)))

        alone = [f for f in self.shared if ex.free_labels(f) == {label}]
        rest = [f for f in self.shared if f not in alone]
        column: ex.Expr = self.column
        if alone and len(rest) == 1 and isinstance(rest[0], ex.Access):  # products then read the weights as they are
            column = named(f"{self.column.tensor}_scaled", _times([self.column, *alone]))
        else:
            rest = list(self.shared)
        read = named(f"{self.column.tensor}_sum", ex.Dot(_times(rest), column, total.labels))
        summed = _times([ex.Reduce("sum", ex.Binary("*", self.row, read), self.terms), *self.of_sum])
        instead = {total: summed, self.dot: _times([read, *self.of_dot])}
        changed = [replace(d, expr=d.expr.transform(lambda n: instead.get(n, n))) for d in backward.definitions]  # type: ignore[call-overload]
        return backward.with_definitions(in_order_of_reads((*made, *changed)))


def _exchange(backward: Algorithm, total: ex.Reduce) -> _Exchange | None:
    (label,) = total.labels
    parts = factors_of(total.arg)
    for i, part in enumerate(parts):
        body = inline_access(part, backward) if isinstance(part, ex.Access) and part.tensor in backward else part
        if not isinstance(body, ex.Dot) or len(parts) == 1 or not _only_summed(backward, part):
            continue
        weights = [*parts[:i], *parts[i + 1 :]]
        for row, column in ((body.left, body.right), (body.right, body.left)):
            apart = label not in ex.free_labels(row) and label in ex.free_labels(column) and isinstance(column, ex.Access)
            own = ex.free_labels(row) - set(body.labels)
            if apart and own - ex.free_labels(column) and column.tensor not in backward:  # type: ignore[attr-defined]
                for dot in _products_with(backward, column, total.labels):
                    if (found := _shared(dot, column, weights, label)) is not None:
                        return _Exchange(dot, *found, row, column, body.labels)  # type: ignore[arg-type]
    return None


def _only_summed(backward: Algorithm, product: ex.Expr) -> bool:
    """Return whether ``product`` is read in sums alone: one that is read element by element is made in any case, as attention's dP is."""

    def apart(e: ex.Expr) -> bool:
        if isinstance(e, ex.Reduce) and e.kind == "sum":
            return True
        same = isinstance(e, ex.Access) and isinstance(product, ex.Access) and e.tensor == product.tensor
        return not same and e != product and all(map(apart, e.children()))

    own = product.tensor if isinstance(product, ex.Access) else None
    return all(apart(d.expr) for d in backward.definitions if d.name != own)


def _products_with(backward: Algorithm, side: ex.Expr, labels: tuple[str, ...]) -> Iterator[ex.Dot]:
    """Yield the products over ``labels`` that have the operand ``side``."""
    for d in backward.definitions:
        for n in d.expr.walk():
            if isinstance(n, ex.Dot) and n.labels == labels and side in (n.left, n.right):
                yield n


def _shared(
    dot: ex.Dot, column: ex.Expr, weights: list[ex.Expr], label: str
) -> tuple[tuple[ex.Expr, ...], tuple[ex.Expr, ...], tuple[ex.Expr, ...]] | None:
    """Return (shared factors, others of the sum, others of the product); None if others than the shared ones vary with ``label``."""
    shared, of_sum, of_dot = [], [], factors_of(dot.right if dot.left == column else dot.left)
    for w in weights:
        if w in of_dot and label in ex.free_labels(w):
            of_dot.remove(w)
            shared.append(w)
        else:
            of_sum.append(w)
    if not shared or any(label in ex.free_labels(f) for f in (*of_sum, *of_dot)):
        return None
    return tuple(shared), tuple(of_sum), tuple(of_dot)


def _times(factors: list[ex.Expr]) -> ex.Expr:
    return reduce(lambda a, b: ex.Binary("*", a, b), factors)


def in_order_of_reads(definitions: tuple[Definition, ...]) -> tuple[Definition, ...]:
    """Return the definitions, each after those that it reads."""
    found: list[Definition] = []
    left = list(definitions)
    while left:
        names = {d.name for d in left}
        ready = next(d for d in left if not any(a.tensor in names for a in ex.accesses(d.expr)))
        found.append(ready)
        left.remove(ready)
    return tuple(found)
