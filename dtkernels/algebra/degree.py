"""How an expression answers to a shift of ``mu``: the question behind stability, streaming and splitting.

Write a value as ``v * exp(j * mu)`` with ``v`` independent of ``mu``: it has multiplicative degree j. Write it as
``v + j * mu``: additive degree j. exp turns additive into multiplicative degree, log turns it back, products add,
quotients subtract, sums and comparisons need equal degrees. Where no rule applies there is no degree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from ..lang import expr as ex


@dataclass(frozen=True)
class Degree:
    """``v * exp(times * mu)`` or ``v + plus * mu``; both zero for a value that does not depend on mu."""

    times: Fraction = Fraction(0)
    plus: Fraction = Fraction(0)

    @property
    def free(self) -> bool:
        return not self.times and not self.plus


FREE = Degree()


def degree(expr: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    """Degree of ``expr``; ``known`` gives that of each Func (None where it has none, absent where mu does not enter)."""
    match expr:
        case ex.Access(tensor, _):
            return known.get(tensor, FREE)
        case ex.Unary("-", arg):
            d = degree(arg, known)
            return d and Degree(d.times, -d.plus)
        case ex.Binary("+" | "-" as op, left, right):
            return _sum(degree(left, known), degree(right, known), 1 if op == "+" else -1)
        case ex.Binary("*" | "/" as op, left, right):
            return _product(op, left, right, known)
        case ex.Cast(arg, "fp32") | ex.Reshape(arg, _):
            return degree(arg, known)
        case ex.Call("exp", (arg,)):
            d = degree(arg, known)
            return None if d is None or d.times else Degree(times=d.plus)
        case ex.Call("log", (arg,)):
            d = degree(arg, known)
            return None if d is None or d.plus else Degree(plus=d.times)
        case ex.Call("maximum" | "minimum", (a, b)):
            return _same(degree(a, known), degree(b, known), (a, b))
        case ex.Call("where", (condition, a, b)):
            return guarded_shift(expr, known) or _where(condition, a, b, known)
        case ex.Binary(op, left, right) if op in ex.COMPARISONS:
            return _comparison(left, right, known)
        case ex.Reduce("sum", arg, _):
            d = degree(arg, known)
            return None if d is None or d.plus else d
        case ex.Reduce("max" | "min", arg, _):
            return degree(arg, known)
        case ex.Dot(left, right, _):
            return _product("*", left, right, known)
    below = [degree(c, known) for c in expr.children()]
    return FREE if all(d is not None and d.free for d in below) else None


def guarded_shift(expr: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    """``where(mu > -inf, mu, 0)``: mu itself, made safe for a row in which nothing is finite."""
    match expr:
        case ex.Call("where", (ex.Binary(">", a, ex.Unary("-", ex.Const(math.inf))), b, ex.Const(0))) if a == b and isinstance(a, (ex.Access, ex.Cast)):
            d = degree(a, known)
            return d if d is not None and d.plus and not d.times else None
    return None


def _sum(a: Degree | None, b: Degree | None, sign: int) -> Degree | None:
    if a is None or b is None:
        return None
    if not a.times and not b.times:
        return Degree(plus=a.plus + sign * b.plus)
    return a if a == b and not a.plus else None


def _product(op: str, left: ex.Expr, right: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    a, b = degree(left, known), degree(right, known)
    if a is None or b is None:
        return None
    if not a.plus and not b.plus:
        return Degree(times=a.times + (b.times if op == "*" else -b.times))
    for one, other, node in ((a, b, right), (b, a, left)):
        factor = _rational(node)
        if one.plus and not one.times and other.free and factor is not None and (op == "*" or node is right):
            return Degree(plus=one.plus * factor if op == "*" else one.plus / factor)
    return None


def _rational(node: ex.Expr) -> Fraction | None:
    if isinstance(node, ex.Const) and not isinstance(node.value, bool) and node.value not in (0, float("inf")):
        return Fraction(node.value)
    if isinstance(node, ex.Unary) and node.op == "-":
        inner = _rational(node.arg)
        return None if inner is None else -inner
    return None


def _fits_any(node: ex.Expr, *, additive: bool) -> bool:
    """Constants that have every degree: 0 multiplicatively, plus or minus infinity additively."""
    if additive:
        return node in (ex.INF, ex.NEG_INF)
    return node in (ex.Const(0), ex.Const(0.0))


def _same(a: Degree | None, b: Degree | None, nodes: tuple[ex.Expr, ex.Expr]) -> Degree | None:
    if a is None or b is None:
        return None
    for one, other, node in ((a, b, nodes[1]), (b, a, nodes[0])):
        if _fits_any(node, additive=bool(one.plus)):
            return one
    return a if a == b else None


def _where(condition: ex.Expr, a: ex.Expr, b: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    c = degree(condition, known)
    return _same(degree(a, known), degree(b, known), (a, b)) if c is not None and c.free else None


def _comparison(left: ex.Expr, right: ex.Expr, known: dict[str, Degree | None]) -> Degree | None:
    """A comparison is unchanged by mu if both sides move alike: same degree, or scaled and held against 0."""
    return FREE if _same(degree(left, known), degree(right, known), (left, right)) is not None else None
