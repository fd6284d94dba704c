"""Classify leading dimensions: which inputs may have or lack them, and whether they may be folded into a label.

Folding a batch into the first label leaves the kernel unchanged: it merely has more rows.
"""

from __future__ import annotations

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ...lang.extents.formulas import inputs_of


def collapsible_label(algorithm: Algorithm, label: str) -> tuple[str, ...] | None:
    """Return the inputs that must all have the batch for it to be folded into ``label``; None where folding is not allowed.

    It is allowed if the label is always the first index and is never a value, a length or reduced, and the program does not declare its
    extent.
    """
    if any(told in algorithm.tied_labels(label) for told, _, _ in algorithm.extents):
        return None
    if algorithm.formulas and any(algorithm.tied_labels(label) & _sized(algorithm, own) for own, _ in algorithm.formulas):
        return None
    having: dict[str, bool] = {}
    for d in algorithm.definitions:
        if label in d.labels[1:] or d.labels[:1] != (label,) or _is_used_as_number(d.expr, label):
            return None
        for node in d.expr.walk():
            if isinstance(node, (ex.Len, ex.Scan)) and node.label == label or isinstance(node, (ex.Reduce, ex.Dot)) and label in node.labels:
                return None
            if isinstance(node, ex.Access):
                first = bool(node.index) and isinstance(node.index[0], ex.Label) and node.index[0].name == label
                elsewhere = any(label in labels_outside(i) for i in node.index[first:])
                if elsewhere or having.setdefault(node.tensor, first) != first or node.tensor in algorithm and not first:
                    return None
    return tuple(n for n in algorithm.inputs if having.get(n))


def _sized(algorithm: Algorithm, label: str) -> frozenset[str]:
    """Return the labels whose dimensions the formula of ``label`` reads, and ``label`` itself."""
    read = (algorithm.plain_labels(t)[dim] for f in algorithm.extent_formulas(label) for t, dim in inputs_of(f))
    return frozenset({label, *(name for name in read if name)})


def labels_outside(index: ex.Expr) -> frozenset[str]:
    """Return the labels of an index, without those inside of accesses."""
    if isinstance(index, ex.Access):
        return frozenset()
    return frozenset({index.name}) if isinstance(index, ex.Label) else frozenset().union(*map(labels_outside, index.children()))


def _is_used_as_number(expr: ex.Expr, label: str) -> bool:
    """Tell whether ``label`` is used as a number outside an index."""
    if isinstance(expr, ex.Access):
        return False
    return (isinstance(expr, ex.Label) and expr.name == label) or any(_is_used_as_number(c, label) for c in expr.children())


def leading_inputs(algorithm: Algorithm, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the inputs whose leading dimensions are those of the call. Those of other inputs must broadcast to them.

    These are the inputs of the highest rank, and the inputs of the highest rank among those that an output's first label indexes: ``A`` of
    ``A[x, y] * w[y]``, and both ``t`` and ``W`` of ``W[t[x], y]``.
    """
    ranks = {n: len(algorithm.plain_labels(n)) for n in algorithm.inputs}
    groups = [set(algorithm.inputs)]
    for output in outputs:
        reached = _with_indexed_dims(algorithm, algorithm[output].labels[:1])
        groups.append({name for name, index in _indices(algorithm) if any(reached & labels_outside(i) for i in index)})
    return tuple(n for n in algorithm.inputs if any(n in group and ranks[n] == max(ranks[m] for m in group) for group in groups))


def first_dimensions(algorithm: Algorithm, outputs: tuple[str, ...]) -> dict[str, int]:
    """Return, for each input, how many of its first dimensions match the first dimensions of every output: a call may lack them."""
    found = {n: len(algorithm.plain_labels(n)) for n in algorithm.inputs}
    for output in outputs:
        labels = algorithm[output].labels
        reached = [_with_indexed_dims(algorithm, (label,)) for label in labels]
        for name, index in _indices(algorithm):
            apart = (place for place, i in enumerate(index) if place >= len(labels) or not reached[place] & labels_outside(i))
            found[name] = min(found[name], next(apart, len(index)))
    return found


def _indices(algorithm: Algorithm) -> list[tuple[str, tuple[ex.Expr, ...]]]:
    """Return every (input, index) in the algorithm."""
    accesses = (a for d in algorithm.definitions for a in ex.accesses(d.expr))
    return [(a.tensor, a.index) for a in accesses if a.tensor in algorithm.inputs]


def _with_indexed_dims(algorithm: Algorithm, labels: tuple[str, ...]) -> frozenset[str]:
    """Return ``labels`` and the dimensions of Funcs that they index."""
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
