"""Leading dimensions of a call: which inputs may bring or lack them, and whether they may be joined with a label.

A joined label stands for more rows, and the kernel stays as it is.
"""

from __future__ import annotations

from ...lang import expr as ex
from ...lang.algorithm import Algorithm


def collapsible_label(algorithm: Algorithm, label: str) -> tuple[str, ...] | None:
    """The inputs that must all have more rows along ``label``; None where it may not stand for more rows.

    It may if it is always the first index, and never a value, a length or reduced, nor of an extent that the program tells.
    """
    if any(told in algorithm.tied_labels(label) for told, _, _ in algorithm.extents):
        return None
    having: dict[str, bool] = {}
    for d in algorithm.definitions:
        if label in d.labels[1:] or d.labels[:1] != (label,) or _as_value(d.expr, label):
            return None
        for node in d.expr.walk():
            if isinstance(node, ex.Len) and node.label == label or isinstance(node, (ex.Reduce, ex.Dot)) and label in node.labels:
                return None
            if isinstance(node, ex.Access):
                first = bool(node.index) and isinstance(node.index[0], ex.Label) and node.index[0].name == label
                elsewhere = any(label in labels_outside(i) for i in node.index[first:])
                if elsewhere or having.setdefault(node.tensor, first) != first or node.tensor in algorithm and not first:
                    return None
    return tuple(n for n in algorithm.inputs if having.get(n))


def labels_outside(index: ex.Expr) -> frozenset[str]:
    """Labels of an index, but for those of the elements in it, which are looked at for themselves."""
    if isinstance(index, ex.Access):
        return frozenset()
    return frozenset({index.name}) if isinstance(index, ex.Label) else frozenset().union(*map(labels_outside, index.children()))


def _as_value(expr: ex.Expr, label: str) -> bool:
    """Whether ``label`` is used as a number outside an index."""
    if isinstance(expr, ex.Access):
        return False
    return (isinstance(expr, ex.Label) and expr.name == label) or any(_as_value(c, label) for c in expr.children())


def leading_inputs(algorithm: Algorithm, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """The inputs whose leading dimensions are those of the call; those of other inputs must broadcast to them.

    These are the inputs of the highest rank and, of those that an output's first label indexes, the ones of the highest rank:
    both ``A`` of ``A[x, y] * w[y]``, and ``t`` as well as ``W`` of ``W[t[x], y]``.
    """
    ranks = {n: len(algorithm.plain_labels(n)) for n in algorithm.inputs}
    groups = [set(algorithm.inputs)]
    for output in outputs:
        reached = _reached(algorithm, algorithm[output].labels[:1])
        groups.append({name for name, index in _indices(algorithm) if any(reached & labels_outside(i) for i in index)})
    return tuple(n for n in algorithm.inputs if any(n in group and ranks[n] == max(ranks[m] for m in group) for group in groups))


def first_dimensions(algorithm: Algorithm, outputs: tuple[str, ...]) -> dict[str, int]:
    """For each input the number of its first dimensions that move along the same dimension of every output: a call may lack them."""
    found = {n: len(algorithm.plain_labels(n)) for n in algorithm.inputs}
    for output in outputs:
        labels = algorithm[output].labels
        reached = [_reached(algorithm, (label,)) for label in labels]
        for name, index in _indices(algorithm):
            apart = (place for place, i in enumerate(index) if place >= len(labels) or not reached[place] & labels_outside(i))
            found[name] = min(found[name], next(apart, len(index)))
    return found


def _indices(algorithm: Algorithm) -> list[tuple[str, tuple[ex.Expr, ...]]]:
    """Every index of every input."""
    accesses = (a for d in algorithm.definitions for a in ex.accesses(d.expr))
    return [(a.tensor, a.index) for a in accesses if a.tensor in algorithm.inputs]


def _reached(algorithm: Algorithm, labels: tuple[str, ...]) -> frozenset[str]:
    """``labels``, and the labels of the Funcs' own dimensions that they index."""
    found: set[str] = set().union(*map(algorithm.tied_labels, labels)) if labels else set()
    while True:
        more = {
            algorithm[a.tensor].labels[place]
            for d in algorithm.definitions
            for a in ex.accesses(d.expr)
            if a.tensor in algorithm
            for place, i in enumerate(a.index)
            if found & labels_outside(i)
        }
        if more <= found:
            return frozenset(found)
        found |= more
