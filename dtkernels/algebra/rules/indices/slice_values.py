"""Name what a Func holds in each of its slices: the gradient of a product of which three parts are taken has the gradient of each in its own place."""

from __future__ import annotations

from dataclasses import replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ...joined_slices import slice_before, slices_of
from ..canonicalize import fresh_name


def name_slices(algorithm: Algorithm) -> Algorithm:
    """Give each addend that is 0 outside one slice of a Func its own Func over the elements of a slice, where the slices are all that the Func has.

    Before: ``p[b, j] = exp(A[b, j]);  d[b, g] = p[b, g - 0] * A[b, g - 0] + p[b, g - len(j)] * (1 - p[b, g - len(j)]);``
    After:  ``p[b, j] = exp(A[b, j]);  d_slice0[b, j] = p[b, j] * A[b, j];  d_slice1[b, j] = p[b, j] * (1 - p[b, j]);
        d[b, g] = d_slice0[b, g - 0] + d_slice1[b, g - len(j)];``, with ``Extent g = 2 * len(j);``

    Each element of ``d`` as it was computes all slices and keeps one.
    """
    for d in algorithm.definitions:
        algorithm = _with_named_slices(algorithm, d)
    return algorithm


def _with_named_slices(algorithm: Algorithm, d: Definition) -> Algorithm:
    terms = ex.operands_of(d.expr, "+")
    if len(terms) < 2 or any(isinstance(n, (ex.Reduce, ex.Dot, ex.Scan, ex.Write)) for n in d.expr.walk()):
        return algorithm
    for label in d.labels:
        found = {place: t for t in terms if (place := _slice(t, label, algorithm))}
        own = {own for _, own in found}
        if len(found) != len(terms) or len(own) != 1 or {n for n, _ in found} != {*range(len(terms))} or all(isinstance(t, ex.Access) for t in terms):
            continue
        (x,) = own
        if x not in d.labels and slices_of(algorithm, label, x) == len(terms):
            return _renamed(algorithm, d, label, {n: t for (n, _), t in found.items()}, x)
    return algorithm


def _slice(term: ex.Expr, label: str, algorithm: Algorithm) -> tuple[int, str] | None:
    """Return which slice an addend is 0 outside of, and the label of its elements: it has the label there alone, and a factor that is a Func over the slice."""
    factors = _factors(term)
    own = {algorithm[f.tensor].labels[dim] for f in factors if isinstance(f, ex.Access) and f.tensor in algorithm for dim, i in enumerate(f.index) if label in ex.free_labels(i)}
    if len(own) != 1:
        return None
    (x,) = own
    indices = [i for a in ex.accesses(term) for i in a.index if label in ex.free_labels(i)]
    places = {slice_before(i, label, x) for i in indices}
    count = sum(isinstance(n, ex.Label) and n.name == label for n in term.walk())
    if len(places) != 1 or None in places or count != len(indices):
        return None
    return places.pop(), x  # type: ignore[return-value]


def _factors(e: ex.Expr) -> list[ex.Expr]:
    """Return what an addend is a product of."""
    match e:
        case ex.Binary("*", a, b):
            return [*_factors(a), *_factors(b)]
        case ex.Unary("-", a):
            return _factors(a)
    return [e]


def _renamed(algorithm: Algorithm, d: Definition, label: str, terms: dict[int, ex.Expr], own: str) -> Algorithm:
    """Return the algorithm with a Func for each of ``terms``, by the slice that it is of."""
    taken = {*algorithm.names, *algorithm.labels}
    made: list[Definition] = []
    read: dict[int, ex.Expr] = {}

    def at_own(i: ex.Expr) -> ex.Expr:
        return ex.Label(own) if label in ex.free_labels(i) else i

    labels = tuple(own if x == label else x for x in d.labels)
    for n, term in sorted(terms.items()):
        value = term.transform(lambda node: replace(node, index=tuple(map(at_own, node.index))) if isinstance(node, ex.Access) else node)
        made.append(Definition(fresh_name(f"{d.name}_slice{n}", taken), labels, value, d.pos))
        place = next(i for a in ex.accesses(term) for i in a.index if label in ex.free_labels(i))
        read[n] = ex.Access(made[-1].name, tuple(place if x == label else ex.Label(x) for x in d.labels))
    changed = Definition(d.name, d.labels, ex.joined("+", [read[n] for n in sorted(read)]), d.pos)
    at = algorithm.definitions.index(d)
    return algorithm.with_definitions((*algorithm.definitions[:at], *made, changed, *algorithm.definitions[at + 1 :]))
