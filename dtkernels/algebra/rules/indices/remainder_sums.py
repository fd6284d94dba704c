"""Sum over the places of one remainder, rather than over all places under a condition that most of them do not fulfil.

``x % s == p`` leaves one in ``s`` of the terms over ``x``: the gradient of weights that are picked by ``x % s`` is such a sum for each ``p``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm
from ....lang.extents.linear_form import linear_form
from ...quotients import divided, steps_of, with_steps
from ...smart_constructors import ZERO, add, conditions_of_term, conjuncts_of, factors_of, plus
from ..canonicalize import fresh_name


@dataclass(frozen=True)
class _Remainder:
    """The condition ``(x + offset) % size == value``."""

    condition: ex.Expr
    x: str
    offset: int
    size: int
    value: ex.Const | ex.Label

    @property
    def own(self) -> str:
        """The declared name of ``x``, which gradients rename while they take it apart."""
        return self.x.rstrip("'")


def sum_over_steps(algorithm: Algorithm) -> Algorithm:
    """Replace a label of a sum, whose remainder a condition tells, by one that counts the places of that remainder.

    Before: ``d_W[p] = rsum(where(x % 2 == p, d_f[x] * A[x / 2], 0), x);``
    After:  ``d_W[p] = where(p < 2, rsum(d_f[2 * x_step + p] * A[x_step + 0], x_step), 0);``

    The place stays under a condition where it may be past the extent of ``x`` and no input as a factor is 0 there.
    """
    taken, steps = set(algorithm.names), dict[tuple[str, int, int], str]()

    def change(node: ex.Expr) -> ex.Expr:
        nonlocal algorithm
        if not (isinstance(node, ex.Reduce) and node.kind == "sum"):
            return node
        node, outer, algorithm = over_steps(node, algorithm, taken, steps)
        for condition in outer:
            node = ex.Call("where", (condition, node, ZERO))
        return node

    definitions = tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions)
    return algorithm.with_definitions(definitions)


def over_steps(node: ex.Reduce, algorithm: Algorithm, taken: set[str], steps: dict[tuple[str, int, int], str]) -> tuple[ex.Reduce, list[ex.Expr], Algorithm]:
    """Return a sum over places of one remainder, the conditions under which it is not 0, and the algorithm with the labels that count these places.

    ``steps``: those of other sums so far, which count the same.
    """
    outer: list[ex.Expr] = []
    while found := _remainder(node):
        key = (found.own, found.offset, found.size)
        inside = {x for n in ex.reductions(node) for x in n.labels}
        if key not in steps or steps[key] in inside | ex.free_labels(node):
            steps[key] = fresh_name(f"{found.own}_step", taken)
            algorithm = replace(with_steps(algorithm, steps[key], *key), rvars=(*algorithm.rvars, steps[key]))
        node = _summed(node, found, steps[key], algorithm, outer)
    return node, outer, algorithm


def _remainder(node: ex.Reduce) -> _Remainder | None:
    """Return the first condition on the terms of a sum that tells the remainder of one of its labels."""
    for c in conditions_of_term(node.arg)[0]:
        match c:
            case ex.Binary("==", ex.Binary("%", place, ex.Const(size)), (ex.Const() | ex.Label()) as value) if type(size) is int and size > 1:
                form = {atom: times for atom, times in linear_form(place).items() if times}
                offset = form.pop(None, 0) % size
                x = next((a.name for a in form if isinstance(a, ex.Label)), "")
                inside = isinstance(value, ex.Label) or type(value.value) is int and 0 <= value.value < size
                if list(form.values()) == [1] and x in node.labels and inside and value != ex.Label(x) and not _has_scan_along(node.arg, x):
                    return _Remainder(c, x, offset, size, value)
    return None


def _has_scan_along(e: ex.Expr, x: str) -> bool:
    return any(isinstance(n, ex.Scan) and n.label == x for n in e.walk())


def _summed(node: ex.Reduce, r: _Remainder, step: str, algorithm: Algorithm, outer: list[ex.Expr]) -> ex.Reduce:
    """Return the sum over ``step``; what its terms do not decide goes to ``outer``."""
    term = _without(node.arg, r.condition)
    vanishes = any(isinstance(f, ex.Access) and f.tensor in algorithm.inputs and ex.Label(r.x) in f.index for f in factors_of(conditions_of_term(term)[1]))
    place = plus(add(ex.Binary("*", ex.Const(r.size), ex.Label(step)), r.value), -r.offset)
    term = ex.substitute(term, {r.x: place})
    term = divided(term, algorithm, {r.value.name: r.size} if isinstance(r.value, ex.Label) else {})
    if not vanishes and not steps_of(algorithm, r.own, r.offset, r.size)[1]:
        below = ex.Binary("<", place, ex.Len(r.own))
        term = ex.Call("where", (ex.Binary("and", ex.Binary(">=", place, ZERO), below) if r.offset else below, term, ZERO))
    if isinstance(r.value, ex.Label) and (algorithm.constant_extent(r.value.name) or r.size + 1) > r.size:
        small = ex.Binary("<", r.value, ex.Const(r.size))
        if r.value.name in node.labels:
            term = ex.Call("where", (small, term, ZERO))
        else:
            outer.append(small)
    return replace(node, arg=term, labels=tuple(step if x == r.x else x for x in node.labels))


def _without(e: ex.Expr, condition: ex.Expr) -> ex.Expr:
    """Return ``e`` without one of the conditions under which it is not 0."""
    if not (isinstance(e, ex.Call) and e.fn == "where" and e.args[2] == ZERO):
        return e
    kept = [c for c in conjuncts_of(e.args[0]) if c != condition]
    inner = _without(e.args[1], condition)
    return ex.Call("where", (ex.joined("and", kept), inner, ZERO)) if kept else inner
