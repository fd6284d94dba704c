"""Count negative positions from the end, as indexing does in torch, where a position may be negative."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from ...lang import expr as ex
from ..builder import Builder
from ..values import Size

Bounds = tuple[Any, Any]  #: the least and the largest value, as sizes; None where unknown
UNKNOWN: Bounds = (None, None)
FAR = 2**31 - 1  #: what positions of labels are below; rounded down, a quotient by it is -1 of negative ones and 0 of others
SIGN, WIDE_SIGN = 31, 63  #: a shift that leaves -1 of negative numbers and 0 of others; the second for int64, since a shift by all 32 bits has no defined result


def from_the_end(b: Builder, expr: ex.Expr, size: Any) -> ex.Expr:
    """Return a position along a dimension: a negative one plus ``size``. What is outside on either side stays outside."""
    low, high = bounds(b, expr, {})
    if low is not None and b.sizes.never_negative(low):
        return expr
    whole = b.number(size)
    if low is not None and low == high:
        return b.number(b.sizes.of(low + size))
    if high is not None and b.sizes.never_negative(-1 - high):
        return ex.Binary("+", expr, whole)
    if _inside(b, low, high, size) and not any(isinstance(n, (ex.Access, ex.Scalar)) for n in expr.walk()):
        return ex.Binary("%", expr, whole)  # of labels alone: gradients know its inverse
    if any(isinstance(n, ex.Binary) and n.op in ("/", "//") for n in expr.walk()):  # in an index both are "/", which bits are not taken of
        return ex.Binary("-", expr, ex.Binary("*", ex.Binary("//", expr, ex.Const(FAR)), whole))
    sign = ex.Binary(">>", expr, ex.Const(WIDE_SIGN if _wide(b, expr) else SIGN))
    return ex.Binary("+", expr, ex.Binary("&", sign, whole))


def _inside(b: Builder, low: Any, high: Any, size: Any) -> bool:
    """Tell whether a position is an element's, from either end."""
    return None not in (low, high) and b.sizes.never_negative(low + size) and b.sizes.never_negative(size - 1 - high)


def _wide(b: Builder, expr: ex.Expr) -> bool:
    """Tell whether a position is made of tensors of int64."""
    types = {known.name: known.source.dtype for known in b.inputs.values()}
    found = {types.get(n.tensor if isinstance(n, ex.Access) else n.name) for n in expr.walk() if isinstance(n, (ex.Access, ex.Scalar))}
    return found == {torch.int64}


def bounds(b: Builder, expr: ex.Expr, funcs: dict[str, Bounds]) -> Bounds:
    """Return the least and the largest value that integer arithmetic can have. ``funcs``: those of Funcs, as far as they are known."""
    match expr:
        case ex.Const(bool()):
            return sympy.Integer(0), sympy.Integer(1)
        case ex.Const(int() as value):
            return sympy.Integer(value), sympy.Integer(value)
        case Size(value):
            return value, value
        case ex.Label():
            return sympy.Integer(0), _last(b, expr.index)  # type: ignore[attr-defined]
        case ex.Access(name, _) | ex.Scalar(name):
            if name not in funcs:
                funcs[name] = _of_tensor(b, name, funcs)
            return funcs[name]
        case ex.Reduce(kind, arg, labels, _):
            return _of_reduction(b, kind, bounds(b, arg, funcs), [_last(b, b.bound[n]) for n in labels])
        case ex.Cast(arg, word) if word in ("int32", "int64"):
            return bounds(b, arg, funcs)
        case ex.Call("where", (_, p, q)):
            return _of_choice(b, bounds(b, p, funcs), bounds(b, q, funcs))
        case ex.Unary("-", arg):
            return _negative(bounds(b, arg, funcs))
        case ex.Binary(op, p, q):
            return _of_operator(b, op, bounds(b, p, funcs), bounds(b, q, funcs))
    return UNKNOWN


def _last(b: Builder, index: Any) -> Any:
    return b.sizes.of(index.axis.root().size - 1)


def _of_tensor(b: Builder, name: str, funcs: dict[str, Bounds]) -> Bounds:
    """Return the bounds of a Func's elements, or of an input's by its dtype."""
    definition = next((d for d in b.definitions if d.name == name), None)
    if definition is not None:
        return bounds(b, definition.expr, funcs)
    dtype = next(known.source.dtype for known in b.inputs.values() if known.name == name)
    return (sympy.Integer(0), None) if dtype in (torch.uint8, torch.bool) else UNKNOWN


def _of_reduction(b: Builder, kind: str, terms: Bounds, lasts: list[Any]) -> Bounds:
    if kind in ex.PLACES:
        return sympy.Integer(0), lasts[0] if len(lasts) == 1 else None
    if kind in ("max", "min"):
        return terms
    return (sympy.Integer(0) if kind == "sum" and _positive(b, terms) else None), None


def _of_choice(b: Builder, p: Bounds, q: Bounds) -> Bounds:
    """Return bounds that hold for either."""
    low, high = None, None
    if None not in (p[0], q[0]):
        low = p[0] if b.sizes.never_negative(q[0] - p[0]) else q[0] if b.sizes.never_negative(p[0] - q[0]) else None
        low = sympy.Integer(0) if low is None and _positive(b, p) and _positive(b, q) else low
    if None not in (p[1], q[1]):
        high = p[1] if b.sizes.never_negative(p[1] - q[1]) else q[1] if b.sizes.never_negative(q[1] - p[1]) else None
    return low, high


def _of_operator(b: Builder, op: str, p: Bounds, q: Bounds) -> Bounds:
    if op == "+":
        return _sum(p[0], q[0]), _sum(p[1], q[1])
    if op == "-":
        return _of_operator(b, "+", p, _negative(q))
    first, second = _positive(b, p), _positive(b, q)
    if op == "%" and second:
        return sympy.Integer(0), None if q[1] is None else q[1] - 1
    if op == "*" and first and second:
        return p[0] * q[0], None if None in (p[1], q[1]) else p[1] * q[1]
    if op in ("//", "/", ">>") and first and second:
        return sympy.Integer(0), p[1]
    if op == "&" and (first or second):
        return sympy.Integer(0), p[1] if first else q[1]
    return (sympy.Integer(0), None) if op in ("|", "^", "<<") and first and second else UNKNOWN


def _positive(b: Builder, one: Bounds) -> bool:
    return one[0] is not None and b.sizes.never_negative(one[0])


def _negative(one: Bounds) -> Bounds:
    return None if one[1] is None else -one[1], None if one[0] is None else -one[0]


def _sum(p: Any, q: Any) -> Any:
    return None if p is None or q is None else p + q
