"""Represent expressions of the algorithm: frozen values that print as DT text.

Nodes carry their source position for error messages. Positions do not affect equality: ``parse(str(e)) == e``. Labels, scalars and
parameters are distinguished after the whole program is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

from .errors import Position

#: name -> number of arguments; all functions are elementwise
FUNCTIONS = {
    "exp": 1, "exp2": 1, "log": 1, "log2": 1, "sqrt": 1, "rsqrt": 1, "abs": 1, "erf": 1, "floor": 1,
    "sigmoid": 1, "tanh": 1, "maximum": 2, "minimum": 2, "where": 3,
}  # fmt: skip
#: reductions: DT name -> kind
REDUCTIONS = {"rsum": "sum", "rmax": "max", "rmin": "min", "rmean": "mean"}
REDUCTION_NAMES = {kind: name for name, kind in REDUCTIONS.items()}
#: dtypes that a program may cast to: DT name -> torch name
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
#: binary operator -> precedence (higher binds tighter)
PRECEDENCE = {"or": 1, "and": 2, **dict.fromkeys(COMPARISONS, 4), "+": 5, "-": 5, "*": 6, "/": 6, "%": 6}
NOT_PRECEDENCE, NEGATE_PRECEDENCE, ATOM = 3, 7, 9


def _field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; cached, unlike ``dataclasses.fields``."""
    return tuple(f.name for f in fields(kind))


#: ``_field_names``, remembered: ``fields`` makes its list anew each time
field_names: Callable[[type], tuple[str, ...]] = cache(_field_names)


