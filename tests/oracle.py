"""The float64 reference of every generated kernel: brute force over the parsed, untransformed algorithm.

Nothing of the compiler but its parser is used, and no torch. A value is an array with named axes and, beside it, a bound
of how far a float32 evaluation may be off (a running error analysis: every operation adds its own rounding to the errors
of its arguments). So a tolerance follows from the program, its sizes and its numbers; no test tunes one. The bound is
infinite where no statement about a float32 result is possible (overflow, a division by what may be 0), and such elements
are not compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dtkernels.codegen.pipeline import lower
from dtkernels.lang import expr as ex
from dtkernels.lang import parse
from dtkernels.lang.algorithm import Algorithm

U = 2.0**-23  #: one float32 step, twice the rounding of one operation
#: relative rounding to a dtype; bfloat16 is rounded toward zero by the interpreter
STEP = {"float32": 2.0**-24, "fp32": 2.0**-24, "float16": 2.0**-11, "fp16": 2.0**-11, "bfloat16": 2.0**-7, "bf16": 2.0**-7}
LARGEST = {"float32": 3.4e38, "fp32": 3.4e38, "float16": 65504.0, "fp16": 65504.0, "bfloat16": 3.3e38, "bf16": 3.3e38}
SMALLEST = {"float32": 1e-37, "fp32": 1e-37, "float16": 2.0**-24, "fp16": 2.0**-24, "bfloat16": 1e-37, "bf16": 1e-37}


@dataclass
class Value:
    """``v`` with one axis for each of ``labels``, and ``e``, the most a float32 evaluation may be off."""

    labels: tuple[str, ...]
    v: np.ndarray
    e: np.ndarray

    def to(self, labels: tuple[str, ...], sizes: dict[str, int] | None = None) -> Value:
        """Axes in the order of ``labels``; missing ones have length 1, or their extent if ``sizes`` are given."""
        return Value(labels, *(_spread(a, self.labels, labels, sizes) for a in (self.v, self.e)))


def _spread(array: np.ndarray, have: tuple[str, ...], want: tuple[str, ...], sizes: dict[str, int] | None) -> np.ndarray:
    assert set(have) <= set(want), (have, want)
    array = array.transpose([have.index(label) for label in want if label in have])
    array = array[tuple(slice(None) if label in have else None for label in want)]
    return array if sizes is None else np.broadcast_to(array, tuple(sizes[label] for label in want))


def evaluate(text: str | Algorithm, inputs: dict[str, np.ndarray], scalars: dict[str, float] | None = None, *,
             params: dict[str, int | bool] | None = None, operands: str = "float32", dtypes: dict[str, str] | None = None,
             errors: dict[str, np.ndarray] | None = None, approximate: dict[str, float] | None = None, stored: dict[str, str] | None = None,
             underflow: bool = False, rounded: frozenset[str] = frozenset()) -> dict[str, Value]:  # fmt: skip
    """Every Func of the program.

    ``operands``: the inputs' dtype, to which computed operands of rdot are rounded. With ``dtypes``, those of the
    floating-point inputs by name: the coarsest among the inputs that enter the product. ``errors``: how far elements of
    inputs may be off. ``approximate``: function -> the relative error that a schedule asks for. ``stored``: Funcs
    that others may read back as they were stored in this dtype. ``underflow``: exponentials too small for float32 may be 0,
    as they are where nothing has the compiler shift them. ``rounded``: inputs that products round as they do what is computed.
    """
    algorithm = parse(text).algorithm if isinstance(text, str) else text
    with np.errstate(all="ignore"):
        return _Evaluation(algorithm, inputs, scalars or {}, params or {}, operands, dtypes, errors or {}, approximate or {}, stored or {}, underflow, rounded).run()


def extents(algorithm: Algorithm, shapes: dict[str, tuple[int, ...]], params: dict[str, int | bool] | None = None) -> dict[str, int]:
    """Extent of each label, from the inputs it indexes by itself, or through a Func indexed by it."""
    sizes = {label: shapes[tensor][dim] if tensor else dim for label, tensor, dim in algorithm.extents}
    accesses = [a for d in algorithm.definitions for a in ex.accesses(d.expr)]
    for _ in range(len(algorithm.labels) + 1):
        for a in accesses:
            own = algorithm[a.tensor].labels if a.tensor in algorithm else (None,) * len(a.index)
            for dim, (label, index) in enumerate(zip(own, a.index)):
                if not isinstance(index, ex.Label):
                    continue
                known = shapes[a.tensor][dim] if label is None else sizes.get(label, sizes.get(index.name))
                for name in (label, index.name):
                    if name is not None and known is not None and sizes.setdefault(name, known) != known:
                        raise ValueError(f"extents of {name} disagree: {sizes[name]} and {known}")
        for label, formula in algorithm.formulas:
            known = _size(formula, sizes, shapes, params or {})
            if known is not None and sizes.setdefault(label, known) != known:
                raise ValueError(f"extents of {label} disagree: {sizes[label]} and {known}")
    return sizes


def _size(formula: ex.Expr, sizes: dict[str, int], shapes: dict[str, tuple[int, ...]], params: dict[str, int | bool]) -> int | None:
    match formula:
        case ex.Const(value):
            return int(value)
        case ex.Param(name):
            return int(params[name])
        case ex.Len(label):
            return sizes.get(label)
        case ex.Access(tensor, (ex.Const(dim),)):
            return shapes[tensor][int(dim)]
    below = [_size(c, sizes, shapes, params) for c in formula.children()]
    if None in below:
        return None
    a, b = (0, *below)[-2:]
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a // b, "%": lambda: a % b}[formula.op]()


def mismatches(got: np.ndarray, want: Value, dtype: str = "float32") -> list[str]:
    """Where ``got``, stored as ``dtype``, is further from ``want`` than rounding explains; one line each."""
    got = np.asarray(got, dtype=np.float64)
    if got.shape != want.v.shape:
        return [f"shape {got.shape}, not {want.v.shape}"]
    with np.errstate(all="ignore"):
        bound = want.e + STEP[dtype] * np.abs(np.where(np.isfinite(want.v), want.v, 0)) * 1.01 + SMALLEST[dtype]
        unknown = np.isinf(want.e) | (np.isfinite(want.v) & (np.abs(want.v) + want.e > LARGEST[dtype]))
        same = (got == want.v) | (np.isnan(got) & np.isnan(want.v)) | (np.abs(got - want.v) <= bound)
    wrong = np.argwhere(~(same | unknown))
    return [f"[{', '.join(map(str, i))}]: {got[tuple(i)]!r}, not {want.v[tuple(i)]!r} +- {bound[tuple(i)]:.2g}" for i in wrong]


def compared(want: Value) -> int:
    """How many elements a comparison with ``want`` says something about."""
    return int((~np.isinf(want.e)).sum())


class _Evaluation:
    def __init__(self, algorithm: Algorithm, inputs: dict[str, np.ndarray], scalars: dict[str, float],
                 params: dict[str, int | bool], operands: str, dtypes: dict[str, str] | None = None,
                 errors: dict[str, np.ndarray] | None = None, approximate: dict[str, float] | None = None, stored: dict[str, str] | None = None,
                 underflow: bool = False, rounded: frozenset[str] = frozenset()):  # fmt: skip
        self.algorithm, self.scalars, self.operands = algorithm, scalars, operands
        self.dtypes, self.errors, self.approximate, self.stored = dtypes, errors or {}, approximate or {}, stored or {}
        self.underflow, self.rounded = underflow, rounded
        self.params = {**dict(algorithm.params), **params}
        self.inputs = {name: np.asarray(array) for name, array in inputs.items()}
        self.sizes = extents(algorithm, {name: array.shape for name, array in self.inputs.items()}, self.params)
        self.done: dict[str, Value] = {}

    def run(self) -> dict[str, Value]:
        for d in self.algorithm.definitions:
            value = self.value(d.expr).to(d.labels, self.sizes)
            if d.name in self.stored:
                value = self._cast(value, self.stored[d.name])
            self.done[d.name] = Value(d.labels, value.v.astype(np.float64), value.e)
        return self.done

    # -- expressions ------------------------------------------------------------------------------------------------

    def value(self, expr: ex.Expr) -> Value:
        match expr:
            case ex.Const(value):
                return _exact((), np.asarray(value)) if isinstance(value, bool) else _rounded(value)
            case ex.Param(name):
                return _exact((), np.asarray(self.params[name]))
            case ex.Scalar(name):
                return _rounded(self.scalars[name])
            case ex.Len(label):
                return _exact((), np.asarray(float(self.sizes[label])))
            case ex.Label(name):
                return _exact((name,), np.arange(self.sizes[name], dtype=np.float64))
            case ex.Reshape(arg, _):
                return self.value(arg)
            case ex.Cast(arg, dtype):
                return self._cast(self.value(arg), dtype)
            case ex.Access(tensor, index):
                return self._access(tensor, index)
            case ex.Unary("-", arg):
                a = self.value(arg)
                return Value(a.labels, -_number(a.v), a.e)
            case ex.Unary("not", arg):
                a = _truth(self.value(arg))
                return Value(a.labels, ~a.v, a.e)
            case ex.Binary(op, left, right):
                return _elementwise(op, [self.value(left), self.value(right)])
            case ex.Call(fn, args):
                return self._approximated(fn, _elementwise(fn, [self.value(a) for a in args]))
            case ex.Reduce(kind, arg, labels):
                return self._unless_hoisted(expr, self._reduce(kind, self.value(arg), labels))
            case ex.Scan():
                return self._scan(expr)
            case ex.Dot(left, right, labels):
                dtype = self._precision(expr)
                sides = [self._operand(side, dtype) for side in (left, right)]
                return self._unless_hoisted(expr, self._reduce("sum", _elementwise("*", sides), labels))
        raise TypeError(type(expr).__name__)

    def _unless_hoisted(self, reduction: ex.Reduce | ex.Dot, value: Value) -> Value:
        """The value of a reduction; not known for a sum of no terms of which a factor that is taken out of it may not be finite."""
        if all(self.sizes[label] for label in reduction.labels) or isinstance(reduction, ex.Reduce) and reduction.kind in ("max", "min"):
            return value
        read, todo = set(), [reduction]
        while todo:
            for name in {a.tensor for a in ex.accesses(todo.pop())} & {*self.done} - read:
                read.add(name)
                todo.append(self.algorithm[name].expr)
        return value if all(np.isfinite(_number(self.done[name].v)).all() for name in read) else Value(value.labels, value.v, np.full_like(value.e, np.inf))

    def _approximated(self, fn: str, value: Value) -> Value:
        if self.underflow and fn in ("exp", "exp2"):
            value = Value(value.labels, value.v, np.where(np.abs(value.v) < SMALLEST["float32"], np.maximum(value.e, np.abs(value.v)), value.e))
        return Value(value.labels, value.v, value.e + relative * np.where(np.isfinite(value.v), np.abs(value.v), 0) + 1e-37) if (relative := self.approximate.get(fn)) else value

    def _precision(self, dot: ex.Dot) -> str:
        """The coarsest dtype that a computed operand of ``dot`` may be rounded to."""
        if self.dtypes is None:
            return self.operands
        entering, todo = set(), [dot]
        while todo:
            for access in ex.accesses(todo.pop()):
                if access.tensor not in entering:
                    entering.add(access.tensor)
                    todo += [self.algorithm[access.tensor].expr] if access.tensor in self.algorithm else []
        found = [self.dtypes[name] for name in entering if name in self.dtypes] or list(self.dtypes.values()) or ["float32"]
        return max(found, key=STEP.__getitem__)

    def _operand(self, side: ex.Expr, dtype: str) -> Value:
        value = self.value(side)
        plain = isinstance(side, ex.Access) and side.tensor in self.inputs and side.tensor not in self.rounded
        return value if plain or dtype == "float32" else self._cast(value, dtype)

    def _cast(self, a: Value, dtype: str) -> Value:
        v = _number(a.v)
        e = a.e + 2 * STEP[dtype] * np.abs(np.where(np.isfinite(v), v, 0)) + SMALLEST[dtype]
        return Value(a.labels, v, np.where(np.isfinite(v) & (np.abs(v) + e > LARGEST[dtype]), np.inf, np.where(np.isfinite(v), e, a.e)))

    def _access(self, tensor: str, index: tuple[ex.Expr, ...]) -> Value:
        source = self.done.get(tensor) or Value((), self.inputs[tensor], self.errors.get(tensor, np.zeros(self.inputs[tensor].shape)))
        where = [self._index(i) for i in index]
        labels = tuple(dict.fromkeys(label for i in where for label in i.labels))
        at = [i.to(labels, self.sizes).v for i in where]
        inside = np.ones(tuple(self.sizes[label] for label in labels), dtype=bool)
        for i, size in zip(at, source.v.shape):
            inside &= (i >= 0) & (i < size)
        if all(source.v.shape):
            clipped = tuple(np.clip(i, 0, size - 1) for i, size in zip(at, source.v.shape))
            v, e = source.v[clipped], source.e[clipped]
        else:
            v = e = np.zeros(inside.shape)
        v = v if v.dtype == bool else v.astype(np.float64)
        return Value(labels, np.where(inside, v, False if v.dtype == bool else 0.0), np.where(inside, e, 0.0))

    def _index(self, expr: ex.Expr) -> Value:
        """Index arithmetic: integers, and / rounds down."""
        match expr:
            case ex.Binary(op, left, right):
                a, b = self._index(left), self._index(right)
                labels = tuple(dict.fromkeys(a.labels + b.labels))
                a, b = a.to(labels), b.to(labels)
                return _exact(labels, {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.floor_divide, "%": np.mod}[op](a.v, b.v))
            case ex.Unary(_, arg):
                a = self._index(arg)
                return _exact(a.labels, -a.v)
        a = self.value(expr)
        return _exact(a.labels, a.v.astype(np.int64))

    def _reduce(self, kind: str, arg: Value, over: tuple[str, ...]) -> Value:
        labels = tuple(dict.fromkeys(arg.labels + over))
        arg = arg.to(labels, self.sizes)
        axes = tuple(labels.index(label) for label in over)
        count = math.prod(self.sizes[label] for label in over)
        kept = tuple(label for label in labels if label not in over)
        v, e = _number(arg.v), arg.e
        if kind in ("any", "all"):
            truth = _truth(arg)
            v = getattr(truth.v, kind)(axis=axes)
            decides = (truth.v == (kind == "any")) & (truth.e == 0)  # one that surely decides
            return Value(kept, v, np.where(decides.any(axis=axes), 0.0, truth.e.max(axis=axes, initial=0.0)))
        if kind == "prod":
            size = np.abs(np.where(np.isfinite(v), v, 0)) + e
            error = size.prod(axis=axes) * ((1 + 2 * U) ** (count + 8)) - np.abs(v).prod(axis=axes)
            overflows = np.maximum(size, 1).prod(axis=axes) > LARGEST["float32"]  # in some order of the factors, and a zero among them then makes a NaN
            return Value(kept, *_settled(v.prod(axis=axes), np.where(overflows, np.inf, error), [e.max(axis=axes, initial=0.0)]))
        if kind in ("max", "min"):
            start = -np.inf if kind == "max" else np.inf
            reduced = (np.max if kind == "max" else np.min)(v, axis=axes, initial=start)
            return Value(kept, reduced, np.max(e, axis=axes, initial=0.0))
        total = v.sum(axis=axes)
        size = np.abs(np.where(np.isfinite(v), v, 0)).sum(axis=axes)
        error = e.sum(axis=axes) + (count + 8) * U * size
        if kind == "mean":
            total, error = total / count, error / max(count, 1) + U * np.abs(total / max(count, 1))
        both = np.isnan(total) & ~np.isnan(v).any(axis=axes)  # infinities of both signs: of an infinite factor that leaves the sum an infinity is left
        total, error = np.where(both & (count > 0), 0.0, total), np.where(both, np.inf, error)  # a mean of nothing is a NaN, or what all terms would be
        return Value(kept, *_settled(total, error, [e.max(axis=axes, initial=0.0)]))

    def _scan(self, scan: ex.Scan) -> Value:
        """Element by element, with the error of any order of the same steps: that of a sum of the absolute terms."""
        args = [self.value(a) for a in scan.args]
        labels = (*dict.fromkeys(x for a in args for x in a.labels if x != scan.label), scan.label)
        args = [a.to(labels, self.sizes) for a in args]
        v, e = [_number(a.v) for a in args], [a.e for a in args]
        found, errors = np.empty(v[0].shape), np.empty(v[0].shape)
        start = {"recur": 0.0, **{kind: float(first) for kind, first in ex.SCANS.items()}}[scan.kind]
        h = np.full(v[0].shape[:-1], start)
        off, size = np.zeros_like(h), np.abs(h) if scan.kind in ("prod", "recur") else np.zeros_like(h)
        order = range(self.sizes[scan.label])
        for step, t in enumerate(reversed(order) if scan.reverse else order, 2):
            if scan.exclusive:
                found[..., t], errors[..., t] = h, off + step * 4 * U * size
            x, dx = v[0][..., t], e[0][..., t]
            match scan.kind:
                case "sum":
                    h, off, size = h + x, off + dx, size + np.abs(x)
                case "prod" | "recur":
                    b, db = (v[1][..., t], e[1][..., t]) if scan.kind == "recur" else (0.0, 0.0)
                    off = np.abs(x) * off + dx * (np.abs(h) + off) + db
                    h, size = x * h + b, np.abs(x) * size + np.abs(b)
                case _:
                    h, off = (np.maximum if scan.kind == "max" else np.minimum)(h, x), np.maximum(off, dx)
            if not scan.exclusive:
                found[..., t], errors[..., t] = h, off + step * 4 * U * size
        return Value(labels, found, np.where(np.isfinite(errors), errors, np.inf))


# -- element by element -----------------------------------------------------------------------------------------------


def _exact(labels: tuple[str, ...], v: np.ndarray) -> Value:
    return Value(labels, v, np.zeros(v.shape))


def _rounded(value: float) -> Value:
    """A constant or scalar, which a kernel holds in float32."""
    v = np.asarray(float(value))
    return Value((), v, np.abs(v - v.astype(np.float32)) if np.isfinite(v) else np.zeros(()))


def _number(v: np.ndarray) -> np.ndarray:
    return v.astype(np.float64)


def _truth(a: Value) -> Value:
    """As a condition: true where not 0. The error of a condition is 1 where rounding may turn it."""
    if a.v.dtype == bool:
        return a
    return Value(a.labels, a.v != 0, np.where((a.e > 0) & ~(np.abs(a.v) > a.e), 1.0, 0.0))


def _settled(v: np.ndarray, e: np.ndarray, arguments: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Unknown stays unknown, overflow becomes unknown; exact infinities and NaNs have no error."""
    unknown = np.zeros(np.shape(v), dtype=bool)
    for a in arguments:
        unknown = unknown | np.isinf(a)
    e = np.where(np.isfinite(v), np.where(np.isnan(e), np.inf, e), 0.0)
    e = np.where(unknown | (np.isfinite(v) & (np.abs(v) + e > LARGEST["float32"])), np.inf, e)
    return v, e


