"""Canonicalize programs: means become sums, and no reduction stays inside the argument of another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.reserved_names import clashes
from ..smart_constructors import sum_with_product


def mean_to_sum(algorithm: Algorithm) -> Algorithm:
    """Rewrite means as sums.

    Before: ``rmean(A[x, y], y)``  After: ``rsum(A[x, y], y) / len(y)``
    """

    def change(node: ex.Expr) -> ex.Expr:
        if isinstance(node, ex.Reduce) and node.kind == "mean":
            total: ex.Expr = ex.Reduce("sum", node.arg, node.labels, pos=node.pos)
            for label in node.labels:
                total = ex.Binary("/", total, ex.Len(label))
            return total
        return node

    return replace(algorithm, definitions=tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions))


def conditions_to_numbers(algorithm: Algorithm) -> Algorithm:
    """Rewrite reductions of conditions as a maximum or minimum of ones and zeros.

    Before: ``rany(A[x, y] > 0, y)``, ``rall(A[x, y] > 0, y)``
    After:  ``rmax(where(A[x, y] > 0, 1, 0), y) > 0``, ``rmin(where(A[x, y] > 0, 1, 0), y) > 0``
    """

    def change(node: ex.Expr) -> ex.Expr:
        if isinstance(node, ex.Reduce) and node.kind in ("any", "all"):
            terms = ex.Call("where", (node.arg, ex.Const(1), ex.Const(0)))
            return ex.Binary(">", ex.Reduce("max" if node.kind == "any" else "min", terms, node.labels, pos=node.pos), ex.Const(0))
        return node

    return replace(algorithm, definitions=tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions))


def drop_detach(algorithm: Algorithm) -> Algorithm:
    """Replace values that no gradient passes through by the values: a kernel computes both alike.

    Before: ``f[x] = A[x] + detach(round(A[x]) - A[x]);``  After: ``f[x] = A[x] + (round(A[x]) - A[x]);``
    """

    def change(node: ex.Expr) -> ex.Expr:
        return node.args[0] if isinstance(node, ex.Call) and node.fn == "detach" else node

    return algorithm.transform(change)


def fold_invariant_reductions(algorithm: Algorithm) -> Algorithm:
    """Evaluate a reduction over a label that its terms lack: the extent times the term, or the term itself.

    Before: ``rsum(A[x], y)``, ``rmax(A[x], y)``, ``rdot(A[x], B[x], y)``
    After:  ``A[x] * len(y)``, ``where(len(y) > 0, A[x], -inf)``, ``A[x] * B[x] * len(y)``
    """

    def change(node: ex.Expr) -> ex.Expr:
        if not isinstance(node, (ex.Reduce, ex.Dot)) or isinstance(node, ex.Reduce) and node.kind in ("prod", *ex.PLACES):
            return node
        terms = node.arg if isinstance(node, ex.Reduce) else ex.Binary("*", node.left, node.right, pos=node.pos)
        absent = tuple(label for label in node.labels if label not in ex.free_labels(terms))
        present = tuple(label for label in node.labels if label not in absent)
        if not absent:
            return node
        kept = replace(node, labels=present) if present else terms
        for label in absent:
            if isinstance(node, ex.Reduce) and node.kind != "sum":
                empty = ex.NEG_INF if node.kind == "max" else ex.INF
                kept = ex.Call("where", (ex.Binary(">", ex.Len(label), ex.Const(0)), kept, empty))
            else:
                kept = ex.Binary("*", kept, ex.Len(label))
        return kept

    return replace(algorithm, definitions=tuple(replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions))


def extract_nested_reductions(algorithm: Algorithm, invariant: bool = False) -> Algorithm:
    """Give a reduction its own Func if it is inside the argument of another or runs over a label of its Func; with ``invariant`` also if it lacks one.

    Before: ``y[x] = rsum(exp(rdot(A[x, k], B[k, l], k)), l);``
    After:  ``y_dot[x, l] = rdot(A[x, k], B[k, l], k);  y[x] = rsum(exp(y_dot[x, l]), l);``

    A reduction that another Func already computes is read from that Func, so that later rules recognize it as the same value.

    Before: ``y[x] = rsum(exp(rdot(A[x, k], B[k, l], k)), l);  z[x, l] = exp(rdot(A[x, k], B[k, l], k)) / y[x];``
    After:  ``y_dot[x, l] = ...;  y[x] = rsum(exp(y_dot[x, l]), l);  z[x, l] = exp(y_dot[x, l]) / y[x];``
    """
    definitions: list[Definition] = []
    taken = set(algorithm.names)
    for d in algorithm.definitions:
        below = algorithm.with_definitions((*definitions, d)).needed_by((d.name,))
        hoisting = _NestedReductionExtractor(d, [f for f in definitions if f.name in below], taken, algorithm, invariant)
        expr = hoisting.of(d.expr, whole=True)
        hoisting.below += hoisting.made
        expr = hoisting.of(expr, whole=True)  # the rest of the definition
        definitions += [*hoisting.made, replace(d, expr=expr)]
    return algorithm.with_definitions(tuple(definitions))


def extract_reductions_for_gradient(algorithm: Algorithm) -> Algorithm:
    """Give a reduction its own Func if it enters anything but sums and products, so that derivatives can refer to it.

    What is added to a product goes with it: rounded together they keep their sign, which a maximum with 0 asks for.
    A Func whose derivative follows from its own value, such as a sigmoid of the reduction, needs none. The argument of a maximum gets a Func
    too: its derivative asks which terms equal the maximum, so both must come from one computation.

    Before: ``y[x] = rsum(A[x, c], c) * rsqrt(rsum(A[x, c] * A[x, c], c));``
    After:  ``y_sum[x] = rsum(A[x, c] * A[x, c], c);  y[x] = rsum(A[x, c], c) * rsqrt(y_sum[x]);``
    """
    definitions: list[Definition] = []
    taken = set(algorithm.names)
    for d in algorithm.definitions:
        naming = _GradientReductionExtractor(d, taken, algorithm.labels)
        by_value = isinstance(d.expr, ex.Call) and d.expr.fn in ("exp", "exp2", "sqrt", "rsqrt", "sigmoid", "tanh")
        expr = d.expr.rebuild(naming.of) if by_value else naming.of(d.expr, whole=True)
        definitions += [*naming.made, replace(d, expr=expr)]
    return algorithm.with_definitions(tuple(definitions))


class _GradientReductionExtractor:
    """Makes the Funcs of ``extract_reductions_for_gradient`` for one definition."""

    def __init__(self, owner: Definition, taken: set[str], order: tuple[str, ...]):
        self.owner, self.taken, self.order = owner, taken, order
        self.made: list[Definition] = []

    def of(self, node: ex.Expr, linear: bool = True, whole: bool = False) -> ex.Expr:
        """Name the reductions in ``node``; ``linear``: it is part of sums and products only."""
        match node:
            case ex.Reduce("max" | "min", arg, _):
                if not isinstance(arg, ex.Access):
                    node = replace(node, arg=self._extract(arg, "term"))
                return node if whole else self._extract(node, node.kind)
            case ex.Reduce("sum", _, _) | ex.Dot():
                return node if linear else self._extract(node, "dot" if isinstance(node, ex.Dot) else "sum")
            case ex.Binary("+" | "-", _, _) if not linear and (dot := sum_with_product(node)) and ex.free_labels(node) == ex.free_labels(dot):
                return self._extract(node, "product")
            case ex.Binary("+" | "-" | "*", _, _) | ex.Unary("-", _) | ex.Cast() | ex.Reshape():
                return node.rebuild(lambda child: self.of(child, linear))
            case ex.Binary("/", left, right):
                return replace(node, left=self.of(left, linear), right=self.of(right, False))
            case ex.Call("where", (condition, a, b)):
                return replace(node, args=(self.of(condition, False), self.of(a, linear), self.of(b, linear)))
        return node.rebuild(lambda child: self.of(child, False))

    def _extract(self, node: ex.Expr, kind: str) -> ex.Expr:
        return extracted_func(node, kind, self.owner, self.made, self.taken, self.order)


class _NestedReductionExtractor:
    """Makes the Funcs of ``extract_nested_reductions`` for one definition, or finds them among the Funcs ``below``."""

    def __init__(self, owner: Definition, below: list[Definition], taken: set[str], algorithm: Algorithm, invariant: bool):
        self.invariant = invariant
        self.owner, self.below, self.taken, self.order, self.tied = owner, below, taken, algorithm.labels, algorithm.tied_labels
        self.made: list[Definition] = []

    def of(self, node: ex.Expr, inside: bool = False, whole: bool = False) -> ex.Expr:
        """Hoist the reductions in ``node``, which is ``inside`` another's argument or the ``whole`` definition."""
        reduces = isinstance(node, (ex.Reduce, ex.Dot))
        over = node.labels if isinstance(node, (ex.Reduce, ex.Dot)) else ()
        node = node.rebuild(lambda child: self.of(child, inside or reduces))
        if not reduces:
            return node
        if not whole and (same := self._existing_func(node)):
            return same
        lacks = self.invariant and not set(self.owner.labels) <= ex.free_labels(node)  # blocks of that label would each make it again
        if not inside and not lacks and not set(over) & set(self.owner.labels):
            return node
        return extracted_func(node, "dot" if isinstance(node, ex.Dot) else node.kind, self.owner, self.made, self.taken, self.order)  # type: ignore[attr-defined]

    def _existing_func(self, node: ex.Expr) -> ex.Expr | None:
        """Return the element of a Func below that computes just this reduction, perhaps at other labels."""
        for d in self.below:
            names = matches(d.expr, node) if isinstance(d.expr, type(node)) else None
            if names is not None and set(d.labels) == set(names) and all(new == old or new in self.tied(old) for old, new in names.items()):
                return ex.Access(d.name, tuple(ex.Label(names[label]) for label in d.labels), pos=node.pos)  # type: ignore[attr-defined]
        return None


