"""Name the terms of sums over the elements that data picks, so that a schedule can add each of them where its index says.

A gradient of ``A[t[b], k]`` is such a sum: each row of the result looks for the terms that are its own. Before::

    d_A[v, k] = rsum(where(b >= d_A_first[v] and b < d_A_past[v] and t[b] == v, d_f[b, k] * 2, 0), b);

After, with ``d_A_terms``, which ``d_A.accumulate_at(d_A_terms, k)`` adds to row ``t[b]`` of the sum in memory::

    d_A_terms[b, k] = d_f[b, k] * 2;
    d_A[v, k] = rsum(where(t[b] == v, d_A_terms[b, k], 0), b);

Of several sums in one definition, as for ``A[s[b], k] * A[t[b], k]``, each becomes a Func, ``d_A_picked`` and ``d_A_picked2`` of ``d_A_terms`` and ``d_A_terms2``.

Data may hold numbers that are no places. ``d_A_whole_terms`` are 0 there, and are added where the data are as integers::

    d_A_whole_terms[b, k] = where(t[b] == cast(t[b], int64), d_f[b, k] * 2, 0);
    d_A[v, k] = rsum(where(cast(t[b], int64) == v, d_A_whole_terms[b, k], 0), b);
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..expr import Access, Binary, Call, Cast, Const, Dot, Expr, Label, Reduce, Reshape, Scan, accesses, free_labels, joined, operands_of

if TYPE_CHECKING:
    from ..algorithm import Algorithm, Definition

NESTED = (Dot, Reduce, Scan, Reshape)  #: what the terms do not contain
WHOLE = "whole_"  #: in names of terms that are 0 where data are no whole numbers


@dataclass(frozen=True)
class PickedTerms:
    """The terms of ``node``, a sum of the Func ``owner`` in which each belongs to the element of the result that ``places`` say, by label.

    ``adding``: the Func that is that sum.
    """

    owner: str
    adding: str
    node: Reduce | Dot
    places: tuple[tuple[str, Expr], ...]
    labels: tuple[str, ...]
    value: Expr

    def of_whole_numbers(self) -> PickedTerms:
        """Return the terms that are 0 where data are no whole numbers, at the places that data are as integers."""
        as_integers = tuple((label, Cast(data, "int64")) for label, data in self.places)
        tests = joined("and", (Binary("==", data, place) for (_, data), (_, place) in zip(self.places, as_integers)))
        return replace(self, places=as_integers, value=Call("where", (tests, self.value, Const(0))))

    def read(self, name: str, labels: tuple[str, ...] = (), summed: tuple[str, ...] = ()) -> Reduce:
        """Return the sum over the named terms, which may have other ``labels``, ``summed`` of them."""
        tests = joined("and", (Binary("==", data, Label(label)) for label, data in self.places))
        terms = Call("where", (tests, Access(name, tuple(map(Label, labels or self.labels))), Const(0)))
        return Reduce("sum", terms, summed or self.node.labels)


def picked_term_names(algorithm: Algorithm) -> dict[str, PickedTerms]:
    """Map the names that such terms have in a schedule, ``f_terms`` of a Func ``f`` and ``f_terms2`` of its second sum, to the terms.

    ``f_whole_terms`` are those of data that may hold other numbers than whole ones.
    """
    found: dict[str, PickedTerms] = {}
    for d in algorithm.definitions:
        sums = list(dict.fromkeys(_outer_sums(d.expr)))
        for i, node in enumerate(sums, 1):
            number = "" if i == 1 else str(i)
            name, adding = f"{d.name}_terms{number}", d.name if len(sums) == 1 else f"{d.name}_picked{number}"
            if not {name, adding} - {d.name} & {*algorithm.names} and (terms := picked_terms_of(algorithm, d, node, adding)) is not None:
                found[name] = terms
                if (checked := f"{d.name}_{WHOLE}terms{number}") not in algorithm.names:
                    found[checked] = terms.of_whole_numbers()
    return found


def with_picked_terms(algorithm: Algorithm, name: str, terms: PickedTerms) -> Algorithm:
    """Return the algorithm with a Func of those terms before the sum that adds them, and with one of the sum where its Func has others."""
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        if d.name == terms.owner:
            definitions.append(replace(d, name=name, labels=terms.labels, expr=terms.value))
            sum_: Expr = terms.read(name)
            if terms.adding != d.name:
                definitions.append(replace(d, name=terms.adding, expr=sum_))
                sum_ = Access(terms.adding, tuple(map(Label, d.labels)))
            d = replace(d, expr=_replaced(d.expr, terms.node, sum_))
        definitions.append(d)
    return replace(
        algorithm.with_definitions(tuple(definitions)),
        vars=(*algorithm.vars, *(x for x in algorithm.rvars if x in terms.labels)),
        rvars=tuple(x for x in algorithm.rvars if x not in terms.labels),
    )


def _replaced(e: Expr, node: Expr, by: Expr) -> Expr:
    return by if e == node else e.rebuild(lambda child: _replaced(child, node, by))


def _outer_sums(e: Expr) -> Iterator[Expr]:
    """Yield the reductions that no other one contains."""
    if isinstance(e, NESTED):
        yield e
        return
    for child in e.children():
        yield from _outer_sums(child)


def picked_terms_of(algorithm: Algorithm, d: Definition, node: Expr, adding: str) -> PickedTerms | None:
    """Return the terms of a sum of a definition, if data picks them."""
    inner = sum(isinstance(n, NESTED) for n in node.walk())
    if inner > 1 or not isinstance(node, (Reduce, Dot)) or isinstance(node, Reduce) and node.kind != "sum":
        return None
    tests: list[tuple[str, Expr]] = []
    terms = (node.left, node.right) if isinstance(node, Dot) else (node.arg,)
    value = joined("*", (_stripped(algorithm, d, node, factor, tests) for term in terms for factor in operands_of(term, "*")))
    places = tuple(dict.fromkeys(tests))
    used = free_labels(value) | {x for _, data in places for x in free_labels(data)}
    picked = {label for label, _ in places}
    if not places or len(picked) < len(places) or used & picked or not {*node.labels} <= used:
        return None
    if any(not {*free_labels(data)} <= {*node.labels, *d.labels} - picked for _, data in places):
        return None
    labels = (*node.labels, *(x for x in d.labels if x in used))
    return PickedTerms(d.name, adding, node, places, _in_memory_order(value, places, labels), value)


def _in_memory_order(value: Expr, places: tuple[tuple[str, Expr], ...], labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return labels in the order in which the tensor that has most of them has them."""
    every = (*accesses(value), *(a for _, data in places for a in accesses(data)))
    read = [[n.name for i in a.index for n in i.walk() if isinstance(n, Label) and n.name in labels] for a in every]
    order = max(read, key=lambda names: len({*names}), default=[])
    return (*(x for x in labels if x not in order), *dict.fromkeys(order))


