"""Print a Kernel as one @triton.jit function, with the arguments of its launch."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ....lang.algorithm import Algorithm
from ....lang.expr import Dot, Label, Write, accesses
from ...analysis.product_types import Operands
from ...ir import nest
from ...ir.layout import as_no_matrix_product
from ...ir.nest import (
    WHOLE,
    Accumulator,
    Assign,
    Axis,
    Barrier,
    Const,
    DescriptorLoad,
    DescriptorStore,
    Guard,
    Index,
    InteriorOrEdge,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Op,
    Position,
    Range,
    ScaleFactor,
    Size,
    Start,
    Statement,
    Store,
    Tile,
    TileDot,
    Valued,
    has_matrix_product,
    is_descriptor_load,
    is_load,
    loaded,
    mask_axes,
    statements,
    values,
)
from ...ir.value_type import overflowing_integers
from ..device_scalars import scalar_loads
from . import exp2_emulation, integer_codes
from .dependent_launch import before_stores, head, tail
from .expr import ExpressionPrinter
from .grid import BEFORE, grid_lines, grid_size
from .memory import LINE, Box, MemoryPrinter

VOLUME, PLANE = 3, 2  #: whole extents from which on a tile holds a volume; the same of a kernel beside others with products


@dataclass
class KernelText:
    """The printed kernel. ``arguments`` are (parameter, expression in the wrapper), compile-time ones in ``constants``."""

    name: str
    source: str
    arguments: list[tuple[str, str]] = field(default_factory=list)
    constants: list[tuple[str, str]] = field(default_factory=list)
    helpers: frozenset[str] = frozenset()
    grid: str = "(1,)"
    labels: tuple[str, ...] = ()  #: whose extents it is passed
    boxes: list[Box] = field(default_factory=list)  #: of each descriptor
    warps: int = 0  #: to launch with, where they are not the schedule's
    condition: str = ""  #: what the wrapper must ask before a launch, beside descriptors
    dense: list[str] = field(default_factory=list)  #: and before it joins dimensions for them
    dependent: bool = False  #: waits by itself for the kernel launched before it


def dimension_names(algorithm: Algorithm, tensor: str) -> tuple[str, ...]:
    """Return a name for each dimension of an input or Func: its label, or its place where that does not tell them apart."""
    if tensor in algorithm and tensor not in algorithm.written:
        return algorithm[tensor].labels
    written = algorithm[tensor].expr if tensor in algorithm else None
    index = written.place.index if isinstance(written, Write) else next(a.index for d in algorithm.definitions for a in accesses(d.expr) if a.tensor == tensor)
    inside = [
        i for i in index if not isinstance(i, Label) and any(accesses(i))
    ]  # named after what they are elements of, they would mislead
    names = [str(dim) if i in inside else next((n.name for n in i.walk() if isinstance(n, Label)), str(dim)) for dim, i in enumerate(index)]
    return tuple(n if names.count(n) == 1 else str(dim) for dim, n in enumerate(names))


def jit_function(language: str, name: str, parameters: list[str], lines: list[str]) -> str:
    """Return the text of one function under ``language``'s jit, its parameters filled to the width of a line."""
    glue = "\0"  # keeps "name: tl.constexpr" on one line
    signature = textwrap.fill(
        ", ".join(p.replace(" ", glue) for p in parameters),
        LINE,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([f"@{language}.jit", f"def {name}(", signature.replace(glue, " ") + ",", "):", *lines]) + "\n"


def print_kernel(kernel: Kernel, algorithm: Algorithm, operands: Operands) -> KernelText:
    """Return the Triton text of ``kernel``."""
    return _KernelPrinter(kernel, algorithm, operands).run()


class _KernelPrinter:
    maker = "tensor_map"  #: the helper that makes descriptors in the wrapper

    def __init__(self, kernel: Kernel, algorithm: Algorithm, operands: Operands):
        self.kernel, self.algorithm, self.operands = kernel, algorithm, operands
        self.beside_products = any(isinstance(n, Dot) for d in algorithm.definitions for n in d.expr.walk())
        self.lines: list[str] = []
        self.blocks = {g.label: g.block for g in kernel.grid}
        self.pieces = {g.label: g.inside for g in kernel.grid}  #: of a tail, whose last pieces may lie past the extent
        self.sizes: dict[str, None] = {}
        self.tiles: dict[str, str] = {}
        self.even: dict[str, str] = {}
        self.bounds: dict[tuple[str, int], None] = {}
        self.dense: dict[str, str] = {}
        self.spaces = {w.name for w in kernel.workspaces}
        self.starts = {s.axis: s.start for s in statements(kernel.body) if isinstance(s, Index)}
        self.masked = self._masked_axes()
        loads: dict[str, Load | DescriptorLoad] = {s.name: s.value for s in statements(kernel.body) if is_load(s) or is_descriptor_load(s)}
        self.upcast = self._arithmetic_only(loads)
        self.integers = frozenset(n for n, load in loads.items() if isinstance(load, Load) and load.whole)
        self.outgrown = overflowing_integers(self._nodes(), self.integers)
        self.expr = ExpressionPrinter(frozenset(loads) - self.upcast, loads, operands, self.first, self.tile, self.size, kernel.approximate)
        self.expr.block_of = self.block_index
        self.started = self._started_axes()
        self.counted: set[Axis] = set()  # axes of loops over single elements
        self.steady: dict[int, str] = {}  #: id of a load -> its pointer, in the loop that is being printed; names are used again in inner loops
        self.named: dict[str, str] = {}  #: names that stand for a value computed before a loop
        self.before: set[str] = set()  #: those that are known at this place of the text
        self.taken = {
            *kernel.reads,
            *kernel.writes,
            *kernel.scalars,
            *(getattr(s, "name", "") for s in statements(kernel.body)),
            *(a.name for a in self.starts),
        }
        self.vectors = {n.axis for n in self._nodes(steady=False) if isinstance(n, Position)} | self.masked
        self.memory = MemoryPrinter(self)

    def run(self) -> KernelText:
        link = self.kernel.link
        lines, depth = grid_lines(self.kernel, self)
        self.lines += lines
        self._block(depth)
        boxes = self.memory.boxes()
        name = f"{self.kernel.name}_kernel"
        text = KernelText(name, "", helpers=frozenset(self.expr.helpers), dependent=link is not None)
        code = "\n".join(self.lines)
        self._parameters(text, boxes, code)
        text.constants += [("DEPENDENT", '"launch_pdl" in dependent')] if link else []
        prologue = head(link)
        prologue += scalar_loads(self.kernel.scalars, self.algorithm.integer_scalars(), "tl")
        names = [a for a, _ in text.arguments] + [f"{c}: tl.constexpr" for c, _ in text.constants]
        text.source = jit_function("triton", name, names, [*prologue, code, *tail(link)])
        text.boxes = boxes
        text.condition, text.dense = self._condition(), self.dense_conditions(self.memory.first.values())
        text.grid, text.labels = grid_size(self.kernel), tuple(self.sizes)
        return text

    def _block(self, depth: int) -> None:
        """Emit the statements of one block; twice, with and without masks, where interior blocks need none."""
        forms = self.kernel.body[-1] if self.kernel.body else None
        if not isinstance(forms, InteriorOrEdge):
            return self._until_stores(self.kernel.body, depth)
        axis = forms.axis
        self._index(axis, "block", depth)
        inside = f"({self.block_index(axis.label)} + 1) * {self.block(axis.label)} <= {self.size(axis.label)}"
        self.line(depth, f"if {self.even_constant(axis)} or {inside}:")
        self._until_stores(forms.interior, depth + 1)
        self.line(depth, "else:")
        self.line(depth + 1, f"{axis.name}_ok = {axis.name} < {self.size(axis.label)}")
        return self._until_stores(forms.edge, depth + 1)

    def _until_stores(self, body: tuple[Statement, ...], depth: int) -> None:
        """Emit the statements of a block. The call that lets the next kernel start comes before its stores."""
        link = self.kernel.link
        stores = next((i for i, s in enumerate(body) if isinstance(s, (Store, DescriptorStore))), 0) if link and not self.kernel.persistent else 0
        self._body(body[:stores], depth)
        self.lines += ["    " * (depth - 1) + line for line in before_stores(link)] if link and stores else []
        self._body(body[stores:], depth)

    # -- parameters -------------------------------------------------------------------------------------------------

    def _parameters(self, text: KernelText, boxes: Sequence[Box] = (), code: str = "") -> None:
        """List the arguments of a launch. Pointers and strides of what descriptors alone reach are left out: ``code`` does not have them."""
        k = self.kernel
        buffers = tuple(dict.fromkeys(k.reads + k.writes))
        reached, words = {box.buffer for box in boxes}, set(re.findall(r"\w+", code))
        text.arguments += [(box.name, self._descriptor_made(box)) for box in boxes]
        text.arguments += [(f"{t}_ptr", self._passed(t)) for t in buffers if t not in reached or f"{t}_ptr" in words]
        text.arguments += [(s, s) for s in k.scalars]
        text.arguments += [(f"size_{label}", f"size_{label}") for label in self.sizes if label not in k.constants]
        text.arguments += [(BEFORE, BEFORE)] if k.tail or k.last_wave else []
        text.arguments += [(f"{t}_size_{d}", self._length(t, d)) for t, d in self.bounds]
        for t in buffers:
            value = self._given(t)
            strides = [(f"{t}_stride_{d}", f"{value}.stride({i})") for i, d in enumerate(self.dimensions(t))]
            text.arguments += [(name, stride) for name, stride in strides if t not in reached or name in words]
        text.constants += [(f"{s}_on_device", f"isinstance({s}, torch.Tensor)") for s in k.scalars]
        text.constants += [(f"{s}_positive", f"not isinstance({s}, torch.Tensor) and {s} > 0") for s in _sunk_scales(k.body)]
        text.constants += [(f"size_{label}", f"size_{label}") for label in self.sizes if label in k.constants]
        text.constants += [*self.tiles.items()]
        text.constants += [*self.even.items(), *self.dense.items()]
        names = [self._given(t) for t in buffers]
        text.constants.append(("INDEX", "tl.int32" if self.memory.descriptors else f"index_type({', '.join(names)})"))
        if any(h.startswith("hardware_") for h in self.expr.helpers):
            text.constants.append(("ON_GPU", f'{names[0]}.device.type != "cpu"'))
        if self.expr.helpers & exp2_emulation.HELPERS.keys():
            text.constants.append(("EXP_DEGREE", f"exp_degree({names[0]}, dtype)"))
        if self.expr.helpers & integer_codes.HELPERS.keys():
            text.constants.append(("PAIRS", f"converts_pairs({names[0]})"))
        if has_matrix_product(k.body):
            text.constants.append(("PRECISION", "dot_precision()"))
            if "rdot" in k.approximate:
                text.constants.append(("EXACT", f"exact_products({names[0]})"))
        if any(h.startswith("code_of_") for h in self.expr.helpers):
            text.constants.append(("FLOAT8", "has_float8"))
        for wanted in self.expr.types:
            name = self.operands.variable(wanted)
            form = f"float8_type({name}, has_float8)" if wanted and wanted.float8 else f"language_type({name})"
            text.constants.append((self.operands.constant(wanted), form))

    def _descriptor_made(self, box: Box) -> str:
        """Return what the wrapper passes for a descriptor."""
        extents, strides = (f"({', '.join(d)}{',' * (len(d) == 1)})" for d in (box.extents, box.strides))
        return f"{self.maker}({self._passed(box.buffer)}, {extents}, {strides}, {box.sizes})"

    def _given(self, buffer: str) -> str:
        """Return the name of a buffer in the wrapper."""
        return buffer if buffer in self.algorithm.inputs else f"{buffer}_out"

    def _passed(self, buffer: str) -> str:
        """Return what the wrapper passes for a buffer."""
        name = self._given(buffer)
        return f"float8_pointer({name}, has_float8)" if buffer in self.algorithm.float8_buffers else name

    def _condition(self) -> str:
        """Return what the wrapper must ask before a launch: additions through a descriptor are beyond Triton's interpreter."""
        added = next((s.buffer for s in statements(self.kernel.body) if isinstance(s, DescriptorStore) and s.onto == "sum"), None)
        return f'{added}_out.device.type != "cpu"' if added else ""

    def _length(self, buffer: str, dim: int) -> str:
        """Return the extent of a dimension in the wrapper; rows that ``align`` pads are longer in memory."""
        if buffer in self.algorithm.written:
            return f"{buffer}_out.shape[{dim}]"
        return f"size_{self.algorithm[buffer].labels[dim]}" if buffer in self.algorithm else f"{buffer}.shape[{dim}]"

    def dimensions(self, buffer: str) -> tuple[str, ...]:
        """Return a name for each dimension of a buffer."""
        space = next((w for w in self.kernel.workspaces if w.name == buffer), None)
        if space is None:
            return dimension_names(self.algorithm, buffer)
        names = (space.part, *space.labels)
        return tuple(n if names.count(n) == 1 else str(dim) for dim, n in enumerate(names))

    def size(self, label: str) -> str:
        """Return the extent of ``label`` in the kernel."""
        self.sizes[label] = None
        return f"size_{label}"

    def block_index(self, label: str) -> str:
        """Return the name of the index of a block; that of its one element, where a block is one."""
        axis = next((s.axis for s in self.kernel.body if isinstance(s, Index) and s.start == "block" and s.axis.label == label), None)
        return axis.name if axis and axis.scalar and axis.whole is None else f"block_{label}"

    def first(self, axis: Axis) -> str:
        """Return the name of the first index of the current tile of ``axis``."""
        if axis.half:
            return "0" if axis.half == 1 else self.tile(replace(axis, half=1))
        if axis in self.started:
            return f"{axis.name}_first"
        if axis in self.counted:
            return axis.name
        if axis.every > 1 and axis.whole:
            return f"{axis.whole.name}_start // {axis.every}"
        return f"({axis.whole.name}_start + {axis.offset})" if axis.whole else f"{axis.name}_start"

    def tile(self, axis: Axis) -> str:
        """Return the compile-time constant that holds how far ``axis`` advances."""
        if self.blocks.get(axis.label) == axis.tile:
            return self.block(axis.label)
        value = self._held(axis) if axis.tile == WHOLE else str(axis.tile)
        name, count = f"TILE_{axis.label}", 0
        while self.tiles.get(name, value) != value:
            count += 1
            name = f"TILE_{axis.label}_{count}"
        self.tiles[name] = value
        if axis.tile == WHOLE:
            self.size(axis.label)
        return name

    def _held(self, axis: Axis) -> str:
        """Return the tile of an axis that holds a whole extent, or its part of it."""
        return f"{('first', 'second')[axis.half - 1]}_tile(size_{axis.label})" if axis.half else self._whole(axis.label)

    def _whole(self, label: str) -> str:
        """Return the tile that holds a whole extent.

        In a file with matrix products ``whole`` gives 16 at least. A kernel without them that holds several dimensions takes no more than they are: rows of
        windows of two elements would be held as windows of 16, and five dimensions of 16 are more than Triton allows.
        """
        held = {s.axis.label for s in statements(self.kernel.body) if isinstance(s, nest.Index) and s.axis.tile == WHOLE}
        exact = len(held) >= (PLANE if self.beside_products else VOLUME) and not nest.has_matrix_product(self.kernel.body)
        return f"max(1, triton.next_power_of_2(size_{label}))" if exact else f"whole(size_{label})"

    def block(self, label: str) -> str:
        """Return the compile-time constant that holds the block of ``label``."""
        self.tiles[f"BLOCK_{label}"] = str(self.blocks[label])
        return f"BLOCK_{label}"

    # -- statements -------------------------------------------------------------------------------------------------

    def _body(self, body: tuple[Statement, ...], depth: int) -> None:
        origin = ""
        for s in body:
            wanted = getattr(s, "origin", "")
            if wanted and wanted != origin and not isinstance(s, Accumulator):
                self.line(depth, f"# {wanted.rstrip(';')}")
                origin = wanted
            match s:
                case Index(axis, start):
                    self._index(axis, start, depth)
                    self._mask(axis, depth)
                case Loop():
                    self._loop(s, depth)
                case Let(name, Load() | DescriptorLoad() as load, axes):
                    self.memory.load(name, load, axes, depth, widen=name in self.upcast)
                case Let(name, value, axes):
                    self.line(depth, f"{name} = {self.expr.text(as_no_matrix_product(value, axes), axes)}")
                case Accumulator(name, axes, start):
                    self._accumulator(name, axes, start, depth)
                case Assign(name, axes, value):
                    self._assign(name, axes, value, depth)
                case Store() | DescriptorStore():
                    self.memory.store(s, depth)
                case Barrier():
                    self.line(depth, "tl.debug_barrier()")

    def line(self, depth: int, text: str) -> None:
        pad = "    " * depth
        if len(pad) + len(text) > LINE and text.startswith("#"):
            text = text[: LINE - len(pad) - 3] + "..."
        self.lines.append(pad + text)

    def _index(self, axis: Axis, start: str, depth: int) -> None:
        if start == "block" and axis.scalar and axis.whole is None:
            return  # the block's index is the element's
        base = {"block": f"block_{axis.label}", "loop": self.first(axis), "whole": self.first(axis) if axis.half == 2 else ""}.get(start)
        if start in ("block", "block+loop") and (self.blocks[axis.label] != 1 or axis.padded):
            base = f"block_{axis.label} * {self.block(axis.label)}"
            base += f" + {axis.name}_start" if start == "block+loop" else f" + {axis.offset}" if axis.offset else ""
        if axis.every > 1 and start == "block":
            base = f"block_{axis.label} * ({self.block(axis.label)} // {axis.every})"
        if axis in self.started and not axis.scalar and not axis.half and start != "loop":
            self.line(depth, f"{self.first(axis)} = {base}")
            base = self.first(axis)
        if axis not in self.vectors:
            return
        if axis.scalar:
            if start != "loop" or axis.whole:  # the loop counts in the axis itself
                self.line(depth, f"{axis.name} = {base}")
        else:
            steps = f"tl.arange(0, {self.tile(axis)})" + ("" if start.startswith("block") else ".to(INDEX)")
            steps = next((name for name in sorted(self.before) if self.named[name] == steps and start == "loop"), steps)
            self.line(depth, f"{axis.name} = {base} + {steps}" if base else f"{axis.name} = {steps}")

    def _mask(self, axis: Axis, depth: int) -> None:
        if axis in self.masked:
            inside, end = f"{axis.name} * {axis.every} < " if axis.every > 1 else f"{axis.name} < ", self.size(axis.label)
            inside += f"min({end}, (block_{axis.label} + 1) * {self.block(axis.label)})" if axis.padded else end
            self.line(depth, f"{axis.name}_ok = {inside}" if axis.padded else f"{axis.name}_ok = ({inside}) | {self.even_constant(axis)}")

    def even_constant(self, axis: Axis) -> str:
        """Return the constant that says that ``axis`` never passes its extent, so that its mask folds away."""
        size = f"size_{axis.label}"
        step = self.blocks[axis.label] * self.pieces.get(axis.label, 1) if self.starts.get(axis, "loop").startswith("block") else (axis.whole or axis).tile
        if axis.half:
            first = self._held(replace(axis, half=1))
            value = f"{size} >= {first}" if axis.half == 1 else f"{size} == {first} + {self._held(axis)}"
        else:
            value = f"{size} % {step} == 0" if step != WHOLE else f"{size} == {self._whole(axis.label)}"
        name, count = f"EVEN_{axis.label}", 0
        while self.even.get(name, value) != value:
            count += 1
            name = f"EVEN_{axis.label}_{count}"
        self.even[name] = value
        return name

    def dense_constant(self, buffer: str, first: int, extents: tuple[str, ...]) -> str:
        """Return the constant that says that a buffer's dimensions from ``first`` on, of these extents after it, follow each other without gaps."""
        name = f"DENSE_{buffer}_{first}_{first + len(extents)}"
        self.dense[name] = self._is_dense(buffer, first, extents)
        return name

    def unit_constant(self, buffer: str) -> str:
        """Return the constant that says that elements of an input along its last dimension follow each other."""
        name = f"UNIT_{buffer}"
        self.dense[name] = f"{buffer}.stride({len(self.dimensions(buffer)) - 1}) == 1"
        return name

    def dense_conditions(self, accesses: Iterable[DescriptorLoad | DescriptorStore]) -> list[str]:
        """Return what the wrapper must ask of the dimensions that boxes join."""
        return list(dict.fromkeys(self._is_dense(a.buffer, j.first, j.extents) for a in accesses for j in a.joined))

    def _is_dense(self, buffer: str, first: int, extents: tuple[str, ...]) -> str:
        value = self._given(buffer)
        return " and ".join(f"{value}.stride({d}) == {self.size(label)} * {value}.stride({d + 1})" for d, label in enumerate(extents, first))

    def described_dimensions(self, access: DescriptorLoad | DescriptorStore) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the extents and strides that a descriptor has, as expressions in the wrapper."""
        value, n = self._given(access.buffer), 0
        extents, lasts = [], []
        for axis, start in zip(access.box, access.start):
            last = next((j.last for j in access.joined if j.first == n), n)
            extents.append(self._described_extent(access.buffer, n, axis, start))
            lasts.append(last)
            n = last + 1
        return tuple(extents), (*(f"{value}.stride({d})" for d in lasts[:-1]), "1")

    def _described_extent(self, buffer: str, dim: int, axis: Axis | None, start: Tile) -> str:
        if axis and isinstance(start, Op) and start.args[1:] == (Const(0),):  # at the label, of another extent
            return f"min({self._length(buffer, dim)}, {self.size(axis.label)})"
        known = isinstance(start, (Start, Const)) if axis else isinstance(start, Position)  # a shifted box reads beyond the extent of its label
        axis = axis or (start.axis if isinstance(start, Position) else None)
        return self.size(axis.label) if axis and known else self._length(buffer, dim)

    def _loop(self, loop: Loop, depth: int) -> None:
        axis = loop.axis
        counter = axis.name if axis.scalar and loop.within == "extent" else f"{axis.name}_start"
        (self.counted.add if counter == axis.name else self.counted.discard)(axis)
        begin = "0" if loop.begin is None else self.expr.text(loop.begin, ())
        end = self.expr.text(loop.end or Size(axis.label), ()) if loop.within == "extent" else self.block(axis.label)
        step = "" if axis.scalar else f", {self.tile(axis)}"
        extra = "".join(f", {name}={value}" for name, value in loop.options)
        steady, before = dict(self.steady), set(self.before)
        if loop.when is not None:
            self.line(depth, f"if {self.expr.text(loop.when, ())}:")
            depth += 1
        self._hoisted_offsets(loop, depth)
        if loop.tail:
            self.line(depth, f"if not {self.even_constant(axis)}:")
            depth += 1
        if loop.order:
            self._first_indices(loop, depth)
            counter, step, begin, end = f"{axis.name}_step", "", "0", self.joined_steps(loop)
        self.line(depth, f"for {counter} in {'tl.range' if extra else 'range'}({begin}, {end}{step}{extra}):")
        outside = set(self.before)
        self._body(loop.body, depth + 1)
        if loop.order:
            self._next_indices(loop, depth + 1)
        self.before, self.steady = before if loop.when is not None else outside, steady  # what comes after may bear the name of a load in here

    def joined_steps(self, loop: Loop) -> str:
        """Return the number of steps of nested loops that are one."""
        return " * ".join(self.steps(r) for r in loop.order)

    def steps(self, r: Range) -> str:
        """Return the number of steps over a range; none if it ends before it begins."""
        count = self._end(r) if r.begin is None else f"{self._end(r)} - {self.expr.text(r.begin, ())}"
        steps = count if r.axis.scalar else f"tl.cdiv({count}, {self.tile(r.axis)})"
        return steps if (r.begin, r.end) == (None, None) else f"max({steps}, 0)"

    def _first_indices(self, loop: Loop, depth: int) -> None:
        """Print where each of the joined loops begins."""
        for r in loop.order:
            self.line(depth, f"{self._counter(r.axis)} = {self._begin(r)}")
            if r.axis.scalar:
                self.counted.add(r.axis)

    def _next_indices(self, loop: Loop, depth: int) -> None:
        """Print where each of the joined loops is in the next step. They are carried: divisions of the number of the step would take registers."""
        order = loop.order[::-1]
        self.line(depth, f"{self._counter(order[0].axis)} += {self._advance(order[0].axis)}")
        for r, outer in zip(order, order[1:]):
            index, over = self._counter(r.axis), f"{r.axis.name}_over"
            self.line(depth, f"{over} = {index} >= {self._end(r)}")
            self.line(depth, f"{index} = tl.where({over}, {self._begin(r)}, {index})")
            self.line(depth, f"{self._counter(outer.axis)} += tl.where({over}, {self._advance(outer.axis)}, 0)")

    def _begin(self, r: Range) -> str:
        return f"tl.cast({'0' if r.begin is None else self.expr.text(r.begin, ())}, INDEX)"

    def _end(self, r: Range) -> str:
        return self.size(r.axis.label) if r.end is None else self.expr.text(r.end, ())

    def _advance(self, axis: Axis) -> str:
        return "1" if axis.scalar else self.tile(axis)

    @staticmethod
    def _counter(axis: Axis) -> str:
        return axis.name if axis.scalar else f"{axis.name}_start"

    def _hoisted_offsets(self, loop: Loop, depth: int) -> None:
        """Return the loop-invariant parts of the offsets of this loop's loads."""
        axis = loop.axis
        loads = [s for s in loop.body if is_load(s) and s.value.hoisted_from == axis]
        for s in loads:
            tile = self.name_value(f"{axis.name}_tile", f"tl.arange(0, {self.tile(axis)}).to(INDEX)", depth)
            offsets = self.memory.steady_offsets(s.value, s.axes, axis, tile)
            at = self.name_value(f"{s.name}_at", offsets, depth)
            self.steady[id(s.value)] = self.memory.steady_pointer(s.value, axis, at)

    def name_value(self, wish: str, value: str, depth: int) -> str:
        """Return the name of a value that is computed here, unless it is known already; another value never gets that name."""
        name, count = wish, 0
        while name in self.taken or self.named.get(name, value) != value:
            count += 1
            name = f"{wish}_{count}"
        self.named[name] = value
        if name not in self.before:
            self.line(depth, f"{name} = {value}")
            self.before.add(name)
        return name

    def _accumulator(self, name: str, axes: tuple[Axis, ...], start: float, depth: int) -> None:
        shape = ", ".join(self.tile(a) for a in axes)
        value = "0.0" if start == 0 else repr(start) if math.isfinite(start) else f'float("{"-" if start < 0 else ""}inf")'
        if isinstance(start, int):
            value = f"tl.full([{shape}], {value}, tl.int64)"
        elif axes:
            value = f"tl.zeros([{shape}], tl.float32)" if start == 0 else f"tl.full([{shape}], {value}, tl.float32)"
        self.line(depth, f"{name} = {value}")

    def _assign(self, name: str, axes: tuple[Axis, ...], value: Tile, depth: int) -> None:
        match value:
            case Op("+", (older, TileDot() as dot)):
                self.line(depth, f"{name} = {self.expr.accumulate(older, dot, axes)}")
            case Op("+", (Local(own), terms)) if own == name:
                self.line(depth, f"{name} += {self.expr.text(terms, axes)}")
            case _:
                self.line(depth, f"{name} = {self.expr.text(value, axes)}")

    # -- what the body needs ----------------------------------------------------------------------------------------

    def _nodes(self, steady: bool = True) -> Iterator[Tile]:
        """Yield every tile of the body, indices and bounds of loops too; if not ``steady``, without axes that such loads need no more."""
        for s in statements(self.kernel.body):
            if not steady and is_load(s) and (axis := s.value.hoisted_from):
                yield from (n for i in s.value.index if i != Position(axis) for n in i.walk())
                continue
            roots = s.bounds() if isinstance(s, Loop) else (s.value,) if isinstance(s, Valued) else ()
            for tile in (*roots, *(s.index if isinstance(s, Store) else s.start if isinstance(s, DescriptorStore) else ())):
                yield from tile.walk()

    def _masked_axes(self) -> set[Axis]:
        found: set[Axis] = set()
        for n in self._nodes():
            found |= set(n.axes if isinstance(n, Guard) else mask_axes(n.index) if isinstance(n, Load) else ())
        for s in statements(self.kernel.body):
            found |= set(mask_axes(s.index)) if isinstance(s, Store) else set()
        return found

    def _started_axes(self) -> set[Axis]:
        """Return axes the first index of whose tile is asked for, and is no loop's counter."""
        asked = {n.axis for n in self._nodes() if isinstance(n, Start)}
        return {a for a in asked if self.starts[a] != "loop"}

    def _arithmetic_only(self, loads: dict[str, Load | DescriptorLoad]) -> frozenset[str]:
        """Return the loads to widen to float32 at once: all except operands of matrix products, which take or convert the loaded type."""
        operands, codes = set(), set()
        for s in statements(self.kernel.body):
            for n in s.value.walk() if isinstance(s, Valued) else ():
                if isinstance(n, TileDot):
                    operands |= {side.name for side in map(loaded, (n.left, n.right)) if isinstance(side, Local)}
                    codes |= {part.name for part in n.walk() if isinstance(part, Local) and part.name in loads and loads[part.name].buffer in self.algorithm.integral}
        kept = self.operands.held.keys() | self.operands.loose | self.algorithm.float8_buffers.keys()
        widened = (n for n, load in loads.items() if n not in codes and (n not in operands or load.buffer not in kept))
        return frozenset(n for n in widened if not getattr(loads[n], "whole", False))


def _sunk_scales(body: tuple[Statement, ...]) -> Iterator[str]:
    """Yield the scalars whose sign the kernel must know."""
    yield from dict.fromkeys(n.scale.name for v in values(body) for n in v.walk() if isinstance(n, ScaleFactor))


__all__ = ["KernelText", "dimension_names", "nest", "print_kernel"]
