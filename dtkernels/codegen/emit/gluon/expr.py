"""Print tiles as Gluon expressions.

Every value lies in one of three layouts: (rows, columns) as the matrix units leave products, ``MMA_<columns>``; rows as
``ROWS``, a column of the first of these; columns as ``COLUMNS_<columns>``, a row of theirs. Layouts of rows differ by
name only between products of different widths, so that converting between them moves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ...analysis.product_types import Operands
from ...ir.layout import preferred_dim_order
from ...ir.nest import Axis, TileReduce
from ..triton.expr import ExpressionPrinter
from ..triton.functions import HELPERS

IMPORTS = """from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor

new_names = hasattr(tma, "async_load")  # Triton 3.7 and later
tma_load = tma.async_load if new_names else tma.async_copy_global_to_shared
tma_store = tma.async_store if new_names else tma.async_copy_shared_to_global
"""
#: for kernels that add to memory in bulk; Triton 3.8 brought a function for it
TMA_ADD = """
from triton.experimental.gluon.language import _core


@_core.builtin
def tma_add_of_builder(desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(_core.ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


tma_add = getattr(tma, "async_atomic_add", tma_add_of_builder)
"""
#: for numbers of columns, which are copied by words
COPY = """
from triton.experimental.gluon.language.nvidia.ampere import async_copy

copy_to_shared = async_copy.async_load if new_names else async_copy.async_copy_global_to_shared
"""
_OWN = {
    "sigmoid": """
@gluon.jit
def sigmoid_gl(x):
    return 1.0 / (1.0 + gl.exp(-x))
"""
}


def helper(name: str) -> str:
    """Return the text of the function ``name_gl`` for Gluon kernels, from that for Triton."""
    return _OWN.get(name) or gluon_text(HELPERS[name].replace("@triton.jit", "@gluon.jit").replace(f"def {name}(", f"def {name}_gl("))[0]


def gluon_text(text: str) -> tuple[str, frozenset[str]]:
    """Return (Triton text with Gluon's names, helpers it calls)"""
    calls = {name: rf"(?<![\w.])(?:tl\.)?{name}(?=[()])" for name in (*HELPERS, *_OWN)}
    helpers = frozenset(name for name, call in calls.items() if re.search(call, text))
    for name in helpers:
        text = re.sub(calls[name], f"{name}_gl", text)
    return re.sub(r"\btl\.(?!PropagateNan)", "gl.", text), helpers


class GluonExpressions(ExpressionPrinter):
    """Prints the tiles that consumers compute. ``main`` are the columns whose products give rows their layout."""

    def __init__(
        self,
        rows: Axis,
        main: Axis,
        operands: Operands,
        start_of: Callable[[Axis], str],
        step_of: Callable[[Axis], str],
        size_of: Callable[[str], str],
    ):
        super().__init__(frozenset(), {}, operands, start_of, step_of, size_of)
        self.rows, self.main = rows, main

    def columns(self, axes: frozenset[Axis] | tuple[Axis, ...]) -> Axis | None:
        """Return the axis of ``axes`` that is not the rows."""
        return next((a for a in axes if a != self.rows), None)

    def layout(self, axes: tuple[Axis, ...]) -> str:
        """Return the name of the layout of a value over ``axes``."""
        columns = self.columns(axes)
        if columns is None:
            return "ROWS"
        return f"MMA_{columns.name}" if self.rows in axes else f"COLUMNS_{columns.name}"

    def arrange(self, text: str, have: tuple[Axis, ...], order: tuple[Axis, ...]) -> str:
        """Return ``text`` in the layout of ``order``."""
        if not have or have == order:
            return text
        columns = self.columns(order)
        if have == (self.rows,):
            if columns.name != self.main.name:  # type: ignore[union-attr]
                text = f"gl.convert_layout({text}, gl.SliceLayout(1, MMA_{columns.name}))"  # type: ignore[union-attr]
            return f"{text}[:, None]"
        return f"{text}[None, :]"

    def _reduce(self, tile: TileReduce, order: tuple[Axis, ...]) -> str:
        inner = tuple(sorted(preferred_dim_order(tile.arg), key=lambda a: a != self.rows))
        text = self.text(tile.arg, inner)
        if tile.kind == "sum" or not tile.keeps_nan:
            text = f"gl.{tile.kind}({text}, {len(inner) - 1})"
        elif tile.kind in ("prod", "key"):
            text = f"gl.reduce({text}, {len(inner) - 1}, product_of_two)" if tile.kind == "prod" else f"gl.max({text}, {len(inner) - 1})"
        else:
            text = f"gl.reduce({text}, {len(inner) - 1}, nan_{tile.kind})"
        rest = inner[:-1]
        if rest and inner[-1].name != self.main.name:
            text = f"gl.convert_layout({text}, ROWS)"
        return self.arrange(text, rest, order)
