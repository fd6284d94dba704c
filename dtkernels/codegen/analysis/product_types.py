"""Decide in which dtype emitted kernels store the operands of their matrix products; algebra/operand_types.py has the rule.

A Func that only products read, without conversion, is stored between kernels in the widest of their types, rounded once where it is computed.
A product that is divided by its norm is stored in the results' dtype (normalized_products.py). Any other Func is float32, unless it is an
output or a cast. The wrapper casts an input that products of one type read. An input that products of several types read keeps its dtype,
and each product converts what it loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...algebra.operand_types import CAST, OperandType, products, rows_of, work
from ...lang import expr as ex
from ...lang.algorithm import Algorithm
from ..ir.nest import DescriptorLoad, Let, Load, Local, TileDot, loaded, statements, values
from .dtype_propagation import copied_funcs, narrow_buffers, operands_only, product_inputs, value_inputs
from .normalized_products import normalized_products

if TYPE_CHECKING:
    from ..ir.nest import Kernel

SHORT_NAMES = {name: short for short, name in ex.TORCH_NAMES.items()}
#: dtype -> bytes per element
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "int8": 1, "uint8": 1, "bool": 1, "int32": 4, "int64": 8}
SLOWER = 4  #: how many times as long a product takes in float32 as one of 16 bits, at least: in tiles for 16 bits much longer


def cast_bytes(algorithm: Algorithm, func: str) -> int:
    """Return the bytes of an element of a Func that is a cast and is stored as such, 0 of any other."""
    return BYTES.get(SHORT_NAMES.get(algorithm.own_dtype(func), ""), 0)


def typed_buffers(algorithm: Algorithm) -> dict[str, OperandType | None]:
    """Map Funcs that are not stored in float32 between kernels to the type that they are stored in; None is the results' dtype.

    One that only products read, without conversion, has the widest type of these.
    """
    only = operands_only(algorithm)
    wanted = {t: _widest(types) for t, types in _operand_types(algorithm).items() if t in only}
    found = {t: w for t, w in sorted(wanted.items()) if w is not None and not w.float8}
    return found | dict.fromkeys(sorted(normalized_products(algorithm) - only))


def _widest(types: set[OperandType]) -> OperandType | None:
    """Return the type that holds the values of all of ``types``; None where casts decide some."""
    if len(types) == 1:
        return next(iter(types))
    if any(t.fixed for t in types):
        return None
    sources = {s for t in types for s in t.sources}
    return OperandType(tuple(sorted(sources)), tuple(sorted({s for t in types for s in t.otherwise} - sources)))


def typed_inputs(algorithm: Algorithm) -> dict[str, OperandType]:
    """Map inputs that only products of one type read, without conversion, to that type: the wrapper casts them to it."""
    kept = _also_read_as_they_are(algorithm) | algorithm.float8_buffers.keys()
    return {t: wanted for t, wanted in _direct_operands(algorithm).items() if t in algorithm.inputs and t not in kept and not wanted.fixed}


def _also_read_as_they_are(algorithm: Algorithm) -> frozenset[str]:
    """Return the inputs that stand for computed values and enter more than products: they are rounded as operands, and only there."""
    operands = {id(rows_of(side)) for _, dot, _ in products(algorithm) for side in (dot.left, dot.right)}
    read = {a.tensor for d in algorithm.definitions for a in ex.accesses(d.expr) if id(a) not in operands}
    return frozenset(read & {t for t, _ in algorithm.stands_for})


def _direct_operands(algorithm: Algorithm) -> dict[str, OperandType]:
    """Map tensors whose elements are operands of products of one type to that type."""
    return {t: next(iter(wanted)) for t, wanted in sorted(_operand_types(algorithm).items()) if len(wanted) == 1}


def _operand_types(algorithm: Algorithm) -> dict[str, set[OperandType]]:
    """Map tensors whose elements are operands of products to the types of these."""
    found: dict[str, set[OperandType]] = {}
    for _, dot, wanted in products(algorithm):
        for side in (dot.left, dot.right):
            if rows := rows_of(side):
                found.setdefault(rows.tensor, set()).add(wanted)
    for name, copied in reversed(copied_funcs(algorithm).items()):
        if name in found:
            found.setdefault(copied.tensor, set()).update(found[name])
    return found


@dataclass
class Operands:
    """The dtypes of the operands of products in emitted kernels.

    ``held``: buffers that are stored in the type of the products that read them, None where that is the results' dtype.
    ``loose``: inputs that products of several types read; they keep their dtype, and kernels convert what they load.
    """

    algorithm: Algorithm
    uniform: bool  #: all inputs have one dtype, or the wrapper casts them to it
    held: dict[str, OperandType | None] = field(default_factory=dict)
    loose: frozenset[str] = frozenset()
    names: dict[OperandType | None, str] = field(default_factory=dict)  #: type -> name of the wrapper's variable

    @staticmethod
    def of(algorithm: Algorithm, kernels: Iterable[Kernel], uniform: bool) -> Operands:
        """Return the operands of all kernels of a program. ``uniform``: every call passes inputs of a single floating-point dtype."""
        taken = operand_types_by_buffer(kernels)
        types = {t for found in taken.values() for t in found}
        floats = value_inputs(algorithm, algorithm.inputs)
        uniform = uniform or not types or len(floats) > 1 and all(set(t.sources) == set(floats) for t in types)
        uniform = uniform and not algorithm.float8  # nothing is brought to float8, nor float8 to another dtype in memory
        made = Operands(algorithm, uniform)
        buffers = typed_buffers(algorithm)
        if uniform:
            made.held = dict.fromkeys((*product_inputs(algorithm), *sorted(narrow_buffers(algorithm))))
            made.held |= {f: t for f, t in buffers.items() if t is not None and t.fixed}
        else:
            several = {t for t, types in _operand_types(algorithm).items() if len(types) > 1}  # some of their products may be sums of a few terms, in no tile
            kept = _also_read_as_they_are(algorithm) | several
            plain = {t: next(iter(found)) for t, found in taken.items() if t in algorithm.inputs and t not in kept and len(found) == 1}
            made.held = {**{t: found for t, found in plain.items() if not found.fixed}, **buffers}
            made.loose = frozenset(t for t in taken if t in algorithm.inputs and t not in made.held)
        narrow = algorithm.integral | algorithm.float8_buffers.keys()
        made.held = {t: held for t, held in made.held.items() if t not in narrow}  # read in their narrow type, converted in registers
        made.loose -= narrow
        return made

    def type_of(self, dot: TileDot) -> OperandType | None:
        """Return the type of a product's operands; None for the results' dtype."""
        found = dot.operands
        return None if found is None or self.uniform and not found.fixed else found

    def needs_no_conversion(self, buffer: str, wanted: OperandType | None) -> bool:
        """Return whether a product reads ``buffer`` without conversion."""
        return buffer in self.held and self.held[buffer] == wanted

    def variable(self, wanted: OperandType | None) -> str:
        """Return the wrapper's name for a type."""
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
        """Return the kernels' name for a type."""
        return f"AS_{self.variable(wanted)}"


