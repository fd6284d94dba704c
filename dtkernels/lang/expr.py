"""Represent expressions of the algorithm: frozen values that print as DT text.

Nodes carry their source position for error messages. Positions do not affect equality: ``parse(str(e)) == e``. Labels, scalars and
parameters are distinguished after the whole program is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, reduce
from typing import Any

from .errors import Position


@dataclass(frozen=True)
class Function:
    """An elementwise function of ``arguments`` values.

    ``derivative``: for each argument the partial derivative as DT text of the arguments ``a``, ``b``, ``c`` and the value ``v``; () where
    ``algebra/autodiff/derivative.py`` has a rule of its own.
    """

    arguments: int = 1
    most: int = 0  #: arguments that it may have, where their number varies
    derivative: tuple[str, ...] = ()
    torch: str = ""  #: name in torch, where it is another one
    is_slow: bool = False  #: computed by the special function unit or by more than a few instructions
    keeps_zero: bool = False  #: 0 of 0
    is_finite: bool = False  #: never an infinity
    is_boolean: bool = False  #: its value is a truth value
    is_name: bool = False  #: a program may declare its name for something else, which is not called


@dataclass(frozen=True)
class Float8:
    """A floating-point dtype of eight bits: OCP Formats 8-bit, revision 1.0. Both have codes for NaN, e5m2 for infinities too."""

    torch: str  #: torch's name
    triton: str  #: Triton's name
    largest: float  #: finite number
    fraction: int  #: bits of the fraction
    bias: int  #: of the exponent


NONE = ("0",)

#: the elementwise functions: a row has all that the compiler asks of one by name, but its forms in Triton
#: (codegen/emit/triton/functions.py) and in torch
FUNCTIONS = {
    "exp": Function(is_slow=True),
    "exp2": Function(is_slow=True),
    "log": Function(is_slow=True),
    "log2": Function(is_slow=True),
    "sqrt": Function(is_slow=True, keeps_zero=True),
    "rsqrt": Function(is_slow=True),
    "abs": Function(keeps_zero=True),
    "erf": Function(is_slow=True, keeps_zero=True, is_finite=True),
    "floor": Function(keeps_zero=True, derivative=NONE),
    "sigmoid": Function(is_slow=True, is_finite=True),
    "tanh": Function(is_slow=True, keeps_zero=True, is_finite=True),
    "maximum": Function(2),
    "minimum": Function(2),
    "where": Function(3),
    "sin": Function(derivative=("cos(a)",), is_slow=True, keeps_zero=True, is_finite=True, is_name=True),
    "cos": Function(derivative=("-sin(a)",), is_slow=True, is_finite=True, is_name=True),
    "log1p": Function(derivative=("1 / (1 + a)",), is_slow=True, keeps_zero=True, is_name=True),
    "expm1": Function(derivative=("exp(a)",), is_slow=True, keeps_zero=True, is_name=True),
    "erfc": Function(derivative=("-1.1283791670955126 * exp(-(a * a))",), is_slow=True, is_finite=True, is_name=True),
    "atan": Function(derivative=("1 / (1 + a * a)",), is_slow=True, keeps_zero=True, is_finite=True, is_name=True),
    "asin": Function(derivative=("rsqrt(1 - a * a)",), is_slow=True, keeps_zero=True, is_finite=True, is_name=True),
    "acos": Function(derivative=("-rsqrt(1 - a * a)",), is_slow=True, is_finite=True, is_name=True),
    "atan2": Function(2, derivative=("b / (a * a + b * b)", "-a / (a * a + b * b)"), is_slow=True, is_finite=True, is_name=True),
    "detach": Function(derivative=NONE, keeps_zero=True, is_name=True),
    "pow": Function(2, derivative=("where(b == 0, 0, b * pow(a, b - 1))", "where(a == 0 and b >= 0, 0, v * log(a))"), is_slow=True, is_name=True),
    "clamp": Function(
        3,
        derivative=("where(a >= b and a <= c, 1, 0)", "where(a < b and b < c, 1, 0)", "where(a > c or c < b, 1, 0)"),
        is_name=True,
    ),
    "round": Function(derivative=NONE, keeps_zero=True, is_name=True),
    "ceil": Function(derivative=NONE, keeps_zero=True, is_name=True),
    "trunc": Function(derivative=NONE, keeps_zero=True, is_name=True),
    "sign": Function(derivative=NONE, keeps_zero=True, is_finite=True, is_name=True),
    "isnan": Function(derivative=NONE, is_boolean=True, is_name=True),
    "isinf": Function(derivative=NONE, is_boolean=True, is_name=True),
    "isfinite": Function(derivative=NONE, is_boolean=True, is_name=True),
    "random": Function(2, most=5, derivative=NONE, is_slow=True, is_finite=True, is_name=True),
    "normal": Function(2, most=5, derivative=NONE, is_slow=True, is_finite=True, is_name=True),
}
#: functions of a seed and of integers
RANDOM = ("random", "normal")

SLOW = tuple(name for name, f in FUNCTIONS.items() if f.is_slow)
BOOLEAN = frozenset(name for name, f in FUNCTIONS.items() if f.is_boolean)
#: reductions: DT name -> kind
REDUCTIONS = {
    "rsum": "sum", "rmax": "max", "rmin": "min", "rmean": "mean",
    "rprod": "prod", "rany": "any", "rall": "all", "rargmax": "argmax", "rargmin": "argmin", "rtopk": "topk", "rargtopk": "argtopk",
}  # fmt: skip
#: reductions whose names a program may declare for something else
NEW_REDUCTIONS = frozenset({"rprod", "rany", "rall", "rargmax", "rargmin", "rtopk", "rargtopk"})
#: reductions to the element of a rank, which the algebra rewrites (algebra/top_k.py)
RANKED = frozenset({"topk", "argtopk"})
#: reductions whose value is a place: the first element that is largest or smallest
PLACES = frozenset({"argmax", "argmin", "argtopk"})
REDUCTION_NAMES = {kind: name for name, kind in REDUCTIONS.items()}
#: dtypes that a program may cast to: DT name -> torch name
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: dtypes of eight bits that values are stored in, and in which products of two such operands multiply
FLOAT8 = {"e4m3": Float8("float8_e4m3fn", "float8e4nv", 448.0, 3, 7), "e5m2": Float8("float8_e5m2", "float8e5", 57344.0, 2, 15)}
#: the same of integers and truth values: DT name -> (least, largest) value
INTEGERS = {
    "int8": (-(2**7), 2**7 - 1), "uint8": (0, 2**8 - 1), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1), "bool": (0, 1),
}  # fmt: skip
TORCH_NAMES = {**DTYPES, **{name: f.torch for name, f in FLOAT8.items()}, **{name: name for name in INTEGERS}}  #: every dtype of a cast: DT name -> torch name
#: operators on integers alone
INTEGER_OPERATORS = ("//", "&", "|", "^", "<<", ">>")
#: kinds of rscan -> the value before the first element
SCANS = {"sum": 0, "prod": 1, "max": -math.inf, "min": math.inf}
ORDERED = ("<", "<=", ">", ">=")
COMPARISONS = (*ORDERED, "==", "!=")
#: binary operator -> precedence (higher binds tighter)
PRECEDENCE = {
    "or": 1, "and": 2, **dict.fromkeys(COMPARISONS, 4), "|": 5, "^": 6, "&": 7, "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "//": 10, "%": 10,
}  # fmt: skip
NOT_PRECEDENCE, NEGATE_PRECEDENCE, ATOM = 3, 11, 13


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
    def _reductions(self) -> tuple[Reduce | Dot, ...]:
        return tuple(node for node in self._nodes if isinstance(node, (Reduce, Dot)))

    @cached_property
    def _free_labels(self) -> frozenset[str]:
        if isinstance(self, Label):
            return frozenset({self.name})
        below = frozenset[str]().union(*(c._free_labels for c in ((self.arg,) if isinstance(self, Reshape) else self._children)))
        if isinstance(self, Scan):
            return below | {self.label}
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
    """``-e``, ``not e`` or ``~e``."""

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
    """A reduction of ``arg`` over ``labels``; kind is a value of ``REDUCTIONS``."""

    kind: str
    arg: Expr
    labels: tuple[str, ...]
    rank: Expr | None = None  #: of the kinds ``RANKED``: a label or a number, 0 for the largest element


@dataclass(frozen=True)
class Dot(Expr):
    """``rdot(a, b, k)``: the sum of ``a*b`` over ``labels``, for the matrix units."""

    left: Expr
    right: Expr
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Scan(Expr):
    """Partial results along ``label``, which stays free: ``rscan(sum, a, t)`` at t is the sum of a at 0 .. t, ``reverse``: at t .. len(t) - 1.

    kind is sum, prod, max or min with one argument, or recur with two: ``h[t] = args[0][t] * h[t - 1] + args[1][t]``.
    """

    kind: str
    args: tuple[Expr, ...]
    label: str
    reverse: bool = False
    exclusive: bool = False  #: without the element itself; the algebra removes it (rules/scans.py)


@dataclass(frozen=True)
class Write(Expr):
    """``write(e, K[t[x], y])``: all of a definition, whose value is stored in an input at ``place``, where ``condition`` holds."""

    value: Expr
    place: Access
    condition: Expr | None = None


INF = Const(math.inf)
NEG_INF = Unary("-", INF)


def operands_of(expr: Expr, op: str) -> list[Expr]:
    """Return what a chain of ``op`` joins, from left to right; the expression itself if it is no such chain."""
    return [*operands_of(expr.left, op), *operands_of(expr.right, op)] if isinstance(expr, Binary) and expr.op == op else [expr]


def joined(op: str, operands: Iterable[Expr]) -> Expr:
    """Return the chain of ``op`` that joins ``operands``, of which there is one at least."""
    return reduce(lambda a, b: Binary(op, a, b), operands)


def free_labels(expr: Expr) -> frozenset[str]:
    """Return the labels that the value of ``expr`` varies with; labels bound by an inner reduction are not free."""
    return expr._free_labels


def accesses(expr: Expr) -> Iterator[Access]:
    """Iterate over every tensor access in ``expr``."""
    return iter(expr._accesses)


def own_labels(dot: Dot) -> tuple[frozenset[str], frozenset[str]]:
    """Return the labels that only the left operand has, and those that only the right one has: rows and columns of a product of matrices."""
    return free_labels(dot.left) - free_labels(dot.right), free_labels(dot.right) - free_labels(dot.left)


def reductions(expr: Expr) -> Iterator[Reduce | Dot]:
    """Iterate over every reduction and product in ``expr``."""
    return iter(expr._reductions)


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
        case Cast(_, dtype):
            return dtype in INTEGERS and dtype != "bool"
        case Unary("-" | "~", _) | Binary("+" | "-" | "*" | "%" | "//" | "&" | "|" | "^" | "<<" | ">>", _, _):
            return all(is_integer(c, inputs, scalars) for c in expr.children())
        case Reduce(kind, _, _):
            return kind in PLACES
        case Call("where", (_, a, b)):
            return is_integer(a, inputs, scalars) and is_integer(b, inputs, scalars)
        case Call("floor", (Binary("/", a, b),)):
            return is_integer(a, inputs, scalars) and is_integer(b, inputs, scalars)
    return False


def substitute(expr: Expr, labels: Mapping[str, Expr], index: bool = False) -> Expr:
    """Replace free labels by index arithmetic. Labels bound by an inner reduction stay.

    ``index``: whether ``expr`` is inside an index. There the replacement is used as it is, elsewhere as a value (``as_value``).
    """
    changed = {name: new for name, new in labels.items() if not (isinstance(new, Label) and new.name == name)}
    return _substitute(expr, changed, index) if changed else expr


def _substitute(expr: Expr, labels: Mapping[str, Expr], index: bool) -> Expr:
    if isinstance(expr, Label):
        new = labels.get(expr.name, expr)
        return new if index else as_value(new)
    if isinstance(expr, (Reduce, Dot)):
        labels = {k: v for k, v in labels.items() if k not in expr.labels}
    if isinstance(expr, Scan) and expr.label in labels:  # partial results have no value between elements: only a rename is one
        new = labels[expr.label]
        assert isinstance(new, Label), f"{expr} at {new}"
        expr = replace(expr, label=new.name)
    return expr.rebuild(lambda child: _substitute(child, labels, index or isinstance(expr, Access)))


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
        case Unary(op, arg):
            return f"{op}{_text(arg, NEGATE_PRECEDENCE)}", NEGATE_PRECEDENCE
        case Binary(op, left, right):
            own = PRECEDENCE[op]  # comparisons do not chain: both sides bind tighter; other operators are left-associative
            return f"{_text(left, own + (op in COMPARISONS))} {op} {_text(right, own + 1)}", own
        case Call(fn, args):
            return f"{fn}({_join(args)})", ATOM
        case Cast(arg, dtype):
            return f"cast({_text(arg, 0)}, {dtype})", ATOM
        case Reshape(arg, shape):
            return f"reshape({_text(arg, 0)}, {_join(shape)})", ATOM
        case Reduce(kind, arg, labels, rank):
            return f"{REDUCTION_NAMES[kind]}({_text(arg, 0)}, {', '.join((*labels, *([] if rank is None else [_text(rank, 0)])))})", ATOM
        case Dot(left, right, labels):
            return f"rdot({_text(left, 0)}, {_text(right, 0)}, {', '.join(labels)})", ATOM
        case Scan(kind, args, label, reverse, exclusive):
            named = "rrecur(" if kind == "recur" else f"rscan({kind}, "
            return f"{named}{_join(args)}, {label}{', reversed' if reverse else ''}{', exclusive' if exclusive else ''})", ATOM
        case Write(value, place, condition):
            return f"write({_join((value, place, *([] if condition is None else [condition])))})", ATOM
    raise TypeError(f"no text for {type(expr).__name__}")
