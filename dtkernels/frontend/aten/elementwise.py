"""Translate elementwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...lang import expr as ex
from ..builder import DTYPE_WORDS, EXACT, Builder
from ..unsupported import UnsupportedOperation
from ..values import Value
from .table import TABLE, op

Expr = ex.Expr
MOST_FACTORS = 4  #: of a power of integers that is written as a product
ARITHMETIC, FUNCTIONS, ACTIVATIONS, CONDITIONS, CASTS = "arithmetic", "functions", "activations", "comparisons and masks", "casts and copies"


def number(value: float | int) -> Expr:
    """Return a constant, negative ones too."""
    return ex.Unary("-", ex.Const(-value)) if value < 0 else ex.INF if value == math.inf else ex.Const(value)


def call(fn: str, *args: Expr) -> Expr:
    return ex.Call(fn, args)


def binary(operator: str) -> Callable[[Expr, Expr], Expr]:
    def made(a: Expr, b: Expr) -> Expr:
        return ex.Binary(operator, a, b)

    return made


plus, minus, times, over = binary("+"), binary("-"), binary("*"), binary("/")
ZERO, ONE = ex.Const(0), ex.Const(1)


def negative(a: Expr) -> Expr:
    return ex.Unary("-", a)


def silu(a: Expr) -> Expr:
    return times(a, call("sigmoid", a))


def softplus_of(a: Expr) -> Expr:
    """log(1 + exp(a)), without overflow."""
    return plus(call("maximum", a, ZERO), call("log1p", call("exp", negative(call("abs", a)))))


def relu(a: Expr) -> Expr:
    return call("maximum", a, ZERO)


def clipped(a: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """Keep a NaN, and the gradient at the bounds, as torch does; ``high`` where the bounds cross."""
    if low is not None:
        a = call("where", ex.Binary("<", a, low), low, a)
    return a if high is None else call("where", ex.Binary(">", a, high), high, a)


def choose(condition: Expr, a: Expr, b: Expr) -> Expr:
    return call("where", condition, a, b)


def choose_as(dtype: torch.dtype, condition: Expr, a: Expr, b: Expr) -> Expr:
    """Choose between two elements of a dtype; between truth values by conditions, since DT's ``where`` gives numbers."""
    if dtype != torch.bool:
        return choose(condition, a, b)
    return ex.Binary("or", ex.Binary("and", condition, a), ex.Binary("and", ex.Unary("not", condition), b))


def compare(operator: str, a: Expr, b: Expr) -> Expr:
    return ex.Binary(operator, a, b)


# -- arithmetic ---------------------------------------------------------------------------------------------------------


def scaled(b: Builder, other: Any, alpha: Any) -> Value:
    """other * alpha."""
    other = b.value(other)
    return other if alpha == 1 else b.elementwise(times, other, alpha, dtype=other.dtype)


NARROW = {torch.uint8: 0, torch.int8: 2**7, torch.int16: 2**15}  #: integers that wrap around -> the sign bit


def wrapped(b: Builder, x: Value) -> Value:
    """Return a result of integer arithmetic with the bits that its dtype has."""
    if x.dtype not in NARROW:
        return x
    sign, whole = ex.Const(NARROW[x.dtype]), b.exact(x)
    most = 2 ** torch.iinfo(x.dtype).bits - 1
    expr: Expr = ex.Binary("&", whole, ex.Const(most))
    return Value(x.dims, expr if sign == ZERO else minus(ex.Binary("^", expr, sign), sign), x.dtype)


