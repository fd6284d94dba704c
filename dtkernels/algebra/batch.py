"""Batch an algorithm: add leading dimensions to those that it was written with."""

from __future__ import annotations

from dataclasses import replace

from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from .rules.canonicalize import fresh_name


def add_batch(algorithm: Algorithm, batched: frozenset[str], count: int) -> Algorithm:
    """Give ``count`` leading labels to the inputs in ``batched`` and to every Func.

    Before: ``y[x] = A[x] * w[x];``  After, with A batched once: ``y[batch, x] = A[batch, x] * w[x];``
    """
    if not count:
        return algorithm
    taken = {*algorithm.names, *(n for n, _ in algorithm.params)}
    labels = tuple(fresh_name("batch", taken) for _ in range(count))
    lead = tuple(ex.Label(label) for label in labels)

    def change(node: ex.Expr) -> ex.Expr:
        if isinstance(node, ex.Access) and (node.tensor in batched or node.tensor in algorithm):
            return replace(node, index=lead + node.index)
        return node

    definitions = tuple(replace(d, labels=labels + d.labels, expr=d.expr.transform(change)) for d in algorithm.definitions)
    extents = tuple((label, tensor, dim + count if tensor in batched else dim) for label, tensor, dim in algorithm.extents)
    formulas = tuple((label, _shifted(formula, batched, count)) for label, formula in algorithm.formulas)
    ranks = tuple((tensor, rank + count if tensor in batched else rank) for tensor, rank in algorithm.ranks)
    return replace(algorithm, vars=labels + algorithm.vars, definitions=definitions, extents=extents, formulas=formulas, ranks=ranks)


def _shifted(formula: ex.Expr, batched: frozenset[str], count: int) -> ex.Expr:
    """Return the formula of an extent with the dimensions of batched inputs ``count`` further."""

    def change(node: ex.Expr) -> ex.Expr:
        match node:
            case ex.Access(tensor, (ex.Const(dim),)) if tensor in batched:
                return replace(node, index=(ex.Const(dim + count),))
        return node

    return formula.transform(change)
