"""Center the weights in sums over the adjoint of a softmax's scores.

Before::

    d_slope[b] = rsum(d_s[b, m, l] * (l - m), m, l);

After, with ``t_mean`` made by forward and saved in float32::

    t_mean[b, m] = where(t[b, m] == 0, 0, rsum(e[b, m, l] * (l - m), l) / t[b, m]);
    d_slope[b] = rsum(d_s[b, m, l] * (l - m - t_mean[b, m]), m, l);

The outputs do not change where one number is added to all scores of a row, so that the adjoint ``d_s`` sums to 0 along a row, and any number
may be subtracted from its weights. In floating point it does not quite: ``d_s = (d_e + d_t) * e``, and ``d_t`` is a sum over results that were
rounded when they were stored, and whose products rounded ``e`` before that; a softmax is rounded itself, and the logarithm of ``t`` that backward
reads. Such errors are multiplied by ``rsum(e * weight) / t``, the mean of the weights, which centered weights do not have. Saving
results in more digits would leave the error of rounded ``e``. Forward makes the mean in the loop that streams the scores; where no product
makes them, backward does, of the rows that it reads anyway.

A constant or an exponential that is added to the sum of exponentials, such as a sink, is a score of weight 0: the adjoint sums to
the negative of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ..rules.canonicalize import extracted_func, fresh_name, inline_access, matches
from ..rules.exponentials.shift_degree import Degree, degree_of
from ..rules.exponentials.sum_exp_addends import shifted_alike
from ..smart_constructors import ONE, ZERO, add, divide, is_zero, multiply, negate, simplify, where
from .saved_tensors import sums_of_exponentials

Adjoints = Mapping[str, ex.Expr]  #: Func -> its adjoint over its own labels


def center_weights(algorithm: Algorithm, outputs: tuple[str, ...], backward: Algorithm, adjoints: Adjoints) -> tuple[Algorithm, tuple[Definition, ...]]:
    """Center the weights of each sum in ``backward`` over the adjoint of scores. Return also the means, which forward makes and saves."""
    made: list[Definition] = []
    for scores in _scores(algorithm, outputs, backward, adjoints):
        centering = _Centering(algorithm, backward, scores, made)
        changed = (d if d.name in algorithm or d.name == scores.adjoint else centering.of(d) for d in backward.definitions)
        backward = backward.with_definitions(tuple(changed))
    definitions: list[Definition] = []
    for d in backward.definitions:
        read = {a.tensor for a in ex.accesses(d.expr)}
        definitions += [m for m in made if m.name in read and m not in definitions and not _is_saved(m)]
        definitions.append(d)
    means = tuple(m for m in made if _is_saved(m) and any(a.tensor == m.name for d in definitions for a in ex.accesses(d.expr)))
    return replace(backward, inputs=(*backward.inputs, *(m.name for m in means))).with_definitions(tuple(definitions)), means


def name_scores(algorithm: Algorithm, outputs: tuple[str, ...], wanted: tuple[str, ...]) -> Algorithm:
    """Give arguments of exp a Func of their own where they have parameters for a whole row, and so have the products that such a parameter scales.

    Before: ``t[x] = rsum(exp(A[x, y] * a), y);``  After: ``t_scores[x, y] = A[x, y] * a;  t[x] = rsum(exp(t_scores[x, y]), y);``
    """
    for total, argument in sums_of_exponentials(algorithm, outputs):
        body = inline_access(argument, algorithm) if isinstance(argument, ex.Access) and argument.tensor in algorithm else argument
        found = _row_parameters(body, total.labels, algorithm, wanted) if body is not None else set()
        if not found:
            continue
        func = argument.tensor if body is not argument else None  # type: ignore[attr-defined]
        if func is None:
            func = fresh_name(f"{total.name}_scores", set(algorithm.names))
            algorithm = _with_named_argument(algorithm, argument, func)
        algorithm = _with_named_products(algorithm, func, wanted, total.labels)
    return algorithm


def inline_scores(algorithm: Algorithm, names: set[str]) -> Algorithm:
    """Put the arguments that ``name_scores`` named back into the exponentials; those of ``names`` that are products stay."""
    for d in algorithm.definitions:
        if d.name not in names or any(isinstance(n, (ex.Reduce, ex.Dot, ex.Scan)) for n in d.expr.walk()):
            continue

        def change(node: ex.Expr, d: Definition = d) -> ex.Expr:
            own = isinstance(node, ex.Access) and node.tensor == d.name
            return ex.substitute(d.expr, dict(zip(d.labels, node.index))) if own else node  # type: ignore[attr-defined]

        algorithm = algorithm.with_definitions(tuple(replace(x, expr=x.expr.transform(change)) for x in algorithm.definitions if x.name != d.name))
    return algorithm


@dataclass(frozen=True)
class _Scores:
    """A Func ``func[index]`` whose exponentials ``total`` sums up over ``over``, and its ``adjoint``, which sums to 0 with that of ``alike``."""

    func: str
    index: tuple[str, ...]
    total: Definition
    over: tuple[str, ...]
    adjoint: str
    alike: tuple[tuple[ex.Access, ex.Expr], ...]  #: (element of a Func that the sum adds, its adjoint)


def _scores(algorithm: Algorithm, outputs: tuple[str, ...], backward: Algorithm, adjoints: Adjoints) -> Iterator[_Scores]:
    for total, argument in sums_of_exponentials(algorithm, outputs):
        if not (isinstance(argument, ex.Access) and argument.tensor in algorithm and all(isinstance(i, ex.Label) for i in argument.index)):
            continue
        index = tuple(i.name for i in argument.index)  # type: ignore[attr-defined]
        adjoint, alike = adjoints.get(argument.tensor), shifted_alike(total, algorithm)
        over = tuple(label for label in index if label not in total.labels)
        if len(set(index)) < len(index) or not set(total.labels) <= set(index) or not isinstance(adjoint, ex.Access) or adjoint.tensor not in backward:
            continue
        own = tuple(map(ex.Label, total.labels))
        of_alike = tuple((ex.Access(a, own), adjoints[a]) for a in alike if a in adjoints)
        scores = _Scores(argument.tensor, index, total, over, adjoint.tensor, of_alike)
        if len(of_alike) == len(alike) and _sums_to_zero(algorithm, outputs, scores):
            yield scores


def _sums_to_zero(algorithm: Algorithm, outputs: tuple[str, ...], scores: _Scores) -> bool:
    """Return whether the outputs stay as they are where one number is added to all scores of a row."""
    rows = tuple(ex.Label(f"#{scores.index.index(label)}") for label in scores.total.labels)
    known: dict[str, Degree | None] = {scores.func: replace(Degree(), plus=Degree().plus + 1, at=rows)}
    for i, (element, _) in enumerate(scores.alike):
        known[element.tensor] = replace(Degree(), times=Degree().times + 1, at=tuple(ex.Label(f"#{i}") for i in range(len(scores.total.labels))))
    for d in algorithm.definitions:
        if d.name not in known:
            known[d.name] = degree_of(d, known)
    return all((found := known[o]) is not None and found.free for o in outputs)


@dataclass(frozen=True)
class _Linear:
    """``where(conditions, access * weight + rest, 0)``, summed over ``labels``; the rest is 0 if there are any."""

    access: ex.Access
    weight: ex.Expr = ONE
    rest: ex.Expr = ZERO
    conditions: tuple[ex.Expr, ...] = ()
    labels: tuple[str, ...] = ()

    def within(self, factor: ex.Expr) -> bool:
        """Return whether ``factor`` may be moved inside the sum."""
        return not ex.free_labels(factor) & set(self.labels)

    def folded(self) -> _Linear:
        """Return the same without conditions."""
        return replace(self, weight=_under(self.conditions, self.weight), rest=_under(self.conditions, self.rest), conditions=())


@dataclass
class _Centering:
    """Rewrites the definitions of ``backward`` for one Func of scores; ``made`` are the means so far."""

    algorithm: Algorithm
    backward: Algorithm
    scores: _Scores
    made: list[Definition]
    carriers: set[str] = field(default_factory=set)  #: Funcs that are the adjoint times something, element for element

    def __post_init__(self) -> None:
        self.carriers.add(self.scores.adjoint)
        for d in self.backward.definitions:
            plain = not any(isinstance(n, (ex.Reduce, ex.Dot, ex.Scan)) for n in d.expr.walk())
            if d.name not in self.algorithm and plain and any(a.tensor in self.carriers for a in ex.accesses(d.expr)):
                self.carriers.add(d.name)

    def of(self, d: Definition) -> Definition:
        expr = d.expr.transform(self._centered)
        expr = d.expr if expr == d.expr else simplify(expr)
        return d if is_zero(expr) else replace(d, expr=expr)

    def _centered(self, node: ex.Expr) -> ex.Expr:
        """Center the weights of a sum that runs along whole rows of the adjoint."""
        levels, terms = [], node
        while isinstance(terms, ex.Reduce) and terms.kind == "sum":
            levels.append(terms.labels)
            terms = terms.arg
        linear = self._linear(terms) if levels else None
        if linear is None:
            return node
        levels[-1] = (*linear.labels, *levels[-1])
        here = tuple(i.name for i in linear.access.index)  # type: ignore[attr-defined]
        over = {at for at, label in zip(here, self.scores.index) if label in self.scores.over}
        if not over <= {label for labels in levels for label in labels}:
            return node
        masked = self._masks_scores(linear.conditions, here)
        weight = linear.weight if masked else _under(linear.conditions, linear.weight)
        if not ex.free_labels(weight) & over:
            centered: ex.Expr = ZERO  # the sum of the adjoint itself
            apart = weight
        else:
            bare = masked and _finite(linear.weight)  # exponentials are 0 where the conditions do not hold
            mean = self._mean(linear.weight if bare else _under(linear.conditions, linear.weight), here)
            if mean is None:
                return node
            centered, apart = multiply(linear.access, ex.Binary("-", weight, mean)), mean
        centered = _under(linear.conditions, add(centered, linear.rest)) if masked else add(centered, _under(linear.conditions, linear.rest))
        return add(_summed(centered, levels), negate(self._of_alike(apart, here, [tuple(x for x in labels if x not in over) for labels in levels])))

    def _of_alike(self, weight: ex.Expr, here: tuple[str, ...], levels: list[tuple[str, ...]]) -> ex.Expr:
        """Return ``weight`` times the adjoints of what is added to the sum of exponentials, which balance that of the scores."""
        to = {own: ex.Label(at) for own, at in zip(self.scores.index, here)}
        total: ex.Expr = ZERO
        for element, adjoint in self.scores.alike:
            total = add(total, multiply(weight, ex.substitute(multiply(adjoint, element), to)))
        return _summed(total, levels)

    def _masks_scores(self, conditions: tuple[ex.Expr, ...], here: tuple[str, ...]) -> bool:
        """Return whether scores are -inf where the ``conditions`` do not hold: the adjoint is 0 there."""
        d, masks = self.algorithm[self.scores.func], []
        to = {own: ex.Label(at) for own, at in zip(d.labels, here)}
        e = d.expr
        while isinstance(e, ex.Call) and e.fn == "where" and e.args[2] == ex.NEG_INF:
            masks.append(ex.substitute(e.args[0], to))
            e = e.args[1]
        return all(c in masks for c in conditions)

    def _mean(self, weight: ex.Expr, here: tuple[str, ...]) -> ex.Access | None:
        """Return the mean of ``weight``, by the exponentials, over the row at ``here``; None where forward cannot make it as one number a row."""
        names = dict(zip(here, self.scores.index))
        bound = {label for n in weight.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels}
        forward = all(a.tensor in self.algorithm or a.tensor in self.algorithm.inputs for a in ex.accesses(weight))
        if not forward or not ex.free_labels(weight) <= set(here) or bound & set(self.scores.index) or not bound <= set(self.algorithm.labels):
            return None
        weight = ex.substitute(weight, {at: ex.Label(own) for at, own in names.items()})
        total, e, over = self.scores.total, self._exponential(), self.scores.over
        value = ex.Access(total.name, tuple(map(ex.Label, total.labels)))
        parts = (weight, *(self.algorithm[f].expr for f in self.algorithm.needed_by((self.scores.func,))))
        if any(isinstance(n, ex.Dot) for part in parts for n in part.walk()):
            expr: ex.Expr = ex.Cast(_unless_zero(value, ex.Binary("/", ex.Reduce("sum", ex.Binary("*", e, weight), over), value)), "fp32")
        else:
            expr = _unless_zero(value, ex.Reduce("sum", ex.Binary("*", ex.Binary("/", e, value), weight), over))
        name = next((d.name for d in self.made if d.expr == expr), None)
        if name is None:
            a, b = self.algorithm, self.backward
            name = fresh_name(f"{total.name}_mean", {*a.funcs, *b.names, *(d.name for d in self.made)})
            self.made.append(Definition(name, total.labels, expr))
        at = {own: at for at, own in names.items()}
        return ex.Access(name, tuple(ex.Label(at[label]) for label in total.labels))

    def _exponential(self) -> ex.Expr:
        """Return the exponential of a score, as an element of a Func if one has it."""
        scores = ex.Access(self.scores.func, tuple(map(ex.Label, self.scores.index)))
        for d in self.algorithm.definitions:
            if isinstance(d.expr, ex.Call) and d.expr.fn == "exp" and (names := matches(d.expr.args[0], scores)) is not None and set(names) == set(d.labels):
                return ex.Access(d.name, tuple(ex.Label(names[label]) for label in d.labels))
        return ex.Call("exp", (scores,))

    def _carries(self, e: ex.Expr) -> bool:
        return any(a.tensor in self.carriers for a in ex.accesses(e))

    def _linear(self, e: ex.Expr) -> _Linear | None:
        """Return ``e`` as a multiple of one element of the adjoint; None if it is none."""
        match e:
            case ex.Access(tensor, index) if tensor == self.scores.adjoint:
                plain = all(isinstance(i, ex.Label) for i in index) and len(set(index)) == len(index)
                return _Linear(e) if plain else None
            case ex.Access(tensor, _) if tensor in self.carriers:
                body = inline_access(e, self.backward)
                return None if body is None else self._linear(body)
            case ex.Unary("-", arg) if (inner := self._linear(arg)) is not None:
                return replace(inner, weight=negate(inner.weight), rest=negate(inner.rest))
            case ex.Binary("+" | "-" as op, a, b):
                return self._linear_sum(a, b if op == "+" else negate(b))
            case ex.Binary("*", a, b):
                for one, other in ((a, b), (b, a)):
                    if not self._carries(other) and (inner := self._linear(one)) is not None and inner.within(other):
                        return replace(inner, weight=multiply(inner.weight, other), rest=multiply(inner.rest, other))
            case ex.Binary("/", a, b) if not self._carries(b) and (inner := self._linear(a)) is not None and inner.within(b):
                return replace(inner, weight=divide(inner.weight, b), rest=divide(inner.rest, b))
            case ex.Call("where", (c, a, b)) if not self._carries(c) and is_zero(b) and (inner := self._linear(a)) is not None and inner.within(c):
                return replace(inner, conditions=(c, *inner.conditions))
            case ex.Call("where", (c, a, b)) if not self._carries(c) and is_zero(a) and (inner := self._linear(b)) is not None and inner.within(c):
                return replace(inner, conditions=(ex.Unary("not", c), *inner.conditions))
            case ex.Reduce("sum", arg, labels) if (inner := self._linear(arg)) is not None and is_zero(inner.rest) and not set(labels) & set(inner.labels):
                return replace(inner, labels=(*inner.labels, *labels))
        return None

    def _linear_sum(self, a: ex.Expr, b: ex.Expr) -> _Linear | None:
        if self._carries(a) and self._carries(b):
            one, other = self._linear(a), self._linear(b)
            if one is None or other is None or (one.access, one.labels) != (other.access, other.labels):
                return None
            if one.conditions != other.conditions:
                one, other = one.folded(), other.folded()
            return replace(one, weight=add(one.weight, other.weight), rest=add(one.rest, other.rest))
        found = self._linear(a if self._carries(a) else b)
        if found is None or found.labels:
            return None
        found = found.folded() if found.conditions else found
        return replace(found, rest=add(found.rest, b if self._carries(a) else a))


def _is_saved(mean: Definition) -> bool:
    """Return whether forward computes and saves a mean; backward computes one without products itself, since it reads the rows."""
    return isinstance(mean.expr, ex.Cast)


def _unless_zero(total: ex.Expr, e: ex.Expr) -> ex.Expr:
    return ex.Call("where", (ex.Binary("==", total, ZERO), ZERO, e))


def _under(conditions: tuple[ex.Expr, ...], e: ex.Expr) -> ex.Expr:
    """Return ``e`` where all ``conditions`` hold, else 0."""
    return reduce(lambda kept, c: where(c, kept, ZERO), reversed(conditions), e)


def _finite(e: ex.Expr) -> bool:
    """Return whether ``e`` is arithmetic on labels and numbers, which no input makes infinite."""
    return isinstance(e, (ex.Const, ex.Label, ex.Len)) or isinstance(e, (ex.Unary, ex.Binary)) and e.op in "+-*" and all(map(_finite, e.children()))


def _summed(terms: ex.Expr, levels: list[tuple[str, ...]]) -> ex.Expr:
    """Sum ``terms`` over the labels of each of the ``levels``, the last one first."""
    return reduce(lambda e, labels: e if is_zero(e) or not labels else ex.Reduce("sum", e, labels), reversed(levels), terms)


def _row_parameters(e: ex.Expr, rows: tuple[str, ...], algorithm: Algorithm, wanted: tuple[str, ...]) -> set[ex.Expr]:
    """Return the numbers in ``e``, outside reductions, that are one for a whole row or more and depend on what is differentiated."""
    match e:
        case ex.Reduce() | ex.Dot() | ex.Scan():
            return set()
        case ex.Scalar(name):
            return {e} if name in wanted else set()
        case ex.Access(tensor, _):
            return {e} if ex.free_labels(e) <= set(rows) and _depends(tensor, algorithm, wanted) else set()
    return {found for child in e.children() for found in _row_parameters(child, rows, algorithm, wanted)}


def _depends(tensor: str, algorithm: Algorithm, wanted: tuple[str, ...]) -> bool:
    nodes = [n for f in algorithm.needed_by((tensor,)) for n in algorithm[f].expr.walk()] if tensor in algorithm else []
    return tensor in wanted or any(isinstance(n, ex.Access) and n.tensor in wanted or isinstance(n, ex.Scalar) and n.name in wanted for n in nodes)


def _with_named_argument(algorithm: Algorithm, argument: ex.Expr, name: str) -> Algorithm:
    """Give ``argument`` the Func ``name``, before the first Func that reads it, in exponentials or beside them."""
    named = Definition(name, tuple(label for label in algorithm.labels if label in ex.free_labels(argument)), argument)

    def change(node: ex.Expr) -> ex.Expr:
        names = matches(argument, node)
        return node if names is None else ex.Access(name, tuple(ex.Label(names[label]) for label in named.labels))

    changed = [replace(d, expr=d.expr.transform(change)) for d in algorithm.definitions]
    first = next(i for i, (old, new) in enumerate(zip(algorithm.definitions, changed)) if old.expr != new.expr)
    return algorithm.with_definitions((*changed[:first], named, *changed[first:]))


def _with_named_products(algorithm: Algorithm, func: str, wanted: tuple[str, ...], rows: tuple[str, ...]) -> Algorithm:
    """Give the products in ``func`` that a parameter of a row scales a Func: they are the weights of its gradient."""
    d = algorithm[func]
    made: list[Definition] = []
    taken = set(algorithm.names)

    def scaled(node: ex.Expr) -> bool:
        own = isinstance(node, ex.Binary) and node.op in "*/" and any(isinstance(n, ex.Dot) for n in node.walk())
        return own and bool(_row_parameters(node, rows, algorithm, wanted))

    dots = {n for node in d.expr.walk() if scaled(node) for n in node.walk() if isinstance(n, ex.Dot)}
    expr = d.expr.transform(lambda n: extracted_func(n, "dot", d, made, taken, algorithm.labels) if n in dots else n)
    return algorithm.with_definitions(tuple(x for own in algorithm.definitions for x in ((*made, replace(d, expr=expr)) if own is d else (own,))))
