"""A program in float64 by torch operations, so that torch.autograd gives gradients that owe nothing to the compiler's derivation.

Conventions as in docs/language.md: at a tie of ``maximum`` with a constant the gradient is 0, between two values it is
halved, and a maximum over a row splits ties evenly.
"""

from __future__ import annotations

import math

import torch
from oracle import extents

from dtkernels.lang import Algorithm
from dtkernels.lang import expr as ex

Value = tuple[tuple[str, ...], torch.Tensor]  #: labels, and a tensor with an axis for each


class Evaluation:
    """``inputs`` and ``scalars`` are tensors; those whose gradients are wanted require them, in float64."""

    def __init__(self, algorithm: Algorithm, inputs: dict[str, torch.Tensor], scalars: dict[str, torch.Tensor], params: dict[str, int | bool]):
        self.algorithm, self.inputs, self.scalars = algorithm, inputs, scalars
        self.params = {**dict(algorithm.params), **params}
        self.sizes = extents(algorithm, {name: tuple(t.shape) for name, t in inputs.items()})
        self.done: dict[str, Value] = {}

    def run(self) -> dict[str, torch.Tensor]:
        """Every Func, dimensions in the order of its labels."""
        for d in self.algorithm.definitions:
            shape = tuple(self.sizes[label] for label in d.labels)
            self.done[d.name] = d.labels, number(spread(self.value(d.expr), d.labels)).expand(shape)
        return {name: value for name, (_, value) in self.done.items()}

    def value(self, expr: ex.Expr) -> Value:
        match expr:
            case ex.Const(value):
                return (), torch.tensor(value if isinstance(value, bool) else float(value), dtype=None if isinstance(value, bool) else torch.float64)
            case ex.Param(name):
                return self.value(ex.Const(self.params[name]))
            case ex.Scalar(name):
                return (), self.scalars[name]
            case ex.Len(label):
                return (), torch.tensor(float(self.sizes[label]), dtype=torch.float64)
            case ex.Label(name):
                return (name,), torch.arange(self.sizes[name], dtype=torch.float64)
            case ex.Reshape(arg, _) | ex.Cast(arg, _):
                return self.value(arg)
            case ex.Access(tensor, index):
                return self.access(*self.done.get(tensor, ((), self.inputs.get(tensor)))[1:], index)
            case ex.Unary("-", arg):
                labels, v = self.value(arg)
                return labels, -number(v)
            case ex.Unary("not", arg):
                labels, v = self.value(arg)
                return labels, ~truth(v)
            case ex.Binary(op, left, right):
                return self.elementwise(op, (left, right))
            case ex.Call(fn, args):
                return self.elementwise(fn, args)
            case ex.Reduce(kind, arg, labels):
                return self.reduce(kind, self.value(arg), labels)
            case ex.Dot(left, right, labels):
                return self.reduce("sum", self.elementwise("*", (left, right)), labels)
        raise TypeError(type(expr).__name__)

    def access(self, source: torch.Tensor, index: tuple[ex.Expr, ...]) -> Value:
        where = [self.index(i) for i in index]
        labels = tuple(dict.fromkeys(label for own, _ in where for label in own))
        shape = tuple(self.sizes[label] for label in labels)
        at = [spread(i, labels).expand(shape) for i in where]
        inside = torch.ones(shape, dtype=torch.bool)
        for i, size in zip(at, source.shape):
            inside = inside & (i >= 0) & (i < size)
        if source.numel() == 0:
            return labels, torch.zeros(shape, dtype=torch.float64)
        found = source[tuple(i.clamp(0, size - 1) for i, size in zip(at, source.shape))]
        return labels, torch.where(inside, found, torch.zeros_like(found))

    def index(self, expr: ex.Expr) -> Value:
        match expr:
            case ex.Binary(op, left, right):
                labels, (a, b) = together([self.index(left), self.index(right)])
                fn = {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.floor_divide, "%": torch.remainder}[op]
                return labels, fn(a, b)
            case ex.Unary(_, arg):
                labels, v = self.index(arg)
                return labels, -v
        labels, v = self.value(expr)
        return labels, v.detach().long()

    def elementwise(self, fn: str, args: tuple[ex.Expr, ...]) -> Value:
        labels, values = together([self.value(a) for a in args])
        constant = [isinstance(a, ex.Const) for a in args]
        return labels, apply(fn, values, constant)

    def reduce(self, kind: str, value: Value, over: tuple[str, ...]) -> Value:
        kept = tuple(label for label in value[0] if label not in over)
        if kind in ("any", "all"):
            value = value[0], truth(value[1])
        v = number(spread(value, kept + over)).expand(*[self.sizes[label] for label in kept + over])
        v = v.reshape(*v.shape[: len(kept)], math.prod(v.shape[len(kept) :]))
        match kind:
            case "any" | "all":
                return kept, getattr(v.bool(), kind)(-1)
            case "prod":
                return kept, v.prod(-1)
            case "sum":
                return kept, v.sum(-1)
            case "mean":
                return kept, v.sum(-1) / v.shape[-1] if v.shape[-1] else v.sum(-1) * math.nan
        if not v.shape[-1]:
            return kept, v.sum(-1) + (-math.inf if kind == "max" else math.inf)
        return kept, v.amax(-1) if kind == "max" else v.amin(-1)


