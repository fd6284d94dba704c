"""Take the one term of a sum over places that data names, as in the gradient of what experts are given by their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ...smart_constructors import conjuncts_of, is_zero, replaced, where
from ..canonicalize import fresh_name


def pick_compared_terms(algorithm: Algorithm) -> Algorithm:
    """Replace a sum over a label that a condition equates with an element of an input by the term of that element.

    Before: ``d_w[x] = rsum(where(t[x] == e, d_f[e] * 2, 0), e);``
    After:  ``t_place[x] = cast(t[x], int64);  d_w[x] = where(t[x] == t_place[x] and (t_place[x] >= 0 and t_place[x] < len(e)), d_f[t_place[x]] * 2, 0);``

    The input may hold numbers that are no places. The condition may stand at any factor of the terms, the sum may be a product over that label alone,
    and the element may lie at places that the sum goes over too. Terms that reduce stay: as products over groups they are wanted in this form.
    """
    taken = set(algorithm.names)
    made: dict[str, tuple[Definition, ...]] = {}

    def rewritten(d: Definition) -> Definition:
        places: list[Definition] = []

        def change(node: ex.Expr) -> ex.Expr:
            found = _picked(node, algorithm)
            if found is None:
                return node
            summed, label, element, rest = found
            labels = tuple(x for x in algorithm.labels if x in ex.free_labels(element))
            left = tuple(x for x in summed if x != label)
            if not {*labels} <= {*d.labels, *left}:
                return node
            same = next((p for p in places if p.expr == ex.Cast(element, "int64")), None)
            if same is None:
                places.append(same := Definition(fresh_name(f"{element.tensor}_place", taken), labels, ex.Cast(element, "int64")))
            place = ex.Access(same.name, tuple(map(ex.Label, labels)))
            inside = ex.Binary("and", ex.Binary(">=", place, ex.Const(0)), ex.Binary("<", place, ex.Len(label)))
            term = _only_where(ex.Binary("and", ex.Binary("==", element, place), inside), ex.substitute(rest, {label: place}))
            return ex.Reduce("sum", term, left) if left else term

        changed = replace(d, expr=d.expr.transform(change))
        made[d.name] = tuple(places)
        return changed

    definitions = [rewritten(d) for d in algorithm.definitions]
    if not any(made.values()):
        return algorithm
    return algorithm.with_definitions(tuple(new for d in definitions for new in (*made[d.name], d)))


def _only_where(condition: ex.Expr, term: ex.Expr) -> ex.Expr:
    """Return ``term`` where ``condition`` holds too, else 0; in one choice, whose conditions other rules look for."""
    match term:
        case ex.Call("where", (first, kept, zero)) if is_zero(zero):
            return where(ex.Binary("and", first, condition), kept, zero)
    return where(condition, term, ex.Const(0))


def _picked(node: ex.Expr, algorithm: Algorithm) -> tuple[tuple[str, ...], str, ex.Access, ex.Expr] | None:
    """Return the labels of a sum, the one that an element of an input names, that element, and the term where it does."""
    match node:
        case ex.Reduce("sum", term, labels):
            pass
        case ex.Dot(left, right, (_,) as labels):
            term = ex.Binary("*", left, right)
        case _:
            return None
    if any(ex.reductions(term)):
        return None
    for condition in _needed(term):
        for label in labels:
            element = _equal_element(condition, label, algorithm)
            if element is not None:
                rest = replaced(term, {condition: ex.Const(True)})
                if label in ex.free_labels(rest):
                    return labels, label, element, rest
    return None


def _needed(term: ex.Expr) -> Iterator[ex.Expr]:
    """Yield conditions without which a term is 0."""
    match term:
        case ex.Call("where", (condition, kept, zero)) if is_zero(zero):
            yield from conjuncts_of(condition)
            yield from _needed(kept)
        case ex.Binary("*", left, right):
            yield from _needed(left)
            yield from _needed(right)
        case ex.Binary("/", left, _) | ex.Unary("-", left) | ex.Cast(left, "fp32"):
            yield from _needed(left)


def _equal_element(condition: ex.Expr, label: str, algorithm: Algorithm) -> ex.Access | None:
    """Return the element of an input that a condition equates with ``label``, at places without that label."""
    match condition:
        case ex.Binary("==", ex.Access() as a, ex.Label(name)) | ex.Binary("==", ex.Label(name), ex.Access() as a):
            plain = all(isinstance(i, ex.Label) for i in a.index)
            return a if name == label and plain and a.tensor in algorithm.inputs and label not in ex.free_labels(a) else None
    return None
