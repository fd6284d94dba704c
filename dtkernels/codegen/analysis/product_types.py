"""How emitted kernels hold the operands of their matrix products; the rule is algebra/operand_types.py.

Between kernels a Func that products of one type alone take, as it is, is stored in that type, rounded once where it is made.
Any other is float32, unless it is an output or a cast. An input that products of one type take is brought to it by the wrapper;
one that products of several types take keeps its dtype, and each product converts what it loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...algebra.operand_types import CAST, OperandType, products, work
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..ir.nest import Fetch, Let, Load, Local, TileDot, statements, values
from .dtype_propagation import operands_only, product_inputs, value_inputs

if TYPE_CHECKING:
    from ..ir.nest import Kernel

#: bytes of an element
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "uint8": 1, "bool": 1, "int32": 4, "int64": 8}


def typed_buffers(algorithm: Algorithm) -> dict[str, OperandType]:
    """Funcs that products of one type alone take, as they are: between kernels they are stored in that type."""
    only = operands_only(algorithm)
    return {t: wanted for t, wanted in _taken_directly(algorithm).items() if t in only}


def typed_inputs(algorithm: Algorithm) -> dict[str, OperandType]:
    """Inputs that products of one type alone take as they are: the wrapper brings them to it."""
    return {t: wanted for t, wanted in _taken_directly(algorithm).items() if t in algorithm.inputs and not wanted.fixed}


def _taken_directly(algorithm: Algorithm) -> dict[str, OperandType]:
    """Tensors whose elements are operands of products of one type."""
    found: dict[str, set[OperandType]] = {}
    for _, dot, wanted in products(algorithm):
        for side in (dot.left, dot.right):
            if isinstance(side, ex.Access):
                found.setdefault(side.tensor, set()).add(wanted)
    return {t: next(iter(wanted)) for t, wanted in sorted(found.items()) if len(wanted) == 1}


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
        buffers = typed_buffers(algorithm)
        if uniform:
            made.held = dict.fromkeys((*product_inputs(algorithm), *operands_only(algorithm)))
            made.held |= {f: t for f, t in buffers.items() if t.fixed}
        else:
            plain = {t: next(iter(found)) for t, found in taken.items() if t in algorithm.inputs and len(found) == 1}
            made.held = {**{t: found for t, found in plain.items() if not found.fixed}, **buffers}
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


class ElementBytes(dict[str, int]):
    """Bytes an element of each buffer, with the dtypes of the inputs that they follow from."""

    def __init__(self, types: InputTypes, of: Mapping[str, int]):
        super().__init__(of)
        self.types = types


