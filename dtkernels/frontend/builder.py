"""Build an algorithm from torch operations: align dimensions, define Funcs, reduce, multiply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from ..lang import expr as ex
from .sizes import Sizes
from .unsupported import UnsupportedOperation
from .values import SEED, Axis, Dims, Index, IndexLabel, Size, Source, Value, divided, flat, joined, label

DTYPE_WORDS = {getattr(torch, name): word for word, name in ex.DTYPES.items()}
INTEGER_WORDS = {getattr(torch, name): name for name in ex.INTEGERS if name != "bool"}
EXACT = (torch.int32, torch.int64, torch.int8, torch.uint8)  #: dtypes of inputs that DT reads as integers
ONE = sympy.Integer(1)


@dataclass
class Definition:
    """A Func: its index variables and the expression of an element. ``hint`` is the name that it would like, ``place`` the user's file and line."""

    name: str
    indices: list[Index]
    expr: ex.Expr
    hint: str
    place: str = ""


@dataclass
class Input:
    """An input of the program, or with no dimensions a scalar. ``axes`` are those of its dimensions of more than one element."""

    name: str
    source: Source
    axes: list[Axis]
    index: tuple[tuple[Index, ...], ...]


class Builder:
    """The program so far. ``dtype`` and ``shape`` are those of the torch operation at hand; ``hint`` a name for its result."""

    def __init__(self, sizes: Sizes, double: bool = False):
        self.sizes = sizes
        self.double = double  #: whether an argument is float64
        self.inputs: dict[tuple, Input] = {}
        self.definitions: list[Definition] = []
        self.bound: dict[str, Index] = {}  #: index variables that something is reduced over
        self.without_gradient: UnsupportedOperation | None = None  #: raised where a gradient is asked for
        self.draws = 0  #: of random numbers so far
        self.place = ""  #: the user's file and line of the operation at hand
        self.out: Any = None
        self.hint = "value"

    # -- the operation at hand ------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operation's (first) result in torch."""
        return self.results()[0].dtype

    @property
    def shape(self) -> list[Any]:
        """The sizes of the operation's (first) result."""
        return [self.sizes.of(n) for n in self.results()[0].shape]

    def results(self) -> list[torch.Tensor]:
        return [t for t in (self.out if isinstance(self.out, (tuple, list)) else [self.out]) if isinstance(t, torch.Tensor)]

    def forbid_gradient(self, what: str, why: str) -> None:
        """Note something that has the right value and no DT gradient."""
        self.without_gradient = self.without_gradient or UnsupportedOperation(what, why, self.place, allowed="inputs that need no gradient")

    # -- values ---------------------------------------------------------------------------------------------------------

    def index(self, size: Any) -> tuple[Index, ...]:
        """Return a dimension of this size: a new index variable, none for size 1."""
        size = self.sizes.of(size)
        return () if size == 1 else (Index(Axis(size)),)

    def read(self, source: Source) -> Value:
        """Return the value of an input. One-element tensors become scalars of the program."""
        key = (source.root, source.steps)
        if key not in self.inputs:
            name = f"@{len(self.inputs)}"
            self.inputs[key] = Input(name, source, [Axis(n) for n in source.shape if n != 1], ())
        known, dims = self.inputs[key], []
        axes = iter(known.axes)
        for n in source.shape:
            dims.append(() if n == 1 else (Index(next(axes)),))
        indices = tuple(label(i) for dim in dims for i in dim)
        expr: ex.Expr = ex.Access(known.name, indices) if indices else ex.Scalar(known.name)
        if not indices and source.dtype == torch.bool:  # a scalar of a program is a number
            expr = ex.Binary("!=", expr, ex.Const(0))
        return Value(tuple(dims), expr, source.dtype)

    def seed(self) -> ex.Expr:
        """Return the seed of this call's random numbers, a scalar of the program."""
        return self.read(SEED).expr

    def value(self, given: Any, dtype: torch.dtype | None = None) -> Value:
        """Return a value: of an input, of a number, or the value itself."""
        if isinstance(given, Value):
            return given
        if isinstance(given, Source):
            return self.read(given)
        if given is None or isinstance(given, (str, list, tuple, complex)):
            raise UnsupportedOperation(f"{given!r} in place of a tensor")
        kind = torch.bool if isinstance(given, bool) else torch.float32 if isinstance(given, float) else torch.int64
        return Value((), self.number(given), dtype or kind)

    def number(self, given: Any) -> ex.Expr:
        """Return the expression of a Python number or a symbolic size."""
        if isinstance(given, ex.Expr):
            return given
        if isinstance(given, bool):
            return ex.Const(given)
        if isinstance(given, (torch.SymInt, sympy.Basic)):
            size = self.sizes.of(given)
            return self.number(int(size)) if size.is_Integer else Size(size)
        if isinstance(given, torch.SymFloat):
            return Size(given.node.expr)
        if given != given:
            return ex.Binary("-", ex.INF, ex.INF)
        if given < 0:
            return ex.Unary("-", self.number(-given))
        return ex.INF if given == float("inf") else ex.Const(given)

    def numeric(self, value: Value) -> ex.Expr:
        """Return the expression of an element as a number: truth values as 1 and 0."""
        if value.dtype != torch.bool:
            return value.expr
        if isinstance(value.expr, ex.Const):
            return ex.Const(int(value.expr.value))
        return ex.Call("where", (value.expr, ex.Const(1), ex.Const(0)))

    def condition(self, value: Value) -> ex.Expr:
        """Return the expression of an element as a condition."""
        if isinstance(value.expr, ex.Const):
            return ex.Const(bool(value.expr.value))
        return value.expr if value.dtype == torch.bool else ex.Binary("!=", value.expr, ex.Const(0))

    # -- dimensions -----------------------------------------------------------------------------------------------------

    def unify(self, a: tuple[Index, ...], b: tuple[Index, ...]) -> bool:
        """Make two dimensions of one size run over the same axes, splitting those of either where needed. False where that is impossible."""
        left, right = flat(a), flat(b)
        while left and right:
            x, y = left[0].axis.root(), right[0].axis.root()
            if x is y or self.sizes.same(x.size, y.size):
                x.unify(y)
                left, right = left[1:], right[1:]
            elif self.sizes.divides(x.size, y.size):
                y.split(x.size, self.sizes.quotient(y.size, x.size))
                left, right = flat(left), flat(right)
            elif self.sizes.divides(y.size, x.size):
                x.split(y.size, self.sizes.quotient(x.size, y.size))
                left, right = flat(left), flat(right)
            else:
                return False
        return True

    def aligned(self, values: Sequence[Value], ranks: int | None = None) -> tuple[Dims, list[ex.Expr]]:
        """Broadcast values as torch does. Returns the dimensions of the result and each value's expression over them."""
        rank = max((v.rank for v in values), default=0) if ranks is None else ranks
        values = list(values)
        for place in range(-rank, 0):
            present = [k for k, v in enumerate(values) if v.rank >= -place and flat(v.dims[place])]
            for other in present[1:] * 2:
                one, dim = values[present[0]].dims[place], values[other].dims[place]
                if self.unify(one, dim):
                    continue
                again = tuple(Index(leaf.axis) for leaf in flat(one))
                values[other] = self.taken(values[other], values[other].rank + place, lambda at: at, again)
        every = [((),) * (rank - v.rank) + v.dims for v in values]
        target: list[tuple[Index, ...]] = []
        taken: set[str] = set()
        for place in range(rank):
            dim = next((dims[place] for dims in every if flat(dims[place])), ())
            if any(leaf.name in taken for leaf in flat(dim)):
                dim = tuple(Index(leaf.axis) for leaf in flat(dim))
            taken |= {leaf.name for leaf in flat(dim)}
            target.append(dim)
        return tuple(target), [self.moved(v.expr, dims, target) for v, dims in zip(values, every)]

    def moved(self, expr: ex.Expr, dims: Sequence[tuple[Index, ...]], target: Sequence[tuple[Index, ...]]) -> ex.Expr:
        """Rewrite an expression over ``dims`` to one over ``target``, which has the same axes."""
        pairs = [pair for own, other in zip(dims, target) for pair in zip(flat(own), flat(other)) if pair[0] is not pair[1]]
        return self.replaced(expr, {own.name: label(other) for own, other in pairs})

    def replaced(self, expr: ex.Expr, leaves: dict[str, ex.Expr], inside: bool = False) -> ex.Expr:
        """Replace unsplit index variables by integer arithmetic, those of split ones too. ``inside``: within an index."""
        if not leaves:
            return expr
        if isinstance(expr, IndexLabel):
            own = expr.index.leaves()
            found = [leaves.get(leaf.name) or label(leaf) for leaf in own]
            if not any(leaf.name in leaves for leaf in own):
                return expr
            plain = [one.index for one in found if isinstance(one, IndexLabel)]
            whole = label(expr.index.onto(iter(plain))) if len(plain) == len(own) else joined(own, found, [self.number(leaf.axis.root().size) for leaf in own[1:]])
            return whole if inside else ex.as_value(whole)
        return expr.rebuild(lambda child: self.replaced(child, leaves, inside or isinstance(expr, ex.Access)))

    def elementwise(self, function: Callable[..., ex.Expr], *given: Any, dtype: torch.dtype | None = None) -> Value:
        """Apply a function of expressions element by element; truth values count as 1 and 0."""
        values = [self.value(g) for g in given]
        dims, exprs = self.aligned([replace(v, expr=self.numeric(v)) for v in values])
        return Value(dims, function(*exprs), dtype or self.dtype)

    def detached(self, value: Value) -> Value:
        """Return a value that no gradient passes through."""
        plain = not value.dtype.is_floating_point or isinstance(value.expr, ex.Const) or isinstance(value.expr, ex.Call) and value.expr.fn == "detach"
        return value if plain else replace(value, expr=ex.Call("detach", (value.expr,)))

    def passes_gradient(self, expr: ex.Expr) -> bool:
        """Tell whether torch would have a value require a gradient where its floating-point inputs do."""
        return bool(self.differentiated(expr))

    def differentiated(self, expr: ex.Expr) -> frozenset[int]:
        """Return the tensors of a call, by number, of which torch would have a value require a gradient."""
        types = {known.name: known.source for known in self.inputs.values()}
        funcs = {d.name: d for d in self.definitions}
        todo, seen, found = [expr], set(), set()
        while todo:
            match todo.pop():
                case ex.Access(name, _) | ex.Scalar(name) if name in types:
                    if types[name].dtype.is_floating_point and all(str(op) != "aten.detach.default" for op, *_ in types[name].steps):
                        found.add(types[name].root)
                case ex.Access(name, _) if name in funcs and name not in seen:
                    seen.add(name)
                    todo.append(funcs[name].expr)
                case ex.Call("detach" | "isnan" | "isinf" | "isfinite", _) | ex.Access() | ex.Reduce("argmax" | "argmin" | "argtopk", _, _):
                    continue
                case ex.Call("where", (_, a, b)):
                    todo += [a, b]
                case ex.Binary(op, _, _) if op in ex.COMPARISONS:
                    continue
                case ex.Cast(_, dtype) if dtype in ex.INTEGERS:
                    continue
                case node:
                    todo += node.children()
        return frozenset(found)

    def define(self, value: Value, hint: str = "") -> Value:
        """Give a value a Func of its own."""
        name = f"#{len(self.definitions)}"
        self.definitions.append(Definition(name, [i for dim in value.dims for i in dim], value.expr, hint or self.hint, self.place))
        return replace(value, expr=ex.Access(name, tuple(label(i) for dim in value.dims for i in dim)))

    def expand(self, value: Value, sizes: Sequence[Any]) -> Value:
        """Broadcast a value to these sizes. New elements are repetitions."""
        like = Value(tuple(self.index(n) for n in sizes), ex.Const(0), value.dtype)
        dims, (expr, _) = self.aligned([value, like])
        return Value(dims, expr, value.dtype)

    # -- reductions and products ----------------------------------------------------------------------------------------

    def places(self, rank: int, dim: Any) -> list[int]:
        """Return the dimensions that ``dim`` names; None and () name all."""
        if dim is None or isinstance(dim, (list, tuple)) and not dim:
            return list(range(rank))
        several = dim if isinstance(dim, (list, tuple)) else [dim]
        return sorted({int(d) % max(rank, 1) for d in several}) if rank else []

    def reduce(self, kind: str, value: Value, dim: Any = None, keepdim: bool = False, hint: str = "", dtype: torch.dtype | None = None) -> Value:
        """Reduce over dimensions by sum, max, min or mean; the result is a Func."""
        places = self.places(value.rank, dim)
        over = [i for place in places for i in value.dims[place]]
        kept = tuple(() if place in places else d for place, d in enumerate(value.dims) if keepdim or place not in places)
        expr, dtype = self.numeric(value), dtype or value.dtype
        if not over:
            return Value(kept, ex.Const(0) if kind in ex.PLACES else expr, dtype)
        return self.define(Value(kept, ex.Reduce(kind, expr, self.binding(over)), dtype), hint)

    def binding(self, over: list[Index]) -> tuple[str, ...]:
        """Return the names of index variables to reduce over."""
        self.bound |= {i.name: i for i in over}
        return tuple(i.name for i in over)

    def product(self, a: Value, b: Value, over: list[int], hint: str = "") -> Value:
        """Multiply aligned values (equal ranks, () where one lacks a dimension) and sum over the dimensions ``over``."""
        dims, (left, right) = self.aligned([replace(v, expr=self.operand(v)) for v in (a, b)])
        summed = [i for place in over for i in dims[place]]
        kept = tuple(d for place, d in enumerate(dims) if place not in over)
        both = all(set(i.name for i in flat(summed)) & _names(e) for e in (left, right))
        if not summed:
            return Value(kept, ex.Binary("*", left, right), a.dtype)
        names = self.binding(summed)
        expr: ex.Expr = ex.Dot(left, right, names) if both else ex.Reduce("sum", ex.Binary("*", left, right), names)
        return self.define(Value(kept, expr, a.dtype), hint)

    def operand(self, value: Value) -> ex.Expr:
        """Return an operand of a product in the dtype that torch multiplies in."""
        narrow = value.dtype == torch.float32 and self.dtype in (torch.float16, torch.bfloat16)  # autocast
        dtype = self.dtype if narrow else value.dtype
        expr, word = self.numeric(value), DTYPE_WORDS.get(dtype)
        fed = self.fed(expr)
        return expr if word is None or isinstance(expr, ex.Cast) or fed <= {dtype} else ex.Cast(expr, word)

    def fed(self, expr: ex.Expr) -> set[torch.dtype]:
        """Return the floating dtypes of the inputs whose values enter an expression."""
        types = {known.name: known.source.dtype for known in self.inputs.values()}
        funcs = {d.name: d for d in self.definitions}
        found: set[torch.dtype] = set()
        todo, seen = [expr], set()
        while todo:
            node = todo.pop()
            if isinstance(node, ex.Access):
                if node.tensor in types:
                    found.add(types[node.tensor])
                elif node.tensor not in seen:
                    seen.add(node.tensor)
                    todo.append(funcs[node.tensor].expr)
                continue
            todo += node.children()
        return {t for t in found if t.is_floating_point}

    def is_whole(self, expr: ex.Expr) -> bool:
        """Tell whether DT computes an expression as an integer, exactly."""
        match expr:
            case ex.Const(value):
                return type(value) is int
            case ex.Label() | ex.Len() | Size():
                return True
            case ex.Access(name, _) | ex.Scalar(name):
                known = next((i.source.dtype for i in self.inputs.values() if i.name == name), None)
                if known is not None:
                    return known in EXACT
                return any(d.name == name and (isinstance(d.expr, ex.Cast) or isinstance(d.expr, ex.Reduce) and d.expr.kind in ex.PLACES) and self.is_whole(d.expr) for d in self.definitions)
            case ex.Cast(_, dtype):
                return dtype in INTEGER_WORDS.values()
            case ex.Call("trunc", _):  # a number that was converted to integers: ``marked`` casts it
                return True
            case ex.Unary("-" | "~", _) | ex.Binary("+" | "-" | "*" | "%" | "//" | "&" | "|" | "^" | "<<" | ">>", _, _):
                return all(map(self.is_whole, expr.children()))
            case ex.Reduce(kind, _, _):
                return kind in ex.PLACES
            case ex.Call("where", (_, a, b)) | ex.Call("floor", (ex.Binary("/", a, b),)):
                return self.is_whole(a) and self.is_whole(b)
        return False

    def exact(self, value: Value) -> ex.Expr:
        """Return an integer expression for a value of integers or truth values. An input of integers stands beside an operator on integers: DT reads it as such."""
        expr = self.numeric(value)
        if not self.is_whole(expr):
            return ex.Cast(expr, "int64")
        return self.marked(expr)

    def marked(self, expr: ex.Expr) -> ex.Expr:
        """Put inputs of integers beside an operator on integers, which makes DT read them as integers."""
        kinds = {known.name: known.source.dtype for known in self.inputs.values()}
        match expr:
            case ex.Binary("|", ex.Access() | ex.Scalar(), ex.Const(0)):
                return expr
            case ex.Call("trunc", (a,)):
                return ex.Cast(a, "int64")
            case ex.Access(name, _) | ex.Scalar(name):
                return ex.Binary("|", expr, ex.Const(0)) if kinds.get(name) in EXACT else expr
        return expr.rebuild(self.marked)

    def reads_integers(self, expr: ex.Expr) -> bool:
        """Tell whether elements of integer inputs enter an expression, other than as an index or in a comparison."""
        types = {known.name: known.source.dtype for known in self.inputs.values()}
        funcs = {d.name: d for d in self.definitions}
        todo: list[ex.Expr] = [expr]
        while todo:
            node = todo.pop()
            if isinstance(node, ex.Access) and node.tensor in funcs:
                todo.append(funcs[node.tensor].expr)
            elif isinstance(node, (ex.Access, ex.Scalar)):
                kind = types[node.tensor if isinstance(node, ex.Access) else node.name]
                if not kind.is_floating_point and kind != torch.bool:
                    return True
            elif isinstance(node, ex.Call) and node.fn == "where":
                todo += node.args[1:]
            elif not (isinstance(node, ex.Binary) and node.op in ex.COMPARISONS):
                todo += node.children()
        return False

    def reshaped(self, value: Value, sizes: Sequence[Any]) -> Value:
        """Regroup the index variables of a value into dimensions of these sizes."""
        sizes = list(map(self.sizes.of, sizes))
        left, dims = [leaf for dim in value.dims for leaf in flat(dim)], []
        for size in sizes:
            dim: list[Index] = []
            while size != 1:
                if not left:
                    return self.recounted(value, sizes)
                first, own = left[0], left[0].axis.root().size
                if self.sizes.same(own, size):
                    size = ONE
                elif self.sizes.divides(own, size):
                    size = self.sizes.quotient(size, own)
                elif self.sizes.divides(size, own):
                    first.axis.split(size, self.sizes.quotient(own, size))
                    left = flat(left)
                    continue
                else:
                    return self.recounted(value, sizes)
                dim.append(first)
                left = left[1:]
            dims.append(tuple(dim))
        return self.recounted(value, sizes) if left else replace(value, dims=tuple(dims))

    def recounted(self, value: Value, sizes: Sequence[Any]) -> Value:
        """Reshape where no regrouping does it: by the position of each element among all of them."""
        same = 0
        while same < min(value.rank, len(sizes)) and self.sizes.same(self.extent(value.dims[same]), sizes[same]):
            same += 1
        one = replace(value, dims=(*value.dims[:same], tuple(leaf for dim in value.dims[same:] for leaf in flat(dim))))
        dims = tuple(self.index(n) for n in sizes[same:])
        found = self.taken(one, same, lambda at: at, tuple(i for dim in dims for i in dim))
        return replace(found, dims=(*value.dims[:same], *dims))

    def taken(self, value: Value, place: int, at: Callable[[ex.Expr], ex.Expr], dim: tuple[Index, ...]) -> Value:
        """Replace dimension ``place`` by ``dim``. ``at`` makes the old index from the new one, as integer arithmetic."""
        own = flat(value.dims[place])
        where = at(self.flat_index(dim))
        renamed: dict[str, ex.Expr] = {}
        for k, leaf in enumerate(own):
            inner = self.extent(own[k + 1 :])
            one = where if inner == 1 else divided("/", where, self.number(inner))
            renamed[leaf.name] = one if k == 0 else divided("%", one, self.number(leaf.axis.root().size))
        dims = (*value.dims[:place], dim, *value.dims[place + 1 :])
        return Value(dims, self.replaced(value.expr, renamed), value.dtype)

    def extent(self, indices: Sequence[Index]) -> Any:
        """Return the product of the extents of index variables."""
        size = ONE
        for index in indices:
            size = self.sizes.of(size * index.axis.root().size)
        return size

    def flat_index(self, dim: Sequence[Index]) -> ex.Expr:
        """Return the position along a dimension as integer arithmetic."""
        if not dim:
            return ex.Const(0)
        total: ex.Expr = label(dim[0])
        for index in dim[1:]:
            total = ex.Binary("+", ex.Binary("*", total, self.number(index.axis.root().size)), label(index))
        return total


def _names(expr: ex.Expr) -> set[str]:
    """Return the index variables, and the leaves of split ones, that an expression varies with."""
    found: set[str] = set()
    for node in expr.walk():
        if isinstance(node, ex.Label):
            found |= {node.name, *(leaf.name for leaf in node.index.leaves())}  # type: ignore[attr-defined]
    return found