def _elementwise(fn: str, args: list[Value]) -> Value:
    labels = tuple(dict.fromkeys(label for a in args for label in a.labels))
    args = [a.to(labels) for a in args]
    if fn in ("and", "or"):
        a, b = (_truth(x) for x in args)
        v = a.v & b.v if fn == "and" else a.v | b.v
        return Value(labels, v, np.broadcast_to(np.maximum(a.e, b.e), v.shape))
    if fn == "where":
        return _where(labels, *args)
    if fn in ex.COMPARISONS:
        return _comparison(labels, fn, *args)
    if fn in ("isnan", "isinf", "isfinite"):
        v = getattr(np, fn)(_number(args[0].v))
        return Value(labels, v, np.where(np.isinf(args[0].e), 1.0, 0.0))
    if fn == "clamp":
        v, e = _clamp(*((_number(a.v), a.e) for a in args))
        return Value(labels, *_settled(v, np.broadcast_to(e, v.shape), [a.e for a in args]))
    v, e = (_binary if len(args) == 2 else _unary)(fn, *((_number(a.v), a.e) for a in args))
    e = np.broadcast_to(e, v.shape)
    return Value(labels, *_settled(v, e, [a.e for a in args] + ([e] if fn in ("exp", "exp2", "/") else [])))


def _where(labels: tuple[str, ...], condition: Value, a: Value, b: Value) -> Value:
    c = _truth(condition)
    if a.v.dtype == b.v.dtype == bool:
        v = np.where(c.v, a.v, b.v)
        return Value(labels, v, np.maximum(np.where(c.v, a.e, b.e), (c.e > 0) & (a.v != b.v)))
    x, y = _number(a.v), _number(b.v)
    v, e = np.broadcast_arrays(np.where(c.v, x, y), np.where(c.v, a.e, b.e))
    turns = (c.e > 0) & ~((x == y) | (np.isnan(x) & np.isnan(y)))
    apart = np.abs(x - y) + a.e + b.e
    return Value(labels, v, np.where(turns, np.where(np.isfinite(apart), apart, np.inf), e))


