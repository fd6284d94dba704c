"""Drop dimensions of one element: Funcs lose them, and a reduction over one element is that element."""

from __future__ import annotations

from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from .constant_folding import fold_constants

ONE_ELEMENT = ("sum", "mean", "max", "min", "prod")  #: reductions that give the element itself where there is one


def drop_unit_labels(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Drop labels whose declared extent is 1 from Funcs that are no outputs, and reductions over them.

    Before: ``m[x, u] = rmax(A[x, y], y); l[x, u] = log(rsum(exp(m[x, u]), u)); f[x, u] = l[x, u] - rmean(m[x, u], u);``
    After:  ``m[x] = rmax(A[x, y], y); l[x] = m[x]; f[x, u] = l[x] - m[x];``

    Here u is declared by ``Extent u = 1;``. Such a label remains of a dimension that was reduced and kept. One that indexes an input stays, so that the call is checked against it.
    """
    units = {label for label in algorithm.labels if algorithm.constant_extent(label) == 1}
    units -= {n.name for d in algorithm.definitions for a in ex.accesses(d.expr) if a.tensor in algorithm.inputs for n in a.walk() if isinstance(n, ex.Label)}
    if not units:
        return algorithm
    dropped = {d.name: [x in units for x in d.labels] for d in algorithm.definitions if d.name not in outputs and set(d.labels) & units and not _scans(d, units)}
    uses = [a for d in algorithm.definitions for a in ex.accesses(d.expr) if a.tensor in dropped]
    for a in uses:
        if not all(_is_first(i, units) for i, drop in zip(a.index, dropped[a.tensor]) if drop):
            return algorithm  # an index that may lie outside reads 0
    changed = [_without(d, units, dropped) for d in algorithm.definitions]
    return fold_constants(algorithm.with_definitions(tuple(changed)))


def _scans(d: Definition, units: set[str]) -> bool:
    return any(isinstance(n, ex.Scan) and n.label in units for n in d.expr.walk())


def _is_first(index: ex.Expr, units: set[str]) -> bool:
    return isinstance(index, ex.Label) and index.name in units or index == ex.Const(0)


def _without(d: Definition, units: set[str], dropped: dict[str, list[bool]]) -> Definition:
    """Return the definition of a Func without the labels ``units`` where it is one of ``dropped``, read from Funcs without them."""

    def change(node: ex.Expr) -> ex.Expr:
        match node:
            case ex.Access(tensor, index) if tensor in dropped:
                return replace(node, index=tuple(i for i, drop in zip(index, dropped[tensor]) if not drop))
            case ex.Len(label) if label in units:
                return ex.Const(1)
            case ex.Reduce(kind, arg, labels) if kind in ONE_ELEMENT and set(labels) & units:
                left = tuple(x for x in labels if x not in units)
                return replace(node, labels=left) if left else arg
            case ex.Call("log", (ex.Call("exp", (arg,)),)):
                return arg
        return node

    expr = d.expr.transform(change)
    if d.name not in dropped:
        bound = units - set(d.labels)
        return replace(d, expr=ex.substitute(expr, {u: ex.Const(0) for u in bound}))
    own = tuple(x for x in d.labels if x not in units)
    return replace(d, labels=own, expr=ex.substitute(expr, {u: ex.Const(0) for u in units}))
