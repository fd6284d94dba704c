"""Name the sums that several sums of a program share, so that a schedule can compute each once.

Two sums share one where the same factors vary along labels that both sum over. Before::

    a[n]    = rsum(D[n, c, s] * A[n, c, s] * w[c], c, s);        f[n, c, s] = D[n, c, s] + a[n] * A[n, c, s];
    b[c]    = rsum(D[n, c, s] * A[n, c, s] * r[n], n, s);

After, with ``a_sum``, which both tensors are read once for::

    a_sum[n, c] = rsum(D[n, c, s] * A[n, c, s], s);
    a[n]        = rsum(w[c] * a_sum[n, c], c);                   b[c] = rsum(r[n] * a_sum[n, c], n);

The gradients of a norm with a weight are such sums. Only where one of them is needed to go over the shared labels again, as ``a`` is for ``f``: sums that
end in numbers are computed in one loop, which reads everything once as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..expr import Access, Dot, Expr, Label, Reduce, Reshape, Scan, accesses, free_labels, joined, operands_of

if TYPE_CHECKING:
    from ..algorithm import Algorithm, Definition

NESTED = (Dot, Reduce, Scan, Reshape)  #: what the terms of a shared sum do not contain


@dataclass(frozen=True)
class SharedSum:
    """The sum of the product of ``factors`` over ``over``."""

    factors: tuple[Expr, ...]
    over: tuple[str, ...]

    @property
    def sum(self) -> Reduce:
        return Reduce("sum", joined("*", self.factors), self.over)

    def within(self, node: Expr) -> list[Expr] | None:
        """Return the other factors of the terms of ``node``, if it is a sum that this one is a part of, else None."""
        if not _is_plain_sum(node) or not {*self.over} <= {*node.labels}:  # type: ignore[attr-defined]
            return None
        inside, outside = _cut(node, {*self.over})
        return outside if _same(inside, self.factors) else None


def shared_sum_names(algorithm: Algorithm) -> dict[str, SharedSum]:
    """Map the names that shared sums have in a schedule to the sums: ``f_sum`` after the first Func that has a part in one, its second ``f_sum2``."""
    taken, found = {*algorithm.names}, dict[str, SharedSum]()
    own = [(d, n) for d in algorithm.definitions for n in _outer_sums(d.expr)]
    for i, (d, one) in enumerate(own):
        for e, other in own[i + 1 :]:
            shared = _shared(one, other, algorithm.labels)
            known = shared is None or any(s.over == shared.over and _same(s.factors, shared.factors) for s in found.values())
            if known or shared is None or not any(_is_reread_along(algorithm, f.name, {*shared.over}) for f in (d, e)):
                continue
            count = sum(n.startswith(f"{d.name}_sum") for n in found) + 1
            name = f"{d.name}_sum{count if count > 1 else ''}"
            while name in taken:
                name += "_"
            taken.add(name)
            found[name] = shared
    return found


def with_shared_sum(algorithm: Algorithm, name: str, shared: SharedSum) -> Algorithm:
    """Return the algorithm with a Func of that sum before the first sum that it is a part of. What read a Func that is that very sum reads this one.

    Unchanged where no sum has that part any more: an earlier Func of a shared sum is read in its factors.
    """
    labels = tuple(x for x in algorithm.labels if x in free_labels(shared.sum))
    access = Access(name, tuple(map(Label, labels)))

    def change(node: Expr) -> Expr:
        outside = shared.within(node)
        if outside is None:
            return node
        terms = joined("*", (*outside, access))
        rest = tuple(x for x in node.labels if x not in shared.over)  # type: ignore[attr-defined]
        return Reduce("sum", terms, rest) if rest else terms

    changed = [replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions]
    first = next((i for i, (d, before) in enumerate(zip(changed, algorithm.definitions)) if d.expr != before.expr), None)
    if first is None:
        return algorithm
    made = replace(changed[first], name=name, labels=labels, expr=shared.sum)
    definitions = (*changed[:first], made, *(_reading(d, made, changed) for d in changed[first:]))
    return replace(
        algorithm.with_definitions(definitions),
        vars=(*algorithm.vars, *(x for x in algorithm.rvars if x in labels)),
        rvars=tuple(x for x in algorithm.rvars if x not in labels),
    )


def _reading(d: Definition, made: Definition, every: list[Definition]) -> Definition:
    """Return ``d`` with elements of ``made`` in place of those of Funcs that are copies of it."""
    copies = {c.name: c.labels for c in every if isinstance(c.expr, Access) and c.expr.tensor == made.name and c.name != d.name}

    def change(node: Expr) -> Expr:
        if not isinstance(node, Access) or node.tensor not in copies:
            return node
        at = dict(zip(copies[node.tensor], node.index))
        return replace(node, tensor=made.name, index=tuple(at[x] for x in made.labels))

    return replace(d, expr=d.expr.transform(change)) if copies else d


def _shared(one: Reduce, other: Reduce, order: tuple[str, ...]) -> SharedSum | None:
    """Return the sum that both share; None if there is none."""
    over = {*one.labels} & {*other.labels}
    inside, others = _cut(one, over)[0], _cut(other, over)[0]
    if not over or not _same(inside, others) or not any(accesses(f) for f in inside):
        return None
    return SharedSum(tuple(inside), tuple(x for x in order if x in over))


def _cut(node: Expr, over: set[str]) -> tuple[list[Expr], list[Expr]]:
    """Return the factors of the terms of a sum that vary along ``over``, and the others."""
    factors = operands_of(node.arg, "*")  # type: ignore[attr-defined]
    return [f for f in factors if free_labels(f) & over], [f for f in factors if not free_labels(f) & over]


def _same(some: list[Expr] | tuple[Expr, ...], others: list[Expr] | tuple[Expr, ...]) -> bool:
    """Return whether both are the same factors in any order."""
    left = list(others)
    for f in some:
        if f not in left:
            return False
        left.remove(f)
    return not left


def _outer_sums(e: Expr) -> Iterator[Reduce]:
    """Yield the sums in ``e`` that no other reduction contains."""
    if _is_plain_sum(e):
        yield e  # type: ignore[misc]
    elif not isinstance(e, NESTED):
        for child in e.children():
            yield from _outer_sums(child)


def _is_plain_sum(e: Expr) -> bool:
    return isinstance(e, Reduce) and e.kind == "sum" and not any(isinstance(n, NESTED) for n in e.arg.walk())


def _is_reread_along(algorithm: Algorithm, func: str, over: set[str]) -> bool:
    """Return whether a later Func that needs ``func`` has or reduces over all of the labels ``over``."""
    later = [d for d in algorithm.definitions if d.name != func and func in algorithm.needed_by((d.name,))]
    return any(over <= _range_of(d) for d in later)


def _range_of(d: Definition) -> set[str]:
    """Return the labels that a Func has or reduces over."""
    return {*d.labels}.union(*(n.labels for n in d.expr.walk() if isinstance(n, (Reduce, Dot))))
