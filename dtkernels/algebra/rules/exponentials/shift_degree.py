"""Analyse how an expression changes with a shift ``mu``: the property behind stabilization, online reductions and split-K.

Write a value as ``v * exp(j * mu)`` with ``v`` independent of ``mu``: it has multiplicative degree j. Write it as
``v + j * mu``: additive degree j. exp turns additive into multiplicative degree, log turns it back, products add,
quotients subtract, sums and comparisons need equal degrees. Where no rule applies there is no degree.

mu is indexed: a value that moves with ``mu[x]`` does not move together with one that moves with ``mu[x + 1]``. A sum over x of terms that
move with ``mu[x]`` has no degree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from ....lang import expr as ex
from ....lang.algorithm import Definition


@dataclass(frozen=True)
class Degree:
    """The degree of ``v * exp(times * mu[at])`` or ``v + plus * mu[at]``; both are zero for a value that does not depend on mu.

    ``at`` is None where the degree holds at any index of a Func, above all for mu itself.
    """

    times: Fraction = Fraction(0)
    plus: Fraction = Fraction(0)
    at: tuple[ex.Expr, ...] | None = None

    @property
    def free(self) -> bool:
        return not self.times and not self.plus


FREE = Degree()


def degree_of(d: Definition, known: dict[str, Degree | None]) -> Degree | None:
    """Return the degree of a Func over its own labels, in the form that ``known`` takes: labels are numbered by dimension."""
    found = degree(d.expr, known)
    if found is None or found.free:
        return found
    own = {label: _dimension(i) for i, label in enumerate(d.labels)}
    return replace(found, at=tuple(ex.substitute(i, own, index=True) for i in found.at or ()))


def _dimension(number: int) -> ex.Label:
    return ex.Label(f"#{number}")


def degree(expr: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    """Return the degree of ``expr``; ``known`` has that of each Func (None if it has none, absent if mu does not enter)."""
    match expr:
        case ex.Access(tensor, index):
            return _accessed(known.get(tensor, FREE), index)
        case ex.Unary("-", arg):
            d = degree(arg, known)
            return d and replace(d, plus=-d.plus)
        case ex.Binary("+" | "-" as op, left, right):
            return _sum(degree(left, known), degree(right, known), 1 if op == "+" else -1)
        case ex.Binary("*" | "/" as op, left, right):
            return _product(op, left, right, known)
        case ex.Cast(arg, "fp32") | ex.Reshape(arg, _):
            return degree(arg, known)
        case ex.Call("exp", (arg,)):
            d = degree(arg, known)
            return None if d is None or d.times else _degree(d.plus, 0, d.at)
        case ex.Call("log", (arg,)):
            d = degree(arg, known)
            return None if d is None or d.plus else _degree(0, d.times, d.at)
        case ex.Call("sqrt" | "rsqrt" | "abs" as fn, (arg,)):
            d = degree(arg, known)
            power = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "abs": Fraction(1)}[fn]
            return None if d is None or d.plus else replace(d, times=d.times * power)
        case ex.Call("maximum" | "minimum", (a, b)):
            return _same(degree(a, known), degree(b, known), (a, b))
        case ex.Call("pow", (a, b)) if (exponent := _rational(b)) is not None:
            d = degree(a, known)
            return None if d is None or d.plus else replace(d, times=d.times * exponent)
        case ex.Call("sign", (arg,)):
            d = degree(arg, known)
            return None if d is None or d.plus else FREE
        case ex.Call("where", (condition, a, b)):
            return guarded_shift(expr, known) or _where(condition, a, b, known)
        case ex.Binary(op, left, right) if op in ex.COMPARISONS:
            return _comparison(left, right, known)
        case ex.Reduce("sum", arg, labels):
            d = degree(arg, known)
            return None if d is None or d.plus else _reduced(d, labels)
        case ex.Reduce("max" | "min", arg, labels):
            return _reduced(degree(arg, known), labels)
        case ex.Dot(left, right, labels):
            return _reduced(_product("*", left, right, known), labels)
    below = [degree(c, known) for c in expr.children()]
    return FREE if all(d is not None and d.free for d in below) else None


def shift_dependent_terms(expr: ex.Expr, known: dict[str, Degree | None], shift: Callable[[ex.Expr], ex.Expr]) -> ex.Expr:
    """Apply ``shift`` to those addends of ``expr`` that depend on mu."""
    match expr:
        case ex.Binary("+" | "-", _, _) | ex.Unary("-", _):
            return expr.rebuild(lambda child: shift_dependent_terms(child, known, shift))
    found = degree(expr, known)
    return expr if found is not None and found.free else shift(expr)


def guarded_shift(expr: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    """Match ``where(mu > -inf, mu, 0)``: mu itself, guarded for a row in which nothing is finite."""
    match expr:
        case ex.Call("where", (ex.Binary(">", a, ex.Unary("-", ex.Const(math.inf))), b, ex.Const(0))):
            d = degree(a, known) if a == b and isinstance(a, (ex.Access, ex.Cast)) else None
            return d if d is not None and d.plus and not d.times else None
    return None


def _degree(times: Fraction | int, plus: Fraction | int, at: tuple[ex.Expr, ...] | None) -> Degree:
    """Return a Degree, without an index where mu cancels."""
    return Degree(Fraction(times), Fraction(plus), at) if times or plus else FREE


def _accessed(d: Degree | None, index: tuple[ex.Expr, ...]) -> Degree | None:
    if d is None or d.free:
        return d
    places = {_dimension(i).name: place for i, place in enumerate(index)}
    return replace(d, at=index if d.at is None else tuple(ex.substitute(i, places, index=True) for i in d.at))


def _reduced(d: Degree | None, labels: tuple[str, ...]) -> Degree | None:
    """Return the degree of a reduction: that of its terms, if all of them move with the same element of mu."""
    if d is None or any(ex.free_labels(i) & set(labels) for i in d.at or ()):
        return None
    return d


def _same_shift(a: Degree, b: Degree) -> bool:
    """Return whether at most one of the two moves, or both move with the same element of mu."""
    return a.free or b.free or a.at == b.at


def _sum(a: Degree | None, b: Degree | None, sign: int) -> Degree | None:
    if a is None or b is None or not _same_shift(a, b):
        return None
    if not a.times and not b.times:
        return _degree(0, a.plus + sign * b.plus, b.at if a.free else a.at)
    return a if a == b and not a.plus else None


def _product(op: str, left: ex.Expr, right: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    a, b = degree(left, known), degree(right, known)
    if a is None or b is None or not _same_shift(a, b):
        return None
    if not a.plus and not b.plus:
        return _degree(a.times + (b.times if op == "*" else -b.times), 0, b.at if a.free else a.at)
    for one, other, node in ((a, b, right), (b, a, left)):
        factor = _rational(node)
        if one.plus and not one.times and other.free and factor is not None and (op == "*" or node is right):
            return replace(one, plus=one.plus * factor if op == "*" else one.plus / factor)
    return None


def _rational(node: ex.Expr) -> Fraction | None:
    if isinstance(node, ex.Const) and not isinstance(node.value, bool) and node.value not in (0, float("inf")):
        return Fraction(node.value)
    if isinstance(node, ex.Unary) and node.op == "-":
        inner = _rational(node.arg)
        return None if inner is None else -inner
    return None


def _has_any_degree(node: ex.Expr, *, additive: bool) -> bool:
    """Match constants that have every degree: 0 multiplicatively, plus or minus infinity additively."""
    if additive:
        return node in (ex.INF, ex.NEG_INF)
    return node in (ex.Const(0), ex.Const(0.0))


def _same(a: Degree | None, b: Degree | None, nodes: tuple[ex.Expr, ex.Expr]) -> Degree | None:
    if a is None or b is None:
        return None
    for one, node in ((a, nodes[1]), (b, nodes[0])):
        if _has_any_degree(node, additive=bool(one.plus)):
            return one
    return a if a == b else None


def _where(condition: ex.Expr, a: ex.Expr, b: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    c = degree(condition, known)
    return _same(degree(a, known), degree(b, known), (a, b)) if c is not None and c.free else None


def _comparison(left: ex.Expr, right: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    """Return degree 0 for a comparison whose sides move alike: same degree, or scaled and compared with 0."""
    return FREE if _same(degree(left, known), degree(right, known), (left, right)) is not None else None
