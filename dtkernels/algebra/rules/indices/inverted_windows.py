"""Read what windows were read from directly, where a sum over the windows that hold an element reads them at the place of that element.

The gradient of a maximum over windows asks of each window that holds an element whether that element is its maximum. The term of the window at
``x = t - r`` is the element at ``x + r``, which is ``t`` for every ``r``: it is loaded once. What all terms of a window share has a Func of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ....lang import expr as ex
from ....lang.algorithm import Algorithm, Definition
from ....lang.extents.linear_form import linear_form
from ...index_inversion import multiple
from ...smart_constructors import ZERO, add, conjuncts_of
from ..canonicalize import extracted_func
from ..condition_folding import fold_condition


def invert_windows(algorithm: Algorithm, outputs: tuple[str, ...]) -> Algorithm:
    """Inline a Func that is read in windows, where its own indices then have fewer labels.

    Before: ``e[x, r] = where(A[x + r] == m[x], d[x], 0);  f[t] = rsum(e[t - r, r], r);``
    After:  ``e[x, r] = where(A[x + r] == m[x], d[x], 0);  f[t] = rsum(where(A[t] == m[t - r], d[t - r], 0), r);``

    A part of ``e`` that is computed from a sum and lacks some of its labels becomes a Func, ``f_window[x] = d[x] / n[x]``.
    """
    taken = set(algorithm.names)
    definitions: list[Definition] = []
    for d in algorithm.definitions:
        inverter = _Inverter(algorithm, d, outputs, taken)
        expr = inverter.of(d.expr, frozenset())
        if expr != d.expr:
            expr = fold_condition(inverter.with_own_extents(inverter.with_plain_conditions(expr, frozenset())))
        definitions += [*inverter.made, replace(d, expr=expr)]
    return algorithm.with_definitions(tuple(definitions)) if definitions != list(algorithm.definitions) else algorithm


@dataclass
class _Inverter:
    algorithm: Algorithm
    owner: Definition
    outputs: tuple[str, ...]
    taken: set[str]
    made: list[Definition] = field(default_factory=list)

    def of(self, e: ex.Expr, known: frozenset[ex.Expr]) -> ex.Expr:
        """Return ``e``, evaluated where the conditions ``known`` hold, without reads of windows that invert."""
        match e:
            case ex.Call("where", (condition, a, b)):
                return replace(e, args=(condition, self.of(a, known | {*conjuncts_of(condition)}), self.of(b, known)))
            case ex.Access(tensor, index) if tensor in self.algorithm and not all(isinstance(i, ex.Label) for i in index):
                return self._inlined(e, known)
            case ex.Access() | ex.Dot() | ex.Scan():
                return e
        return e.rebuild(lambda child: self.of(child, known))

    def _inlined(self, access: ex.Access, known: frozenset[ex.Expr]) -> ex.Expr:
        d = self.algorithm[access.tensor]
        if not self._is_plain(d) or d.name in self.outputs:
            return access
        kept = len(self.made)
        body = ex.substitute(self._shared(self._expanded(d.expr), set(d.labels)), dict(zip(d.labels, access.index)))
        found = self._simplified(body, known)
        if _variables(found) == _variables(body):
            del self.made[kept:]
            return access
        for bound in [] if _vanishes_outside(body, access.index) else self._bounds(access, d, known):
            found = ex.Call("where", (bound, found, ZERO))
        return found

    def _is_plain(self, d: Definition) -> bool:
        """Return whether a Func is computed element by element."""
        return not any(isinstance(n, (ex.Reduce, ex.Dot, ex.Scan, ex.Cast, ex.Write)) for n in d.expr.walk())

    def _expanded(self, e: ex.Expr) -> ex.Expr:
        """Inline Funcs that are computed element by element."""
        match e:
            case ex.Access(tensor, index) if tensor in self.algorithm and self._is_plain(self.algorithm[tensor]) and all(isinstance(i, ex.Label) for i in index):
                return self._expanded(ex.substitute(self.algorithm[tensor].expr, dict(zip(self.algorithm[tensor].labels, index))))
            case ex.Access():
                return e
        return e.rebuild(self._expanded)

    def _bounds(self, access: ex.Access, d: Definition, known: frozenset[ex.Expr]) -> list[ex.Expr]:
        """Return the conditions that keep every index inside the Func, which reads 0 beyond, as far as ``known`` does not say so."""
        found: list[ex.Expr] = []
        for i, label in zip(access.index, d.labels):
            if isinstance(i, ex.Label) and self._same_extent(i.name, label):
                continue
            value = ex.as_value(i)
            below = [ex.Binary("<", value, ex.Len(x)) for x in sorted(self.algorithm.tied_labels(label))]
            found += [above] if (above := ex.Binary(">=", value, ZERO)) not in known else []
            found += [ex.Binary("<", value, ex.Len(label))] if not known & {*below} else []
        return found

    def _same_extent(self, a: str, b: str) -> bool:
        """Return whether two labels have one extent."""
        one, other = self.algorithm.plain_extent(a), self.algorithm.plain_extent(b)
        return b in self.algorithm.tied_labels(a) or one is not None and one == other

    def with_plain_conditions(self, e: ex.Expr, known: frozenset[ex.Expr]) -> ex.Expr:
        """Simplify conditions by those around them."""
        match e:
            case ex.Call("where", (condition, a, b)):
                inner = known | {*conjuncts_of(condition)}
                return replace(e, args=(self._simplified(condition, known), self.with_plain_conditions(a, inner), self.with_plain_conditions(b, known)))
            case ex.Access():
                return e
        return e.rebuild(lambda child: self.with_plain_conditions(child, known))

    def with_own_extents(self, e: ex.Expr) -> ex.Expr:
        """Write the extents of labels that occur with their own names, so that a condition on a label and its extent is decided."""
        free = sorted(ex.free_labels(e))

        def change(node: ex.Expr) -> ex.Expr:
            if isinstance(node, ex.Len):
                return next((ex.Len(x) for x in free if self._same_extent(x, node.label)), node)
            return node

        return e.transform(change)

    def _shared(self, e: ex.Expr, labels: set[str]) -> ex.Expr:
        """Name the parts that are computed from sums and lack some of the ``labels``: all terms of a window share them."""
        reads = [a for a in ex.accesses(e) if a.tensor in self.algorithm]
        operator = isinstance(e, ex.Binary) and e.op in "*/" or isinstance(e, ex.Call) and e.fn != "where"
        if operator and reads and ex.free_labels(e) < labels and all(isinstance(i, ex.Label) for a in ex.accesses(e) for i in a.index):
            return extracted_func(e, "window", self.owner, self.made, self.taken, self.algorithm.labels)
        return e if isinstance(e, ex.Access) else e.rebuild(lambda child: self._shared(child, labels))

    def _simplified(self, e: ex.Expr, known: frozenset[ex.Expr], index: bool = False) -> ex.Expr:
        """Write sums of labels with each label once; quotients that ``known`` says leave no remainder are multiplied out."""
        if index or isinstance(e, ex.Binary) and e.op in ex.ORDERED:
            whole = {a.left for a in known if isinstance(a, ex.Binary) and a.op == "==" and a.right == ZERO}
            if index:
                return _linear(e, whole)
            return replace(e, left=_linear(e.left, whole), right=_linear(e.right, whole))  # type: ignore[attr-defined, call-arg]
        return e.rebuild(lambda child: self._simplified(child, known, isinstance(e, ex.Access)))


def _vanishes_outside(e: ex.Expr, index: tuple[ex.Expr, ...]) -> bool:
    """Return whether ``e`` is an element, where a condition holds, that has all of these indices: beyond their extents it reads 0."""
    match e:
        case ex.Access(_, own):
            return set(index) - {i for i in index if isinstance(i, ex.Label)} <= set(own)
        case ex.Call("where", (_, a, b)):
            return b == ZERO and _vanishes_outside(a, index)
    return False


def _linear(e: ex.Expr, whole: set[ex.Expr]) -> ex.Expr:
    """Return a sum of labels with each once. ``whole``: remainders that are 0."""
    form: dict[ex.Expr | None, int] = {}
    for atom, times in linear_form(e).items():
        place, size = _quotient(atom)
        if place is not None and times % size == 0 and ex.Binary("%", place, ex.Const(size)) in whole:
            for inner, n in linear_form(place).items():
                form[inner] = form.get(inner, 0) + n * times // size
        else:
            form[atom] = form.get(atom, 0) + times
    found: ex.Expr = ZERO
    for atom, times in form.items():
        if times:
            found = add(found, multiple(atom, times))
    return found


def _quotient(atom: ex.Expr | None) -> tuple[ex.Expr | None, int]:
    match atom:
        case ex.Binary("/", place, ex.Const(size)) | ex.Call("floor", (ex.Binary("/", place, ex.Const(size)),)) if type(size) is int:
            return place, size
    return None, 1


def _variables(e: ex.Expr) -> int:
    """Count the labels of all indices."""
    return sum(len(ex.free_labels(i)) for a in ex.accesses(e) for i in a.index)
