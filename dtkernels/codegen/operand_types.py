"""The dtype of a matrix product's operands: a property of the product, not of the program.

The rule, on the algorithm as it is lowered:

1. An operand is *plain* if it is an element of an input, its negation, a ``where`` that chooses between plain values and
   constants, or a ``cast``. Its type is the input's dtype, or the one that the cast names. Any other operand is *computed*.
2. Two plain operands: the promoted type of the two.
3. A computed operand beside a plain one: the plain one's type. The computed one is rounded to it.
4. Two computed operands: the promoted type of what feeds them. A value that holds matrix products is fed by those products;
   any other value is fed by its inputs and casts. Conditions, comparisons, indices and scalar inputs feed nothing.

Integers and truth values have no type of their own: they take that of the rest, float32 where there is no rest. Inputs of a
derived backward that stand for computed values (``Algorithm.stands_for``) are computed, and fed by what fed those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from .nest import Fetch, Let, Load, Local, TileDot, statements, values
from .value_inputs import operands_only, product_inputs, value_inputs

if TYPE_CHECKING:
    from .nest import Kernel

CAST = "cast:"  #: before the name of a dtype among sources; the others are inputs
#: bytes of an element
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "uint8": 1, "bool": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class OperandType:
    """The promoted dtype of ``sources``, inputs and casts ("cast:bf16"); that of ``otherwise`` where all sources hold integers."""

    sources: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()

    @property
    def fixed(self) -> bool:
        """Whether a cast has a say in it."""
        return any(s.startswith(CAST) for s in self.sources)


def _type(sources: Iterable[str], otherwise: Iterable[str] = ()) -> OperandType:
    return OperandType(tuple(sorted(sources)), tuple(sorted(set(otherwise) - set(sources))))


@dataclass(frozen=True)
class _Fed:
    """What feeds a value: its matrix products, and its inputs and casts."""

    products: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()

    @property
    def sources(self) -> frozenset[str]:
        return self.products or self.inputs

    def __or__(self, other: _Fed) -> _Fed:
        return _Fed(self.products | other.products, self.inputs | other.inputs)


class OperandTypes:
    """The types of the products of one algorithm."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.stands_for = dict(algorithm.stands_for)
        self.integers = algorithm.integer_inputs()
        self._plain: dict[str, frozenset[str] | None] = {}
        self._fed: dict[str, _Fed] = {}

    def of(self, dot: ex.Dot) -> OperandType:
        """The type of the operands of ``dot``."""
        left, right = self.plain(dot.left), self.plain(dot.right)
        if left is not None and right is not None:
            return _type(left | right)
        if left is None and right is None:
            return _type(self.fed(dot.left).sources | self.fed(dot.right).sources)
        plain, computed = (left, dot.right) if right is None else (right, dot.left)
        return _type(plain or (), self.fed(computed).sources)

    def buffers(self) -> dict[str, OperandType]:
        """Funcs that products of one type alone take, as they are: between kernels they are stored in that type."""
        found: dict[str, set[OperandType]] = {}
        for dot in (n for d in self.algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)):
            for side in (dot.left, dot.right):
                if isinstance(side, ex.Access):
                    found.setdefault(side.tensor, set()).add(self.of(dot))
        return {f: next(iter(found[f])) for f in sorted(operands_only(self.algorithm)) if len(found[f]) == 1}

    def plain(self, e: ex.Expr) -> frozenset[str] | None:
        """What gives a plain value its type; None of a computed one."""
        match e:
            case ex.Cast(ex.Access(tensor, _), _) if tensor in self.stands_for:
                return None
            case ex.Cast(_, dtype):
                return frozenset({CAST + dtype})
            case ex.Access(tensor, _) if tensor in self.algorithm:
                if tensor not in self._plain:
                    self._plain[tensor] = self.plain(self.algorithm[tensor].expr)
                return self._plain[tensor]
            case ex.Access(tensor, _):
                return None if tensor in self.stands_for else frozenset({tensor} - self.integers)
            case ex.Unary("-", arg):
                return self.plain(arg)
            case ex.Call("where", (_, a, b)):
                sides = [self.plain(side) for side in (a, b) if not _constant(side)]
                known = [side for side in sides if side is not None]
                return frozenset().union(*known) if known and len(known) == len(sides) else None
        return None

    def fed(self, e: ex.Expr) -> _Fed:
        """What feeds ``e``."""
        match e:
            case ex.Access(tensor, _) if tensor in self.stands_for:
                return _Fed(inputs=frozenset(self.stands_for[tensor]))
            case ex.Access(tensor, _) if tensor in self.algorithm:
                if tensor not in self._fed:
                    self._fed[tensor] = self.fed(self.algorithm[tensor].expr)
                return self._fed[tensor]
            case ex.Access(tensor, _):
                return _Fed(inputs=frozenset({tensor} - self.integers))
            case ex.Cast(ex.Access(tensor, _) as arg, _) if tensor in self.stands_for:
                return self.fed(arg)
            case ex.Cast(arg, dtype):
                said = frozenset({CAST + dtype})
                return _Fed(products=said) if self.fed(arg).products else _Fed(inputs=said)
            case ex.Dot():
                found = self.of(e)
                return _Fed(products=frozenset((*found.sources, *found.otherwise)))
            case ex.Call("where", (_, a, b)):
                return self.fed(a) | self.fed(b)
            case ex.Binary(op, _, _) if op in ex.COMPARISONS or op in ("and", "or"):
                return _Fed()
            case ex.Unary("not", _):
                return _Fed()
        found = _Fed()
        for child in e.children():
            found |= self.fed(child)
        return found


