"""Take the one term of a sum over remainders that its conditions leave, as in the gradient of a transposed convolution."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm
from ....lang.extents.linear_form import linear_form
from ...smart_constructors import conjuncts_of, factors_of


def pick_remainders(algorithm: Algorithm) -> Algorithm:
    """Replace a label that a condition on a remainder decides by its value, and drop conditions that hold wherever an element is not 0.

    Before: ``d_A[t] = rsum(where((2 * t + p + r - r) % 2 == 0, d_f[2 * t + p + r] * W[r], 0), r, p);``
    After:  ``d_A[t] = rsum(d_f[2 * t + 0 + r] * W[r], r);``

    ``p`` has two values here. A condition that keeps an index inside an input is dropped where that input is a factor, which is 0 beyond.
    """

    def change(node: ex.Expr) -> ex.Expr:
        if not (isinstance(node, ex.Reduce) and node.kind == "sum"):
            return node
        term, labels = without_remainders(node.arg, node.labels, algorithm)
        if labels == node.labels:
            return node
        return replace(node, arg=term, labels=labels) if labels else term

    return algorithm.transform(change)


def without_remainders(term: ex.Expr, summed: tuple[str, ...], algorithm: Algorithm) -> tuple[ex.Expr, tuple[str, ...]]:
    """Return the terms of a sum and its labels, without the labels that conditions on remainders decide."""
    conditions, term = _conditions(term)
    labels = list(summed)
    while (picked := _picked(conditions, labels, algorithm)) is not None:
        label, value = picked
        conditions = [c for c in conditions if _remainder(c, label, algorithm) is None]
        *conditions, term = (_without_rests(ex.substitute(e, {label: value})) for e in (*conditions, term))
        labels.remove(label)
    if len(labels) < len(summed):
        conditions = [c for c in conditions if not _is_extent_of_factor(c, term, algorithm)]
    for c in conditions:
        term = ex.Call("where", (c, term, ex.Const(0)))
    return term, tuple(labels)


def _conditions(e: ex.Expr) -> tuple[list[ex.Expr], ex.Expr]:
    """Return the conditions under which a term counts, and the term."""
    match e:
        case ex.Call("where", (condition, inner, ex.Const(0))):
            more, term = _conditions(inner)
            return [*conjuncts_of(condition), *more], term
    return [], e


def _picked(conditions: list[ex.Expr], labels: list[str], algorithm: Algorithm) -> tuple[str, ex.Expr] | None:
    """Return a label that a condition decides, and its value."""
    return next(((x, v) for c in conditions for x in labels if (v := _remainder(c, x, algorithm)) is not None), None)


def _remainder(condition: ex.Expr, label: str, algorithm: Algorithm) -> ex.Expr | None:
    """Return the value of ``label`` where the condition is that a number of multiples of its extent and itself leaves a certain remainder."""
    match condition:
        case ex.Binary("==", ex.Binary("%", number, ex.Const(size)), ex.Const(rest)) if algorithm.constant_extent(label) == size:
            form = {atom: times for atom, times in linear_form(number).items() if times}
            times, constant = form.pop(ex.Label(label), 0), form.pop(None, 0)
            others = {atom: n for atom, n in form.items() if n % size}
            if abs(times) == 1 and not others:
                return ex.Const(int(times * (rest - constant) % size))
            atom = next((a for a, n in others.items() if a is not None and n == 1), None)
            if times == -1 and rest == constant and len(others) == 1 and atom is not None:
                return ex.Binary("%", atom, ex.Const(size))
        case ex.Binary("==", ex.Binary("%", number, ex.Const(size)), ex.Label(rest)) if rest != label and algorithm.constant_extent(label) == size:
            form = {atom: times for atom, times in linear_form(number).items() if times % size}
            if list(form.items()) == [(ex.Label(label), 1)] and (algorithm.constant_extent(rest) or size + 1) <= size:
                return ex.Label(rest)
    return None


def _without_rests(e: ex.Expr) -> ex.Expr:
    """Simplify quotients of what is left without a remainder, and what they make with it: ``(c - c % 8) / 8``, ``c / 8 * 8 + c % 8``."""

    def change(node: ex.Expr) -> ex.Expr:
        match node:
            case ex.Binary("/", ex.Binary("-", a, ex.Binary("%", b, size)), by) if a == b and size == by:
                return replace(node, left=a)
            case ex.Binary("+", ex.Binary("*", ex.Binary("/", a, size), by), ex.Binary("%", b, rest)) if a == b and size == by == rest:
                return ex.Binary("+", a, ex.Const(0))  # a bare label would give the dimension its extent
        return node

    return e.transform(change)


def _is_extent_of_factor(condition: ex.Expr, term: ex.Expr, algorithm: Algorithm) -> bool:
    """Return whether a condition keeps an index inside an input that is a factor of the term: beyond it the factor is 0."""
    match condition:
        case ex.Binary("<", index, ex.Len(label)):
            read = (f for f in factors_of(term) if isinstance(f, ex.Access) and f.tensor in algorithm.inputs)
            return any(i == index and own == label for f in read for i, own in zip(f.index, algorithm.plain_labels(f.tensor)))
    return False
