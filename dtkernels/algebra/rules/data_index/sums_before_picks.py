"""Sum what a condition on data does not tell apart before the terms that it picks are.

A table of biases by distance is read for each window of an image: its gradient takes the sum over windows first, and places that once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ...smart_constructors import conditions_of_term
from ..canonicalize import fresh_name


def sum_before_picks(algorithm: Algorithm) -> Algorithm:
    """Give a sum of picked elements a Func for the sum over the labels that no condition has.

    Before: ``d_T[v, h] = rsum(where(R[m, l] == v, d_s[w, h, m, l], 0), w, m, l);``
    After:  ``d_T_sum[h, m, l] = rsum(d_s[w, h, m, l], w);  d_T[v, h] = rsum(where(R[m, l] == v, d_T_sum[h, m, l], 0), m, l);``
    """
    taken = set(algorithm.names)
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        made: list[Definition] = []

        def change(node: ex.Expr) -> ex.Expr:
            if not (isinstance(node, ex.Reduce) and node.kind == "sum"):
                return node
            conditions, element = conditions_of_term(node.arg)
            first = tuple(x for x in node.labels if not any(x in ex.free_labels(c) for c in conditions))
            plain = isinstance(element, ex.Access) and all(isinstance(i, ex.Label) for i in element.index) and {*first} <= ex.free_labels(element)
            if not plain or not first or len(first) == len(node.labels) or not any(_compares_data(c, d, node.labels) for c in conditions):  # noqa: B023
                return node
            own = tuple(i.name for i in element.index if isinstance(i, ex.Label) and i.name not in first)  # type: ignore[attr-defined]
            if len({*own}) < len(own):
                return node
            name = fresh_name(f"{d.name}_sum", taken)  # noqa: B023
            made.append(Definition(name, own, ex.Reduce("sum", element, first), d.pos))  # noqa: B023
            total = ex.Access(name, tuple(map(ex.Label, own)))
            return replace(node, arg=node.arg.transform(lambda n: total if n == element else n), labels=tuple(x for x in node.labels if x not in first))

        changed = replace(d, expr=d.expr.transform(change))
        definitions += [*made, changed]
    return algorithm.with_definitions(tuple(definitions)) if len(definitions) > len(algorithm.definitions) else algorithm


def _compares_data(condition: ex.Expr, d: Definition, summed: tuple[str, ...]) -> bool:
    """Return whether data along a label of the sum is compared with a label of the result."""
    return any(name in d.labels and ex.free_labels(data) & {*summed} for name, data in _sides(condition))


def _sides(condition: ex.Expr) -> Iterator[tuple[str, ex.Expr]]:
    match condition:
        case ex.Binary("==", ex.Label(name), data) | ex.Binary("==", data, ex.Label(name)) if any(ex.accesses(data)):
            yield name, data
