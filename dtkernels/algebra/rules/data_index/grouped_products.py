"""Rewrite a product with slices that data picks as a sum of products over the slices, so that the matrix units can take it."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm
from ...smart_constructors import ZERO
from ..canonicalize import fresh_name


def group_products(algorithm: Algorithm) -> Algorithm:
    """Sum over the slices that an index from data can pick; where it picks another, the other operand is 0.

    Before: ``f[m, n] = rdot(A[m, k], W[e[m], k, n], k);``
    After:  ``f[m, n] = rdot(where(e[m] == W_0, A[m, k], 0), W[W_0, k, n], W_0, k);``

    with ``Extent W_0 = W[0];``. A block of rows then shares each slice. The loop over slices runs from the least to the largest index of the block, and skips those
    that no row has (codegen/transforms/loops/loop_partition.py), so that it is right for rows in any order and fast for sorted ones.
    """
    grouping = _Grouping(algorithm)
    definitions = tuple(replace(d, expr=d.expr.transform(grouping.change)) for d in algorithm.definitions)
    if not grouping.by_index:
        return algorithm
    rvars, extents = algorithm.rvars + tuple(grouping.by_index.values()), algorithm.extents + tuple(grouping.extents)
    made = replace(algorithm, rvars=rvars, extents=extents, whole_inputs=algorithm.whole_inputs | algorithm.integer_inputs())
    return made.with_definitions(definitions)


def labels_without_data(e: ex.Expr) -> frozenset[str]:
    """Return the labels of ``e`` but those that only an index from data has: of ``W[e[m], k]`` that is ``k``."""
    if isinstance(e, (ex.Unary, ex.Cast)):
        return labels_without_data(e.arg)
    if not isinstance(e, ex.Access):
        return ex.free_labels(e)
    return frozenset().union(*(ex.free_labels(i) for i in e.index if not any(ex.accesses(i))))


class _Grouping:
    """Rewrites the products of one algorithm."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.taken = {*algorithm.names, *(n for n, _ in algorithm.params)}
        self.by_index: dict[ex.Expr, str] = {}  #: index -> the label made for it: what one index picks from has one extent
        self.extents: list[tuple[str, str, int]] = []

    def change(self, node: ex.Expr) -> ex.Expr:
        """Return a product over slices where ``node`` is a product with slices picked by data."""
        if not isinstance(node, ex.Dot):
            return node
        for picked, other in ((node.right, node.left), (node.left, node.right)):
            dim = self._picked_dimension(picked, other, node.labels)
            if dim is None:
                continue
            access = next(a for a in ex.accesses(picked) if a.tensor in self.algorithm.inputs and any(any(ex.accesses(i)) for i in a.index))
            label = self._label(access.tensor, dim, access.index[dim])
            index = (*access.index[:dim], ex.Label(label), *access.index[dim + 1 :])
            slices = picked.transform(lambda n, old=access, new=index: replace(old, index=new) if n == old else n)  # type: ignore[misc]
            same = ex.Binary("==", ex.as_value(access.index[dim]), ex.Label(label))
            rows = ex.Call("where", (same, other, ZERO))
            left, right = (rows, slices) if picked is node.right else (slices, rows)
            return ex.Dot(left, right, (label, *node.labels), pos=node.pos)
        return node

    def _picked_dimension(self, picked: ex.Expr, other: ex.Expr, over: tuple[str, ...]) -> int | None:
        """Return the one dimension of the input ``picked`` that data index, if both sides then are matrices; else None."""
        access = picked
        while isinstance(access, (ex.Unary, ex.Cast)):
            if isinstance(access, ex.Unary) and access.op != "-" or isinstance(access, ex.Cast) and access.dtype not in ex.DTYPES:
                return None
            access = access.arg
        if not isinstance(access, ex.Access) or access.tensor not in self.algorithm.inputs:
            return None
        dims = [d for d, i in enumerate(access.index) if any(ex.accesses(i))]
        if len(dims) != 1:
            return None
        rows, columns = ex.free_labels(access.index[dims[0]]), labels_without_data(access)
        alone = ex.free_labels(other) - columns - set(over)
        ours = columns - ex.free_labels(other)
        shared = set(over) <= columns & ex.free_labels(other)
        return dims[0] if shared and rows and rows <= ex.free_labels(other) - set(over) and rows & alone and ours else None

    def _label(self, tensor: str, dim: int, index: ex.Expr) -> str:
        """Return the label for a dimension that ``index`` picks from: gate and up projections of one expert are summed in one loop."""
        if index not in self.by_index:
            self.by_index[index] = fresh_name(f"{tensor}_{dim}", self.taken)
        extent = (self.by_index[index], tensor, dim)
        self.extents += [extent] if extent not in self.extents else []
        return self.by_index[index]
