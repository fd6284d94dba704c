"""Bound sums over the elements that data picks: derive where the first and the last of them lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ...smart_constructors import ZERO, conjuncts_of, is_zero
from ..canonicalize import fresh_name

EXACT = 2**24  #: whole numbers up to this one are exact in float32


def bound_picked_sums(algorithm: Algorithm) -> Algorithm:
    """Say of a sum over the elements that equal a label of the result where the first and the last of them are.

    Before: ``f[g, k, n] = rdot(where(e[m] == g, A[m, k], 0), D[m, n], m);``
    After:  ``f_first[g] = where(len(m) <= 16777216, rmin(where(e[m] == g, m, len(m)), m), 0);
            f_past[g] = where(len(m) <= 16777216, rmax(where(e[m] == g, m + 1, 0), m), inf);
            f[g, k, n] = rdot(where(m >= f_first[g] and m < f_past[g] and e[m] == g, A[m, k], 0), D[m, n], m);``

    The bounds become those of the loop over m: of sorted ``e`` each g reads its own elements, and of any ``e`` none that lies before the
    first or after the last. Only where what is summed has a dimension that ``e`` lacks: the bounds then take less than the sum.
    """
    taken = {*algorithm.names, *(n for n, _ in algorithm.params)}
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        bounding = _Bounding(d, algorithm.labels, taken)
        expr = d.expr.transform(bounding.change)
        definitions += [*bounding.made, replace(d, expr=expr)]
    return algorithm.with_definitions(tuple(definitions)) if len(definitions) > len(algorithm.definitions) else algorithm


@dataclass
class _Bounding:
    """Bounds the sums of one definition."""

    owner: Definition
    order: tuple[str, ...]
    taken: set[str]

    def __post_init__(self) -> None:
        self.made: list[Definition] = []

    def change(self, node: ex.Expr) -> ex.Expr:
        """Return a sum with its bounds, where ``node`` is one whose terms data picks."""
        match node:
            case ex.Reduce("sum", arg, labels):
                return replace(node, arg=self._masked(arg, labels, ex.free_labels(arg)))
            case ex.Dot(left, right, labels):
                free = ex.free_labels(left) | ex.free_labels(right)
                return replace(node, left=self._masked(left, labels, free), right=self._masked(right, labels, free))
        return node

    def _masked(self, e: ex.Expr, over: tuple[str, ...], free: frozenset[str]) -> ex.Expr:
        match e:
            case ex.Call("where", (condition, value, zero)) if is_zero(zero):
                test = next((t for t in conjuncts_of(condition) if self._picks(t, over, free)), None)
                if test is not None:
                    return replace(e, args=(self._bounded(test, condition, over), value, zero))
        return e

    def _picks(self, test: ex.Expr, over: tuple[str, ...], free: frozenset[str]) -> bool:
        """Return whether ``test`` compares data along a summed label with a label of the result, and more is summed than it compares."""
        match test:
            case ex.Binary("==", ex.Label(name) as target, data) | ex.Binary("==", data, ex.Label(name) as target):
                labels = ex.free_labels(data)
                known = any(ex.accesses(data)) and name in self.owner.labels and labels & set(over) and target.name not in labels
                return bool(known and free - labels - {name} - set(over))
        return False

    def _bounded(self, test: ex.Expr, condition: ex.Expr, over: tuple[str, ...]) -> ex.Expr:
        compared = ex.free_labels(test)
        bound = tuple(label for label in over if label in compared)
        label = next(i.name for a in ex.accesses(test) for i in a.index for i in i.walk() if isinstance(i, ex.Label) and i.name in bound)
        own = tuple(x for x in self.order if x in compared and x not in bound)
        place, length = ex.Label(label), ex.Len(label)
        exact = ex.Binary("<=", length, ex.Const(EXACT))
        least = ex.Reduce("min", ex.Call("where", (test, place, length)), bound)
        most = ex.Reduce("max", ex.Call("where", (test, ex.Binary("+", place, ex.Const(1)), ZERO)), bound)
        first = self._func("first", own, ex.Call("where", (exact, least, ZERO)))
        past = self._func("past", own, ex.Call("where", (exact, most, ex.INF)))
        inside = ex.Binary("and", ex.Binary(">=", place, first), ex.Binary("<", place, past))
        return ex.Binary("and", inside, condition)

    def _func(self, wish: str, labels: tuple[str, ...], expr: ex.Expr) -> ex.Expr:
        found = next((d.name for d in self.made if d.expr == expr), None)
        if found is None:
            found = fresh_name(f"{self.owner.name}_{wish}", self.taken)
            self.made.append(Definition(found, labels, expr, self.owner.pos))
        return ex.Access(found, tuple(map(ex.Label, labels)))
