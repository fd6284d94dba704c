"""Lower entries to direct calls in the code that Inductor generates. Imported only where Inductor is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import sympy
import torch
from torch._inductor import config, ir, lowering
from torch._inductor.virtualized import V
from torch._library.utils import get_layout_constraint_tag
from torch.utils import _pytree as pytree

from . import graph_calls

IMPORT = f"from {graph_calls.__name__} import {graph_calls.graph_call.__name__}"


def lower(name: str, entry: str) -> None:
    """Lower ``<name>_<entry>`` to a call of ``graph_call``, unless someone else has lowered it."""
    op = getattr(torch.ops.dtkernels, f"{name}_{entry}").default
    if op not in lowering.lowerings:
        constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))  # as Inductor does by itself
        lowering.make_fallback(op, layout_constraint=constraint)
    elif not getattr(lowering.lowerings[op], "_is_fallback_handler", False):
        return

    def lowered(*args, **kwargs):
        made = _DirectCall.create(op, *args, **kwargs)
        return pytree.tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, made)

    lowered._is_fallback_handler = True  # type: ignore[attr-defined]  # processes that compile for others take torch's own
    lowering.register_lowering(op, type_promotion_kind=None)(lowered)


class _DirectCall(ir.FallbackKernel):
    """A fallback whose Python code calls a function of its own. Everything else is the fallback's, code in C++ too."""

    function: str | None = None  #: its name in the generated code

    def codegen(self, wrapper) -> None:
        python = not (V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False))
        self.function = f"dtkernels_{self.get_name()}" if python else None  # no other buffer of the file has this name
        results = [made for made in self.outputs if isinstance(made, ir.MultiOutput)]
        layouts = [_layout(made) for made in results]
        for made, layout in zip(results, layouts):
            made.skip_size_stride_alignment_checks = python and layout is not None  # where kernels are bound is soon enough to check
        if python:
            wrapper.add_import_once(IMPORT)
            wrapper.add_import_once(f"{self.function} = {self._made(layouts)}")
        super().codegen(wrapper)

    def _made(self, layouts: list) -> str:
        """Return the text that makes the function."""
        name, entry = str(self.op_overload).split(".")[1].rsplit("_", 1)
        args, named = self._given()
        return f"graph_call({name!r}, {entry!r}, {tuple(map(_constant, args))}, {({n: _constant(v) for n, v in named.items()})}, {layouts})"

    def get_kernel_name(self) -> str:
        return self.function or super().get_kernel_name()

    def codegen_args(self) -> list[str]:
        if self.function is None:
            return super().codegen_args()
        args, named = self._given()
        return [V.graph.wrapper_code.val_to_arg_str(v) for v in _varying([*args, *named.values()])]

    def codegen_kwargs(self, skip_out: bool = False) -> list[str]:
        return super().codegen_kwargs(skip_out) if self.function is None else []

    def _given(self) -> tuple[list, dict]:
        return self.unflatten_args([_Reference(x.codegen_reference()) for x in cast(Sequence[ir.IRNode], self.inputs)], self.constant_args)


def _layout(made: ir.MultiOutput) -> tuple[tuple, tuple, bool] | None:
    """Return shape and strides of a result, and whether it is taken to be aligned; None where they vary or nothing is to be checked."""
    numbers = [*made.get_size(), *made.get_stride()]
    if not config.size_asserts or 0 in numbers or not all(isinstance(n, (int, sympy.Integer)) for n in numbers):
        return None
    shape, strides = (tuple(map(int, n)) for n in (made.get_size(), made.get_stride()))
    return shape, strides, config.alignment_asserts and made.get_name() not in V.graph.unaligned_buffers


class _Reference:
    """A tensor as generated code names it."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _is_constant(value: object) -> bool:
    return value is None or type(value) in (bool, int, str) or type(value) is float and math.isfinite(value)  # others have no text that Python reads


def _constant(value: object) -> object:
    """Return an argument with ``...`` for what varies from call to call."""
    if isinstance(value, (list, tuple)):
        return [_constant(v) for v in value]
    return value if _is_constant(value) else ...


def _varying(values: Iterable[object]) -> Iterator[object]:
    """Yield what ``_constant`` leaves out, in the same order."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _varying(value)
        elif not _is_constant(value):
            yield value