def _constant(e: ex.Expr) -> bool:
    return isinstance(e, ex.Const) or isinstance(e, ex.Unary) and e.op == "-" and isinstance(e.arg, ex.Const)


def typed_as(algorithm: Algorithm, func: str) -> frozenset[str]:
    """What feeds ``func``, for a backward in which an input stands for it; a cast of all of it is how it is returned, and left out."""
    types, e = OperandTypes(algorithm), algorithm[func].expr
    e = e.arg if isinstance(e, ex.Cast) else e
    plain = types.plain(e)
    return types.fed(e).sources if plain is None else plain


# -- in emitted text ------------------------------------------------------------------------------------------------------


@dataclass
class Operands:
    """How the products of emitted kernels find their operands.

    ``held``: buffers whose elements have the type of the products that take them, None where that is the results' dtype.
    ``loose``: inputs that products of several types take; they keep their dtype, and kernels convert what they load.
    """

    algorithm: Algorithm
    uniform: bool  #: all inputs have one dtype, or are brought to it by the wrapper
    held: dict[str, OperandType | None] = field(default_factory=dict)
    loose: frozenset[str] = frozenset()
    names: dict[OperandType | None, str] = field(default_factory=dict)  #: of the wrapper's variables

    @staticmethod
    def of(algorithm: Algorithm, kernels: Iterable[Kernel], uniform: bool) -> Operands:
        """For all kernels of a program. ``uniform``: it is called with inputs of one floating-point dtype only."""
        taken = taken_by(kernels)
        types = {t for found in taken.values() for t in found}
        floats = value_inputs(algorithm, algorithm.inputs)
        uniform = uniform or not types or len(floats) > 1 and all(set(t.sources) == set(floats) for t in types)
        made = Operands(algorithm, uniform)
        buffers = OperandTypes(algorithm).buffers()
        if uniform:
            made.held = {t: None for t in product_inputs(algorithm)} | {t: None for t in operands_only(algorithm)}
            made.held |= {f: t for f, t in buffers.items() if t.fixed}
        else:
            plain = {t: next(iter(found)) for t, found in taken.items() if t in algorithm.inputs and len(found) == 1}
            made.held = {t: found for t, found in plain.items() if not found.fixed} | buffers
            made.loose = frozenset(t for t in taken if t in algorithm.inputs and t not in made.held)
        return made

    def type_of(self, dot: TileDot) -> OperandType | None:
        """The type of a product's operands; None for the results' dtype."""
        found = dot.operands
        return None if found is None or self.uniform and not found.fixed else found

    def as_it_is(self, buffer: str, wanted: OperandType | None) -> bool:
        """Whether a product takes what is loaded of ``buffer`` without conversion."""
        return buffer in self.held and self.held[buffer] == wanted

    def variable(self, wanted: OperandType | None) -> str:
        """The wrapper's name for a type."""
        if wanted is None:
            return "dtype"
        if wanted not in self.names:
            wish = "_".join([*(s.removeprefix(CAST) for s in wanted.sources or wanted.otherwise), "dtype"])
            a = self.algorithm
            taken = {*a.inputs, *a.scalars, *a.funcs, *a.labels, *self.names.values(), "operand_dtype"}
            tried = (f"{wish}_{i}" if i else wish for i in range(len(taken) + 1))
            self.names[wanted] = next(n for n in tried if not {n, f"AS_{n}"} & taken)
        return self.names[wanted]

    def constant(self, wanted: OperandType | None) -> str:
        """The kernels' name for a type."""
        return f"AS_{self.variable(wanted)}"


