"""Evaluate an algorithm by eager torch operations: the reference, differentiable, on any device.

Every value is a tensor with named dimensions. Operations broadcast by name. Half-precision inputs are computed in float32 and
float64 inputs in float64, so that the same code is the oracle of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...codegen.emit.module import value_inputs
from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.extents.sources import size_from
from ..signature.signature import promoted, size_sources
from ..torch_support.dtypes import FLOAT8_NAMES, scalar_gradient_dtype
from . import philox
from .float8 import to_float8
from .scans import scanned

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {name: getattr(torch, f.torch or name) for name, f in ex.FUNCTIONS.items() if name not in ex.RANDOM}
_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.true_divide, "<": torch.lt, "<=": torch.le, ">": torch.gt,
    ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
    "&": torch.bitwise_and, "|": torch.bitwise_or, "^": torch.bitwise_xor, "<<": torch.bitwise_left_shift, ">>": torch.bitwise_right_shift,
}  # fmt: skip


@dataclass
class Named:
    """A tensor with a label for each dimension."""

    data: torch.Tensor
    labels: tuple[str, ...]


def extents(algorithm: Algorithm, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the extent of every label from the shapes of the inputs."""
    return {label: size_from(s, tensors, label) for label, s in size_sources(algorithm).items()}


def evaluate(algorithm: Algorithm, tensors: dict[str, torch.Tensor], scalars: dict[str, object], outputs: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a prepared algorithm, with dimensions in label order, in the promoted dtype of the inputs.

    Autocast has cast the inputs of a call already and casts nothing here: a backward that runs under it computes what the forward did.
    """
    device = next((t.device.type for t in tensors.values()), "cpu")
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.amp.autocast(device, enabled=False):
            return _Evaluator(algorithm, tensors, scalars).outputs(outputs)
    return _Evaluator(algorithm, tensors, scalars).outputs(outputs)


def result_dtype(algorithm: Algorithm, tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """Return the promoted dtype of the inputs whose values enter the results."""
    return promoted([tensors[name].dtype for name in value_inputs(algorithm, list(tensors)) if tensors[name].is_floating_point()])


class _Evaluator:
    def __init__(self, algorithm: Algorithm, tensors: dict[str, torch.Tensor], scalars: dict[str, object]):
        self.algorithm, self.tensors, self.scalars = algorithm, tensors, scalars
        self.sizes = extents(algorithm, tensors)
        self.result = result_dtype(algorithm, tensors)
        self.integers = algorithm.integer_tensors()
        self.compute = torch.float64 if self.result == torch.float64 else torch.float32
        self.device = next(iter(tensors.values())).device
        self.known: dict[str, Named] = {}

    def outputs(self, names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        needed = self.algorithm.needed_by(names)
        last = {access.tensor: name for name in needed for access in ex.accesses(self.algorithm[name].expr)}
        for name in needed:
            d = self.algorithm[name]
            if isinstance(d.expr, ex.Write):
                self._write(d)
                continue
            value = self._index(d.expr) if self.algorithm.integer_funcs.get(name, "bool") != "bool" else self.value(d.expr)
            self.known[name] = self._expand(value, d.labels)
            for read in [k for k in self.known if last.get(k) == name and k not in names]:
                del self.known[read]  # free its memory for the rest
        found = []
        for name in names:
            if name in self.algorithm.written:
                found.append(self.tensors[self.algorithm.written[name]])
                continue
            cast, own = self.algorithm[name].expr, self.algorithm.own_dtype(name)
            dtype = getattr(torch, own) if own else self.result
            dtype = self.compute if isinstance(cast, ex.Cast) and cast.dtype == "fp32" else dtype  # float64 stays float64
            found.append(self.known[name].data.to(scalar_gradient_dtype(self.algorithm, name, self.scalars) or dtype))
        return tuple(found)

    def _write(self, d: Definition) -> None:
        """Store the values of a write in its input, where the index lies inside and the condition holds."""
        write: ex.Write = d.expr  # type: ignore[assignment]
        target = self.tensors[write.place.tensor]
        places = [self._expand(self._index(i), d.labels).data for i in write.place.index]
        value, inside = self._expand(self.value(write.value), d.labels).data, torch.ones((), dtype=torch.bool, device=self.device)
        if write.condition is not None:
            inside = self._expand(self.value(write.condition), d.labels).data.to(torch.bool)
        for size, place in zip(target.shape, places):
            inside = inside & (place >= 0) & (place < size)
        value = self._numbers(value)
        form = FLOAT8_NAMES.get(target.dtype)
        if form is not None:  # torch does not index into float8
            value, target = to_float8(value, ex.FLOAT8[form]).to(target.dtype).view(torch.uint8), target.view(torch.uint8)
        target[tuple(p[inside] for p in places)] = value.to(target.dtype)[inside]

    def _expand(self, value: Named, labels: tuple[str, ...]) -> Named:
        """Expand ``value`` to exactly ``labels``."""
        data = self._aligned(value, labels)
        return Named(data.expand([self.sizes[label] for label in labels]), labels)

    def _aligned(self, value: Named, labels: tuple[str, ...]) -> torch.Tensor:
        kept = [label for label in labels if label in value.labels]
        data = value.data.permute([value.labels.index(label) for label in kept])
        for i, label in enumerate(labels):
            if label not in value.labels:
                data = data.unsqueeze(i)
        return data

    def _broadcast(self, *values: Named) -> tuple[list[torch.Tensor], tuple[str, ...]]:
        labels = tuple(label for label in self.algorithm.labels if any(label in v.labels for v in values))
        return [self._aligned(v, labels) for v in values], labels

    def _number(self, value: object, integer: bool = False) -> Named:
        if isinstance(value, torch.Tensor):
            return Named(value.to(self.device).reshape(()).to(value.dtype if integer else self.compute), ())
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if integer else self.compute
        return Named(torch.tensor(value, dtype=dtype, device=self.device), ())

    def value(self, expr: ex.Expr) -> Named:
        match expr:
            case ex.Const(value):
                return self._number(value)
            case ex.Scalar(name):
                return self._number(self.scalars[name])
            case ex.Len(label):
                return self._number(self.sizes[label])
            case ex.Label(name):
                return Named(torch.arange(self.sizes[name], device=self.device).to(self.compute), (name,))
            case ex.Access():
                return self._access(expr)
            case ex.Unary("~", _) | ex.Binary("//" | "&" | "|" | "^" | "<<" | ">>", _, _):
                v = self._index(expr)
                return Named(v.data.to(self.compute), v.labels)
            case ex.Unary(op, arg):
                v = self.value(arg)
                return Named(torch.logical_not(v.data) if op == "not" else -self._numbers(v.data), v.labels)
            case ex.Binary(op, left, right):
                whole = (op in ex.COMPARISONS or op == "%") and all(ex.is_integer(side, self.integers) for side in (left, right))
                (a, b), labels = self._broadcast(*((self._index if whole else self.value)(side) for side in (left, right)))
                if op == "%":
                    return Named(torch.remainder(a, b).to(self.compute), labels)
                if op in ("and", "or"):
                    return Named((torch.logical_and if op == "and" else torch.logical_or)(a, b), labels)
                return Named(_BINARY[op](self._numbers(a), self._numbers(b)), labels)
            case ex.Call("maximum" | "minimum" as fn, (a, b)) if isinstance(a, ex.Const) or isinstance(b, ex.Const):
                return self._clamp(fn, *((a, b) if isinstance(b, ex.Const) else (b, a)))
            case ex.Call("random" | "normal" as fn, (seed, *integers)):
                data, labels = self._broadcast(*(self._index(i) for i in integers))
                return Named(getattr(philox, fn)(self._index(seed).data, data).to(self.compute), labels)
            case ex.Call(fn, args):
                return self._call(fn, [self.value(a) for a in args])
            case ex.Cast(arg, "bool"):
                v = self.value(arg)
                return Named(v.data != 0, v.labels)
            case ex.Cast(_, dtype) if dtype in ex.INTEGERS:
                v = self._index(expr)
                return Named(v.data.to(self.compute), v.labels)
            case ex.Cast(arg, dtype):
                v = self.value(arg)
                if dtype in ex.FLOAT8:
                    return Named(to_float8(self._numbers(v.data), ex.FLOAT8[dtype]), v.labels)
                return v if dtype == "fp32" else Named(v.data.to(getattr(torch, ex.DTYPES[dtype])).to(self.compute), v.labels)
            case ex.Reduce(kind, arg, labels):
                return self._reduce(kind, self._expand_over(self.value(arg), labels), labels)
            case ex.Scan(kind, args, label, reverse):
                data, labels = self._broadcast(*(self._expand_over(self.value(a), (label,)) for a in args))
                return Named(scanned(kind, [x.to(self.compute) for x in torch.broadcast_tensors(*data)], labels.index(label), reverse), labels)
            case ex.Dot(left, right, labels):
                return self._dot(self._expand_over(self.value(left), labels), self._expand_over(self.value(right), labels), labels)
        raise AssertionError(f"{type(expr).__name__} is gone before evaluation")

    def _call(self, fn: str, args: list[Named]) -> Named:
        data, labels = self._broadcast(*args)
        if fn == "where":
            return Named(torch.where(data[0].to(torch.bool), data[1], data[2]), labels)
        data = [self._numbers(d) for d in data]
        return Named(_FUNCTIONS[fn](*data), labels)

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        """Convert truth values to 0 and 1 in the compute dtype, as kernels do; return other values unchanged."""
        return data.to(self.compute) if data.dtype == torch.bool else data

    def _clamp(self, fn: str, arg: ex.Expr, bound: ex.Expr) -> Named:
        """Clamp against a constant. At a tie the constant is taken, so that the gradient there is 0. NaN stays."""
        v, limit = self.value(arg), self.value(bound)
        beyond = v.data <= limit.data if fn == "maximum" else v.data >= limit.data
        return Named(torch.where(beyond, limit.data, v.data), v.labels)

    def _expand_over(self, value: Named, over: tuple[str, ...]) -> Named:
        labels = value.labels + tuple(label for label in over if label not in value.labels)
        return self._expand(value, labels)

    def _reduce(self, kind: str, value: Named, over: tuple[str, ...]) -> Named:
        dims = [value.labels.index(label) for label in over]
        labels = tuple(label for label in value.labels if label not in over)
        data = self._numbers(value.data)
        if kind == "sum":
            return Named(data.sum(dims), labels)
        if kind == "prod" or kind in ex.PLACES:
            flat = data.permute([*(value.labels.index(label) for label in labels), *dims]).flatten(len(labels))
            if not dims or kind == "prod":
                return Named(flat.prod(-1), labels)
            return Named(getattr(torch, kind)(flat, -1) if flat.shape[-1] else flat.new_zeros(flat.shape[:-1], dtype=torch.int64), labels)
        if any(self.sizes[label] == 0 for label in over):
            shape = [self.sizes[label] for label in labels]
            return Named(torch.full(shape, -math.inf if kind == "max" else math.inf, dtype=self.compute, device=self.device), labels)
        return Named(data.amax(dims) if kind == "max" else data.amin(dims), labels)

    def _dot(self, left: Named, right: Named, over: tuple[str, ...]) -> Named:
        names = {label: i for i, label in enumerate(self.algorithm.labels)}
        labels = tuple(label for label in self.algorithm.labels if label in left.labels + right.labels and label not in over)
        one, other = left.data.to(self.compute), right.data.to(self.compute)  # truth values count as numbers here
        data = torch.einsum(one, [names[x] for x in left.labels], other, [names[x] for x in right.labels], [names[x] for x in labels])
        return Named(data, labels)

    def _access(self, access: ex.Access, whole: bool = False) -> Named:
        """Return an element in the compute dtype. Truth values keep their dtype; ``whole`` asks for int64."""
        if access.tensor in self.known:
            value = self.known[access.tensor].data
            value = value if whole or value.dtype != torch.int64 else value.to(self.compute)
        else:
            value = self.tensors[access.tensor]
            if whole:
                value = value.to(torch.int64)  # arithmetic in 8 bits wraps around, and torch takes a uint8 index as a mask
            elif value.dtype != torch.bool:
                value = value.to(self.compute)
        plain = [i.name for i in access.index if isinstance(i, ex.Label)]
        if len(plain) == len(access.index) and len(set(plain)) == len(plain):
            return Named(value, tuple(plain))
        return self._gather(value, [self._index(i) for i in access.index])

    def _gather(self, value: torch.Tensor, index: list[Named]) -> Named:
        """Gather elements at computed indices; 0 out of range."""
        places, labels = self._broadcast(*index)
        inside = torch.ones((), dtype=torch.bool, device=self.device)
        safe = []
        for size, place in zip(value.shape, places):
            inside = inside & (place >= 0) & (place < size)
            safe.append(place.clamp(0, max(size - 1, 0)))
        if 0 in value.shape:
            return Named(torch.zeros([self.sizes[label] for label in labels], dtype=value.dtype, device=self.device), labels)
        found = value[tuple(torch.broadcast_tensors(*safe))]
        return Named(torch.where(inside, found, torch.zeros((), dtype=value.dtype, device=self.device)), labels)

    def _index(self, expr: ex.Expr) -> Named:
        match expr:
            case ex.Label(name):
                return Named(torch.arange(self.sizes[name], device=self.device), (name,))
            case ex.Const(value):
                return self._number(value, integer=True)
            case ex.Len(label):
                return self._number(self.sizes[label], integer=True)
            case ex.Scalar(name):
                return self._number(self.scalars[name], integer=True)
            case ex.Access():
                return self._access(expr, whole=True)
            case ex.Unary(op, arg):
                v = self._index(arg)
                return Named(~v.data if op == "~" else -v.data, v.labels)
            case ex.Cast(arg, dtype) if dtype in ex.INTEGERS:
                return self._to_integer(arg, dtype)
            case ex.Reduce():
                v = self.value(expr)
                return Named(v.data.to(torch.int64), v.labels)
            case ex.Call("where", (condition, chosen, other)):
                data, labels = self._broadcast(self.value(condition), self._index(chosen), self._index(other))
                return Named(torch.where(data[0].to(torch.bool), data[1], data[2]), labels)
            case ex.Call("floor", (quotient,)):  # of integers, where the value is an integer too
                return self._index(quotient)
            case ex.Binary(op, left, right):
                (a, b), labels = self._broadcast(self._index(left), self._index(right))
                if op == "%":
                    return Named(torch.remainder(a, b), labels)
                return Named(torch.div(a, b, rounding_mode="floor") if op in ("/", "//") else _BINARY[op](a, b), labels)
        raise AssertionError(f"{type(expr).__name__} in an index")

    def _to_integer(self, arg: ex.Expr, dtype: str) -> Named:
        """Return the integer in the range of ``dtype`` that is nearest to ``arg`` without its fraction, as int64; 0 for a NaN."""
        least, most = ex.INTEGERS[dtype]
        if ex.is_integer(arg, self.integers, self.algorithm.integer_scalars()):
            v = self._index(arg)
            return Named(v.data.clamp(least, most), v.labels)
        v = self.value(arg)
        data = torch.trunc(self._numbers(v.data).double()).nan_to_num(0.0)
        inside = (data > float(least)) & (data < float(most))
        whole = torch.where(inside, data, torch.zeros((), dtype=data.dtype, device=data.device)).to(torch.int64)
        return Named(torch.where(inside, whole, torch.where(data >= float(most), most, torch.where(data <= float(least), least, whole))), v.labels)
