"""Whether leading dimensions may be joined with a label: it then stands for more rows, and the kernel stays as it is."""

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
