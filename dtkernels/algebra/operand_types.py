"""Infer the operand dtype of each matrix product. It is a property of the product, not of the program.

The rule, on the algorithm as it is lowered:

1. An operand is *plain* if it is an element of an input, its negation, a ``where`` that chooses between plain values and
   constants, or a ``cast``. Its type is the input's dtype, or the one that the cast names. Any other operand is *computed*.
2. Two plain operands: the promoted type of the two.
3. A computed operand beside a plain one: the plain one's type. The computed one is rounded to it.
4. Two computed operands: the promoted type of what feeds them. A value that holds matrix products is determined by those products;
   any other value is determined by its inputs and casts. Conditions, comparisons, indices and scalar inputs feed nothing.

Float8 has a type of its own only in a product of two plain operands that are both float8: they are multiplied as they are, in fp16 where one is
e4m3 and the other e5m2. Elsewhere float8 elements and casts count as integers do.

Integers and booleans have no type of their own: they take that of the other sources, or float32 if there are none. Inputs of a derived
backward that stand for computed values (``Algorithm.stands_for``) count as computed, with the sources of those values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from .smart_constructors import is_constant, is_zero

CAST = "cast:"  #: prefix of a source that is a dtype; the others are inputs


@dataclass(frozen=True)
class OperandType:
    """The promoted dtype of ``sources``, which are inputs and casts ("cast:bf16"); that of ``otherwise`` if all sources hold integers."""

    sources: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()

    @property
    def fixed(self) -> bool:
        """Return whether a cast is among the sources."""
        return any(s.startswith(CAST) for s in self.sources)

    @property
    def float8(self) -> str:
        """Return the dtype of a product in float8, "" for any other."""
        return next((s.removeprefix(CAST) for s in self.sources if s in _FLOAT8), "")


def _type(sources: Iterable[str], otherwise: Iterable[str] = ()) -> OperandType:
    return OperandType(tuple(sorted(sources)), tuple(sorted(set(otherwise) - set(sources))))


@dataclass(frozen=True)
class _Sources:
    """The sources of a value: its matrix products, and its inputs and casts."""

    products: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()

    @property
    def sources(self) -> frozenset[str]:
        return self.products or self.inputs

    def __or__(self, other: _Sources) -> _Sources:
        return _Sources(self.products | other.products, self.inputs | other.inputs)


class OperandTypes:
    """Infers the operand types of the products of one algorithm."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.stands_for = dict(algorithm.stands_for)
        self.integers = algorithm.integer_inputs()
        self.float8 = {name: CAST + dtype for name, dtype in algorithm.float8}
        self._plain: dict[str, frozenset[str] | None] = {}
        self._fed: dict[str, _Sources] = {}

    def of(self, dot: ex.Dot) -> OperandType:
        """Return the type of the operands of ``dot``."""
        left, right = self.plain(dot.left), self.plain(dot.right)
        if left and right and left | right <= _FLOAT8:
            return _type(left if left == right and len(left) == 1 else {f"{CAST}fp16"})  # fp16 holds every number of both
        left, right = (side if side is None else self.wider(side) for side in (left, right))
        if left is not None and right is not None:
            return _type(left | right)
        if left is None and right is None:
            return _type(self.sources_of(dot.left).sources | self.sources_of(dot.right).sources)
        plain, computed = (left, dot.right) if right is None else (right, dot.left)
        return _type(plain or (), self.sources_of(computed).sources)

    def wider(self, sources: Iterable[str]) -> frozenset[str]:
        """Return those of ``sources`` that are not float8."""
        return frozenset(sources) - _FLOAT8 - self.float8.keys()

    def plain(self, e: ex.Expr) -> frozenset[str] | None:
        """Return the sources of a plain value; None for a computed one."""
        match e:
            case ex.Cast(ex.Access(tensor, _), _) if tensor in self.stands_for:
                return None
            case ex.Cast(_, dtype):
                return frozenset({CAST + dtype} if dtype in ex.DTYPES or dtype in ex.FLOAT8 else ())
            case ex.Access(tensor, _) if tensor in self.algorithm:
                if tensor not in self._plain:
                    self._plain[tensor] = self.plain(self.algorithm[tensor].expr)
                return self._plain[tensor]
            case ex.Access(tensor, _):
                return None if tensor in self.stands_for else frozenset({self.float8.get(tensor, tensor)} - self.integers)
            case ex.Unary("-", arg):
                return self.plain(arg)
            case ex.Call("where", (_, a, b)):
                sides = [self.plain(side) for side in (a, b) if not is_constant(side)]
                known = [side for side in sides if side is not None]
                found = frozenset().union(*known) if known and len(known) == len(sides) else None
                rounds = any(is_constant(side) and not is_zero(side) for side in (a, b))
                return None if found and found <= _FLOAT8 and rounds else found
        return None

    def sources_of(self, e: ex.Expr) -> _Sources:
        """Return the sources of ``e``."""
        match e:
            case ex.Access(tensor, _) if tensor in self.stands_for:
                return _Sources(inputs=self.wider(self.stands_for[tensor] or (tensor,)))
            case ex.Access(tensor, _) if tensor in self.algorithm:
                if tensor not in self._fed:
                    self._fed[tensor] = self.sources_of(self.algorithm[tensor].expr)
                return self._fed[tensor]
            case ex.Access(tensor, _):
                return _Sources(inputs=self.wider({tensor} - self.integers))
            case ex.Cast(ex.Access(tensor, _) as arg, _) if tensor in self.stands_for:
                return self.sources_of(arg)
            case ex.Cast(_, dtype) if dtype in ex.INTEGERS or dtype in ex.FLOAT8:
                return _Sources()
            case ex.Cast(arg, dtype):
                said = frozenset({CAST + dtype})
                return _Sources(products=said) if self.sources_of(arg).products else _Sources(inputs=said)
            case ex.Dot():
                own = self.of(e)
                return _Sources(products=self.wider((*own.sources, *own.otherwise)))
            case ex.Call("where", (_, a, b)):
                return self.sources_of(a) | self.sources_of(b)
            case ex.Binary(op, _, _) if op in ex.COMPARISONS or op in ("and", "or"):
                return _Sources()
            case ex.Unary("not", _):
                return _Sources()
        found = _Sources()
        for child in e.children():
            found |= self.sources_of(child)
        return found


