"""Rewrite the element of a rank, and its place, as one maximum after another.

The elements of a row are ordered by value, larger ones first, NaNs before all, and equal ones by place. The element of rank i is the maximum
of those that come after the element of rank i - 1; its place is that of the first among them that equals it. A row that a kernel holds is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..lang import expr as ex
from ..lang.algorithm import Algorithm, Definition
from ..lang.errors import DTError
from .rules.canonicalize import fresh_name
from .smart_constructors import ONE, ZERO

MOST = 32  #: elements: each takes two reductions of its own


def expand_top_k(algorithm: Algorithm, picked: bool = False) -> Algorithm:
    """Replace each ``rtopk`` and ``rargtopk``.

    Before: ``f[x, j] = rtopk(A[x, y], y, j);``
    After, with ``Extent j = 2;``: ``f_top[x] = rmax(A[x, y], y); f_place[x] = rargmax(A[x, y], y);
    f_top2[x] = rmax(where(A[x, y] < f_top[x] or A[x, y] == f_top[x] and y > f_place[x]
    or isnan(f_top[x]) and (not isnan(A[x, y]) or y > f_place[x]), A[x, y], -inf), y);
    f_place2[x] = rargmax(where((A[x, y] < f_top[x] or A[x, y] == f_top[x] and y > f_place[x]
    or isnan(f_top[x]) and (not isnan(A[x, y]) or y > f_place[x])) and (A[x, y] == f_top2[x]
    or isnan(A[x, y]) and isnan(f_top2[x])), 1, 0), y);
    f[x, j] = where(j < len(y), where(j == 0, f_top[x], f_top2[x]), -inf);``

    ``picked``: values are ``rsum(where(y == f_place[x], A[x, y], 0), y)``, whose gradient is that of the one element at the place.
    """
    if not any(_ranked(d.expr) for d in algorithm.definitions):
        return algorithm
    taken = {*algorithm.names, *(n for n, _ in algorithm.params)}
    rows: dict[tuple[ex.Expr, str], _Row] = {}
    found: list[Definition] = []
    for d in algorithm.definitions:
        made: list[Definition] = []

        def change(node: ex.Expr, d: Definition = d, made: list[Definition] = made) -> ex.Expr:
            if not (isinstance(node, ex.Reduce) and node.kind in ex.RANKED):
                return node
            key = (node.arg, node.labels[0])
            row = rows.setdefault(key, _Row(d.name, node.arg, node.labels[0], tuple(x for x in algorithm.labels if x in _outside(node)), picked, taken))
            return _chosen(node, [row.element(i, node.kind, made) for i in _ranks(algorithm, node)])

        expr = d.expr.transform(change)
        found += [*made, replace(d, expr=expr)]
    return algorithm.with_definitions(tuple(found))


def _ranked(expr: ex.Expr) -> bool:
    return any(isinstance(n, ex.Reduce) and n.kind in ex.RANKED for n in expr.walk())


def _outside(node: ex.Reduce) -> frozenset[str]:
    """Return the labels of the rows."""
    return ex.free_labels(node.arg) - {node.labels[0]}


def _ranks(algorithm: Algorithm, node: ex.Reduce) -> Iterator[int]:
    """Return the ranks that are asked for. Raises DTError where they are not known at compile time, or too many."""
    name = ex.REDUCTION_NAMES[node.kind]
    match node.rank:
        case ex.Const(value) if type(value) is int and value >= 0:
            first, count = value, value + 1
        case ex.Label(label) if label != node.labels[0] and (size := algorithm.constant_extent(label)) is not None:
            first, count = 0, size
        case _:
            allowed = "a label of constant extent, Extent j = 8;, or an integer from 0 on"
            raise DTError(f"the rank of {name} is known at compile time", found=str(node.rank), allowed=allowed, at=node.pos)
    if count > MOST:
        raise DTError(f"{name} finds at most {MOST} elements", found=str(count), at=node.pos)
    return iter(range(first, count))


def _chosen(node: ex.Reduce, elements: list[ex.Expr]) -> ex.Expr:
    """Return the element of a rank; past the end of the row -inf, its place 0."""
    *before, chosen = elements
    rank: ex.Expr = node.rank  # type: ignore[assignment]
    for i, element in reversed(list(enumerate(before))):
        chosen = ex.Call("where", (ex.Binary("==", rank, ex.Const(i)), element, chosen))
    return ex.Call("where", (ex.Binary("<", rank, ex.Len(node.labels[0])), chosen, ZERO if node.kind == "argtopk" else ex.NEG_INF))


@dataclass
class _Row:
    """The elements of one row that are found so far: for each rank the Funcs of its value, of its place, and of its value for a gradient."""

    owner: str
    arg: ex.Expr
    label: str
    labels: tuple[str, ...]
    picked: bool
    taken: set[str]

    def __post_init__(self) -> None:
        self.top: list[str] = []
        self.at: list[str] = []
        self.value: list[str] = []

    def element(self, rank: int, kind: str, made: list[Definition]) -> ex.Expr:
        """Return the value or the place of ``rank``; ``made`` gets the Funcs that it needs and that do not exist yet."""
        while len(self.at) <= rank:
            self._next(made)
        while self.picked and len(self.value) <= rank:
            here = ex.Binary("==", ex.Label(self.label), self._of(self.at[len(self.value)]))
            self.value.append(self._func("value", self._reduce("sum", ex.Call("where", (here, self.arg, ZERO))), made))
        return self._of((self.at if kind == "argtopk" else self.value if self.picked else self.top)[rank])

    def _next(self, made: list[Definition]) -> None:
        if not self.at:
            self.top.append(self._func("top", self._reduce("max", self.arg), made))
            self.at.append(self._func("place", self._reduce("argmax", self.arg), made))
            return
        after = self._after()
        self.top.append(self._func("top", self._reduce("max", ex.Call("where", (after, self.arg, ex.NEG_INF))), made))
        top = self._of(self.top[-1])
        equal = _or(ex.Binary("==", self.arg, top), _and(_nan(self.arg), _nan(top)))
        self.at.append(self._func("place", self._reduce("argmax", ex.Call("where", (_and(after, equal), ONE, ZERO))), made))

    def _after(self) -> ex.Expr:
        """Return whether an element comes after the last one that was found."""
        top, later = self._of(self.top[-1]), ex.Binary(">", ex.Label(self.label), self._of(self.at[-1]))
        numbers = _or(ex.Binary("<", self.arg, top), _and(ex.Binary("==", self.arg, top), later))
        return _or(numbers, _and(_nan(top), _or(ex.Unary("not", _nan(self.arg)), later)))

    def _of(self, func: str) -> ex.Expr:
        return ex.Access(func, tuple(map(ex.Label, self.labels)))

    def _reduce(self, kind: str, arg: ex.Expr) -> ex.Expr:
        return ex.Reduce(kind, arg, (self.label,))

    def _func(self, word: str, expr: ex.Expr, made: list[Definition]) -> str:
        name = fresh_name(f"{self.owner}_{word}", self.taken)
        made.append(Definition(name, self.labels, expr))
        return name


def _and(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    return ex.Binary("and", a, b)


def _or(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    return ex.Binary("or", a, b)


def _nan(e: ex.Expr) -> ex.Expr:
    return ex.Call("isnan", (e,))