def operand_types_by_buffer(kernels: Iterable[Kernel]) -> dict[str, set[OperandType]]:
    """Map each buffer to the types of the products that read it; computed operands are under the name ''."""
    found: dict[str, set[OperandType]] = {}
    for kernel in (one for k in kernels for one in (k, *k.tail)):
        loads = {s.name: s.value.buffer for s in statements(kernel.body) if isinstance(s, Let) and isinstance(s.value, (Load, DescriptorLoad))}
        for dot in products_of(kernel):
            for side in (dot.left, dot.right):
                side = loaded(side)
                name = loads.get(side.name, "") if isinstance(side, Local) else ""
                found.setdefault(name, set()).add(dot.operands or OperandType())
    return found


def products_of(kernel: Kernel) -> tuple[TileDot, ...]:
    """Return the matrix products of one kernel."""
    return tuple(n for value in values(kernel.body) for n in value.walk() if isinstance(n, TileDot))


# -- of one call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputTypes:
    """The dtype of each input of a call whose inputs have several: ("Q", "bf16"), ("slopes", "fp32")."""

    of: tuple[tuple[str, str], ...]

    def promoted(self, sources: Iterable[str]) -> str:
        """Return the promoted dtype of inputs and casts; "" if none is a floating-point one. Float8 counts where it is alone and a cast."""
        given, sources = dict(self.of), tuple(sources)
        if len(sources) == 1 and sources[0].startswith(CAST) and (narrow := sources[0].removeprefix(CAST)) in ex.FLOAT8:
            return narrow
        found = {d for s in sources if (d := given.get(s) or s.removeprefix(CAST)) in ex.DTYPES}
        return "" if not found else found.pop() if len(found) == 1 else "fp32"

    def operand(self, wanted: OperandType) -> str:
        """Return the dtype of operands."""
        return self.promoted(wanted.sources) or self.promoted(wanted.otherwise) or "fp32"

    def typed(self, algorithm: Algorithm) -> Algorithm:
        """Return ``algorithm`` with the inputs that are float8 in this call, on which the types of its products depend."""
        found = tuple((t, dtype) for t, dtype in self.of if dtype in ex.FLOAT8 and t in algorithm.inputs)
        return replace(algorithm, float8=found) if found else algorithm

    def result(self, algorithm: Algorithm) -> str:
        """Return the dtype of results."""
        return self.promoted(value_inputs(algorithm, algorithm.inputs)) or "fp32"

    def main(self, algorithm: Algorithm, sizes: Mapping[str, int]) -> str:
        """Return the dtype that schedules are chosen by: that of the product with the most work, or the results' if there is no product.

        Float8 where all products are in it; where only the largest one is, all take the schedules of 16 bits.
        """
        dots = products(self.typed(algorithm))
        if not dots:
            return self.result(algorithm)
        _, dot, wanted = max(dots, key=lambda found: work(found[1], sizes))
        if wanted.float8:
            return wanted.float8 if all(other.float8 for _, _, other in dots) else "fp16"
        return self.operand(wanted)


def typed(algorithm: Algorithm, sizes: Mapping[str, int], types: int | InputTypes) -> tuple[Algorithm, int]:
    """Return the algorithm with the inputs that are float8 in a call, and the bytes of an element that its schedule and its predicted time go by.

    Beside products in float8 these are 2, of what they make. Inputs of one dtype may have the product that takes longest in float32, by a cast.
    """
    if not isinstance(types, int):
        return types.typed(algorithm), max(2, BYTES[types.main(algorithm, sizes)])
    timed = [(work(dot, sizes) * (SLOWER if (wide := f"{CAST}fp32" in wanted.sources) else 1), wide) for _, dot, wanted in products(algorithm)]
    return algorithm, BYTES["fp32"] if timed and max(timed)[1] else types


class ElementBytes(dict[str, int]):
    """Bytes an element of each buffer, with the dtypes of the inputs that they follow from."""

    def __init__(self, types: InputTypes, of: Mapping[str, int]):
        super().__init__(of)
        self.types = types


