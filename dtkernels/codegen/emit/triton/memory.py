"""Print loads and stores in Triton, by pointers or through tensor descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ir import nest
from ...ir.integer_math import addends
from ...ir.merged_dimensions import Run, merged_runs
from ...ir.nest import (
    Axis,
    BlockNumber,
    DescriptorLoad,
    DescriptorStore,
    Joined,
    Load,
    Local,
    Op,
    Position,
    Store,
    Tile,
    mask_axes,
)
from ...ir.value_type import is_boolean, is_integer, never_negative
from .expr import arrange
from .lane_order import in_lane_order

if TYPE_CHECKING:
    from .kernel import _KernelPrinter

LINE = 120


@dataclass(frozen=True)
class Box:
    """What a descriptor is made for: a buffer, with some of its dimensions ``joined``. All texts are expressions in the wrapper."""

    name: str  #: of the descriptor
    buffer: str
    sizes: str  #: of a box
    extents: tuple[str, ...]
    strides: tuple[str, ...]
    joined: tuple[Joined, ...] = ()


def uniform_part(index: Tile) -> tuple[Tile, Tile] | None:
    """Return what varies of a sum over a tile, and what is one number for all of it: ``x`` and ``s - 1`` of ``x + s - 1``; None where it has not both.

    The pointer, or the bound of a mask, takes the number: the elements then have one address for all steps of a loop over ``s``.
    """
    if not nest.axes_of(index):
        return None
    parts = list(addends(index))
    varying = [(sign, a) for sign, a in parts if nest.axes_of(a)]
    single = [(sign, a) for sign, a in parts if not nest.axes_of(a)]
    steps = any(isinstance(n, Position) for _, a in single for n in a.walk())
    if not steps or not any(sign > 0 for sign, _ in varying):
        return None
    return _total(varying), _total(single)


def _total(parts: list[tuple[int, Tile]]) -> Tile:
    """Return a sum, what is added before what is subtracted."""
    first, *rest = sorted(parts, key=lambda a: a[0] < 0)
    total = first[1] if first[0] > 0 else Op("neg", (first[1],))
    for sign, a in rest:
        total = Op("+" if sign > 0 else "-", (total, a))
    return total


ROW = 16  #: elements that rows of an aligned buffer are a multiple of: 16 bytes in any dtype


class MemoryPrinter:
    """Prints the memory accesses of one kernel; remembers the descriptors they need."""

    def __init__(self, kernel: _KernelPrinter):
        self.k = kernel
        self.descriptors: dict[tuple[str, tuple[str, ...]], str] = {}  #: (buffer, its box) -> name
        self.first: dict[str, DescriptorLoad | DescriptorStore] = {}  #: name -> the first access through it
        self.aligned = self._aligned()

    def _aligned(self) -> frozenset[str]:
        """Return the buffers whose rows are declared to Triton to start at multiples of 16 elements.

        Of those with as many dimensions as any in the kernel it sees that in their strides, whatever the number of rows (specialization.py).
        """
        ranks = {b: len(self.k.dimensions(b)) for b in self.k.kernel.reads}
        return frozenset(b for b in self.k.kernel.aligned_reads if ranks[b] < max(ranks.values()))

    def load(self, name: str, load: Load | DescriptorLoad, axes: tuple[Axis, ...], depth: int, widen: bool) -> None:
        """Emit a load into ``name``, widened to float32 if ``widen``."""
        form = self.k.expr.float8.get(load.buffer) if widen else None
        tail = ".to(tl.int64)" if name in self.k.outgrown else ".to(tl.float32)" if widen and not form and load.buffer not in self.k.spaces else ""
        if isinstance(load, DescriptorLoad):
            shape = self._shape(load.box)
            reshape = f".reshape({shape})" if None in load.box else ""
            loaded = f"{self._descriptor(load)}.load({self._starts(load)}){reshape}{tail}"
            return self.k.line(depth, f"{name} = {self.k.expr.from_float8(form, loaded, 'tl.float32') if form else loaded}")
        mask = self._mask(load.buffer, load.index, load.checked, axes, only=load.only)
        args = [self.k.steady.get(id(load)) or self._pointer(load.buffer, load.index, axes)]
        if repeated := load.sunk_into or load.duplicate_in:  # 0: no step changes it, and Triton is not to see that
            args[0] += f" + tl.minimum({self.k.first(repeated)}, 0)"
        if mask:
            args += [f"mask={mask}", "other=" + ("0" if load.whole else 'float("-inf")' if load.other else "0.0")]
        policy = load.evict or next((policy for t, policy in self.k.kernel.evict if t == load.buffer), None)
        args += [f'eviction_policy="evict_{policy}"'] if policy else []
        if form:
            before, after = self.k.expr.from_float8(form, "\0", "tl.float32").split("\0")
            return self._call(depth, f"{name} = {before}tl.load", args, after)
        return self._call(depth, f"{name} = tl.load", args, tail)

    def store(self, s: Store | DescriptorStore, depth: int) -> None:
        """Write a value, or add it to what is there."""
        form = self.k.expr.float8.get(s.buffer)
        value = self.k.expr.text(_code(s.value, form) if form else s.value, s.axes)
        if s.buffer in self.k.algorithm.operands and (is_integer(s.value) or is_boolean(s.value)):  # the interpreter takes their bits for a bfloat16
            value = f"tl.cast({value}, tl.float32)"
        if isinstance(s, DescriptorStore):
            value = f"({value})" if " " in value else value
            value += f".to({self._descriptor(s)}.dtype)"
            value += f".reshape([{', '.join(self.k.tile(a) if a else '1' for a in s.box)}])" if None in s.box else ""
            return self.k.line(depth, f"{self._descriptor(s)}.{'atomic_add' if s.onto.endswith('sum') else 'store'}({self._starts(s)}, {value})")
        checked = tuple(d for d, i in enumerate(s.index) if not isinstance(i, (Position, BlockNumber))) if s.onto else ()
        mask = self._mask(s.buffer, s.index, checked, s.axes, self._filled(s, depth))
        if s.onto.endswith("sum"):
            args = [self._pointer(s.buffer, s.index, s.axes), f"tl.cast({value}, tl.float32)", *([f"mask={mask}"] if mask else []), 'sem="relaxed"']
            return self._call(depth, "tl.atomic_add", args)
        return self._call(depth, "tl.store", [self._pointer(s.buffer, s.index, s.axes), value] + ([f"mask={mask}"] if mask else []))

    def _filled(self, s: Store, depth: int) -> dict[Axis, str]:
        """Return the mask of a row that is stored up to the multiple of 16 elements that it has in memory.

        A mask that ends at an odd extent would have each element stored by itself. What lies behind the extent nobody reads.
        """
        last = s.index[-1] if s.index else None
        if s.buffer not in self.k.kernel.aligned or not isinstance(last, Position) or last.axis not in self.k.masked or last.axis.scalar:
            return {}
        axis = last.axis
        if axis.exact or axis.padded:
            return {}
        whole = f"({axis.name} < tl.cdiv({self.k.size(axis.label)}, {ROW}) * {ROW}) | {self.k.even_constant(axis)}"
        return {axis: self.k.name_value(f"{axis.name}_in_row", whole, depth)}

    # -- descriptors ------------------------------------------------------------------------------------------------

    def boxes(self) -> list[Box]:
        """Return what the wrapper makes a descriptor for, of each."""
        made = []
        for (buffer, box), name in self.descriptors.items():
            access = self.first[name]
            made.append(Box(name, buffer, self._box_sizes(box), *self.k.described_dimensions(access), access.joined))
        return made

    def _box_sizes(self, box: tuple[str, ...]) -> str:
        """Return the box as an expression in the wrapper."""
        return f"({', '.join(self.k.tiles.get(b, b) for b in box)}{',' if len(box) == 1 else ''})"

    def _descriptor(self, access: DescriptorLoad | DescriptorStore) -> str:
        key = (access.buffer, tuple(self.k.tile(a) if a else "1" for a in access.box))
        if key not in self.descriptors:
            count = sum(buffer == access.buffer for buffer, _ in self.descriptors)
            self.descriptors[key] = f"{access.buffer}_desc" + (f"_{count}" if count else "")
            self.first[self.descriptors[key]] = access
        return self.descriptors[key]

    def _starts(self, access: DescriptorLoad | DescriptorStore) -> str:
        texts = []
        for start in access.start:
            text = self.k.expr.text(start, ())
            texts.append(text if isinstance(start, nest.Const) else f"tl.cast({text}, tl.int32)")  # whatever offsets of pointers are
        return f"[{', '.join(texts)}]"

    def _shape(self, box: tuple[Axis | None, ...]) -> str:
        return f"[{', '.join(self.k.tile(a) for a in box if a)}]"

    # -- pointers ---------------------------------------------------------------------------------------------------

    def _pointer(self, buffer: str, index: tuple[Tile, ...], axes: tuple[Axis, ...]) -> str:
        if not index:
            return f"{buffer}_ptr"
        shape = tuple(a for a in axes if not a.scalar)
        return in_lane_order(f"{buffer}_ptr + {self._offsets(buffer, index, axes)}", buffer, index, shape, self.k)

    def _offsets(self, buffer: str, index: tuple[Tile, ...], axes: tuple[Axis, ...], known: dict[Tile, str] | None = None) -> str:
        """Return how far an element is from the first; ``known`` names what to print for some indices."""
        parts: list[str] = []
        uniform: list[str] = []  #: what one number says for the whole tile, of indices that have such a part: it comes before what varies
        dims = self.k.dimensions(buffer)
        runs = merged_runs(index)
        apart = {n: sides for n, i in enumerate(index) if n not in runs and not (known or {}).get(i) and (sides := uniform_part(i))}
        for n, (i, d) in enumerate(zip(index, dims), 1):
            if (run := runs.get(n - 1)) is not None:
                if run.last == n - 1:
                    parts.append(self._merged(buffer, run, index, dims, axes))
                continue
            if (sides := apart.get(n - 1)) is not None:
                uniform.append(f"tl.cast({self.k.expr.text(sides[1], ())}, INDEX) * {buffer}_stride_{d}")
                i = sides[0]
            text = (known or {}).get(i) or self._index(i, axes, n == len(index))
            text = f"{text} * {buffer}_stride_{d}" if isinstance(i, Position) else f"({text}) * {buffer}_stride_{d}"
            single = isinstance(i, Position) and i.axis.scalar
            text = f"tl.multiple_of({text}, {ROW})" if single and buffer in self.aligned else text
            (uniform if apart and not nest.axes_of(i) else parts).append(text)
        return " + ".join((*uniform, *parts))

    def _merged(self, buffer: str, run: Run, index: tuple[Tile, ...], dims: tuple[str, ...], axes: tuple[Axis, ...]) -> str:
        """Return the offset along dimensions that one label counts together: where they follow each other in memory, that of one dimension."""
        apart = " + ".join(f"({self.k.expr.text(index[n], axes)}) * {buffer}_stride_{dims[n]}" for n in range(run.first, run.last + 1))
        whole = self.k.expr.text(run.whole, axes)
        return f"(({whole}) * {buffer}_stride_{dims[run.last]} if {self.k.dense_constant(buffer, run.first, run.extents)} else {apart})"

    def _index(self, index: Tile, axes: tuple[Axis, ...], last: bool) -> str:
        """Return one index; loaded integers of 32 bits may not hold the offset of the row that they number."""
        if isinstance(index, Op) and index.fn == "where" and index.args[2] == nest.Const(-1) and not last:  # of a write: its index where its condition holds
            condition, chosen, other = index.args
            return f"tl.where({self.k.expr.text(condition, axes)}, {self._index(chosen, axes, last)}, {self.k.expr.text(other, ())})"
        if isinstance(index, Local) and not last and index.name in self.k.integers - self.k.outgrown:
            return arrange(f"{index.name}.to(INDEX)", index.axes, axes)
        return self.k.expr.text(index, axes)

    def steady_offsets(self, load: Load, axes: tuple[Axis, ...], axis: Axis, tile: str) -> str:
        """Return the offsets of a load in the first step of the loop over ``axis``; ``tile`` is the index inside a step."""
        return self._offsets(load.buffer, load.index, axes, {Position(axis): arrange(tile, (axis,), axes)})

    def steady_pointer(self, load: Load, axis: Axis, at: str) -> str:
        """Return the pointer in any step, ``at`` being the offsets in the first."""
        strides = [f"{load.buffer}_stride_{d}" for i, d in zip(load.index, self.k.dimensions(load.buffer)) if i == Position(axis)]
        return f"{load.buffer}_ptr + ({at} + {' + '.join(f'tl.cast({self.k.first(axis)}, INDEX) * {stride}' for stride in strides)})"

    def _mask(
        self,
        buffer: str,
        index: tuple[Tile, ...],
        checked: tuple[int, ...],
        axes: tuple[Axis, ...],
        filled: dict[Axis, str] | None = None,
        only: Tile | None = None,
    ) -> str:
        involved = mask_axes(index)
        tiles = [arrange((filled or {}).get(a, f"{a.name}_ok"), (a,), axes) for a in involved if not a.scalar]
        single = [f"{a.name}_ok" for a in involved if a.scalar]
        for d in checked:
            self.k.bounds[(buffer, d)] = None
            varying, shift = uniform_part(index[d]) or (index[d], None)
            text = self.k.expr.text(varying, axes)
            parts = [] if never_negative(index[d]) else [f"({text} >= {self._shifted('0', shift)})"]
            parts.append(f"({text} < {self._shifted(f'{buffer}_size_{d}', shift)})")
            (tiles if nest.axes_of(index[d]) else single).extend(parts)
        if only is not None:
            truth = "" if is_boolean(only) else " != 0"  # a loaded element is true where it is not 0
            (tiles if nest.axes_of(only) else single).append(f"({self.k.expr.text(only, axes)}{truth})")
        if tiles and single:  # the interpreter cannot combine a single truth value with a tile of them by &
            return f"tl.where({' & '.join(single)}, {' & '.join(tiles)}, False)"
        shape = [a for a in axes if not a.scalar]
        if single and shape:  # nor, from Triton 3.9 on, spread one over a tile
            return f"tl.full({self._shape(tuple(shape))}, {' & '.join(single)}, tl.int32) != 0"
        return " & ".join(tiles + single)

    def _shifted(self, bound: str, shift: Tile | None) -> str:
        """Return a bound less a number, which is subtracted once rather than added to each element that is compared."""
        return f"{bound} - ({self.k.expr.text(shift, ())})" if shift is not None else bound

    def _call(self, depth: int, head: str, args: list[str], tail: str = "") -> None:
        line = f"{head}({', '.join(args)}){tail}"
        if 4 * depth + len(line) <= LINE:
            return self.k.line(depth, line)
        self.k.line(depth, f"{head}(")
        for a in args:
            self.k.line(depth + 1, f"{a},")
        return self.k.line(depth, f"){tail}")


def _code(value: Tile, form: str) -> Tile:
    """Return the code in a float8 dtype of a value, which is rounded to it where it is not yet."""
    return Op(f"code:{form}", value.args if isinstance(value, Op) and value.fn == f"cast:{form}" else (value,))