def extract_equal_products(algorithm: Algorithm) -> Algorithm:
    """Give a product that a definition has more than once its own Func.

    Before: ``f[x, y] = tanh(rdot(A[x, k], B[k, y], k)) * sigmoid(rdot(A[x, k], B[k, y], k));``
    After:  ``f_dot[x, y] = rdot(A[x, k], B[k, y], k);  f[x, y] = tanh(f_dot[x, y]) * sigmoid(f_dot[x, y]);``
    """
    definitions: list[Definition] = []
    taken = set(algorithm.names)
    for d in algorithm.definitions:
        made: list[Definition] = []
        dots = Counter(n for n in d.expr.walk() if isinstance(n, ex.Dot))
        for dot in (n for n, count in dots.items() if count > 1):
            access = extracted_func(dot, "dot", d, made, taken, algorithm.labels)
            d = replace(d, expr=d.expr.transform(lambda n, dot=dot, access=access: access if n == dot else n))  # type: ignore[misc]
        definitions += [*made, d]
    return algorithm.with_definitions(tuple(definitions))


def extracted_func(node: ex.Expr, kind: str, owner: Definition, made: list[Definition], taken: set[str], order: tuple[str, ...]) -> ex.Expr:
    """Return an element of a Func for a part of ``owner``: one of those ``made`` so far, or a new one named after ``kind``."""
    for d in made:
        if d.expr == node:
            return ex.Access(d.name, tuple(ex.Label(label) for label in d.labels))
    labels = tuple(label for label in order if label in ex.free_labels(node))
    name = fresh_name(f"{owner.name}_{kind}", taken)
    made.append(Definition(name, labels, node, owner.pos))
    return ex.Access(name, tuple(ex.Label(label) for label in labels), pos=node.pos)