def _comparison(labels: tuple[str, ...], op: str, a: Value, b: Value) -> Value:
    compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal}[op]
    x, y, e = _number(a.v), _number(b.v), a.e + b.e
    close = (e > 0) & (np.isinf(e) | (np.abs(x - y) <= e))
    v = compare(x, y)
    return Value(labels, v, np.broadcast_to(np.where(close, 1.0, 0.0), v.shape))


def _binary(fn: str, left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    (a, ea), (b, eb) = left, right
    match fn:
        case "+":
            return a + b, ea + eb + U * np.abs(a + b)
        case "-":
            return a - b, ea + eb + U * np.abs(a - b)
        case "*":
            return a * b, np.abs(a) * eb + np.abs(b) * ea + ea * eb + U * np.abs(a * b)
        case "/":
            v, least = a / b, np.abs(b) - eb
            e = (ea + np.abs(v) * eb) / np.where(eb == 0, np.abs(b), least) + 2 * U * np.abs(v)
            either = np.isnan(v) & np.isfinite(a) & np.isfinite(b) & ((ea > 0) | (eb > 0))  # 0 / 0, where one of the two may be another number
            return v, np.where(((least > 0) | (eb == 0)) & ~either, e, np.inf)
        case "%":  # of whole numbers
            return np.mod(a, b), np.zeros(np.broadcast(a, b).shape)
        case "pow":
            return _power(a, ea, b, eb)
        case "atan2":
            length = np.hypot(a, b) - np.hypot(ea, eb)
            apart = np.where((ea == 0) & (eb == 0), 0, np.where((length > 0) & ~((b < 0) & (np.abs(a) <= ea)), np.hypot(ea, eb) / np.where(length > 0, length, 1), 7))
            return np.arctan2(a, b), apart + 8 * U
        case "maximum":
            return np.maximum(a, b), np.maximum(ea, eb)
        case "minimum":
            return np.minimum(a, b), np.maximum(ea, eb)
    raise ValueError(fn)


def _clamp(arg: tuple, low: tuple, high: tuple) -> tuple[np.ndarray, np.ndarray]:
    return np.minimum(np.maximum(arg[0], low[0]), high[0]), np.maximum(np.maximum(arg[1], low[1]), high[1])


def _power(a: np.ndarray, ea: np.ndarray, b: np.ndarray, eb: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By exp2(b * log2(a)): an error of the exponent is one of the result's, relatively. A base that may change its sign says nothing."""
    v, size = np.power(a, b), np.abs(a)
    log = np.abs(np.log(np.where(size > 0, size, 1)))
    exponent = np.abs(b) * np.where(ea > 0, -np.log1p(-np.minimum(ea / np.where(size > 0, size, 1), 1)), 0) + eb * (log + 1)
    e = np.abs(np.where(np.isfinite(v), v, 0)) * np.expm1(exponent + 8 * U * (1 + np.abs(np.where(np.isfinite(b), b, 0)) * log)) + 1e-37
    unsure = (ea > 0) & (ea >= size) | (eb > 0) & (a <= 0) | np.isinf(v) & np.isfinite(a) & np.isfinite(b) & (size > 0)
    return v, np.where(unsure, np.inf, e)


def _largest(a: np.ndarray) -> float:
    finite = np.abs(a[np.isfinite(a)])
    return float(finite.max()) if finite.size else 0.0


def _vanished(a: np.ndarray) -> np.ndarray:
    """Error of an exp that is 0 here: it is exactly 0 of -inf alone; else quotients of two such are anything."""
    return np.where(np.isfinite(a), 1e-300, 0.0)


def _undefined(a: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Error where a logarithm or root is not of a positive number: none if it surely is not, else unknown."""
    return np.where((a + e < 0) | (e == 0), 0, np.inf)


def _unary(fn: str, arg: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    a, e = arg
    own = 4 * U
    match fn:
        case "exp":  # the compiler may shift the argument by a row maximum: another 2 roundings of the largest
            v = np.exp(a)
            near = np.where(v == 0, _vanished(a), v * np.expm1(e + own * (1 + _largest(a))))
            return v, np.where(np.isinf(v) & np.isfinite(a), np.inf, near)
        case "exp2":
            v = np.exp2(a)
            near = np.where(v == 0, _vanished(a), v * np.expm1(e + own * (1 + np.abs(a))))
            return v, np.where(np.isinf(v) & np.isfinite(a), np.inf, near)
        case "log" | "log2":
            v = np.log(a) / (math.log(2) if fn == "log2" else 1)
            return v, np.where(e < a, -2 * np.log1p(-np.minimum(e / a, 1)), _undefined(a, e)) + own * np.abs(v)
        case "sqrt":
            v = np.sqrt(a)
            return v, np.where(a >= e, e / np.where(v > 0, v, 1), np.where(a + e < 0, 0, np.inf)) + own * np.abs(v)
        case "rsqrt":
            v = 1 / np.sqrt(a)
            return v, np.where(e < a, v * e / np.abs(a - e), _undefined(a, e)) + own * np.abs(v)
        case "abs":
            return np.abs(a), e
        case "floor" | "ceil" | "trunc" | "round" | "sign":
            step = getattr(np, fn)
            return step(a) if fn != "sign" else np.where(np.isnan(a), 0.0, np.sign(a)), np.where(step(a - e) != step(a + e), step(a + e) - step(a - e), 0.0)
        case "sin" | "cos":
            return getattr(np, fn)(a), np.minimum(e, 2) + own
        case "atan":
            return np.arctan(a), np.minimum(e, 4) + own
        case "asin" | "acos":
            v = getattr(np, f"arc{fn[1:]}")(a)
            return v, np.where(e == 0, 2 * own, np.where(np.abs(a) + e < 1, e / np.sqrt(np.maximum(1 - (np.abs(a) + e) ** 2, 1e-30)) + 2 * own, np.inf))
        case "detach":
            return a, e
        case "log1p":
            v, u = np.log1p(a), 1 + a
            return v, np.where(e < u, -2 * np.log1p(-np.minimum(e / u, 1)), _undefined(u, e)) + own * np.abs(v)
        case "expm1":
            v = np.expm1(a)
            return v, np.where(np.isinf(v) & np.isfinite(a), np.inf, (v + 1) * np.expm1(e) + own * (1 + np.abs(np.where(np.isfinite(a), a, 0))) * np.abs(v))
        case "sigmoid":
            v = np.where(a >= 0, 1 / (1 + np.exp(-np.abs(a))), np.exp(-np.abs(a)) / (1 + np.exp(-np.abs(a))))
            v = np.where(np.isnan(a), np.nan, v)
            return v, np.minimum(np.expm1(np.minimum(e, 700)), 1) * v + own * v * (1 + np.minimum(np.abs(a), 100))
        case "tanh":
            return np.tanh(a), np.minimum(e, 2) + own * np.abs(np.tanh(a))
        case "erfc":
            v = np.vectorize(math.erfc, otypes=[np.float64])(a) if a.size else a
            return v, np.minimum(1.13 * e, 2) + own * np.abs(v) * (1 + np.minimum(np.where(np.isfinite(a), a, 0) ** 2, 1e4))
        case "erf":
            v = np.vectorize(math.erf, otypes=[np.float64])(a) if a.size else a
            return v, np.minimum(1.13 * e, 2) + own * np.abs(v)
    raise ValueError(fn)


# -- kernels against the reference --------------------------------------------------------------------------------------


def dtype_name(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def as_numpy(tensor) -> np.ndarray:
    """A torch tensor in float64 (booleans as they are)."""
    tensor = tensor.detach().cpu()
    return tensor.numpy() if dtype_name(tensor) == "bool" else tensor.double().numpy()


def outputs_of(compiled, *args, **kwargs) -> dict[str, object]:
    """Call every wrapper of a compiled program; results by Func."""
    asked = compiled.program.outputs()
    hosts = {w: k.func for k in lower(compiled.prepared) for w in k.writes}
    results: dict[str, object] = {}
    for root in dict.fromkeys(hosts[f] for f in asked):
        names = [f for f in asked if hosts[f] == root]
        found = getattr(compiled, root if root in names else names[0])(*args, **kwargs)
        assert isinstance(found, tuple) == (len(names) > 1), f"{root}: {type(found)} for {names}"
        results |= dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
    return results


def check(
    text: str, *args, params: dict[str, int | bool] | None = None, dtype: str | None = None, operands: str | None = None
) -> dict[str, object]:
    """Compile ``text``, run it on ``args`` (inputs, then scalars, as the wrapper takes them), compare every output.

    ``dtype`` is that of the results, if it is not the inputs' common one; ``operands`` that of products. Returns the outputs.
    """
    import dtkernels

    compiled = dtkernels.compile(text, params=params)
    algorithm = parse(text).algorithm
    given = dict(zip(algorithm.inputs + algorithm.scalars, args, strict=True))
    inputs = {name: as_numpy(given[name]) for name in algorithm.inputs}
    scalars = {name: s.item() if hasattr(s := given[name], "item") else s for name in algorithm.scalars}
    operands = operands or dtype or dtype_name(args[0])
    want = evaluate(text, inputs, scalars, params=params, operands=operands if operands in STEP else "float32")
    left = compiled.program.algorithm  # parameters bound: what only another variant reads is no argument
    results = outputs_of(compiled, *(given[name] for name in given if name in left.inputs + left.scalars))
    for name, got in results.items():
        assert dtype is None or dtype_name(got) == dtype, f"{name} is {got.dtype}, not {dtype}"
        wrong = mismatches(as_numpy(got), want[name], dtype_name(got))
        assert not wrong, f"{name}: {len(wrong)} of {want[name].v.size} wrong, first {wrong[0]}\n{text}\n{compiled.source}"
    return results
