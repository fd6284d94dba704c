"""Center moments: rewrite a mean of products minus the product of means as the mean of products of deviations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..smart_constructors import ZERO, add, negate, simplify
from .canonicalize import inline_access

SUMS = 2  #: most sums in a product of means


def center_moments(algorithm: Algorithm, outputs: tuple[str, ...], inline: frozenset[str] | None = None) -> Algorithm:
    """Compute variances and covariances from deviations, so that a large mean does not cancel their digits.

    Before: ``m[x] = rsum(A[x, c], c) / len(c);  v[x] = rsum(A[x, c] * A[x, c], c) / len(c) - m[x] * m[x];``
    After:  ``m[x] = rsum(A[x, c], c) / len(c);  v[x] = rsum((A[x, c] - m[x]) * (A[x, c] - m[x]), c) / len(c);``

    Exact: ``E[f * g] - E[f] * E[g] = E[(f - E[f]) * (g - E[g])]`` for means over the same labels, and any multiple of it;
    ``rsum(f * g, c) - rsum(f, c) * rsum(g, c) / len(c)`` is one. In floating point the left side has the rounding errors of
    ``E[f * g]``, however small the difference is. Other terms may stand between the two (``m2[x] + eps - m[x] * m[x]``). Funcs in ``inline`` (all, if None) are looked through where the mean of
    products stands in one; those that nothing uses any more go.
    """
    definitions = tuple(replace(d, expr=d.expr.transform(lambda node: _centered(node, algorithm, inline))) for d in algorithm.definitions)
    if definitions == algorithm.definitions:
        return algorithm
    return replace(algorithm, definitions=definitions).limited_to(outputs)


def cancel_deviations(algorithm: Algorithm) -> Algorithm:
    """Drop sums of deviations from the mean, which are 0.

    Before: ``m[x] = rsum(A[x, c], c) / len(c);  f[x] = g[x] - rsum(A[x, c] - m[x], c);``
    After:  ``m[x] = rsum(A[x, c], c) / len(c);  f[x] = g[x];``

    The gradient of a variance contains such a sum, from its mean. In floating point it is only the rounding error of ``m``.
    """
    changed = {d.name: d.expr.transform(lambda node: ZERO if _is_zero_sum(node, algorithm) else node) for d in algorithm.definitions}
    return algorithm.with_definitions(
        tuple(d if changed[d.name] == d.expr else replace(d, expr=simplify(changed[d.name])) for d in algorithm.definitions)
    )


def _is_zero_sum(node: ex.Expr, algorithm: Algorithm) -> bool:
    match node:
        case ex.Reduce("sum", ex.Binary("-", terms, ex.Access(tensor, _) as mean), over) if tensor in algorithm:
            return averaged(mean, over, algorithm) == terms
    return False


def averaged(mean: ex.Expr, over: tuple[str, ...], algorithm: Algorithm) -> ex.Expr | None:
    """Return the terms of which ``mean`` is the mean over the labels ``over``, looking through Funcs; None if it is no such mean."""
    found = _monomial(mean, algorithm)
    one = _Monomial(lengths=tuple(sorted((label, -1) for label in over)))
    if found is None or len(found.sums) != 1 or ex.free_labels(mean) & set(over) or not _same_multiple(found, one, algorithm):
        return None
    (total,) = found.sums
    if not isinstance(total, ex.Reduce) or len(total.labels) != len(over) or ex.free_labels(total) & set(over):
        return None
    return ex.substitute(total.arg, dict(zip(total.labels, map(ex.Label, over))))


@dataclass(frozen=True)
class _Monomial:
    """A rational factor times powers of extents times at most ``SUMS`` sums."""

    factor: Fraction = Fraction(1)
    lengths: tuple[tuple[str, int], ...] = ()
    sums: tuple[ex.Expr, ...] = ()

    def times(self, other: _Monomial, power: int = 1) -> _Monomial:
        lengths = Counter(dict(self.lengths))
        lengths.update({label: n * power for label, n in other.lengths})
        kept = tuple(sorted((label, n) for label, n in lengths.items() if n))
        return _Monomial(self.factor * other.factor**power, kept, self.sums + other.sums)


def _monomial(e: ex.Expr, algorithm: Algorithm, inline: frozenset[str] | None = None) -> _Monomial | None:
    """Return ``e`` as a monomial, looking through Funcs; None if it is not one."""
    match e:
        case ex.Const(value) if not isinstance(value, bool) and value and math.isfinite(value):
            return _Monomial(Fraction(value))
        case ex.Len(label):
            return _Monomial(lengths=((label, 1),))
        case ex.Reduce("sum", _, _) | ex.Dot():
            return _Monomial(sums=(e,))
        case ex.Access(tensor, _) if tensor in algorithm and (inline is None or tensor in inline):
            body = inline_access(e, algorithm)
            return None if body is None else _monomial(body, algorithm, inline)
        case ex.Binary("*" | "/" as op, left, right):
            if (a := _monomial(left, algorithm, inline)) is None or (b := _monomial(right, algorithm, inline)) is None:
                return None
            if op == "/" and b.sums or len(a.sums) + len(b.sums) > SUMS:
                return None
            return a.times(b, 1 if op == "*" else -1)
    return None


def _centered(node: ex.Expr, algorithm: Algorithm, inline: frozenset[str] | None) -> ex.Expr:
    """Rewrite a mean of products and a product of means among the terms of a sum, in any order: ``eps + m2[x] - m[x] * m[x]``."""
    if not (isinstance(node, ex.Binary) and node.op in "+-"):
        return node
    terms = _signed_terms(node)
    for i, (sign, products) in enumerate(terms):
        for j, (other, means) in enumerate(terms):
            if sign != other and (found := _deviations(products, means, algorithm, inline)) is not None:
                left = [(s, found if at == i else e) for at, (s, e) in enumerate(terms) if at != j]
                return reduce(lambda total, term: add(total, term[1] if term[0] > 0 else negate(term[1])), left, ZERO)  # type: ignore[arg-type,return-value]
    return node


def _signed_terms(e: ex.Expr, sign: int = 1) -> list[tuple[int, ex.Expr]]:
    """Return the terms of sums and differences, each with 1 or -1."""
    match e:
        case ex.Binary("+" | "-" as op, a, b):
            return _signed_terms(a, sign) + _signed_terms(b, sign if op == "+" else -sign)
        case ex.Unary("-", a):
            return _signed_terms(a, -sign)
    return [(sign, e)]


def _deviations(moment_of: ex.Expr, means_of_both: ex.Expr, algorithm: Algorithm, inline: frozenset[str] | None) -> ex.Expr | None:
    """Return a mean of products less a product of means as that of deviations; None if the two are not of that form."""
    products, means = _monomial(moment_of, algorithm, inline), _monomial(means_of_both, algorithm)
    if products is None or means is None or len(products.sums) != 1 or len(means.sums) != 2:
        return None
    moment, over = products.sums[0], products.sums[0].labels  # type: ignore[attr-defined]
    count = _Monomial(lengths=tuple((label, 1) for label in over))
    if not _same_multiple(products.times(count, -1), means, algorithm):
        return None
    for f, g in _factors(moment, algorithm, inline):
        for first, second in (means.sums, means.sums[::-1]):
            if _is_sum_of(first, f, over) and _is_sum_of(second, g, over):
                means_of = [_mean(s, over, means_of_both, algorithm) for s in (first, second)]  # type: ignore[arg-type]
                return _sum_of_deviations(products, moment, (f, g), means_of)  # type: ignore[arg-type]
    return None


def _same_multiple(a: _Monomial, b: _Monomial, algorithm: Algorithm) -> bool:
    """Return whether two monomials have the same factor and the same extents; labels of one dimension have one extent."""

    def powers(m: _Monomial) -> dict[str, int]:
        found: Counter[str] = Counter()
        for label, n in m.lengths:
            found[min(algorithm.tied_labels(label))] += n
        return {label: n for label, n in found.items() if n}

    return a.factor == b.factor and powers(a) == powers(b)


def _factors(moment: ex.Expr, algorithm: Algorithm, inline: frozenset[str] | None) -> Iterator[tuple[ex.Expr, ex.Expr]]:
    """Yield the two factors of the terms of a sum."""
    if isinstance(moment, ex.Dot):
        yield moment.left, moment.right
    elif isinstance(moment, ex.Reduce):
        terms: ex.Expr | None = moment.arg
        while isinstance(terms, ex.Access) and terms.tensor in algorithm and (inline is None or terms.tensor in inline):
            terms = inline_access(terms, algorithm)
        if isinstance(terms, ex.Binary) and terms.op == "*":
            yield terms.left, terms.right


def _is_sum_of(total: ex.Expr, terms: ex.Expr, over: tuple[str, ...]) -> bool:
    """Return whether ``total`` is the sum of ``terms`` over ``over``, up to the names of these labels."""
    if not isinstance(total, ex.Reduce) or len(total.labels) != len(over) or ex.free_labels(total) & set(over):
        return False
    return ex.substitute(total.arg, dict(zip(total.labels, map(ex.Label, over)))) == terms


def _mean(total: ex.Reduce, over: tuple[str, ...], text: ex.Expr, algorithm: Algorithm) -> ex.Expr:
    """Return the mean as an element of a Func that ``text`` reads, if it reads one."""
    mean = _Monomial(lengths=tuple(sorted((label, -1) for label in over)), sums=(total,))
    for access in ex.accesses(text):
        if access.tensor in algorithm and _monomial(access, algorithm) == mean:
            return access
    found: ex.Expr = total
    for label in over:
        found = ex.Binary("/", found, ex.Len(label))
    return found


def _sum_of_deviations(products: _Monomial, moment: ex.Reduce | ex.Dot, terms: tuple[ex.Expr, ex.Expr], means: list[ex.Expr]) -> ex.Expr:
    """Return the multiple of a sum that ``products`` describes, with ``terms`` replaced by their deviations from ``means``."""
    left, right = (ex.Binary("-", term, mean) for term, mean in zip(terms, means))
    if isinstance(moment, ex.Dot):
        result: ex.Expr = replace(moment, left=left, right=right)
    else:
        result = replace(moment, arg=ex.Binary("*", left, right))
    top, bottom = products.factor.numerator, products.factor.denominator
    for op, power, number in (("*", 1, top), ("/", -1, bottom)):
        if number != 1:
            result = ex.Binary(op, result, ex.Const(number))
        for label, n in products.lengths:
            for _ in range(n * power):
                result = ex.Binary(op, result, ex.Len(label))
    return result