def spread(value: Value, want: tuple[str, ...]) -> torch.Tensor:
    """Axes in the order of ``want``, of length 1 where a label is missing."""
    have, v = value
    v = v.permute([have.index(label) for label in want if label in have])
    return v[tuple(slice(None) if label in have else None for label in want)]


def together(values: list[Value]) -> tuple[tuple[str, ...], list[torch.Tensor]]:
    labels = tuple(dict.fromkeys(label for own, _ in values for label in own))
    return labels, [spread(v, labels) for v in values]


def number(v: torch.Tensor) -> torch.Tensor:
    return v.double()


def truth(v: torch.Tensor) -> torch.Tensor:
    return v if v.dtype == torch.bool else v != 0


_UNARY = {
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "abs": torch.abs,
    "erf": torch.erf, "erfc": torch.erfc, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "sin": torch.sin, "cos": torch.cos, "log1p": torch.log1p, "expm1": torch.expm1,
    "atan": torch.atan, "asin": torch.asin, "acos": torch.acos, "detach": torch.detach,
    **{name: lambda v, name=name: getattr(torch, name)(v.detach()) for name in ("floor", "ceil", "round", "trunc", "sign", "isnan", "isinf", "isfinite")},
}  # fmt: skip
_COMPARE = {"<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne}


def apply(fn: str, values: list[torch.Tensor], constant: list[bool]) -> torch.Tensor:
    if fn in ("and", "or"):
        a, b = map(truth, values)
        return a & b if fn == "and" else a | b
    if fn == "where":
        c, a, b = values
        if a.dtype == b.dtype == torch.bool:
            return torch.where(truth(c), a, b)
        return torch.where(truth(c), number(a), number(b))
    values = [number(v) for v in values]
    if fn in _UNARY:
        return _UNARY[fn](values[0])
    if fn == "clamp":
        return torch.clamp(*torch.broadcast_tensors(*values))
    a, b = values
    if fn == "pow":
        return torch.pow(a, b)
    if fn in _COMPARE:
        return _COMPARE[fn](a.detach(), b.detach())
    if fn in ("maximum", "minimum"):
        if any(constant):
            a, b = (a, b) if constant[1] else (b, a)
            kept = a.detach() > b.detach() if fn == "maximum" else a.detach() < b.detach()
            return torch.where(kept | a.isnan(), a, b)
        return torch.maximum(a, b) if fn == "maximum" else torch.minimum(a, b)
    return {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div, "%": torch.remainder}[fn](a, b)
