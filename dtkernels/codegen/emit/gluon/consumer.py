"""Print the code of one consumer for its rows of a block, in Gluon.

Chained products run one step behind: while the matrix units make the fresh products of a tile and the chained
ones of the tile before, only the former are waited for; the elementwise work on them hides the latter::

    scores = fresh product of the first tile; p = work on scores
    for every further tile:
        start scores = fresh product of this tile
        start acc += p V                   # of the tile before
        wait for scores; p' = work on scores
        wait for acc; acc *= rescale; p = p'
    acc += p V                             # of the last tile

Where products over the rows are added to memory, or registers lack room for that, each loop is run by itself, and only its first product
is made a step ahead. Gradients of keys and values, the queries' gradient dQ added to memory::

    S = K Q^T of the first tile
    for every tile:
        start dP = V dO^T + d_total
        P = exp(S - log); start dV += P dO
        wait for dP; dS = P * dP; show dS to the other consumer
        wait for the other's dS; start dQ = dS^T K; start dK += dS Q
        wait for dQ; start S of the next tile; add dQ to memory
        load d_total of the next tile; wait for the rest

Nothing is in flight where a loop goes back: ptxas would run such products one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...ir.nest import (
    Accumulator,
    Assign,
    Axis,
    DescriptorLoadLet,
    DescriptorStore,
    Index,
    Let,
    Load,
    Local,
    Position,
    Statement,
    Store,
    Tile,
    mask_axes,
    statement_kind,
)
from ...ir.value_type import never_negative
from ...transforms.warp_specialize.plan import AddedProduct, LoopStep, Product, Ring, WarpSpecializedKernel
from ..triton.memory import LINE

if TYPE_CHECKING:
    from .kernel import GluonPrinter


def put_name(s: DescriptorStore) -> str:
    """Return the name of the tile in shared memory that a result passes through: of two tiles of a whole extent, and of parts of a tile, one each."""
    part = next((f"_{a.name}" for a in s.box if a and a.offset), "")
    return s.buffer + ("_rest" if any(a and a.half == 2 for a in s.box) else part)


class Consumer:
    """Prints the function that every consumer runs."""

    def __init__(self, printer: GluonPrinter):
        self.k = printer
        self.p: WarpSpecializedKernel = printer.plan
        self.local: dict[str, DescriptorLoadLet] = {t.name: t for t in (*self.p.resident, *(t for ring in self.p.rings for t in ring.tiles))}
        self.home: dict[str, Ring] = {t.name: ring for ring in self.p.rings for t in ring.tiles}
        self.begin, self.end = "0", "0"

    def lines(self) -> list[str]:
        """Return the body of the function."""
        k, p = self.k, self.p
        if p.turns:
            self.begin, self.end = k.bounds_of_all()
        k.lines = ["    done = 0  # blocks", f"    it = {self._steps('WG') if p.turns else '0'}  # tiles of the loop, over all blocks"]
        depth = k.grid()
        if p.turns:
            first, step = "tl.program_id(0) + WG * tl.num_programs(0)", f"{p.consumers} * tl.num_programs(0)"
            k.lines = [re.sub(r"range\(tl.program_id\(0\), (.*), tl.num_programs\(0\)\):", rf"range({first}, \1, {step}):", line) for line in k.lines]
        for s in p.before:
            self._statement(s, depth)
        for tile in p.resident:
            for part in self._resident_parts(tile):
                k.line(depth, f"mbarrier.wait({tile.name}_full.index({part}), done & 1)")
        self.begin, self.end = k.bounds_of_all()
        if p.in_order:
            self._in_order(depth)
        elif p.last.direct:
            self._direct(depth)
        elif p.behind:
            self._chained(depth)
        else:
            self._tile_by_tile(depth)
        for s in p.after:
            self._statement(s, depth)
        k.line(depth, "done += 1")
        if k.puts:
            k.line(1, "tma.store_wait(0)")
        return k.lines

    def _steps(self, times: str) -> str:
        """Return the tiles of the loop in so many blocks, all of which have as many."""
        return f"{times} * ({self.end})" if self.p.last.loop.order else f"{times} * tl.cdiv({self.end}, {self.k.tile(self.p.last.loop.axis)})"

    # -- statements on registers ------------------------------------------------------------------------------------

    def _statement(self, s: Statement, depth: int) -> None:
        k = self.k
        match s:
            case Index(axis, start):
                self._index(axis, start, depth)
            case Let(name, Load() as load, axes):
                self._load(name, load, axes, depth)
            case DescriptorStore():
                self._put(s, depth)
            case Store():
                pointer = self._pointer(s.buffer, s.index, s.axes)
                mask = self._mask(s.buffer, s.index, (), s.axes)
                k.line(depth, f"gl.store({pointer}, {k.expr.text(s.value, s.axes)}{f', mask={mask}' if mask else ''})")
            case Accumulator(name, axes, start):
                value = "0.0" if start == 0 else f'float("{"-" if start < 0 else ""}inf")'
                shape = ", ".join(k.length(a) for a in axes)
                k.line(depth, f"{name} = gl.full([{shape}], {value}, gl.float32, {k.expr.layout(axes)})" if axes else f"{name} = {value}")
            case Let() | Assign():
                k.line(depth, f"{s.name} = {k.expr.text(s.value, s.axes)}")
            case _:
                raise AssertionError(f"a {statement_kind(s)} in a consumer")

    def _index(self, axis: Axis, start: str, depth: int) -> None:
        k, rows = self.k, axis == self.p.rows
        if start == "block":
            k.block_start(axis, depth)
        if axis.scalar or axis not in k.vectors:
            return
        base = {"block": k.first(axis), "loop": f"gl.cast({k.counter()}, gl.int32)", "whole": k.first(axis) if axis.half == 2 else ""}.get(start, "")  # one type where several loops meet
        base = f"{base} + WG * {k.length(axis)}" if rows and self._wg_of_rows() != "0" else base
        steps = f"gl.arange(0, {k.length(axis)}, {k.expr.layout((axis,))})"
        k.line(depth, f"{axis.name} = {base} + {steps}" if base else f"{axis.name} = {steps}")
        if axis in k.masked:
            k.line(depth, f"{axis.name}_ok = ({axis.name} < {k.size(axis.label)}) | {k.even_constant(axis)}")

    def _load(self, name: str, load: Load, axes: tuple[Axis, ...], depth: int) -> None:
        mask = self._mask(load.buffer, load.index, load.checked, axes)
        other = "0" if load.whole else 'float("-inf")' if load.other else "0.0"
        tail = ".to(gl.int64)" if name in self.k.outgrown else "" if load.whole or load.buffer in self.k.spaces else ".to(gl.float32)"
        self.k.line(
            depth,
            f"{name} = gl.load({self._pointer(load.buffer, load.index, axes)}{f', mask={mask}, other={other}' if mask else ''}){tail}",
        )

    def _pointer(self, buffer: str, index: tuple[Tile, ...], axes: tuple[Axis, ...]) -> str:
        parts = [f"{buffer}_ptr"]
        for i, d in zip(index, self.k.dimensions(buffer)):
            text = self.k.expr.text(i, axes)
            parts.append(f"{text} * {buffer}_stride_{d}" if isinstance(i, Position) else f"({text}) * {buffer}_stride_{d}")
        return " + ".join(parts)

    def _mask(self, buffer: str, index: tuple[Tile, ...], checked: tuple[int, ...], axes: tuple[Axis, ...]) -> str:
        k = self.k
        parts = [k.expr.arrange(f"{a.name}_ok", (a,), axes) for a in mask_axes(index) if not a.scalar]
        for d in checked:
            k.bounds[(buffer, d)] = None
            text = k.expr.text(index[d], axes)
            parts += [] if never_negative(index[d]) else [f"({text} >= 0)"]
            parts.append(f"({text} < {buffer}_size_{d})")
        return " & ".join(parts)

    def _put(self, s: DescriptorStore, depth: int) -> None:
        """Store a tile through shared memory, after the last block's store has read it."""
        value = self.k.expr.text(s.value, s.axes)
        self.k.line(depth, "tma.store_wait(0)")
        self._through(s, f"({value})" if " " in value else value, depth)

    def _through(self, s: DescriptorStore, value: str, depth: int) -> None:
        k = self.k
        desc = k.descriptor(s)
        flat = ", ".join(n for n, a in zip(k.boxes[desc], s.box) if a)
        place = f"{put_name(s)}_tiles.index({self._wg() if k.writers(s) != '1' else '0'})"
        k.line(depth, f"{place}{'' if None not in s.box else '.reshape([' + flat + '])'}.store({value}.to({desc}.dtype))")
        k.line(depth, "hopper.fence_async_shared()")
        k.line(depth, f"{'tma_add' if s.onto else 'tma_store'}({desc}, {k.coordinates(s, self._wg_of_rows())}, {place})")

    # -- loaded tiles -----------------------------------------------------------------------------------------------

    def _wg(self) -> str:
        return "WG" if self.p.consumers > 1 else "0"

    def _wg_of_rows(self) -> str:
        """Return which part of a block's rows this consumer computes."""
        return "0" if self.p.turns else self._wg()

    def _resident_part(self, tile: DescriptorLoadLet) -> str:
        """Return which of a resident tile's parts this consumer reads."""
        return self._wg() if self.k.shared(tile) else "0"

    def _resident_parts(self, tile: DescriptorLoadLet) -> list[str]:
        """Return all parts of a resident tile that this consumer reads."""
        return [str(w) for w in range(self.p.consumers)] if self.k.shared(tile) and tile.name in self.p.crossing else [self._resident_part(tile)]

    def _view(self, name: str, wanted: tuple[Axis, ...], slot: str) -> str:
        """Return a loaded tile as a matrix with dimensions ``wanted``."""
        k, tile = self.k, self.local[name]
        own = k.shared(tile)
        place = (f"{slot} * {own} + WG" if own else slot) if name in self.home else self._resident_part(tile)
        box = [a for a in tile.value.box if a]
        text = f"{name}_tiles.index({place})"
        if None in tile.value.box:
            text += f".reshape([{', '.join(k.length(a) for a in box)}])"
        return text if [a.name for a in box] == [a.name for a in wanted] else f"{text}.permute((1, 0))"

    def _release_slots(self, rings: list[Ring], slot: str, depth: int, pred: str = "") -> None:
        for ring in rings:
            self.k.line(depth, f"mbarrier.arrive({ring.name}_free.index({slot}), count=1{f', pred={pred}' if pred else ''})")

    def _await(self, rings: list[Ring], slot: str, it: str, depth: int) -> None:
        for ring in rings:
            self.k.line(depth, f"mbarrier.wait({ring.name}_full.index({slot}), {it} // STAGES & 1)")

    # -- products ---------------------------------------------------------------------------------------------------

    def _multiply(self, q: Product, left: str, slot: str, start: str, depth: int, to: str = "") -> None:
        """Start a product that accumulates onto ``start``, '' for nothing, under the name ``to``."""
        k, to = self.k, to or q.name
        right = self._view(q.right.name, (*q.axes, q.columns), slot)
        zero = f"gl.full([{k.share()}, {k.length(q.columns)}], 0.0, gl.float32, MMA_{q.columns.name})"
        line = f"{to}_made = hopper.warpgroup_mma({left}, {right}, {start or zero}, {'' if start else 'use_acc=False, '}is_async=True)"
        if 4 * depth + len(line) > LINE:
            k.line(depth, f"{q.name}_left = {left}") if "_tiles" in left else None
            k.line(depth, f"{q.name}_right = {right}")
            line = line.replace(f"({left}, {right},", f"({f'{q.name}_left' if '_tiles' in left else left}, {q.name}_right,")
        k.line(depth, line)

    def _fresh(self, slot: str, it: str, depth: int) -> None:
        """Start the fresh products of the tile in ``slot``."""
        self._await([r for r in self.p.rings if r.fresh], slot, it, depth)
        for q in self.p.last.fresh:
            self._multiply_loaded(q, slot, "", depth)

    def _multiply_loaded(self, q: Product, slot: str, start: str, depth: int) -> None:
        """Start a product of loaded tiles, of both tiles of a whole extent."""
        self._multiply(q, self._view(q.loaded_left.name, (q.rows, *q.axes), slot), slot, start, depth)
        if q.rest:
            left = self._view(q.rest.loaded_left.name, (q.rows, *q.rest.axes), slot)
            self._multiply(q.rest, left, slot, f"{q.name}_made", depth, q.name)

    def _fresh_done(self, slot: str, outstanding: int, depth: int) -> None:
        """Wait for the fresh products; what nothing else reads is given back."""
        names = [q.name for q in self.p.last.fresh]
        made = ", ".join(f"{n}_made" for n in names)
        self.k.line(depth, f"{', '.join(names)} = hopper.warpgroup_mma_wait({outstanding}, deps=[{made}])")
        self._release_slots([r for r in self.p.rings if r.fresh and not r.late], slot, depth)

    def _start_chained(self, slot: str, depth: int) -> None:
        self._await([r for r in self.p.rings if r.late and not r.fresh], slot, "it", depth)
        for q in self.p.last.chained:
            self._multiply(q, f"{q.name}_left", slot, q.name, depth)

    def _chained_done(self, depth: int) -> None:
        names = [q.name for q in self.p.last.chained]
        made = ", ".join(f"{n}_made" for n in names)
        self.k.line(depth, f"{', '.join(names)} = hopper.warpgroup_mma_wait(0, deps=[{made}])")

    # -- loops ------------------------------------------------------------------------------------------------------

    def _chained(self, depth: int) -> None:
        k, p = self.k, self.p
        tile, counter, late = k.tile(p.last.loop.axis), k.counter(), [r for r in p.rings if r.late]
        second = f"{self.begin} + {tile}" if self.begin != "0" else tile
        k.line(depth, f"if {self.begin} < {self.end}:")
        inner = depth + 1
        k.line(inner, "slot = it % STAGES")
        self._fresh("slot", "it", inner)
        self._fresh_done("slot", 0, inner)
        k.line(inner, f"{counter} = {self.begin}")
        self._work(p.last, inner)
        self._operands(p.last, inner)
        k.line(inner, f"for {counter} in range({second}, {self.end}, {tile}):")
        k.line(inner + 1, "before, slot = it % STAGES, (it + 1) % STAGES")
        self._fresh("slot", "(it + 1)", inner + 1)
        self._start_chained("before", inner + 1)
        self._fresh_done("slot", len(p.last.chained), inner + 1)
        self._any_work(inner + 1)
        self._chained_done(inner + 1)
        self._release_slots(late, "before", inner + 1)
        self._operands(p.last, inner + 1)
        k.line(inner + 1, "it += 1")
        self._release_resident_tiles(inner)
        k.line(inner, "slot = it % STAGES")
        self._start_chained("slot", inner)
        self._chained_done(inner)
        self._release_slots(late, "slot", inner)
        k.line(inner, "it += 1")
        if p.resident:
            k.line(depth, "else:")
            self._release_resident_tiles(inner)

    def _tile_by_tile(self, depth: int) -> None:
        """Emit for one tile after the other: fresh products, work on them, chained products; other consumers fill the gaps."""
        k, p = self.k, self.p
        late = [r for r in p.rings if r.late]
        k.line(depth, f"for {k.counter()} in range({self.begin}, {self.end}, {k.tile(p.last.loop.axis)}):")
        k.line(depth + 1, "slot = it % STAGES")
        self._fresh("slot", "it", depth + 1)
        self._fresh_done("slot", 0, depth + 1)
        self._any_work(depth + 1)
        self._operands(p.last, depth + 1)
        if p.last.chained:
            self._start_chained("slot", depth + 1)
            self._chained_done(depth + 1)
        self._release_slots(late, "slot", depth + 1)
        k.line(depth + 1, "it += 1")
        self._release_resident_tiles(depth)

    def _release_resident_tiles(self, depth: int) -> None:
        """Release the tiles that were loaded for the whole block."""
        for tile in self.p.resident:
            for part in self._resident_parts(tile):
                self.k.line(depth, f"mbarrier.arrive({tile.name}_free.index({part}), count=1)")

    def _any_work(self, depth: int) -> None:
        """Emit the work of all loops inside one loop; a counter selects. Values that one loop passes on to the next would cost moves."""
        for i, step in enumerate(self.p.steps):
            word = (
                "else:" if step is self.p.last else f"{'elif' if i else 'if'} {self.k.counter()} < {self.k.bound(step.loop.end)}:"
            )
            if len(self.p.steps) > 1:
                self.k.line(depth, word)
            self._work(step, depth + (len(self.p.steps) > 1))

    def _work(self, step: LoopStep, depth: int) -> None:
        """Emit the elementwise work on one tile's fresh products, and name the accumulators and operands that it yields."""
        k, last = self.k, self.p.last
        for s in step.loop.body:
            if isinstance(s, Index):
                self._index(s.axis, s.start, depth)
        for s in step.work:
            self._statement(s, depth)
        for mine, common in zip(step.chained, last.chained):
            if self._shared_left(common) is common:
                k.line(depth, f"{common.name}_operand = {k.expr.text(mine.left, (mine.rows, *mine.axes))}")

    def _shared_left(self, q: Product) -> Product:
        """Return the first chained product of the left operand of ``q``: those of two tiles of a whole extent have one."""
        return next(p for p in self.p.last.chained if (p.left, p.whole_columns) == (q.left, q.whole_columns))

    def _operands(self, step: LoopStep, depth: int) -> None:
        """Emit the moves of accumulators, and convert the left operands of chained products to the layout of the matrix units."""
        k = self.k
        for s in step.moves:
            k.line(depth, f"{s.name} = {k.expr.text(s.value, s.axes)}")
        for q in step.chained:
            layout = f"gl.DotOperandLayout(0, MMA_{q.columns.name}, 2)"
            k.line(depth, f"{q.name}_left = gl.convert_layout({self._shared_left(q).name}_operand.to({q.right.name}_tiles.dtype), {layout})")

    def _direct(self, depth: int) -> None:
        """Emit products that only accumulate: one runs while the tiles of the next are awaited."""
        k, p = self.k, self.p
        names = [q.name for q in p.last.direct]
        made = ", ".join(f"{n}_made" for n in names)
        if p.turns:  # the other has read all tiles of its block
            k.line(depth, "mbarrier.wait(turn.index(WG), (done + 1 + WG) & 1)")
        for step in p.steps:
            begin = self.begin if step is p.steps[0] else k.bound(step.loop.begin)
            end = self.end if step is p.last else k.bound(step.loop.end)
            k.line(depth, f"for {k.counter()} in range({begin}, {end}, {k.advance(step.loop)}):")
            k.line(depth + 1, "slot = it % STAGES")
            self._await(list(p.rings), "slot", "it", depth + 1)
            for q in step.direct:
                left = self._view(q.loaded_left.name, (q.rows, *q.axes), "slot")
                self._multiply(q, left, "slot", "" if p.promotes else q.name, depth + 1)
            if p.promotes:
                k.line(depth + 1, f"{', '.join(f'{n}_step' for n in names)} = hopper.warpgroup_mma_wait(0, deps=[{made}])")
                self._release_slots(list(p.rings), "slot", depth + 1)
                for n in names:
                    k.line(depth + 1, f"{n} += {n}_step")
            else:
                k.line(depth + 1, f"{', '.join(names)} = hopper.warpgroup_mma_wait({len(names)}, deps=[{made}])")
                self._release_slots(list(p.rings), "(it + STAGES - 1) % STAGES", depth + 1, f"{k.counter()} > {self.begin}")
            k.line(depth + 1, "it += 1")
        if p.turns:
            k.line(depth, "mbarrier.arrive(turn.index(1 - WG), count=1)")
        if not p.promotes:
            k.line(depth, f"{', '.join(names)} = hopper.warpgroup_mma_wait(0, deps=[{', '.join(names)}])")
            self._release_slots(list(p.rings), "(it + STAGES - 1) % STAGES", depth, f"{self.begin} < {self.end}")
        if p.turns:
            k.line(depth, f"it += {self._steps('1').removeprefix('1 * ')}  # those of the other's block")
        self._release_resident_tiles(depth)

    # -- loops in order ---------------------------------------------------------------------------------------------

    def _in_order(self, depth: int) -> None:
        """Emit each loop by itself, with its first product one step ahead."""
        k = self.k
        inner = k.outer_loop(depth)
        for step, (begin, end) in zip(self.p.steps, k.loop_bounds()):
            k.line(inner, f"if {begin} < {end}:")
            self._prologue(step, inner + 1)
            k.line(inner + 1, f"for {k.counter()} in range({begin}, {end}, {k.advance(step.loop)}):")
            self._step_in_order(step, end, inner + 2)
            k.line(inner + 2, "it += 1")
        self._release_resident_tiles(depth)

    def _prologue(self, step: LoopStep, depth: int) -> None:
        """Emit what a loop finds done in its first step: the first product, and what others start from."""
        first = step.fresh[0]
        self._multiply_ahead(first, "it", "", depth)
        self._await_products({first.name}, [first.name], depth)
        self._starts(step, depth)

    def _step_in_order(self, step: LoopStep, end: str, depth: int) -> None:
        """Emit one step: a product is issued when its operands are there and awaited where it is read; what is added to memory comes last."""
        k = self.k
        for s in step.loop.body:
            if isinstance(s, Index):
                self._index(s.axis, s.start, depth)
        loads = [s for s in step.work if isinstance(s, Let) and isinstance(s.value, Load) and s not in step.lines]
        started = {q.start.name for q in step.fresh if q.start}
        for s in loads:  # they arrive while the first products run
            self._statement(s, depth)
        k.line(depth, "slot = it % STAGES")
        first, *others = step.fresh
        ahead = self.p.rings_of(first)
        self._await([r for r in self.p.rings if r not in ahead], "slot", "it", depth)
        for q in others:
            self._multiply_loaded(q, "slot", f"{q.name}_start" if q.start else "", depth)
        flying = self._work_in_order(step, [s for s in step.work if s not in loads and s.name not in started], [q.name for q in others], depth)
        for a in step.added:
            self._await_products({f"{a.store.buffer}_part"}, flying, depth)
        self._multiply_ahead(first, "(it + 1)", f"{k.counter()} + {k.advance(step.loop)} < {end}", depth)
        flying.append(first.name)
        for a in step.added:
            for tile, inner in self._by_consumer(a, depth):
                self._through(tile.store, f"{a.store.buffer}_part", inner)
        self._starts(step, depth)
        self._await_products(set(flying), flying, depth)
        self._release_slots(list(self.p.rings), "slot", depth)

    def _work_in_order(self, step: LoopStep, work: list[Let | Assign], flying: list[str], depth: int) -> list[str]:
        """Emit the elementwise work, and each product as soon as what it multiplies is computed; return the products in flight."""
        k = self.k
        waiting: list[Product | AddedProduct] = [*step.added, *step.chained]
        for i in range(len(work) + 1):
            unknown = {s.name for s in work[i:]}
            for q in [q for q in waiting if not _names(q.left) & unknown]:
                waiting.remove(q)
                self._await_products(_names(q.left), flying, depth)
                if isinstance(q, AddedProduct):
                    self._share_terms(q, depth)
                    self._multiply_terms(q, depth)
                    flying.append(f"{q.store.buffer}_part")
                else:
                    value = f"{k.expr.text(q.left, (q.rows, *q.axes))}.to({q.right.name}_tiles.dtype)"
                    k.line(depth, f"{q.name}_left = gl.convert_layout({value}, gl.DotOperandLayout(0, MMA_{q.columns.name}, 2))")
                    self._multiply(q, f"{q.name}_left", "slot", q.name, depth)
                    flying.append(q.name)
            for s in work[i : i + 1]:
                self._await_products(_names(s.value), flying, depth)
                if s in step.lines:
                    self._line(s, depth)
                else:
                    self._statement(s, depth)
        return flying

    def _starts(self, step: LoopStep, depth: int) -> None:
        """Load the numbers that products of the next step start from: these products wait for nothing else there."""
        for q in step.fresh:
            if q.start:
                self._line(next(s for s in step.lines if s.name == q.start.name), depth, "ahead")
                shape = f"[{self.k.share()}, {self.k.length(q.columns)}]"
                self.k.line(depth, f"{q.name}_start = gl.full({shape}, 0.0, gl.float32, MMA_{q.columns.name}) + {q.start.name}[None, :]")

    def _line(self, s: Let | Assign, depth: int, slot: str = "slot") -> None:
        self.k.line(depth, f"{s.name} = {s.name}_row.index({slot}).load({self.k.expr.layout(s.axes)}).to(gl.float32)")

    def _multiply_ahead(self, q: Product, it: str, when: str, depth: int) -> None:
        """Start a product of loaded tiles for step ``it``. Where there is none, ``when`` is false, and what it makes is not used."""
        slot = "ahead"
        self.k.line(depth, f"{slot} = {it} % STAGES")
        for ring in self.p.rings_of(q):
            self.k.line(depth, f"mbarrier.wait({ring.name}_full.index({slot}), {it} // STAGES & 1{f', pred={when}' if when else ''})")
        self._multiply_loaded(q, slot, "", depth)

    def _by_consumer(self, a: AddedProduct, depth: int) -> Iterator[tuple[AddedProduct, int]]:
        """Yield the tile that a consumer adds, with the depth of its lines: each of two has one of two tiles."""
        if a.rest is None:
            yield a, depth
            return
        for word, tile in zip(("if WG == 0:", "else:"), a.tiles):
            self.k.line(depth, word)
            yield tile, depth + 1

    def _await_products(self, names: set[str], flying: list[str], depth: int) -> None:
        """Wait for the products in flight up to the last of ``names``."""
        last = max((i for i, n in enumerate(flying) if n in names), default=-1)
        if last < 0:
            return
        done, flying[:] = flying[: last + 1], flying[last + 1 :]
        self.k.line(depth, f"{', '.join(done)} = hopper.warpgroup_mma_wait({len(flying)}, deps=[{', '.join(f'{n}_made' for n in done)}])")

    def _share_terms(self, a: AddedProduct, depth: int) -> None:
        """Show this consumer's rows of a left operand to all. By then the addition of the step before has long read its tile: nothing waits for it later."""
        k, name = self.k, a.store.buffer
        k.line(depth, "tma.store_wait(0)")
        k.line(depth, f"{name}_terms.index((it & 1) * {self.p.consumers} + {self._wg()}).store({k.expr.text(a.left, (self.p.rows, a.rows))}.to({a.right.name}_tiles.dtype))")
        k.line(depth, "hopper.fence_async_shared()")
        k.line(depth, f"mbarrier.arrive({name}_ready.index(it & 1), count=1)")

    def _multiply_terms(self, a: AddedProduct, depth: int) -> None:
        """Start the product over the rows of all consumers for this consumer's columns, or over its own rows for all columns."""
        self.k.line(depth, f"mbarrier.wait({a.store.buffer}_ready.index(it & 1), (it >> 1) & 1)")
        for tile, inner in self._by_consumer(a, depth):
            self._multiply_own_terms(tile, inner)

    def _multiply_own_terms(self, a: AddedProduct, depth: int) -> None:
        k, name, part, whole, count = self.k, a.store.buffer, self.k.part(a), self.k.tile(a.columns), self.p.consumers
        zero = f"gl.full([{k.tile(a.rows)}, {part}], 0.0, gl.float32, MMA_{part})"
        box = [x for x in self.local[a.right.name].value.box if x]

        def product(rows: str, columns: str, start: str, depth: int) -> None:
            right = f"{a.right.name}_tiles.index({rows})"
            right += f".reshape([{', '.join(k.length(x) for x in box)}])" if None in self.local[a.right.name].value.box else ""
            right += "" if box[0] == self.p.rows else ".permute((1, 0))"
            k.line(depth, f"{name}_left = {name}_terms.index((it & 1) * {count} + {rows}).permute((1, 0))")
            k.line(depth, f"{name}_part_made = hopper.warpgroup_mma({name}_left, {right}{columns}, {start}, is_async=True)")

        if count == 1:
            return product("0", "", f"{zero}, use_acc=False", depth)
        if a.columns.half:
            for w in range(count):
                product(str(w), "", f"{name}_part_made" if w else f"{zero}, use_acc=False", depth)
            return None
        k.line(depth, f"if {part} < {whole}:")
        for w in range(count):
            product(str(w), f".slice(WG * {part}, {part}, dim=1)", f"{name}_part_made" if w else f"{zero}, use_acc=False", depth + 1)
        k.line(depth, "else:")
        product("WG", "", f"{zero}, use_acc=False", depth + 1)


def _names(tile: Tile) -> set[str]:
    return {n.name for n in tile.walk() if isinstance(n, Local)}