def inline_access(access: ex.Access, algorithm: Algorithm) -> ex.Expr | None:
    """Inline the definition of a Func at ``access``; None where the result would differ.

    It differs where the index may lie outside the extent, which reads 0, and where a reduction inside binds a label of the index.
    """
    d = algorithm[access.tensor]
    bound = {label for n in d.expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
    if isinstance(d.expr, ex.Scan) or any(not isinstance(i, ex.Label) or i.name in bound for i in access.index):
        return None
    return ex.substitute(d.expr, dict(zip(d.labels, access.index)))


def fresh_name(wish: str, taken: set[str]) -> str:
    """Number ``wish`` if it, or a name that the emitted file makes from it, is taken; mark the result as taken."""
    name, count = wish, 1
    while clashes(name, taken):
        count += 1
        name = f"{wish}{count}"
    taken.add(name)
    return name


def matches(pattern: ex.Expr, node: ex.Expr) -> dict[str, str] | None:
    """Return the renaming of free labels that makes ``pattern`` equal ``node``; None if there is none."""
    ours, theirs = ([n.name for n in e.walk() if isinstance(n, ex.Label)] for e in (pattern, node))
    if len(ours) != len(theirs):
        return None
    names = {a: b for a, b in zip(ours, theirs) if a in ex.free_labels(pattern)}
    renamed = ex.substitute(pattern, {a: ex.Label(b) for a, b in names.items()})
    return names if renamed == node and len(set(names.values())) == len(names) else None


def row_of(pattern: ex.Expr, node: ex.Expr, labels: tuple[str, ...]) -> tuple[ex.Label, ...] | None:
    """Return the labels that stand for ``labels`` in ``node``, which is ``pattern`` with other labels, or with index arithmetic for the rest; None if it is anything else.

    Of ``s[b, m, l]`` and ``s[b, n, k - n]``, whose rows ``b, m`` count, ``b, n``: another element of one row.
    """
    if (names := matches(pattern, node)) is not None:
        return tuple(ex.Label(names.get(label, label)) for label in labels)
    free, found = ex.free_labels(pattern), dict[str, ex.Expr]()

    def stands(p: ex.Expr, n: ex.Expr, index: bool) -> bool:
        if isinstance(p, ex.Label) and p.name in free and index:
            return found.setdefault(p.name, n) == n
        below = p.children(), n.children()
        return type(p) is type(n) and len(below[0]) == len(below[1]) and all(stands(a, b, isinstance(p, ex.Access)) for a, b in zip(*below))

    if not stands(pattern, node, False) or ex.substitute(pattern, found) != node:
        return None
    row = tuple(found.get(label, ex.Label(label)) for label in labels)
    return row if all(isinstance(place, ex.Label) for place in row) else None  # type: ignore[return-value]


def rename_bound(e: ex.Expr, names: dict[str, str]) -> ex.Expr:
    """Rename labels that reductions inside ``e`` bind, with their uses."""
    if not names:
        return e

    def change(node: ex.Expr) -> ex.Expr:
        if isinstance(node, (ex.Reduce, ex.Dot)) and set(node.labels) & set(names):
            inside = {label: ex.Label(names[label]) for label in node.labels if label in names}
            renamed = tuple(names.get(label, label) for label in node.labels)
            return replace(node.rebuild(lambda child: ex.substitute(child, inside)), labels=renamed)  # type: ignore[call-arg]
        return node

    return e.transform(change)