def taken_by(kernels: Iterable[Kernel]) -> dict[str, set[OperandType]]:
    """Buffer -> types of the products that take what is loaded of it; computed operands under the name ''."""
    found: dict[str, set[OperandType]] = {}
    for kernel in (one for k in kernels for one in (k, *k.tail)):
        loads = {s.name: s.value.buffer for s in statements(kernel.body) if isinstance(s, Let) and isinstance(s.value, (Load, Fetch))}
        for dot in products_of(kernel):
            for side in (dot.left, dot.right):
                name = loads.get(side.name, "") if isinstance(side, Local) else ""
                found.setdefault(name, set()).add(dot.operands or OperandType())
    return found


def products_of(kernel: Kernel) -> tuple[TileDot, ...]:
    """The matrix products of one kernel."""
    return tuple(n for value in values(kernel.body) for n in value.walk() if isinstance(n, TileDot))


# -- of one call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputTypes:
    """The dtype of each input of a call whose inputs have several: ("Q", "bf16"), ("slopes", "fp32")."""

    of: tuple[tuple[str, str], ...]

    def promoted(self, sources: Iterable[str]) -> str:
        """The promoted dtype of inputs and casts; "" if none is a floating-point one."""
        given = dict(self.of)
        found = {d for s in sources if (d := given.get(s) or s.removeprefix(CAST)) in ex.DTYPES}
        return "" if not found else found.pop() if len(found) == 1 else "fp32"

    def operand(self, wanted: OperandType) -> str:
        """The dtype of operands."""
        return self.promoted(wanted.sources) or self.promoted(wanted.otherwise) or "fp32"

    def result(self, algorithm: Algorithm) -> str:
        """The dtype of results."""
        return self.promoted(value_inputs(algorithm, algorithm.inputs)) or "fp32"

    def main(self, algorithm: Algorithm, sizes: Mapping[str, int]) -> str:
        """The dtype that schedules are chosen by: that of the product with the most work, else the results'."""
        dots = products(algorithm)
        if not dots:
            return self.result(algorithm)
        _, dot, wanted = max(dots, key=lambda found: work(found[1], sizes))
        return self.operand(wanted)


def products(algorithm: Algorithm) -> list[tuple[str, ex.Dot, OperandType]]:
    """(Func, product, type of its operands), in order of definition."""
    types = OperandTypes(algorithm)
    return [(d.name, n, types.of(n)) for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot)]


def work(dot: ex.Dot, sizes: Mapping[str, int]) -> int:
    """Multiplications of a product."""
    count = 1
    for label in ex.free_labels(dot) | set(dot.labels):
        count *= sizes.get(label, 1)
    return count