@dataclass(frozen=True)
class Expr:
    """The base class of expressions."""

    pos: Position | None = field(default=None, compare=False, repr=False, kw_only=True)

    def children(self) -> tuple[Expr, ...]:
        """Return the direct subexpressions."""
        return self._children

    @cached_property
    def _children(self) -> tuple[Expr, ...]:
        found: list[Expr] = []
        for name in field_names(type(self)):
            value = getattr(self, name)
            if isinstance(value, Expr):
                found.append(value)
            elif isinstance(value, tuple):
                found += [v for v in value if isinstance(v, Expr)]
        return tuple(found)

    def walk(self) -> Iterator[Expr]:
        """Yield this node and all nodes below it in preorder."""
        return iter(self._nodes)

    @cached_property
    def _nodes(self) -> tuple[Expr, ...]:
        """The nodes of ``walk``. Cached, since rules walk the same frozen expressions repeatedly."""
        return (self, *(node for child in self._children for node in child._nodes))

    @cached_property
    def _accesses(self) -> tuple[Access, ...]:
        return tuple(node for node in self._nodes if isinstance(node, Access))

    @cached_property
    def _free_labels(self) -> frozenset[str]:
        if isinstance(self, Label):
            return frozenset({self.name})
        below = frozenset[str]().union(*(c._free_labels for c in ((self.arg,) if isinstance(self, Reshape) else self._children)))
        return below - frozenset(self.labels) if isinstance(self, (Reduce, Dot)) else below

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields alone, without cached values."""
        return {name: getattr(self, name) for name in field_names(type(self))}

    def rebuild(self, change: Callable[[Expr], Expr]) -> Expr:
        """Apply ``change`` to each direct child. Returns the same object, with its caches, where no child changes."""
        if not self._children:
            return self
        new: dict[str, Any] = {}
        for name in field_names(type(self)):
            value = getattr(self, name)
            if isinstance(value, Expr):
                if (changed := change(value)) is not value:
                    new[name] = changed
            elif isinstance(value, tuple):
                several = tuple(change(v) if isinstance(v, Expr) else v for v in value)
                if any(a is not b for a, b in zip(several, value)):
                    new[name] = several
        return replace(self, **new) if new else self

    def transform(self, change: Callable[[Expr], Expr]) -> Expr:
        """Rewrite bottom-up: the children first, then ``change`` on the node itself."""
        return change(self.rebuild(lambda child: child.transform(change)))

    def __str__(self) -> str:
        return _text(self, 0)


@dataclass(frozen=True)
class Const(Expr):
    value: int | float | bool

    def __eq__(self, other: object) -> bool:  # 1, 1.0 and True are different programs
        return isinstance(other, Const) and type(other.value) is type(self.value) and other.value == self.value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@dataclass(frozen=True)
class Name(Expr):
    """An unresolved name. Only the parser creates it; ``resolve_names`` replaces it."""

    name: str


@dataclass(frozen=True)
class Scalar(Expr):
    """A scalar input (SIn)."""

    name: str


@dataclass(frozen=True)
class Param(Expr):
    """A compile-time parameter."""

    name: str


@dataclass(frozen=True)
class Label(Expr):
    """A label used as a value: the index along it."""

    name: str


@dataclass(frozen=True)
class Len(Expr):
    """The extent of a label."""

    label: str


@dataclass(frozen=True)
class Access(Expr):
    """An element of an input or of a Func."""

    tensor: str
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class Unary(Expr):
    """``-e`` or ``not e``."""

    op: str
    arg: Expr


@dataclass(frozen=True)
class Binary(Expr):
    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Call(Expr):
    fn: str
    args: tuple[Expr, ...]


@dataclass(frozen=True)
class Cast(Expr):
    arg: Expr
    dtype: str


@dataclass(frozen=True)
class Reshape(Expr):
    """``reshape(e, x, 1)``: supported for published programs. Broadcasting by label makes it the identity."""

    arg: Expr
    shape: tuple[Expr, ...]


@dataclass(frozen=True)
class Reduce(Expr):
    """A reduction of ``arg`` over ``labels``; kind is sum, max, min or mean."""

    kind: str
    arg: Expr
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Dot(Expr):
    """``rdot(a, b, k)``: the sum of ``a*b`` over ``labels``, for the matrix units."""

    left: Expr
    right: Expr
    labels: tuple[str, ...]


INF = Const(math.inf)
NEG_INF = Unary("-", INF)


def free_labels(expr: Expr) -> frozenset[str]:
    """Return the labels that the value of ``expr`` varies with; labels bound by an inner reduction are not free."""
    return expr._free_labels


def accesses(expr: Expr) -> Iterator[Access]:
    """Iterate over every tensor access in ``expr``."""
    return iter(expr._accesses)


def is_integer(expr: Expr, inputs: frozenset[str], scalars: frozenset[str] = frozenset()) -> bool:
    """Tell whether the value of ``expr`` is always an integer, given that ``inputs`` and ``scalars`` are."""
    match expr:
        case Const(value):
            return type(value) is int
        case Label() | Len() | Param():
            return True
        case Scalar(name):
            return name in scalars
        case Access(tensor, _):
            return tensor in inputs
        case Unary("-", _) | Binary("+" | "-" | "*" | "%", _, _):
            return all(is_integer(c, inputs, scalars) for c in expr.children())
        case Call("floor", (Binary("/", a, b),)):
            return is_integer(a, inputs, scalars) and is_integer(b, inputs, scalars)
    return False


def substitute(expr: Expr, labels: Mapping[str, Expr], index: bool = False) -> Expr:
    """Replace free labels by index arithmetic. Labels bound by an inner reduction stay.

    ``index``: whether ``expr`` is inside an index. There the replacement is used as it is, elsewhere as a value (``as_value``).
    """
    if isinstance(expr, Label):
        new = labels.get(expr.name, expr)
        return new if index else as_value(new)
    if isinstance(expr, (Reduce, Dot)):
        labels = {k: v for k, v in labels.items() if k not in expr.labels}
    return expr.rebuild(lambda child: substitute(child, labels, index or isinstance(expr, Access)))


def as_value(index: Expr) -> Expr:
    """Convert index arithmetic to a value: its division rounds down."""
    match index:
        case Binary("/", a, b):
            return Call("floor", (Binary("/", as_value(a), as_value(b)),))
        case Binary(op, a, b):
            return Binary(op, as_value(a), as_value(b))
        case Unary(op, a):
            return Unary(op, as_value(a))
    return index


def _number(value: int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "inf" if math.isinf(value) else repr(value)
    return str(value)


def _text(expr: Expr, outer: int) -> str:
    """Format ``expr`` as DT text, parenthesized if it binds less tightly than its context."""
    text, own = _text_and_precedence(expr)
    return f"({text})" if own < outer else text


def _join(parts: tuple[Expr, ...]) -> str:
    return ", ".join(_text(p, 0) for p in parts)


def _text_and_precedence(expr: Expr) -> tuple[str, int]:
    match expr:
        case Const(value):
            return _number(value), ATOM
        case Name(name) | Scalar(name) | Param(name) | Label(name):
            return name, ATOM
        case Len(label):
            return f"len({label})", ATOM
        case Access(tensor, index):
            return f"{tensor}[{_join(index)}]", ATOM
        case Unary("not", arg):
            return f"not {_text(arg, NOT_PRECEDENCE)}", NOT_PRECEDENCE
        case Unary(_, arg):
            return f"-{_text(arg, NEGATE_PRECEDENCE)}", NEGATE_PRECEDENCE
        case Binary(op, left, right):
            own = PRECEDENCE[op]  # comparisons do not chain: both sides bind tighter; other operators are left-associative
            return f"{_text(left, own + (op in COMPARISONS))} {op} {_text(right, own + 1)}", own
        case Call(fn, args):
            return f"{fn}({_join(args)})", ATOM
        case Cast(arg, dtype):
            return f"cast({_text(arg, 0)}, {dtype})", ATOM
        case Reshape(arg, shape):
            return f"reshape({_text(arg, 0)}, {_join(shape)})", ATOM
        case Reduce(kind, arg, labels):
            return f"{REDUCTION_NAMES[kind]}({_text(arg, 0)}, {', '.join(labels)})", ATOM
        case Dot(left, right, labels):
            return f"rdot({_text(left, 0)}, {_text(right, 0)}, {', '.join(labels)})", ATOM
    raise TypeError(f"no text for {type(expr).__name__}")
