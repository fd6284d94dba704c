"""Name the terms of several sums over the elements that data picks as those of one sum, so that one kernel adds them to one sum in memory.

Before, as in the gradient of what is read at two places, each sum would be cleared, added to and read by itself::

    d_A[v, k] = rsum(where(s[b] == v, d_f[b, k] * w[b], 0), b) - rsum(where(t[b] == v, d_f[b, k], 0), b);

After, with ``d_A_joined_terms``, which ``d_A.accumulate_at(d_A_joined_terms, k)`` adds (picked_terms.py)::

    Extent d_A_sums = 2;
    d_A_joined_terms[d_A_sums, b, k] = where(d_A_sums == 0, d_f[b, k] * w[b], -d_f[b, k]);
    d_A[v, k] = rsum(where(where(d_A_sums == 0, s[b], t[b]) == v, d_A_joined_terms[d_A_sums, b, k], 0), b, d_A_sums);

Where a definition has more than these sums, ``d_A_joined`` is their sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..expr import Access, Binary, Call, Const, Expr, Label, Unary, free_labels
from .picked_terms import PickedTerms, picked_terms_of

if TYPE_CHECKING:
    from ..algorithm import Algorithm, Definition


@dataclass(frozen=True)
class JoinedTerms:
    """The terms of all picked sums that ``whole``, an expression of the Func ``owner``, adds up.

    ``adding``: the Func that is their sum. ``label`` counts the sums, of which ``signs`` tells those that are subtracted.
    """

    owner: str
    adding: str
    label: str
    whole: Expr
    sums: tuple[PickedTerms, ...]
    signs: tuple[bool, ...]

    @property
    def node(self) -> Expr:
        return self.sums[0].node

    @property
    def summed(self) -> tuple[str, ...]:
        return (*self.sums[0].node.labels, self.label)

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label, *self.sums[0].labels)

    @property
    def values(self) -> tuple[Expr, ...]:
        return tuple(Unary("-", s.value) if negative else s.value for s, negative in zip(self.sums, self.signs))

    @property
    def places(self) -> tuple[tuple[str, Expr], ...]:
        """Return the place of a term along each label that data names."""
        return tuple((x, self._choice(tuple(dict(s.places)[x] for s in self.sums))) for x, _ in self.sums[0].places)

    @property
    def value(self) -> Expr:
        return self._choice(self.values)

    def _choice(self, of_sums: tuple[Expr, ...]) -> Expr:
        """Return the expression of the sum that the label says; one for all where they are equal."""
        *first, chosen = enumerate(of_sums)
        found = chosen[1]
        for i, e in reversed(first):
            found = found if e == found else Call("where", (Binary("==", Label(self.label), Const(i)), e, found))
        return found


def joined_term_names(algorithm: Algorithm) -> dict[str, JoinedTerms]:
    """Map the names that such terms have in a schedule, ``f_joined_terms`` of a Func ``f``, to the terms."""
    found: dict[str, JoinedTerms] = {}
    for d in algorithm.definitions:
        name, label = f"{d.name}_joined_terms", f"{d.name}_sums"
        if not {name, label, f"{d.name}_joined"} & {*algorithm.names} and (terms := _joined(algorithm, d, d.expr, label)) is not None:
            found[name] = terms
    return found


def with_joined_terms(algorithm: Algorithm, name: str, terms: JoinedTerms) -> Algorithm:
    """Return the algorithm with a Func of those terms before the sum that adds them."""
    one = replace(terms.sums[0], adding=terms.adding, places=terms.places)
    sum_ = one.read(name, terms.labels, terms.summed)
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        if d.name == terms.owner:
            definitions.append(replace(d, name=name, labels=terms.labels, expr=terms.value))
            if terms.adding == d.name:
                d = replace(d, expr=sum_)
            else:
                definitions.append(replace(d, name=terms.adding, expr=sum_))
                read = Access(terms.adding, tuple(map(Label, d.labels)))
                d = replace(d, expr=d.expr.transform(lambda n, read=read: read if n == terms.whole else n))  # type: ignore[misc]
        definitions.append(d)
    return replace(
        algorithm.with_definitions(tuple(definitions)),
        vars=(*algorithm.vars, *(x for x in algorithm.rvars if x in terms.labels), terms.label),
        rvars=tuple(x for x in algorithm.rvars if x not in terms.labels),
        extents=(*algorithm.extents, (terms.label, "", len(terms.sums))),
    )


def _joined(algorithm: Algorithm, d: Definition, e: Expr, label: str) -> JoinedTerms | None:
    """Return the terms of the largest part of a definition that only adds and subtracts such sums, at least two of them."""
    leaves = _added(e)
    if len(leaves) > 1:
        sums = [picked_terms_of(algorithm, d, leaf, d.name) for leaf, _ in leaves]
        known = [s for s in sums if s is not None]
        if len(known) == len(sums) and all(_alike(known[0], s) for s in known):
            adding = d.name if e == d.expr else f"{d.name}_joined"
            same = tuple(replace(s, labels=known[0].labels) for s in known)
            return JoinedTerms(d.name, adding, label, e, same, tuple(negative for _, negative in leaves))
    found = (_joined(algorithm, d, child, label) for child in e.children() if free_labels(child) <= {*d.labels})
    return next((terms for terms in found if terms is not None), None)


def _added(e: Expr, negative: bool = False) -> list[tuple[Expr, bool]]:
    """Return what ``e`` adds up, each with whether it is subtracted."""
    match e:
        case Binary("+" | "-" as op, a, b):
            return [*_added(a, negative), *_added(b, negative != (op == "-"))]
        case Unary("-", a):
            return _added(a, not negative)
    return [(e, negative)]


def _alike(one: PickedTerms, other: PickedTerms) -> bool:
    """Return whether the terms of two sums have the same labels, and data names their places along the same ones."""
    return {*one.labels} == {*other.labels} and {*one.node.labels} == {*other.node.labels} and {x for x, _ in one.places} == {x for x, _ in other.places}


__all__ = ["JoinedTerms", "joined_term_names", "with_joined_terms"]
