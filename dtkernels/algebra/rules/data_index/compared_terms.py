"""Take the one term of a sum over places that data names, as in the gradient of what experts are given by their tokens."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ...smart_constructors import conjuncts_of, is_zero, where
from ..canonicalize import fresh_name


def pick_compared_terms(algorithm: Algorithm) -> Algorithm:
    """Replace a sum over a label that a condition equates with an element of an input by the term of that element.

    Before: ``d_w[x] = rsum(where(t[x] == e, d_f[e] * 2, 0), e);``
    After:  ``t_place[x] = cast(t[x], int64);  d_w[x] = where(t[x] == t_place[x] and (t_place[x] >= 0 and t_place[x] < len(e)), d_f[t_place[x]] * 2, 0);``

    The input may hold numbers that are no places. Terms that reduce, or that read Funcs, stay: as products over groups they are wanted in this form.
    """
    taken = set(algorithm.names)
    made: dict[str, tuple[Definition, ...]] = {}

    def rewritten(d: Definition) -> Definition:
        places: list[Definition] = []

        def change(node: ex.Expr) -> ex.Expr:
            found = _picked(node, algorithm)
            if found is None:
                return node
            reduce, label, element, rest = found
            labels = tuple(x for x in algorithm.labels if x in ex.free_labels(element))
            if not {*labels} <= {*d.labels}:
                return node
            same = next((p for p in places if p.expr == ex.Cast(element, "int64")), None)
            if same is None:
                places.append(same := Definition(fresh_name(f"{element.tensor}_place", taken), labels, ex.Cast(element, "int64")))
            place = ex.Access(same.name, tuple(map(ex.Label, labels)))
            inside = ex.Binary("and", ex.Binary(">=", place, ex.Const(0)), ex.Binary("<", place, ex.Len(label)))
            term = where(ex.Binary("and", ex.Binary("==", element, place), inside), ex.substitute(rest, {label: place}), ex.Const(0))
            left = tuple(x for x in reduce.labels if x != label)
            return replace(reduce, arg=term, labels=left) if left else term

        changed = replace(d, expr=d.expr.transform(change))
        made[d.name] = tuple(places)
        return changed

    definitions = [rewritten(d) for d in algorithm.definitions]
    if not any(made.values()):
        return algorithm
    return algorithm.with_definitions(tuple(new for d in definitions for new in (*made[d.name], d)))


def _picked(node: ex.Expr, algorithm: Algorithm) -> tuple[ex.Reduce, str, ex.Access, ex.Expr] | None:
    """Return a sum, its label that an element of an input names, that element, and the term where it does."""
    match node:
        case ex.Reduce("sum", ex.Call("where", (condition, term, zero)), labels) if is_zero(zero):
            parts = conjuncts_of(condition)
            for part in parts:
                for label in labels:
                    element = _equal_element(part, label, algorithm)
                    if element is not None and _reads_inputs_alone(term, algorithm) and label in ex.free_labels(term):
                        for other in parts:
                            term = term if other is part else where(other, term, zero)
                        return node, label, element, term
    return None


def _equal_element(condition: ex.Expr, label: str, algorithm: Algorithm) -> ex.Access | None:
    """Return the element of an input that a condition equates with ``label``, at places that no other sum goes over."""
    match condition:
        case ex.Binary("==", ex.Access() as a, ex.Label(name)) | ex.Binary("==", ex.Label(name), ex.Access() as a):
            plain = all(isinstance(i, ex.Label) for i in a.index)
            return a if name == label and plain and a.tensor in algorithm.inputs and label not in ex.free_labels(a) else None
    return None


def _reads_inputs_alone(term: ex.Expr, algorithm: Algorithm) -> bool:
    return not any(ex.reductions(term)) and all(a.tensor in algorithm.inputs for a in ex.accesses(term))