def _stripped(algorithm: Algorithm, d: Definition, node: Reduce | Dot, e: Expr, tests: list[tuple[str, Expr]]) -> Expr:
    """Return a factor without the tests that pick its terms, which join ``tests``, and without the bounds that follow from them."""
    rest: list[Expr] = []
    while isinstance(e, Call) and e.fn == "where" and e.args[2] == Const(0):
        condition, e, _ = e.args
        for c in operands_of(condition, "and"):
            if (place := _place(d, node, c)) is not None:
                tests.append(place)
            elif not _is_bound(algorithm, d, node, c):
                rest.append(c)
    return Call("where", (joined("and", rest), e, Const(0))) if rest else e


def _place(d: Definition, node: Reduce | Dot, test: Expr) -> tuple[str, Expr] | None:
    """Return a label of the result and the data that it equals."""
    match test:
        case Binary("==", Label(label), data) | Binary("==", data, Label(label)):
            if label in d.labels and any(accesses(data)) and free_labels(data) & {*node.labels} and label not in free_labels(data):
                return label, data
    return None


def _is_bound(algorithm: Algorithm, d: Definition, node: Reduce | Dot, test: Expr) -> bool:
    """Return whether ``test`` compares a summed label with the first or the last term that a label of the result picks, as data_bounds.py says it."""
    match test:
        case Binary(">=" | "<", Label(label), Access(func)) if label in node.labels and func in algorithm:
            inner = [n for n in algorithm[func].expr.walk() if isinstance(n, Reduce) and n.kind in ("min", "max")]
            conditions = (e.args[0] for n in inner for e in n.walk() if isinstance(e, Call) and e.fn == "where")
            return any(_place(d, node, c) is not None for condition in conditions for c in operands_of(condition, "and"))
    return False


__all__ = ["WHOLE", "PickedTerms", "picked_term_names", "picked_terms_of", "with_picked_terms"]
