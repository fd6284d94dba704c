"""Describe the signature of an algorithm, which a call needs before any kernel runs: names, ranks, sources of extents and dtypes.

All of it follows from the algorithm. For the shipped ops it is precomputed, see op_manifest.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...autoschedule.cost.outline import Outline
from ..torch_support.dtypes import DTYPE_NAMES, FLOAT8_NAMES, INTEGER_DTYPES

if TYPE_CHECKING:
    from ...algebra.autodiff.gradient import Gradient
    from ...codegen.analysis.product_types import InputTypes
    from ...lang.algorithm import Algorithm
    from ...lang.extents.sources import Source


@dataclass(frozen=True)
class Signature:
    """The signature of one prepared algorithm."""

    inputs: dict[str, tuple[str | None, ...]]  #: the label of each dimension, None where it is indexed by arithmetic only
    scalars: tuple[str, ...]
    values: tuple[str, ...]  #: inputs whose dtype enters the result dtype
    sizes: dict[str, Source]  #: label -> (input, dimension), a constant, or arithmetic on them, see lang/extents/sources.py
    rows: dict[str, tuple[str, ...]]  #: labels that batch dimensions may be folded into, if exactly these inputs have them
    precise: bool  #: whether the setting of float32 products (TF32) matters
    leaders: tuple[str, ...] = ()  #: inputs whose leading dimensions are those of the call
    firsts: dict[str, int] = field(default_factory=dict)  #: number of first dimensions that an input may lack, where it is not 0
    outline: Outline | None = None  #: what the cost model needs of the algorithm
    written: tuple[str, ...] = ()  #: inputs that a call changes, in the order of the results that they are
    agree: tuple[tuple[str, Source], ...] = ()  #: formulas that labels with another source, or another formula, must agree with
    codes: tuple[str, ...] = ()  #: inputs that products take converted, as they do integers of few bits

    @staticmethod
    def of(algorithm: Algorithm, called: tuple[str, ...] = ()) -> Signature:
        """Derive the signature of a prepared algorithm. ``called``: its outputs, where a user's call supplies the inputs."""
        from ...codegen.emit.module import plain_labels, value_inputs
        from ...lang import expr as ex
        from .dim_collapse import collapsible_label, first_dimensions, leading_inputs

        inputs = {n: plain_labels(algorithm, n) for n in algorithm.inputs}
        sizes = size_sources(algorithm)
        precise = any(isinstance(n, ex.Dot) for d in algorithm.definitions for n in d.expr.walk())
        firsts = dict.fromkeys(labels[0] for labels in inputs.values() if labels and labels[0])
        rows = {label: found for label in firsts if (found := collapsible_label(algorithm, label)) is not None}
        own = Signature(
            inputs, algorithm.scalars, tuple(value_inputs(algorithm, list(inputs))), sizes, rows, precise, outline=Outline.of(algorithm),
            written=tuple(algorithm.written.values()), agree=_agreeing(algorithm, sizes), codes=_codes(algorithm),
        )  # fmt: skip
        if not called:
            return own
        lacked = {name: count for name, count in first_dimensions(algorithm, called).items() if count}
        return replace(own, leaders=leading_inputs(algorithm, called), firsts=lacked)

    def extents(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        """Return the extent of every label from the shapes of the inputs."""
        return {label: _size(label, s, tensors) for label, s in self.sizes.items()}

    def result_dtype(self, tensors: dict[str, torch.Tensor]) -> torch.dtype:
        """Return the promoted dtype of the inputs whose values enter the results."""
        return promoted([tensors[n].dtype for n in self.values if n in tensors and tensors[n].is_floating_point()])

    def mixed(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Tell whether the algorithm has products and the inputs that enter the results differ in dtype, or any input is in float8."""
        return self.precise and len({tensors[n].dtype for n in self.values if n in tensors}) > 1 or any(t.dtype in FLOAT8_NAMES for t in tensors.values())

    def typed(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Tell whether schedules depend on the dtype of each input: they differ, products take integers that are converted, or integers take more room than results."""
        if self.mixed(tensors) or any(t in tensors and tensors[t].dtype in INTEGER_DTYPES for t in self.codes):
            return True
        narrow = self.result_dtype(tensors).itemsize
        return any(t.dtype in INTEGER_DTYPES and t.element_size() > narrow for t in tensors.values())


class Halves(NamedTuple):
    """The interface between the two halves of a gradient, see ``algebra.autodiff.gradient.Gradient``."""

    outputs: tuple[str, ...]  #: of forward: the op's own, then the tensors saved for backward
    adjoints: dict[str, str]  #: output -> the input of backward that holds its gradient
    grads: dict[str, str]  #: input or scalar -> the output of backward that holds its gradient
    products: tuple[str, ...]  #: those of ``outputs`` that are products
    forward: Signature | None = None  #: None where it is not derived yet, or forward is the op itself
    backward: Signature | None = None

    @staticmethod
    def of(gradient: Gradient) -> Halves:
        """Take the interface of a derived gradient, without signatures."""
        return Halves(gradient.forward_outputs, gradient.adjoints, gradient.grads, gradient.products)


def _size(label: str, source: Source, tensors: dict[str, torch.Tensor]) -> int:
    if not isinstance(source, tuple):
        return source
    if len(source) == 2:
        return tensors[source[0]].shape[source[1]]
    from ...lang.extents.sources import size_from

    return size_from(source, tensors, label)


def size_sources(algorithm: Algorithm) -> dict[str, Source]:
    """Return the source of every known extent: (input, dimension), a constant, or arithmetic on them."""
    from ...lang.extents.formulas import source_of

    found: dict[str, Source] = {}
    for label in algorithm.labels:
        if (constant := algorithm.constant_extent(label)) is not None:
            found[label] = constant
        elif (source := algorithm.extent_source(label)) is not None:
            found[label] = (source[0], source[1])
        elif formulas := algorithm.extent_formulas(label):
            found[label] = source_of(formulas[0])
    return found


def _codes(algorithm: Algorithm) -> tuple[str, ...]:
    from ...codegen.analysis.dtype_propagation import operand_inputs, value_inputs
    from ...lang import expr as ex

    values, whole = value_inputs(algorithm, algorithm.inputs), algorithm.integer_inputs()
    casts = {n.arg.tensor for d in algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Cast) and isinstance(n.arg, ex.Access)}
    computed = dict(algorithm.stands_for)  # of floating-point numbers
    return tuple(t for t in operand_inputs(algorithm) if t not in values and (t in whole or t in casts) and t not in computed)


def _agreeing(algorithm: Algorithm, sizes: dict[str, Source]) -> tuple[tuple[str, Source], ...]:
    if not algorithm.formulas:
        return ()
    from ...lang.extents.formulas import source_of

    found = ((label, source_of(f)) for label in sizes for f in algorithm.extent_formulas(label))
    return tuple((label, source) for label, source in found if sizes[label] != source)


def check_magnitude(op: str, name: str, value: object) -> None:
    """Raise ValueError, one line, for an integer that no float holds."""
    if isinstance(value, int) and abs(value) >= 2**1024:
        raise ValueError(f"{op}: {name} is an integer of {value.bit_length()} bits; allowed: numbers that a float holds")


def check_integers(op: str, name: str, value: object) -> None:
    """Raise TypeError, one line, for a scalar that is used in an index and is not an integer."""
    if isinstance(value, torch.Tensor):
        whole = not value.is_floating_point()
    else:
        whole = isinstance(value, (int, torch.SymInt)) or float(value).is_integer()  # type: ignore[arg-type]
    if not whole:
        found = value.dtype if isinstance(value, torch.Tensor) else value
        raise TypeError(f"{op}: {name} is {found}; allowed: an integer, as it stands in an index")


def input_types(tensors: dict[str, torch.Tensor]) -> InputTypes:
    """Return the dtypes of these inputs under the compiler's names."""
    from ...codegen.analysis.product_types import InputTypes

    names = DTYPE_NAMES | FLOAT8_NAMES
    return InputTypes(tuple((name, names.get(t.dtype, str(t.dtype).removeprefix("torch."))) for name, t in tensors.items()))


def promoted(dtypes: list[torch.dtype]) -> torch.dtype:
    """Return the promotion of several dtypes; float32 for none. Float8 takes no part: torch promotes it to nothing."""
    dtypes = [d for d in dtypes if d not in FLOAT8_NAMES]
    result = dtypes[0] if dtypes else torch.float32
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result
