"""Differentiate expressions: the contribution to each accessed element, given the adjoint of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...lang import expr as ex
from ...lang.errors import DTError
from ...lang.parser import parse_expression
from ..smart_constructors import ONE, ZERO, add, divide, is_constant, is_length, is_zero, multiply, negate, simplify, where


@dataclass(frozen=True)
class Contribution:
    """A summand of the adjoint of ``tensor[index]``: ``adjoint``, summed over every label of ``labels`` that ``index`` does not name."""

    tensor: str
    index: tuple[ex.Expr, ...]
    adjoint: ex.Expr
    labels: tuple[str, ...]


def contributions(expr: ex.Expr, adjoint: ex.Expr, labels: tuple[str, ...], value: ex.Expr | None = None) -> Iterator[Contribution]:
    """Yield the contribution to each access and scalar in ``expr``, where ``expr`` over ``labels`` has the adjoint ``adjoint``.

    ``value`` is an expression for the value of ``expr``, if there is one: ``tanh(a)`` then gives ``(1 - value * value)``.
    A scalar is a tensor without index. Ties: a maximum against a constant selects the constant; between two values the adjoint is
    halved; a maximum over a row splits it evenly. floor and comparisons contribute nothing.
    """
    if is_zero(adjoint):
        return
    match expr:
        case ex.Access(tensor, index):
            yield Contribution(tensor, index, adjoint, labels)
        case ex.Scalar(name):
            yield Contribution(name, (), adjoint, labels)
        case ex.Unary("-", arg):
            yield from contributions(arg, negate(adjoint), labels, value and negate(value))
        case ex.Binary(op, left, right) if op in "+-*/":
            for side, part, known in _arithmetic(op, left, right, adjoint, value):
                yield from contributions(side, part, labels, known)
        case ex.Call("where", (ex.Binary("==", empty, ex.Const(0)), ex.Const(0), kept)) if is_length(empty):
            yield from contributions(kept, adjoint, labels, value)  # over nothing there is nothing to contribute
        case ex.Call(fn, args):
            for arg, part in zip(args, _function(fn, args, adjoint, expr if value is None else value)):
                yield from contributions(arg, part, labels)
        case ex.Cast(_, dtype) if dtype in ex.INTEGERS:
            return
        case ex.Cast(_, dtype) if dtype in ex.FLOAT8:
            raise DTError("a cast to float8 has no gradient", found=str(expr), allowed="a gradient of the value before the cast, in a program of its own", at=expr.pos)
        case ex.Write():
            raise DTError("a write has no gradient", found=str(expr), allowed="torch.no_grad()", at=expr.pos)
        case ex.Cast(arg, _) | ex.Reshape(arg, _):
            yield from contributions(arg, adjoint, labels)
        case ex.Reduce("sum", arg, over):
            yield from contributions(arg, adjoint, labels + over)
        case ex.Reduce("max" | "min", arg, over):
            yield from contributions(arg, _extremum(expr, adjoint, expr if value is None else value), labels + over)
        case ex.Reduce("prod", arg, over):
            yield from contributions(arg, _factor(expr, adjoint, expr if value is None else value), labels + over)
        case ex.Reduce(kind, _, _) if kind in ex.PLACES:
            return
        case ex.Dot(left, right, over):
            yield from contributions(left, multiply(adjoint, right), labels + over)
            yield from contributions(right, multiply(adjoint, left), labels + over)
        case ex.Const() | ex.Label() | ex.Len() | ex.Param() | ex.Binary() | ex.Unary():
            return
        case _:
            raise DTError("no derivative", found=str(expr), at=expr.pos)


def _arithmetic(op: str, left: ex.Expr, right: ex.Expr, adjoint: ex.Expr, value: ex.Expr | None):
    """Yield (operand, its adjoint, its value if known) for a sum, difference, product or quotient."""
    if op in "+-":
        return (left, adjoint, None), (right, adjoint if op == "+" else negate(adjoint), None)
    if op == "*":
        return (left, multiply(adjoint, right), None), (right, multiply(adjoint, left), None)
    quotient = value if value is not None else ex.Binary("/", left, right)
    return (left, divide(adjoint, right), None), (right, negate(divide(multiply(adjoint, quotient), right)), None)


def _function(fn: str, args: tuple[ex.Expr, ...], adjoint: ex.Expr, value: ex.Expr) -> tuple[ex.Expr, ...]:
    """Return the adjoint of each argument of ``fn(args) = value``."""
    a = args[0]
    match fn:
        case "exp":
            factor: ex.Expr = value
        case "exp2":
            factor = multiply(ex.Const(math.log(2)), value)
        case "log":
            return (divide(adjoint, a),)
        case "log2":
            return (divide(adjoint, multiply(ex.Const(math.log(2)), a)),)
        case "sqrt":
            return (divide(multiply(ex.Const(0.5), adjoint), value),)
        case "rsqrt":
            factor = negate(multiply(ex.Const(0.5), multiply(value, multiply(value, value))))
        case "sigmoid":
            factor = multiply(value, ex.Binary("-", ONE, value))
        case "tanh":
            factor = ex.Binary("-", ONE, multiply(value, value))
        case "erf":
            factor = multiply(ex.Const(2 / math.sqrt(math.pi)), ex.Call("exp", (negate(multiply(a, a)),)))
        case "abs":
            return (where(ex.Binary(">", a, ZERO), adjoint, where(ex.Binary("<", a, ZERO), negate(adjoint), ZERO)),)
        case "maximum" | "minimum":
            return _larger(">" if fn == "maximum" else "<", args, adjoint)
        case "where":
            return ZERO, where(a, adjoint, ZERO), where(a, ZERO, adjoint)
        case _:
            return _by_table(fn, args, adjoint, value)
    return (multiply(adjoint, factor),)


def _by_table(fn: str, args: tuple[ex.Expr, ...], adjoint: ex.Expr, value: ex.Expr) -> tuple[ex.Expr, ...]:
    """Return the adjoint of each argument by the derivatives that ``lang/expr.py`` has as text."""
    known = {**dict(zip("abc", args)), "v": value}

    def partial(text: str) -> ex.Expr:
        factor = simplify(parse_expression(text).transform(lambda n: known[n.name] if isinstance(n, ex.Name) else n))
        match factor:
            case ex.Call("where", (c, a, b)) if is_zero(a) or is_zero(b):  # the branch that is not taken may be infinite
                return where(c, multiply(adjoint, a), multiply(adjoint, b))
        return multiply(adjoint, factor)

    if not (rows := ex.FUNCTIONS[fn].derivative):
        raise DTError("no derivative", found=fn)
    return tuple(partial(text) for text in rows)


def _larger(wins: str, args: tuple[ex.Expr, ...], adjoint: ex.Expr) -> tuple[ex.Expr, ...]:
    a, b = args
    if is_constant(a) or is_constant(b):
        return where(ex.Binary(wins, a, b), adjoint, ZERO), where(ex.Binary(wins, b, a), adjoint, ZERO)
    half = multiply(ex.Const(0.5), adjoint)
    tie = ex.Binary("==", a, b)
    return tuple(where(ex.Binary(wins, x, y), adjoint, where(tie, half, ZERO)) for x, y in ((a, b), (b, a)))


def _factor(reduction: ex.Reduce, adjoint: ex.Expr, value: ex.Expr) -> ex.Expr:
    """Multiply the adjoint of a product by that of its other terms: one zero leaves a gradient to itself alone, two leave none."""
    arg, is_zero_term = reduction.arg, ex.Binary("==", reduction.arg, ZERO)
    zeros = ex.Reduce("sum", where(is_zero_term, ONE, ZERO), reduction.labels)
    others = ex.Reduce("prod", where(is_zero_term, ONE, arg), reduction.labels)
    alone = where(ex.Binary("==", zeros, ONE), others, ZERO)
    return multiply(adjoint, where(is_zero_term, alone, where(ex.Binary("==", zeros, ZERO), divide(value, arg), ZERO)))


def _extremum(reduction: ex.Reduce, adjoint: ex.Expr, value: ex.Expr) -> ex.Expr:
    """Split the adjoint of a row's maximum evenly among the elements that equal it."""
    is_it = ex.Binary("==", reduction.arg, value)
    count = ex.Reduce("sum", where(is_it, ONE, ZERO), reduction.labels)
    return where(is_it, divide(adjoint, count), ZERO)


__all__ = ["Contribution", "add", "contributions"]
