"""Reduce once for each group of indices what depends on an index only by the group that it is in."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ...smart_constructors import ONE, ZERO
from ..canonicalize import fresh_name


def share_groups(algorithm: Algorithm, outputs: tuple[str, ...] = ()) -> Algorithm:
    """Give a reduction that reads a label of its Func as a quotient alone a Func with a label for the quotient.

    Before: ``big[n, c] = rmax(abs(A[n, c / 64 * 64 + k]), k);``
    After:  ``big_groups[n, c_group] = rmax(abs(A[n, c_group * 64 + k]), k);  big[n, c] = big_groups[n, c / 64];``

    Results stay: each element of one is written anyway.
    """
    taken = set(algorithm.names)
    definitions: list[Definition] = []
    labels: dict[tuple[str, int], str] = {}
    for d in algorithm.definitions:
        found = _group(d) if d.name not in outputs else None
        if found is None:
            definitions.append(d)
            continue
        label, size = found
        if found not in labels:
            labels[found] = fresh_name(f"{label}_group", taken)
        quotient, group = ex.Binary("/", ex.Label(label), ex.Const(size)), ex.Label(labels[found])
        own = tuple(labels[found] if x == label else x for x in d.labels)
        name = fresh_name(f"{d.name}_groups", taken)
        definitions.append(Definition(name, own, _by_group(d.expr, quotient, group), d.pos))
        definitions.append(replace(d, expr=ex.Access(name, tuple(quotient if x == label else ex.Label(x) for x in d.labels))))
    if not labels:
        return algorithm
    before = [(name, ex.Binary("/", ex.Binary("-", ex.Len(label), ONE), ex.Const(size))) for (label, size), name in labels.items()]
    formulas = (*algorithm.formulas, *((name, ex.Binary("+", steps, ONE)) for name, steps in before))
    return replace(algorithm, vars=(*algorithm.vars, *labels.values()), formulas=formulas).with_definitions(tuple(definitions))


def _by_group(expr: ex.Expr, quotient: ex.Expr, group: ex.Label) -> ex.Expr:
    """Return ``expr`` with a label in place of a quotient.

    As a whole index it is ``group + 0``: a plain one would fix the extent of the dimension, which may be longer or end earlier.
    """
    beyond = ex.Binary("+", group, ZERO)

    def replaced(n: ex.Expr) -> ex.Expr:
        if isinstance(n, ex.Access):
            return replace(n, index=tuple(beyond if i == group else i for i in n.index))
        return group if n == quotient else n

    return expr.transform(replaced)


def _group(d: Definition) -> tuple[str, int] | None:
    """Return a label of a reduction's Func that its definition has in quotients alone, and their divisor."""
    if not list(ex.reductions(d.expr)):
        return None
    for label in d.labels:
        sizes = {n.right.value for n in d.expr.walk() if isinstance(n, ex.Binary) and n.op == "/" and n.left == ex.Label(label) and isinstance(n.right, ex.Const)}
        quotients = sum(isinstance(n, ex.Binary) and n.op == "/" and n.left == ex.Label(label) and isinstance(n.right, ex.Const) for n in d.expr.walk())
        if len(sizes) == 1 and quotients == sum(n == ex.Label(label) for n in d.expr.walk()):
            size = sizes.pop()
            if type(size) is int and size > 1 and not isinstance(d.expr, ex.Access):
                return label, size
    return None