@op("add", group=ARITHMETIC)
def add(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Value:
    x, y = b.value(x), scaled(b, y, alpha)
    if x.dtype == y.dtype == torch.bool:
        return logical(b, "or", x, y)
    return wrapped(b, b.elementwise(plus, x, y))


@op("sub", "subtract", group=ARITHMETIC)
def sub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Value:
    return wrapped(b, b.elementwise(minus, x, scaled(b, y, alpha)))


@op("rsub", group=ARITHMETIC)
def rsub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Value:
    return wrapped(b, b.elementwise(minus, y, scaled(b, x, alpha)))


@op("mul", "multiply", group=ARITHMETIC)
def mul(b: Builder, x: Any, y: Any) -> Value:
    x, y = b.value(x), b.value(y)
    if x.dtype == y.dtype == torch.bool:
        return logical(b, "and", x, y)
    return wrapped(b, b.elementwise(times, x, y))


@op("div", "divide", "true_divide", group=ARITHMETIC)
def div(b: Builder, x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor" and not b.dtype.is_floating_point:
        return integral(b, "//", x, y)
    if rounding_mode == "trunc" and not b.dtype.is_floating_point:
        size = integral(b, "//", absolute(b, x), absolute(b, y))
        return b.elementwise(lambda p, q, n: choose(ex.Binary("!=", compare("<", p, ZERO), compare("<", q, ZERO)), negative(n), n), x, y, size)
    result = b.elementwise(over, x, y)
    if rounding_mode is None:
        return result
    return Value(result.dims, call("floor", result.expr) if rounding_mode == "floor" else truncated(result.expr), result.dtype)


@op("floor_divide", group=ARITHMETIC)
def floor_divide(b: Builder, x: Any, y: Any) -> Value:
    return div(b, x, y, "floor")


@op("fmod", group=ARITHMETIC)
def fmod(b: Builder, x: Any, y: Any) -> Value:
    """The remainder with the sign of x."""
    if not b.dtype.is_floating_point:
        return b.elementwise(lambda p, r: choose(compare("<", p, ZERO), negative(r), r), x, integral(b, "%", absolute(b, x), absolute(b, y)))
    return b.elementwise(lambda p, q: minus(p, times(q, truncated(over(p, q)))), x, y)


@op("remainder", group=ARITHMETIC)
def remainder(b: Builder, x: Any, y: Any) -> Value:
    x, y = b.value(x), b.value(y)
    if whole(x.expr) and whole(y.expr):
        return b.elementwise(binary("%"), x, y)
    if not b.dtype.is_floating_point:
        return integral(b, "%", x, y)
    return b.elementwise(lambda p, q: minus(p, times(q, call("floor", over(p, q)))), x, y)


def integral(b: Builder, operator: str, *given: Any) -> Value:
    """Apply an operator on integers."""
    values = [b.value(v) for v in given]
    if any(not v.dtype.is_floating_point and v.dtype not in (*EXACT, torch.bool) and b.reads_integers(v.expr) for v in values):
        raise UnsupportedOperation(f"integer arithmetic on {next(v.dtype for v in values if v.dtype not in EXACT)}", allowed="int64, int32, int8, uint8")
    dims, exprs = b.aligned([Value(v.dims, b.exact(v), v.dtype) for v in values])
    return wrapped(b, Value(dims, ex.Unary("~", exprs[0]) if operator == "~" else ex.Binary(operator, *exprs), b.dtype))


def whole(e: Expr) -> bool:
    """Tell whether an expression is integer arithmetic on labels, sizes and numbers."""
    if isinstance(e, (ex.Access, ex.Scalar, ex.Call, ex.Cast)) or isinstance(e, ex.Const) and not isinstance(e.value, int):
        return False
    return all(whole(c) for c in e.children())


@op("addcmul", group=ARITHMETIC)
def addcmul(b: Builder, x: Any, y: Any, z: Any, value: Any = 1) -> Value:
    return b.elementwise(lambda p, q, r: plus(p, times(q, r)), x, scaled(b, y, value), z)


@op("addcdiv", group=ARITHMETIC)
def addcdiv(b: Builder, x: Any, y: Any, z: Any, value: Any = 1) -> Value:
    return b.elementwise(lambda p, q, r: plus(p, over(q, r)), x, scaled(b, y, value), z)


@op("lerp", group=ARITHMETIC)
def lerp(b: Builder, x: Any, y: Any, weight: Any) -> Value:
    return b.elementwise(lambda p, q, w: plus(p, times(w, minus(q, p))), x, y, weight)


@op("pow", group=ARITHMETIC)
def power(b: Builder, x: Any, y: Any) -> Value:
    base = b.value(x)
    if type(y) is int and 0 < y <= MOST_FACTORS and base.dtype == b.dtype and not b.dtype.is_floating_point:  # a product of integers is one
        found = base
        for _ in range(y - 1):
            found = mul(b, found, base)
        return found
    return b.elementwise(lambda p, q: call("pow", p, q), x, y)


@op("hypot", group=ARITHMETIC)
def hypot(b: Builder, x: Any, y: Any) -> Value:
    def made(p: Expr, q: Expr) -> Expr:  # relative to the larger one, whose square may overflow
        top, low = call("maximum", call("abs", p), call("abs", q)), call("minimum", call("abs", p), call("abs", q))
        ratio = over(low, choose(compare("==", top, ZERO), ONE, top))
        return choose(compare("==", top, ex.INF), ex.INF, times(top, call("sqrt", plus(ONE, times(ratio, ratio)))))

    return b.elementwise(made, x, y)


@op("atan2", "arctan2", group=ARITHMETIC)
def atan2(b: Builder, x: Any, y: Any) -> Value:
    return b.elementwise(lambda p, q: call("atan2", p, q), x, y)


@op("xlogy", "special_xlogy", group=ARITHMETIC)
def xlogy(b: Builder, x: Any, y: Any) -> Value:
    """x * log(y), 0 where x is 0 and y is no NaN."""
    return b.elementwise(lambda p, q: choose(ex.Binary("and", compare("==", p, ZERO), compare("==", q, q)), ZERO, times(p, call("log", q))), x, y)


@op("copysign", group=ARITHMETIC)
def copysign(b: Builder, x: Any, y: Any) -> Value:
    return b.elementwise(lambda p, q: choose(compare("<", q, ZERO), negative(call("abs", p)), call("abs", p)), x, y)


@op("logaddexp", group=ARITHMETIC)
def logaddexp(b: Builder, x: Any, y: Any) -> Value:
    def made(p: Expr, q: Expr) -> Expr:
        apart = choose(compare("==", p, q), ZERO, call("abs", minus(p, q)))  # inf - inf
        return plus(call("maximum", p, q), call("log1p", call("exp", negative(apart))))

    return b.elementwise(made, x, y)


# -- functions ----------------------------------------------------------------------------------------------------------


def truncated(a: Expr) -> Expr:
    return call("trunc", a)


UNARY: dict[str, Callable[[Expr], Expr]] = {
    "positive": lambda a: a,
    "reciprocal": lambda a: over(ONE, a),
    "frac": lambda a: minus(a, truncated(a)),
    "sgn": lambda a: call("sign", a),
    "log10": lambda a: times(call("log", a), number(1 / math.log(10))),
    "special_ndtr": lambda a: times(number(0.5), call("erfc", times(a, number(-math.sqrt(0.5))))),
    "special_erf": lambda a: call("erf", a),
    "special_expit": lambda a: call("sigmoid", a),
    "tan": lambda a: over(call("sin", a), call("cos", a)),
    "arctan": lambda a: call("atan", a),
    "arcsin": lambda a: call("asin", a),
    "arccos": lambda a: call("acos", a),
    "asinh": lambda a: choose(compare("<", a, ZERO), negative(asinh_of(negative(a))), asinh_of(a)),
    "acosh": lambda a: call("log", plus(a, times(call("sqrt", minus(a, ONE)), call("sqrt", plus(a, ONE))))),
    "atanh": lambda a: times(number(0.5), call("log1p", over(plus(a, a), minus(ONE, a)))),
    "sinc": lambda a: choose(compare("==", a, ZERO), ONE, over(call("sin", times(number(math.pi), a)), times(number(math.pi), choose(compare("==", a, ZERO), ONE, a)))),
    "sinh": lambda a: times(minus(call("exp", a), call("exp", negative(a))), number(0.5)),
    "cosh": lambda a: times(plus(call("exp", a), call("exp", negative(a))), number(0.5)),
    "deg2rad": lambda a: times(a, number(math.pi / 180)),
    "rad2deg": lambda a: times(a, number(180 / math.pi)),
}
ACTIVE: dict[str, Callable[[Expr], Expr]] = {
    "relu": relu,
    "relu6": lambda a: clipped(a, ZERO, ex.Const(6)),
    "silu": silu,
    "mish": lambda a: times(a, call("tanh", softplus_of(a))),
    "log_sigmoid": lambda a: negative(softplus_of(negative(a))),
    "hardsigmoid": lambda a: over(clipped(plus(a, ex.Const(3)), ZERO, ex.Const(6)), ex.Const(6)),
    "hardswish": lambda a: over(times(a, clipped(plus(a, ex.Const(3)), ZERO, ex.Const(6))), ex.Const(6)),
    "selu": lambda a: times(number(1.0507009873554805), choose(compare(">", a, ZERO), a, times(number(1.6732632423543772), below_zero(a)))),
    "softsign": lambda a: over(a, plus(ONE, call("abs", a))),
}


def asinh_of(a: Expr) -> Expr:
    """log(a + sqrt(a * a + 1)) of a >= 0, with its digits near 0 and without overflow."""
    small = call("minimum", a, number(1e15))
    near = call("log1p", plus(small, over(times(small, small), plus(ONE, call("sqrt", plus(ONE, times(small, small)))))))
    return choose(compare(">", a, number(1e15)), plus(call("log", a), number(math.log(2))), near)


def below_zero(a: Expr) -> Expr:
    """exp(a) - 1 where a < 0, without overflow elsewhere."""
    return call("expm1", call("minimum", a, ZERO))


@op("neg", "negative", group=FUNCTIONS)
def neg(b: Builder, x: Any) -> Value:
    return wrapped(b, b.elementwise(negative, x))


@op("abs", group=FUNCTIONS)
def absolute(b: Builder, x: Any) -> Value:
    return b.elementwise((lambda a: call("abs", a)) if b.dtype.is_floating_point else lambda a: choose(compare("<", a, ZERO), negative(a), a), x)


@op("square", group=FUNCTIONS)
def square(b: Builder, x: Any) -> Value:
    return mul(b, x, x)


def _enter(name: str, function: Callable[[Expr], Expr], group: str) -> None:
    @op(name, group=group)
    def entry(b: Builder, x: Any) -> Value:
        return b.elementwise(function, x)


for _name, _function in UNARY.items():
    _enter(_name, _function, FUNCTIONS)
for _name, _function in ACTIVE.items():
    _enter(_name, _function, ACTIVATIONS)
for _name, _row in ex.FUNCTIONS.items():
    if _row.arguments == 1 and hasattr(torch.ops.aten, _name) and _name not in ("abs", "detach", "round"):
        _enter(_name, lambda a, _name=_name: call(_name, a), FUNCTIONS)  # type: ignore[misc]


@op("round", group=FUNCTIONS)
def rounded(b: Builder, x: Any, *, decimals: int = 0) -> Value:
    """To the nearest multiple of 10^-decimals, halves to the even one."""
    unit = ex.Const(10 ** abs(decimals)) if decimals else ONE
    if decimals < 0:
        return b.elementwise(lambda a: times(call("round", over(a, unit)), unit), x)
    return b.elementwise(lambda a: over(call("round", times(a, unit)), unit) if decimals else call("round", a), x)


def _extreme(name: str) -> Callable[..., Value]:
    def entry(b: Builder, x: Any, y: Any) -> Value:
        if b.dtype == torch.bool:
            return logical(b, "or" if name == "maximum" else "and", x, y)
        if not b.dtype.is_floating_point:  # a choice between integers is one
            return b.elementwise(lambda p, q: choose(compare(">" if name == "maximum" else "<", p, q), p, q), x, y)
        return b.elementwise(lambda p, q: call(name, p, q), x, y)

    return entry


for _name in ("maximum", "minimum"):
    op(_name, group=FUNCTIONS)(_extreme(_name))


@op("clamp", "clip", "clamp_min", "clamp_max", "hardtanh", group=FUNCTIONS)
def clamp(b: Builder, x: Any, min: Any = None, max: Any = None) -> Value:
    bounds = [m for m in (min, max) if m is not None]

    def made(a: Expr, *limits: Expr) -> Expr:
        found = iter(limits)
        low = next(found) if min is not None else None
        return clipped(a, low, next(found) if max is not None else None)

    return b.elementwise(made, x, *bounds)


TABLE["hardtanh"] = lambda b, x, min_val=-1, max_val=1: clamp(b, x, min_val, max_val)
TABLE["clamp_max"] = lambda b, x, max: clamp(b, x, None, max)


# -- activations with settings ------------------------------------------------------------------------------------------


@op("gelu", group=ACTIVATIONS)
def gelu(b: Builder, x: Any, approximate: str = "none") -> Value:
    def made(a: Expr) -> Expr:
        if approximate == "tanh":
            inner = times(number(math.sqrt(2 / math.pi)), plus(a, times(number(0.044715), times(times(a, a), a))))
            return times(times(number(0.5), a), plus(ONE, call("tanh", inner)))
        return times(times(number(0.5), a), plus(ONE, call("erf", times(a, number(math.sqrt(0.5))))))

    return b.elementwise(made, x)


@op("leaky_relu", group=ACTIVATIONS)
def leaky_relu(b: Builder, x: Any, negative_slope: float = 0.01) -> Value:
    return b.elementwise(lambda a: choose(compare(">", a, ZERO), a, times(number(negative_slope), a)), x)


@op("rrelu", "rrelu_with_noise", group=ACTIVATIONS)
def rrelu(b: Builder, x: Any, *given: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Value:
    """x, or where it is negative x times the mean of the bounds."""
    numbers = [g for g in given if isinstance(g, (int, float)) and not isinstance(g, bool)]
    if training or any(g is True for g in given):
        raise UnsupportedOperation("rrelu in training", allowed="eval(), leaky_relu")
    lower, upper = numbers if len(numbers) == 2 else (lower, upper)
    return leaky_relu(b, x, (lower + upper) / 2)


@op("elu", "celu", group=ACTIVATIONS)
def elu(b: Builder, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    def made(a: Expr) -> Expr:
        below = times(number(alpha * scale), below_zero(times(a, number(input_scale)) if input_scale != 1 else a))
        return choose(compare(">", a, ZERO), times(number(scale), a) if scale != 1 else a, below)

    return b.elementwise(made, x)


TABLE["celu"] = lambda b, x, alpha=1.0: elu(b, x, alpha, 1.0, 1.0 / alpha)


@op("softplus", group=ACTIVATIONS)
def softplus(b: Builder, x: Any, beta: float = 1, threshold: float = 20) -> Value:
    def made(a: Expr) -> Expr:
        scaled = a if beta == 1 else times(a, number(beta))
        found = softplus_of(scaled) if beta == 1 else times(softplus_of(scaled), number(1 / beta))
        return found if threshold >= 20 else choose(compare(">", scaled, number(threshold)), a, found)  # beyond 20 float32 has no digit for the difference

    return b.elementwise(made, x)


@op("logit", group=FUNCTIONS)
def logit(b: Builder, x: Any, eps: float | None = None) -> Value:
    def made(a: Expr) -> Expr:
        kept = a if eps is None else clipped(a, number(eps), number(1 - eps))
        return call("log", over(kept, minus(ONE, kept)))

    return b.elementwise(made, x)


@op("prelu", group=ACTIVATIONS)
def prelu(b: Builder, x: Any, weight: Any) -> Value:
    x, weight = b.value(x), b.value(weight)
    if weight.rank == 1 and x.rank > 1:
        weight = Value((weight.dims[0], *[()] * (x.rank - 2)), weight.expr, weight.dtype)
    return b.elementwise(lambda a, w: choose(compare(">", a, ZERO), a, times(w, a)), x, weight)


@op("threshold", group=ACTIVATIONS)
def threshold(b: Builder, x: Any, threshold: float, value: float) -> Value:
    return b.elementwise(lambda a: choose(compare("<=", a, number(threshold)), number(value), a), x)


@op("hardshrink", "softshrink", group=ACTIVATIONS)
def hardshrink(b: Builder, x: Any, lambd: float = 0.5) -> Value:
    return b.elementwise(lambda a: choose(compare("<=", call("abs", a), number(lambd)), ZERO, a), x)


def softshrink(b: Builder, x: Any, lambd: float = 0.5) -> Value:
    limit = number(lambd)
    return b.elementwise(lambda a: choose(compare(">", a, limit), minus(a, limit), choose(compare("<", a, negative(limit)), plus(a, limit), ZERO)), x)


TABLE["softshrink"] = softshrink


# -- comparisons and masks ----------------------------------------------------------------------------------------------


def _comparison(operator: str) -> Callable[..., Value]:
    def entry(b: Builder, x: Any, y: Any) -> Value:
        values = [b.value(v) for v in (x, y)]
        wide = all(v.dtype in (torch.int64, torch.int32) and b.is_whole(v.expr) for v in values)  # compared as integers, not in float32
        values = [replace(v, expr=b.exact(v)) if wide and b.reads_integers(v.expr) else v for v in values]
        return b.elementwise(lambda p, q: compare(operator, p, q), *values)

    return entry


for _name, _operator in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    op(_name, group=CONDITIONS)(_comparison(_operator))


def logical(b: Builder, operator: str, x: Any, y: Any) -> Value:
    """Combine two conditions."""
    values = [b.value(v) for v in (x, y)]
    dims, (p, q) = b.aligned([Value(v.dims, b.condition(v), torch.bool) for v in values])
    if operator == "xor":
        found: Expr = ex.Binary("and", ex.Binary("or", p, q), ex.Unary("not", ex.Binary("and", p, q)))
    else:
        found = ex.Binary(operator, p, q)
    return Value(dims, found, torch.bool)


def _logical(operator: str) -> Callable[..., Value]:
    def entry(b: Builder, x: Any, y: Any) -> Value:
        return logical(b, operator, x, y) if b.dtype == torch.bool else integral(b, {"and": "&", "or": "|", "xor": "^"}[operator], x, y)

    return entry


for _name, _operator in {"and": "and", "or": "or", "xor": "xor"}.items():
    op(f"logical_{_name}", f"bitwise_{_name}", f"__{_name}__", group=CONDITIONS)(_logical(_operator))


@op("logical_not", "bitwise_not", group=CONDITIONS)
def logical_not(b: Builder, x: Any) -> Value:
    value = b.value(x)
    if b.dtype != torch.bool:
        return integral(b, "~", value)
    return Value(value.dims, ex.Unary("not", b.condition(value)), torch.bool)


@op("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", group=CONDITIONS)
def left_shift(b: Builder, x: Any, y: Any) -> Value:
    return integral(b, "<<", x, y)


for _name in ("bitwise_right_shift", "__rshift__"):
    TABLE[_name] = lambda b, x, y: integral(b, ">>", x, y)


@op("where", group=CONDITIONS)
def where(b: Builder, condition: Any, x: Any = None, y: Any = None) -> Value:
    if x is None:
        raise UnsupportedOperation("where with a condition alone", why="the size of its result depends on data")
    values = [b.value(v) for v in (condition, x, y)]
    if b.dtype == torch.bool:
        dims, (c, p, q) = b.aligned([Value(v.dims, b.condition(v), torch.bool) for v in values])
        return Value(dims, choose_as(torch.bool, c, p, q), torch.bool)
    dims, (c, p, q) = b.aligned([Value(v.dims, b.condition(v) if v is values[0] else b.numeric(v), v.dtype) for v in values])
    return Value(dims, choose(c, p, q), b.dtype)


@op("masked_fill", group=CONDITIONS)
def masked_fill(b: Builder, x: Any, mask: Any, value: Any) -> Value:
    return where(b, mask, value, x)


# -- casts and copies ---------------------------------------------------------------------------------------------------


def converted(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    """Convert to a dtype. A cast is written where it rounds; computing in float32 already is no cast."""
    if dtype == x.dtype:
        return x
    if dtype == torch.bool:
        return Value(x.dims, b.condition(x), dtype)
    expr = b.numeric(x)
    wide = dtype == torch.float64 and (b.double or not x.dtype.is_floating_point)
    if dtype.is_complex or dtype.is_floating_point and dtype not in DTYPE_WORDS and not wide:
        raise UnsupportedOperation(f"a conversion to {dtype}", allowed="float32, float16, bfloat16, integers, bool; arguments of float64")
    if not dtype.is_floating_point:
        if x.dtype.is_floating_point:
            return Value(x.dims, truncated(expr), dtype)
        smaller = x.dtype != torch.bool and torch.iinfo(dtype).bits <= torch.iinfo(x.dtype).bits
        return wrapped(b, Value(x.dims, expr, dtype)) if smaller else Value(x.dims, expr, dtype)
    rounds = dtype in (torch.float16, torch.bfloat16)
    return Value(x.dims, ex.Cast(expr, DTYPE_WORDS[dtype]) if rounds else expr, dtype)


@op("to", "_to_copy", "type_as", "float", "half", "bfloat16", "bool", "int", "long", "double", group=CASTS)
def to(b: Builder, x: Any, *given: Any, **named: Any) -> Value:
    return converted(b, b.value(x), b.dtype)


TABLE["convert_element_type"] = to  # of torch.prims, in torch's decompositions of 16-bit values


@op("clone", "contiguous", "alias", "lift_fresh", "lift_fresh_copy", "lift", "resolve_conj", "resolve_neg", group=CASTS)
def clone(b: Builder, x: Any, *given: Any, **named: Any) -> Value:
    return b.value(x)


@op("detach", group=CASTS)
def detach(b: Builder, x: Any) -> Value:
    return b.detached(b.value(x))


@op("copy", "fill", "zero", group=CASTS)
def copy(b: Builder, x: Any, source: Any = 0, non_blocking: bool = False) -> Value:
    x = b.value(x)
    dims, (_, expr) = b.aligned([x, converted(b, b.value(source, x.dtype), x.dtype)])
    return Value(dims, expr, x.dtype)