_FLOAT8 = frozenset(CAST + name for name in ex.FLOAT8)


def rows_of(side: ex.Expr) -> ex.Access | None:
    """Return the tensor that is a side of a product, all of it or rows that a condition chooses; None for a side that is computed."""
    match side:
        case ex.Access():
            return side
        case ex.Call("where", (condition, ex.Access(_, (*_, ex.Label(last))) as rows, zero)) if is_zero(zero):
            return rows if last not in ex.free_labels(condition) else None  # type: ignore[return-value]
    return None


def typed_as(algorithm: Algorithm, func: str) -> frozenset[str]:
    """Return the sources of ``func``, for a backward whose input stands for it.

    A cast of the whole value is how it is returned, and is ignored.
    """
    types, e = OperandTypes(algorithm), algorithm[func].expr
    e = e.arg if isinstance(e, ex.Cast) else e
    plain = types.plain(e)
    return types.sources_of(e).sources if plain is None else types.wider(plain)


def products(algorithm: Algorithm) -> list[tuple[str, ex.Dot, OperandType]]:
    """List (Func, product, type of its operands), in order of definition."""
    types = OperandTypes(algorithm)
    return [(d.name, n, types.of(n)) for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]


def work(dot: ex.Dot, sizes: Mapping[str, int]) -> int:
    """Count the multiplications of a product."""
    count = 1
    for label in ex.free_labels(dot) | set(dot.labels):
        count *= sizes.get(label, 1)
    return count
