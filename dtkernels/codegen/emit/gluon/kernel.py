"""Print a warp-specialized plan as Gluon text: a kernel that makes descriptors, rings and barriers, and its producer and consumers."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace

from ....lang.algorithm import Algorithm
from ...analysis.product_types import Operands
from ...ir import nest
from ...ir.nest import Axis, DescriptorLoad, DescriptorLoadLet, DescriptorStore, Index, Let, LoadLet, Loop, Tile, axes_of
from ...ir.value_type import never_negative
from ...transforms.warp_specialize.plan import REGISTERS, AddedProduct, Ring, WarpSpecializedKernel, producer_names, ring_tiles
from ..device_scalars import scalar_loads
from ..triton.grid import grid_lines, grid_size
from ..triton.kernel import KernelText, _KernelPrinter, jit_function
from ..triton.memory import LINE, Box
from .consumer import Consumer, put_name
from .expr import GluonExpressions, gluon_text

INFIX = "_gluon"
WORD = 4  #: bytes of a number of a column
NARROWEST = 64  #: columns of 16 bits that shared memory holds side by side: of fewer no part can be multiplied


def print_gluon(plan: WarpSpecializedKernel, algorithm: Algorithm, operands: Operands) -> KernelText:
    """Return the Gluon text of a planned kernel: three functions, and the arguments of a launch."""
    return GluonPrinter(plan, algorithm, operands).text()


class GluonPrinter(_KernelPrinter):
    """State of printing one kernel: the names of Triton's text, and those of tiles, rings and barriers."""

    expr: GluonExpressions
    maker = "swizzled_map"

    def __init__(self, plan: WarpSpecializedKernel, algorithm: Algorithm, operands: Operands):
        super().__init__(plan.kernel, algorithm, operands)
        self.plan = plan
        main = (*plan.last.fresh, *plan.last.chained, *plan.last.direct)[0].columns
        self.expr = GluonExpressions(plan.rows, main, operands, self.first, self.tile, self.size)
        self.started = self.started | {plan.rows}
        self.boxes: dict[str, tuple[str, ...]] = {}  #: descriptor -> its box
        self.accesses: dict[str, DescriptorLoad | DescriptorStore] = {}
        self.added = {id(tile.store): tile for step in plan.steps for a in step.added for tile in a.tiles}
        self.puts = {put_name(s): s for s in (*plan.after, *(tile.store for a in plan.last.added for tile in a.tiles)) if isinstance(s, DescriptorStore)}

    def text(self) -> KernelText:
        base = self.kernel.name.replace("_descriptor", INFIX)
        consumer = self._function(
            f"{base}_consumer", Consumer(self).lines(), "Every second block, from WG on." if self.plan.turns else f"Rows WG * {self.share()} on of each block.",
            "WG: gl.constexpr",
        )
        producer = self._function(f"{base}_producer", self._producer(), "Brings tiles to where the consumers wait for them.")
        body = self._main(consumer, producer)
        text = KernelText(f"{base}_kernel", "")
        text.boxes = self._boxes()
        self._parameters(text, text.boxes, "\n".join(body))
        text.constants = [(n, v) for n, v in text.constants if n not in ("PRECISION", "EXACT")]
        text.constants = [(n, "tl.int32") if n == "INDEX" else (n, v) for n, v in text.constants]
        text.constants.append(("STAGES", self._stages()))
        main = jit_function("gluon", f"{base}_kernel", [a for a, _ in text.arguments] + [f"{c}: gl.constexpr" for c, _ in text.constants], body)
        text.source, text.helpers = gluon_text("\n\n".join([consumer.text, producer.text, main]))
        text.grid, text.labels = grid_size(replace(self.kernel, num_warps=32)), tuple(self.sizes)  # one program a multiprocessor
        multiplied = [a for a in self.accesses.values() if isinstance(a, DescriptorLoad) or not self.plan.float8 and id(a) not in self.added]
        text.warps, text.condition = 4, f"{'float8_' if self.plan.float8 else ''}warpgroups({', '.join(self._given(a.buffer) for a in multiplied)})"
        if self.plan.lines:
            text.condition += f" and in_words({', '.join(dict.fromkeys(self._given(line.value.buffer) for line in self.plan.lines))})"
        text.dense = self.dense_conditions(self.accesses.values())
        return text

    # -- names ------------------------------------------------------------------------------------------------------

    def share(self) -> str:
        """Return the constant that holds the rows of one consumer."""
        name = f"ROWS_{self.plan.rows.label}"
        self.tiles[name] = str(self.plan.share)
        return name

    def length(self, axis: Axis) -> str:
        """Return the constant that holds the length of ``axis`` in a consumer's tile."""
        return self.share() if axis == self.plan.rows else self.tile(axis)

    def part(self, added: AddedProduct) -> str:
        """Return the constant that holds how many columns one consumer adds.

        It adds its part of the sums over all rows: one of two tiles, or of one tile a share. Where that share would be too narrow, it adds all
        columns of the sums over its own rows.
        """
        whole, count = self.tile(added.columns), self.plan.consumers
        if count == 1 or added.columns.half:
            return whole
        name, value = f"PART_{added.columns.label}", self._value(whole)
        self.tiles[name] = f"({value} // {count} if {value} >= {NARROWEST * count} else {value})"
        return name

    def descriptor(self, access: DescriptorLoad | DescriptorStore) -> str:
        """Return the name of the descriptor that ``access`` goes through."""
        box = tuple(self.length(a) if a else "1" for a in access.box)
        if added := self.added.get(id(access)):
            box = (*box[:-1], self.part(added))
        for name, known in self.boxes.items():
            if self.accesses[name].buffer == access.buffer and known == box:
                return name
        name = f"{access.buffer}_desc" + (f"_{n}" if (n := sum(a.buffer == access.buffer for a in self.accesses.values())) else "")
        self.boxes[name], self.accesses[name] = box, access
        return name

    def coordinates(self, access: DescriptorLoad | DescriptorStore, share: str) -> str:
        """Return where a box starts; rows of the consumer ``share``."""
        texts, added = [], self.added.get(id(access))
        for start, axis in zip(access.start, access.box):
            text = self.expr.text(start, ())
            text = f"{text} + {share} * {self.share()}" if axis == self.plan.rows and share != "0" else text
            if added and axis == added.columns and self.plan.consumers > 1 and not axis.half:
                texts.append(f"WG * ({self.part(added)} % {self.tile(added.columns)})")  # 0 where each adds all columns
                continue
            constant = text == "0" or axis is not None and axis.half
            texts.append(text if constant else f"gl.cast({text}, gl.int32)")
        return f"[{', '.join(texts)}]"

    def shared(self, tile: DescriptorLoadLet) -> str:
        """Return ``CONSUMERS`` where each consumer has its own rows of a loaded tile, else ''."""
        return str(self.plan.consumers) if self.plan.rows in tile.value.box and self.plan.consumers > 1 and not self.plan.turns else ""

    def writers(self, put: DescriptorStore) -> str:
        """Return how many consumers store a result, each through a tile of its own: of two tiles that are added to memory each has one."""
        added = self.added.get(id(put))
        return "1" if added and added.columns.half else str(self.plan.consumers)

    def _value(self, name: str) -> str:
        return self.tiles.get(name, name)

    # -- functions --------------------------------------------------------------------------------------------------

    def _function(self, name: str, lines: list[str], doc: str, *parameters: str) -> Function:
        body = "\n".join(lines)
        main = self.expr.main.name
        columns = {a.name: a for a in (q.columns for q in (*self.plan.last.fresh, *self.plan.last.chained, *self.plan.last.direct))}
        layouts = ["    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])"] if re.search(r"\bLINE\b", body) else []
        if re.search(r"\bROWS\b", body):
            layouts.append(f"    ROWS: gl.constexpr = gl.SliceLayout(1, MMA_{main})")
        for n in columns:
            if f"COLUMNS_{n}" in body:
                layouts.append(f"    COLUMNS_{n}: gl.constexpr = gl.SliceLayout(0, MMA_{n})")
        text = "\n".join(layouts) + body
        made = [
            f"    MMA_{n}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {self.tile(a)}, {32 if self.plan.float8 else 16}])"
            for n, a in columns.items()
            if re.search(rf"\bMMA_{n}\b", text)
        ]
        parts = dict.fromkeys(self.part(tile) for a in self.plan.last.added for tile in a.tiles)
        made += [f"    MMA_{p}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {p}, 16])" for p in parts if f"MMA_{p}" in text]
        return Function(name, [f'    """{doc}"""', *made, *layouts, *lines], parameters)

    def _main(self, consumer: Function, producer: Function) -> list[str]:
        """Return the body of the kernel; completes the other two with the parameters they need."""
        head = scalar_loads(self.kernel.scalars, self.algorithm.integer_scalars(), "gl")
        local = self._allocations()
        known = [*self.accesses, *re.findall(r"^    (\w+) = ", "\n".join(local), re.M)]
        arguments = KernelText("", "")
        for f in (consumer, producer):
            self._parameters(arguments := KernelText("", ""))
            values = [a for a, _ in arguments.arguments]
            constants = [c for c, _ in arguments.constants if c not in ("PRECISION", "EXACT")] + ["STAGES"]
            words = set(re.findall(r"\w+", "\n".join(f.lines)))
            f.values = [n for n in (*known, *values) if n in words]
            f.constants = [n for n in constants if n in words]
            f.text = jit_function("gluon", f.name, [*f.parameters, *f.values, *(f"{c}: gl.constexpr" for c in f.constants)], f.lines)
        regs, few = REGISTERS[self.plan.consumers]
        calls = [
            f"        ({consumer.name}, (gl.constexpr({w}), {', '.join(consumer.values + consumer.constants)})),"
            for w in range(self.plan.consumers)
        ]
        calls.append(f"        ({producer.name}, ({', '.join(producer.values + producer.constants)})),")
        others = self.plan.consumers - 1
        lines = [
            *head,
            *local,
            "    gl.warp_specialize([",
            *(_filled(c) for c in calls),
            f"    ], {[4] * others + [1]}, {[regs] * others + [few]})",
        ]
        return lines

    def _boxes(self) -> list[Box]:
        """Return what the wrapper makes a descriptor for, of each."""
        sizes = {name: f"({', '.join(map(self._value, box))},)" for name, box in self.boxes.items()}
        return [Box(name, a.buffer, sizes[name], *self.described_dimensions(a), a.joined) for name, a in self.accesses.items()]

    def _allocations(self) -> list[str]:
        """Shared memory for tiles, and barriers: ``full`` when tiles have come, ``free`` when they may be overwritten."""
        p, lines, starts = self.plan, [], []
        for tile in p.resident:
            lines.append(self._tiles(tile.name, tile.value, self.shared(tile) or "1"))
            starts += self._barriers(tile.name, self.shared(tile) or "1", 1 if self.shared(tile) and tile.name not in p.crossing else p.consumers)
        for ring in p.rings:
            for tile in ring.tiles:
                lines.append(self._tiles(tile.name, tile.value, "STAGES" + (f" * {self.shared(tile)}" if self.shared(tile) else "")))
            starts += self._barriers(ring.name, "STAGES", 1 if p.turns else p.consumers, copies=bool(self._lines_in(ring)))
        if p.turns:
            starts += ["    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())", "    for i in gl.static_range(2):",
                       "        mbarrier.init(turn.index(i), count=1)"]  # fmt: skip
        for name, put in self.puts.items():
            lines.append(self._tiles(name, put, self.writers(put)))
        for line in p.lines:
            shape = f"[STAGES, {self.tile(line.axes[0])}]"
            lines.append(f"    {line.name}_row = gl.allocate_shared_memory({line.value.buffer}_ptr.dtype.element_ty, {shape}, gl.SwizzledSharedLayout(1, 1, 1, [0]))")
        for added in p.last.added:
            lines.append(self._terms(added))
            starts += self._barriers(added.store.buffer, "2", p.consumers, ("ready",))
        return [*lines, *starts, "    hopper.fence_async_shared()"]

    def _tiles(self, name: str, access: DescriptorLoad | DescriptorStore, count: str) -> str:
        desc = self.descriptor(access)
        shape = f"[{count}, {', '.join(self.boxes[desc])}]"
        return f"    {name}_tiles = gl.allocate_shared_memory({desc}.dtype, {shape}, {desc}.layout)"

    def _terms(self, added: AddedProduct) -> str:
        """Return the lines that allocate the left operand of a product over the rows: twice, so that none is overwritten that another consumer reads."""
        shape = f"[{self.share()}, {self.tile(added.rows)}]"
        name, dtype = added.store.buffer, f"{added.right.name}_tiles.dtype"
        layout = f"    {name}_layout_terms: gl.constexpr = gl.NVMMASharedLayout.get_default_for({shape}, {dtype})"
        return f"{layout}\n    {name}_terms = gl.allocate_shared_memory({dtype}, [{2 * self.plan.consumers}, {shape[1:]}, {name}_layout_terms)"

    def _barriers(self, name: str, count: str, readers: int, kinds: tuple[str, ...] = ("full", "free"), copies: bool = False) -> list[str]:
        made = [f"    {name}_{what} = gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())" for what in kinds]
        start = [f"mbarrier.init({name}_{what}.index(i), count={(33 if copies else 1) if what == 'full' else readers})" for what in kinds]
        return [*made, f"    for i in gl.static_range({count}):", *(f"        {s}" for s in start)]

    def _stages(self) -> str:
        """Return the depth of the rings, as an expression in the wrapper: as asked, as far as shared memory goes."""
        fixed = [self._bytes(t.value, self.shared(t) or "1") for t in self.plan.resident] + [
            self._bytes(put, self.writers(put)) for put in self.puts.values()
        ]
        fixed += [f"2 * 2 * {self.plan.rows.tile} * {self._value(self.tile(a.rows))}" for a in self.plan.last.added]
        each = [self._bytes(tile.value, self.shared(tile) or "1") for _, tile in ring_tiles(self.plan)]
        each += [f"{WORD} * {self._value(self.tile(line.axes[0]))}" for line in self.plan.lines]
        return f"ring_stages({self.plan.stages}, {' + '.join(fixed) or '0'}, {' + '.join(each)})"

    def _bytes(self, access: DescriptorLoad | DescriptorStore, count: str) -> str:
        sizes = [self._value(b) for b in self.boxes[self.descriptor(access)] if b != "1"]
        return " * ".join([self._element_bytes(access), *([count] if count != "1" else []), *sizes])

    def _element_bytes(self, access: DescriptorLoad | DescriptorStore) -> str:
        if id(access) in self.added:
            return "4"
        if not self.plan.float8:
            return "2"
        stored = {"bfloat16": "2", "float16": "2"}.get(self.algorithm.own_dtype(access.buffer) if access.buffer in self.algorithm else "", "4")
        return "1" if access.buffer in self.algorithm.float8_buffers else stored

    # -- the producer -----------------------------------------------------------------------------------------------

    def _producer(self) -> list[str]:
        p, self.lines = self.plan, ["    done = 0  # blocks", "    it = 0  # tiles of the loop, over all blocks"]
        depth = self.grid()
        needed = producer_names(p)
        for s in p.before:
            if isinstance(s, Index) and s.start != "whole":
                self.block_start(s.axis, depth)
            elif isinstance(s, Let) and s.name in needed:
                self.line(depth, f"{s.name} = {self.expr.text(s.value, ())}")
        for tile in p.resident:
            self._load_resident(tile, depth)
        inner = self.outer_loop(depth, needed)
        first = p.rings_of(p.last.fresh[0]) if p.in_order else []  # what a step waits for first
        rings = sorted(p.rings, key=lambda r: r not in first)
        for begin, end in self.loop_bounds():
            self.line(inner, f"for {self.counter()} in range({begin}, {end}, {self.advance(p.last.loop)}):")
            self.joined_indices(p.last.loop, inner + 1)
            self.line(inner + 1, "slot = it % STAGES")
            for ring in rings:
                self._load_ring(ring, inner + 1)
            self.line(inner + 1, "it += 1")
        self.line(depth, "done += 1")
        return self.lines

    def outer_loop(self, depth: int, needed: set[str] | None = None) -> int:
        """Print the loop around all others, if there is one, and the values that it computes for them; return the indentation depth inside it."""
        outer = self.plan.outer
        if outer is None:
            return depth
        self.counted.add(outer.axis)
        begin = "0" if outer.begin is None else self.expr.text(outer.begin, ())
        self.line(depth, f"for {outer.axis.name} in range({begin}, {self.expr.text(outer.end or nest.Size(outer.axis.label), ())}):")
        for s in self.plan.inside:
            if needed is None or s.name in needed:
                self.line(depth + 1, f"{s.name} = {self.expr.text(s.value, ())}")
        return depth + 1

    def loop_bounds(self) -> list[tuple[str, str]]:
        """Return where each loop that is run by itself begins and ends: all at once, unless they are run in order."""
        if not self.plan.in_order:
            return [self.bounds_of_all()]
        loops = [step.loop for step in self.plan.steps]
        return [("0" if x.begin is None else self.bound(x.begin), self.bound(x.end or nest.Size(x.axis.label))) for x in loops]

    def _load_resident(self, tile: DescriptorLoadLet, depth: int) -> None:
        """Load a tile that stays for the whole block, once the last block's buffer is free."""
        desc = self.descriptor(tile.value)
        for w in range(int(self.shared(tile) or 1)):
            self.line(depth, f"mbarrier.wait({tile.name}_free.index({w}), (done & 1) ^ 1)")
            self.line(depth, f"mbarrier.expect({tile.name}_full.index({w}), {desc}.block_type.nbytes)")
            where = self.coordinates(tile.value, str(w))
            self.line(depth, f"tma_load({desc}, {where}, {tile.name}_full.index({w}), {tile.name}_tiles.index({w}))")

    def _load_ring(self, ring: Ring, depth: int) -> None:
        total = [
            f"{self.shared(t)} * {d}" if self.shared(t) else d
            for t in ring.tiles
            for d in [f"{self.descriptor(t.value)}.block_type.nbytes"]
        ]
        self.line(depth, f"mbarrier.wait({ring.name}_free.index(slot), (it // STAGES & 1) ^ 1)")
        self.line(depth, f"mbarrier.expect({ring.name}_full.index(slot), {' + '.join(total)})")
        for tile in ring.tiles:
            desc = self.descriptor(tile.value)
            for w in range(int(self.shared(tile) or 1)):
                place = f"slot * {self.shared(tile)} + {w}" if self.shared(tile) else "slot"
                where = self.coordinates(tile.value, str(w))
                self.line(depth, f"tma_load({desc}, {where}, {ring.name}_full.index(slot), {tile.name}_tiles.index({place}))")
        self._copy_lines(ring, depth)

    def _lines_in(self, ring: Ring) -> tuple[LoadLet, ...]:
        """Return the numbers of columns that come with a ring: all with the first that a step waits for."""
        return self.plan.lines if self.plan.lines and ring is self.plan.rings_of(self.plan.last.fresh[0])[0] else ()

    def _copy_lines(self, ring: Ring, depth: int) -> None:
        """Copy numbers of columns, by words, since their rows start at any multiple of these; each thread reports when its copies have come."""
        for axis in {s.axes[0] for s in self._lines_in(ring)}:
            self.line(depth, f"{axis.name}_line = {self.counter()} + gl.arange(0, {self.tile(axis)}, LINE)")
        for s in self._lines_in(ring):
            axis, load = s.axes[0], s.value
            texts = [f"{axis.name}_line" if axes_of(i) else self.expr.text(i, ()) for i in load.index]
            factors = [t if re.fullmatch(r"\w+", t) else f"({t})" for t in texts]
            pointer = " + ".join([f"{load.buffer}_ptr", *(f"{t} * {load.buffer}_stride_{d}" for t, d in zip(factors, self.dimensions(load.buffer)))])
            mask = [f"({axis.name}_line < {self.size(axis.label)})"]
            for d in load.checked:
                self.bounds[(load.buffer, d)] = None
                mask += [] if never_negative(load.index[d]) else [f"({texts[d]} >= 0)"]
                mask.append(f"({texts[d]} < {load.buffer}_size_{d})")
            self.line(depth, f"copy_to_shared({s.name}_row.index(slot), {pointer}, mask={' & '.join(mask)})")
        if self._lines_in(ring):
            self.line(depth, f"async_copy.mbarrier_arrive({ring.name}_full.index(slot), increment_count=False)")

    # -- what producer and consumers both do --------------------------------------------------------------------------

    def grid(self) -> int:
        """Print the loop over blocks; return the indentation depth inside it."""
        lines, depth = grid_lines(self.kernel, self, balanced=True)
        for line in lines:
            self.lines.append(re.sub(r"tl\.range\((.*?)(?:, flatten=True)?\):", r"range(\1):", line))
        return depth

    def block_start(self, axis: Axis, depth: int) -> None:
        """Print the first index of a block, where it is more than one element."""
        if self.blocks[axis.label] != 1:
            part = f" + {axis.offset}" if axis.offset else ""
            self.line(depth, f"{self.first(axis)} = {self.block_index(axis.label)} * {self.block(axis.label)}{part}")

    def joined_indices(self, loop: Loop, depth: int) -> None:
        """Print where each of the joined loops is, given the number of the step."""
        rest = f"{loop.axis.name}_step"
        for r in reversed(loop.order):
            axis, last = r.axis, r == loop.order[0]
            if axis.scalar:
                self.counted.add(axis)
            now = rest if last else f"{rest} % {self.steps(r)}"
            self.line(depth, f"{axis.name} = {now}" if axis.scalar else f"{axis.name}_start = {now} * {self.tile(axis)}")
            rest += f" // {self.steps(r)}"

    def counter(self) -> str:
        return f"{self.plan.last.loop.axis.name}_{'step' if self.plan.last.loop.order else 'start'}"

    def advance(self, loop: Loop) -> str:
        """Return by how much the counter of a loop advances in a step."""
        return "1" if loop.order else self.tile(loop.axis)

    def bound(self, tile: Tile | None) -> str:
        """Return where one of several loops begins or ends; ``legality`` sees to it that each meets the next."""
        assert tile is not None
        return self.expr.text(tile, ())

    def bounds_of_all(self) -> tuple[str, str]:
        """Return where the walk of all loops begins and ends."""
        first, last = self.plan.steps[0].loop, self.plan.last.loop
        if last.order:
            return "0", self.joined_steps(last)
        return "0" if first.begin is None else self.expr.text(first.begin, ()), self.expr.text(last.end or nest.Size(last.axis.label), ())


class Function:
    """One printed function and, once known, its arguments."""

    def __init__(self, name: str, lines: list[str], parameters: tuple[str, ...]):
        self.name, self.lines, self.parameters = name, lines, parameters
        self.values: list[str] = []
        self.constants: list[str] = []
        self.text = ""


def _filled(line: str) -> str:
    return textwrap.fill(line, LINE, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
