"""Find how a sum changes when the means that its terms are relative to move: the property behind variances in one pass.

A sum of products of two deviations, ``sum (f - p) * (g - q)``, is relative to ``p`` and ``q``. If these are the means of ``f`` and ``g`` over the
same elements, two such sums over ``n`` and ``m`` elements are one, relative to the means over all::

    sum = sum_n + sum_m + (p_m - p_n) * (q_m - q_n) * n * m / (n + m)

Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979. The same holds where only ``f`` is less
its mean: the sum of ``g * (f - p)`` is that of ``(g - q) * (f - p)``. A sum of deviations alone is 0 and needs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..smart_constructors import product
from .center_moments import averaged

MOST = 2  #: deviations that are multiplied


@dataclass(frozen=True)
class Repair:
    """``factor`` times the product of how far the means of ``first`` and of ``second`` lie apart, and of ``n * m / (n + m)``."""

    factor: float
    first: ex.Expr
    second: ex.Expr


@dataclass(frozen=True)
class _Term:
    """A product of a number, of factors without a moving mean, and of deviations: the terms, each less its mean."""

    factor: Fraction = Fraction(1)
    free: tuple[ex.Expr, ...] = ()
    deviations: tuple[ex.Expr, ...] = ()

    def times(self, other: _Term) -> _Term:
        return _Term(self.factor * other.factor, self.free + other.free, self.deviations + other.deviations)


def repairs(terms: ex.Expr, over: tuple[str, ...], moving: frozenset[str], algorithm: Algorithm, inlined: Callable[[ex.Expr], ex.Expr]) -> tuple[Repair, ...] | None:
    """Return what repairs the sum of ``terms`` over ``over`` when the Funcs ``moving`` move; None where they are no means of what they are subtracted from.

    ``inlined`` replaces Funcs that do not move by what they are, so that expressions can be compared.
    """
    found = _Deviations(over, moving, algorithm, inlined).terms(inlined(terms))
    if found is None:
        return None
    result = []
    for term in found:
        inside = tuple(f for f in term.free if ex.free_labels(f) & set(over))
        if len(term.deviations) == MOST and not inside:
            result.append(Repair(float(term.factor), product((*term.free, term.deviations[0])), term.deviations[1]))
        elif len(term.deviations) == 1 and inside:
            result.append(Repair(float(term.factor), product(term.free), term.deviations[0]))
        elif len(term.deviations) == MOST:
            return None
    return tuple(result)


class _Deviations:
    """Expands terms into sums of products of deviations."""

    def __init__(self, over: tuple[str, ...], moving: frozenset[str], algorithm: Algorithm, inlined: Callable[[ex.Expr], ex.Expr]):
        self.over, self.moving, self.algorithm, self.inlined = over, moving, algorithm, inlined

    def terms(self, e: ex.Expr) -> tuple[_Term, ...] | None:
        """Return the addends of ``e``; None if one is not of this form."""
        match e:
            case ex.Const(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf"):
                return (_Term(Fraction(value)),)
        if self._is_free(e):
            return (_Term(free=(e,)),)
        if (deviation := self._deviation(e)) is not None:
            return (deviation,)
        match e:
            case ex.Unary("-", arg):
                return self._multiplied((_Term(Fraction(-1)),), self.terms(arg))
            case ex.Cast(arg, "fp32"):
                return self.terms(arg)
            case ex.Binary("+" | "-" as op, left, right):
                a, b = self.terms(left), self._multiplied((_Term(Fraction(1 if op == "+" else -1)),), self.terms(right))
                return None if a is None or b is None else a + b
            case ex.Binary("*", left, right) | ex.Dot(left, right, _):
                return self._multiplied(self.terms(left), self.terms(right))
            case ex.Binary("/", left, right) if self._is_free(right):
                return self._multiplied(self.terms(left), (_Term(free=(ex.Binary("/", ex.Const(1.0), right),)),))
            case ex.Call("pow", (base, ex.Const(2 | 2.0))):
                found = self.terms(base)
                return self._multiplied(found, found)
        return None

    def _multiplied(self, left: tuple[_Term, ...] | None, right: tuple[_Term, ...] | None) -> tuple[_Term, ...] | None:
        if left is None or right is None:
            return None
        found = tuple(a.times(b) for a in left for b in right)
        return None if any(len(t.deviations) > MOST for t in found) else found

    def _is_free(self, e: ex.Expr) -> bool:
        return not any(a.tensor in self.moving for a in ex.accesses(e))

    def _deviation(self, e: ex.Expr) -> _Term | None:
        """Match terms less their mean, or a mean less its terms."""
        addends = Counter(_addends(e, 1))
        means = [(a, sign) for a, sign in addends if not self._is_free(a)]
        if len(means) != 1 or addends[means[0]] != 1 or not all(map(self._is_here, ex.accesses(means[0][0]))):
            return None
        (mean, sign), rest = means[0], addends - Counter(means)
        terms = averaged(mean, self.over, self.algorithm)
        if terms is None or rest != Counter(_addends(self.inlined(terms), -sign)):
            return None
        return _Term(Fraction(-sign), deviations=(self.inlined(terms),))

    def _is_here(self, access: ex.Access) -> bool:
        """Return whether a moving Func is read at its own element: the mean of another row moves otherwise."""
        return access.tensor not in self.moving or access.index == tuple(map(ex.Label, self.algorithm[access.tensor].labels))


def _addends(e: ex.Expr, sign: int) -> list[tuple[ex.Expr, int]]:
    match e:
        case ex.Binary("+" | "-" as op, left, right):
            return _addends(left, sign) + _addends(right, sign if op == "+" else -sign)
        case ex.Unary("-", arg):
            return _addends(arg, -sign)
        case ex.Cast(arg, "fp32"):
            return _addends(arg, sign)
    return [(e, sign)]
