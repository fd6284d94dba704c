"""Choose the order in which a sum to a single number is made: along the rows that the rest of a backward sums along.

Before, where the other sums of the backward run along ``y``, the number comes from sums down columns, in a pass of its own::

    d_r[x] = rsum(d_y[x, y] * A[x, y], y) * w[];    d_w[] = rsum(rsum(d_y[x, y] * r[x] * A[x, y], x), y);

After, from sums of rows, each of which is made once::

    d_w_rows[x] = rsum(d_y[x, y] * A[x, y], y);     d_r[x] = d_w_rows[x] * w[];     d_w[] = rsum(d_w_rows[x] * r[x], x);

Where other sums run down columns too, the number keeps those: they share a loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..rules.canonicalize import fresh_name
from ..smart_constructors import factors_of, product
from .exchanged_sums import in_order_of_reads


def sum_rows_first(backward: Algorithm) -> Algorithm:
    """Exchange the two sums that make a number, if others run along the labels of the outer one and none along those of the inner one."""
    totals = [n for d in backward.definitions for n in d.expr.walk() if _is_total(n, backward)]
    inside = [n.arg for n in totals]  # type: ignore[attr-defined]
    over = {frozenset(n.labels) for d in backward.definitions for n in ex.reductions(d.expr) if not any(n is t for t in (*totals, *inside))}
    made: list[Definition] = []
    taken = set(backward.names)

    def exchange(d: Definition) -> Definition:
        def change(node: ex.Expr) -> ex.Expr:
            if not _is_total(node, backward) or frozenset(node.labels) not in over or frozenset(node.arg.labels) in over:  # type: ignore[attr-defined]
                return node
            rows, columns = node.labels, node.arg.labels  # type: ignore[attr-defined]
            factors = factors_of(node.arg.arg)  # type: ignore[attr-defined]
            summed = [f for f in factors if ex.free_labels(f) & {*rows}]
            total = ex.Reduce("sum", product(summed), rows)
            name, labels = fresh_name(f"{d.name}_rows", taken), tuple(x for x in backward.labels if x in columns and x in ex.free_labels(total))
            made.append(Definition(name, labels, total))
            rest = [f for f in factors if f not in summed]
            return ex.Reduce("sum", product([ex.Access(name, tuple(map(ex.Label, labels))), *rest]), columns)

        return replace(d, expr=d.expr.transform(change))

    changed = tuple(map(exchange, backward.definitions))
    return backward.with_definitions(in_order_of_reads(_reading(changed, made))) if made else backward


def _reading(definitions: tuple[Definition, ...], made: list[Definition]) -> tuple[Definition, ...]:
    """Return the definitions, and the sums of rows that were made, each read wherever it is a factor of a sum."""

    def read(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, ex.Reduce) or node.kind != "sum":
            return node
        factors = factors_of(node.arg)
        own = [f for f in factors if ex.free_labels(f) & {*node.labels}]
        for m in made:
            if m.expr.labels == node.labels and Counter(factors_of(m.expr.arg)) == Counter(own):  # type: ignore[attr-defined]
                return product([ex.Access(m.name, tuple(map(ex.Label, m.labels))), *(f for f in factors if f not in own)])
        return node

    return (*made, *(replace(d, expr=d.expr.transform(read)) for d in definitions))


def _is_total(node: ex.Expr, backward: Algorithm) -> bool:
    """Return whether a sum of a sum of inputs is a single number."""
    if not (isinstance(node, ex.Reduce) and node.kind == "sum" and isinstance(node.arg, ex.Reduce) and node.arg.kind == "sum") or ex.free_labels(node):
        return False
    return all(a.tensor in backward.inputs for a in ex.accesses(node)) and not any(isinstance(n, ex.Dot) for n in node.walk())
