"""Tile kernels with matrix products: one product, or a product of a product."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...codegen.powers_of_two import next_power_of_two
from ...lang import expr as ex
from ...lang.schedule import Primitive, Sized
from ...lang.schedule_checks import reduction_labels
from ..cost.candidate_time import CandidateTime
from ..problem import CUT_SIDE, ROWS, WHOLE_CHAIN, WHOLE_SIDE, SchedulingProblem
from . import gemm_candidates
from .gemm_candidates import GemmTile
from .program_order import causal_program_order
from .sibling_gemms import each_of, may_be_persistent, products, tiles_read, width

TILED = 128  #: extent that fills a tile
NARROW = 64  #: a side of a product up to this leaves it bound by memory
LONG = 8  #: steps of a loop from which on a copy of what it reads in each costs little beside it
WAITING = 4  #: programs a multiprocessor that have enough loads on the way where none is ahead of its use
FASTER = 0.9  #: a candidate is taken if its predicted time is below this part of the usual schedule's
MERGED = 16  #: steps of a loop from which on cutting it over programs gains more than the kernel that merges the parts takes


def product_tiles(shape: SchedulingProblem, root: str, members: list[str]) -> tuple[Primitive, ...]:
    """block, tensorize, map, split, descriptors, warps and stages of one kernel."""
    main = next(m for m in members if shape.dots(m))
    dot = shape.dots(main)[-1]
    labels = shape.algorithm[root].labels
    rows = [label for label in labels if label in ex.free_labels(dot.left) and label not in ex.free_labels(dot.right)]
    columns = [label for label in labels if label in ex.free_labels(dot.right) and label not in ex.free_labels(dot.left)]
    inner = set().union(*(ex.free_labels(d) for m in members if m != main for d in shape.dots(m)))
    if inner and not shape.has_only_sibling_products(root, members):
        if columns and set(columns) <= inner and not inner & set(rows):  # blocks are of what both products have, whichever side that is
            rows, columns = columns, rows
        return _Chain(shape, root, members, rows, columns).tiles()
    rows, columns = (sorted(side, key=lambda label: min(shape.sizes[label], TILED)) for side in (rows, columns))  # tiles lie along the last
    if rows and columns and labels.index(rows[-1]) > labels.index(columns[-1]):  # the wider side is the one that lies contiguous
        rows, columns, dot = columns, rows, ex.Dot(dot.right, dot.left, dot.labels)
    return _Product(shape, root, members, main, dot, rows, columns).tiles()


def loaded_ahead(shape: SchedulingProblem, root: str, members: list[str], dot: ex.Dot, steps: int) -> tuple[Primitive, ...]:
    """Return a small operand whose rows are no multiple of 16 elements, through a descriptor: by pointers its mask has Triton load single
    elements, which are not loaded ahead, so that a loop of so many ``steps`` waits for them at each."""
    sides = [s.tensor for s in (dot.left, dot.right) if isinstance(s, ex.Access)]
    if shape.itemsize != 2 or len(set(sides)) < 2 or not shape.target.has_tma or steps < MERGED:
        return ()
    for tensor, other in (sides, sides[::-1]):
        small = 8 * shape.elements(tensor) <= shape.elements(other)
        if small and tensor not in members and shape.row_stride(tensor) % 16 and shape.row_stride(other) % 16 == 0:
            if shape.aligned({tensor}):
                return (Primitive(root, "descriptor", (tensor,)),)
            if tensor in shape.algorithm.inputs:
                return Primitive(root, "stage", (tensor,)), Primitive(root, "descriptor", (tensor,))
            if tensor not in shape.outputs:
                return Primitive(tensor, "align"), Primitive(root, "descriptor", (tensor,))
    return ()


@dataclass
class _Product:
    shape: SchedulingProblem
    root: str
    members: list[str]
    main: str
    dot: ex.Dot
    rows: list[str]
    columns: list[str]

    @cached_property
    def dots(self) -> tuple[ex.Dot, ...]:
        return products(self.shape, self.members)

    def tiles(self) -> tuple[Primitive, ...]:
        """Return the usual schedule, or a candidate that is predicted to be well faster: usual ones were measured to be good at many sizes."""
        usual = self._usual()
        plain = all(tiles_read(self.shape, self.members, side) == 1 for dot in self.dots for side in (dot.left, dot.right))
        if self.shape.itemsize != 2 or not plain:
            return usual
        time = CandidateTime(self.shape, self.root, self.members).microseconds
        best = min(self._candidates(), key=time, default=usual)
        return best if time(best) < FASTER * time(usual) else usual

    @cached_property
    def _extents(self) -> tuple[int, int, int, int]:
        """The extents of rows, columns and sum, and the products side by side in a batch."""
        shape = self.shape
        m, n = (max([shape.sizes[x] for x in side], default=1) for side in (self.rows, self.columns))
        batch = math.prod(shape.sizes[label] for label in shape.algorithm[self.root].labels if label not in self.rows[-1:] + self.columns[-1:])
        return m, n, max((shape.sizes[label] for label in self.dot.labels), default=1), batch

    def _tile(self, of: GemmTile) -> dict[str, int]:
        """Return the tile of each label: all of a product's sums but the longest advance by one."""
        shape = self.shape
        tile = {x: of.rows if x in self.rows[-1:] else of.columns if x in self.columns[-1:] else 1 for x in shape.algorithm[self.root].labels}
        for dot in self.dots:
            longest = max(dot.labels, key=lambda label: shape.sizes[label])
            tile |= {k: max(16, min(next_power_of_two(shape.sizes[k]), of.depth)) if k == longest else 1 for k in dot.labels}
        return tile

    def _steps(self, tile: dict[str, int]) -> int:
        return max((self.shape.sizes[label] // tile[label] for label in reduction_labels(self.shape.algorithm, self.main) if label in tile), default=0)

    def _statements(self, of: GemmTile, extra: tuple[Primitive, ...] = (), share: int = 0, parts: int = 0) -> tuple[Primitive, ...]:
        """Return the statements of a tile; ``share`` and ``parts`` as in ``SchedulingProblem.statements``, the first for long sums alone."""
        tile = self._tile(of)
        block = {label: tile[label] for label in self.shape.algorithm[self.root].labels}
        stays = any(p.name == "persistent" for p in extra)
        grouped = (self.rows[-1], self.columns[-1], 4 if stays else 8) if self.rows and self.columns else None
        share = share if self._steps(tile) >= MERGED else 0
        return self.shape.statements(self.root, block, tile, of.warps, of.stages, grouped, share, extra, parts)

    def _candidates(self) -> Iterator[tuple[Primitive, ...]]:
        """Yield schedules of this kernel: tiles, each plain, split, or with descriptors and persistent programs."""
        m, n, k, batch = self._extents
        cores, through = self.shape.target.multiprocessors, self._descriptors()
        for of in gemm_candidates.tiles(m, n * len(self.dots), k, batch, cores):
            of = of._replace(rows=(cut := each_of(self.dots, of.rows, of.columns))[0], columns=cut[1])
            room = self.shape.target.shared_bytes // (self._width(of.rows, of.columns) * of.depth * self.shape.itemsize)
            if room < 2:
                continue
            of, blocks = of._replace(stages=min(of.stages, room)), self._blocks(m, n, of.rows, of.columns, batch)
            large = through and blocks >= cores // 2 and min(of.rows, of.columns) >= 64
            if not (large and len(self.dots) > 1):  # addresses would take registers that the accumulators need
                yield self._statements(of)
            steps = k // of.depth
            for count in gemm_candidates.parts(blocks, steps, cores):
                yield self._statements(of, parts=count)
            if large:
                yield self._statements(of, through)
                if tail := self._tail(of.rows, of.columns, blocks / cores):
                    yield self._statements(of, (*through, *tail))
            if min(m, n) <= NARROW and (ahead := tuple(dict.fromkeys(p for dot in self.dots for p in loaded_ahead(self.shape, self.root, self.members, dot, steps)))):
                yield self._statements(of, ahead)

    def _usual(self) -> tuple[Primitive, ...]:
        """Return the schedule that sizes decide."""
        m, n, k, batch = self._extents
        *of, extra = self._choose(m, n, k, batch)
        tile = GemmTile(*of)
        steps = self._steps(self._tile(tile))
        alone = min(m, n) <= NARROW or self._is_bandwidth_bound(m, n, k, batch)
        waits = min(m, n) <= NARROW and self.shape.itemsize == 2 and self._loose()
        share = WAITING if waits else 1 if alone or extra or len(self.dots) > 1 else 2
        ahead = (p for dot in self.dots for p in loaded_ahead(self.shape, self.root, self.members, dot, steps)) if alone else ()
        return self._statements(tile, tuple(dict.fromkeys((*extra, *ahead))), share)

    def _choose(self, m: int, n: int, k: int, batch: int) -> tuple[int, int, int, int, int, tuple[Primitive, ...]]:
        """Return (rows, columns, depth, warps, stages, further primitives); the figures were measured on an H200.

        Of several products side by side the tiles are those of one of as many columns as all have, cut to what each has of them.
        """
        shape, several = self.shape, len(self.dots) > 1
        plain = all(tiles_read(shape, self.members, side) == 1 for dot in self.dots for side in (dot.left, dot.right))
        bm, bn = min(128, max(16, next_power_of_two(m))), max(16, next_power_of_two(n * len(self.dots)))
        if shape.itemsize != 2 or not plain:
            bm, bn = each_of(self.dots, bm, min(256 if shape.itemsize == 2 else 128 * len(self.dots), bn))
            while bm * bn > 64 * 64 and self._blocks(m, n, bm, bn, batch) < shape.target.multiprocessors:
                bm, bn = (bm, bn // 2) if bn >= bm else (bm // 2, bn)
            return (bm, bn, *self._depth(bm, bn, 8 if bm * bn >= 128 * 128 else 4), ())
        if min(m, n) <= NARROW:
            bm, bn = min(bm, 64), min(max(16, next_power_of_two(n)), 64)  # each program streams alone: few, deep ones keep the most bytes in flight
            return self._latency_bound_config(bm, bn) if self._loose() else (bm, bn, *self._fit_shared_memory(bm, bn, 128, 5), ())
        if self._is_bandwidth_bound(m, n, k, batch):
            bn = min(128, next_power_of_two(n))
            bm, bn = (64, bn) if n <= m else (bm, 64)
            return (bm, bn, *self._fit_shared_memory(bm, bn, 128, 4), ())
        narrow_loads = any(shape.row_stride(t) % 16 for t in self._sides())  # by pointers: Triton knows no row's start to be aligned then
        full = (bm, min(bn, 256))
        waves = self._blocks(m, n, *each_of(self.dots, *full), batch) / shape.target.multiprocessors
        if full == (128, 256) and k >= 64 and (waves >= 1.5 or several and waves >= 0.9 or narrow_loads and waves >= 0.5):
            bm, bn = each_of(self.dots, *full)
            through = self._descriptors()
            through += self._tail(bm, bn, waves) if through and narrow_loads else ()
            return (bm, bn, 64, 8, 3, through) if through else (bm, bn, *self._depth(bm, bn, 8), ())
        bn = min(bn, 128)
        for small in ((bm, bn), (min(bm, 64), bn), (min(bm, 64), min(bn, 64))):
            if 10 * self._blocks(m, n, *each_of(self.dots, *small), batch) >= 9 * shape.target.multiprocessors:
                break
        bm, bn = each_of(self.dots, *small)
        if narrow_loads and small[0] * small[1] >= 64 * 128 and (through := self._descriptors()):
            return (bm, bn, 64, 8 if small == (128, 128) else 4, 4, through)
        alone = self._blocks(m, n, bm, bn, batch) <= shape.target.multiprocessors  # each has all of the shared memory of one
        deep = 128 if alone and self._width(bm, bn) * 128 * 4 * shape.itemsize <= shape.target.shared_bytes else 64
        return (bm, bn, *self._fit_shared_memory(bm, bn, deep, 4 if deep == 128 or bm * bn < 128 * 128 else 3), ())

    def _width(self, bm: int, bn: int) -> int:
        return width(self.shape, self.members, dict.fromkeys(self.rows[-1:], bm) | dict.fromkeys(self.columns[-1:], bn))

    def _loose(self) -> bool:
        """Return whether rows of the larger operand are not aligned to 16 bytes, so that its loads cannot be pipelined."""
        return not self.shape.aligned({max(self._sides(), key=self.shape.elements)}) if self._sides() else False

    def _latency_bound_config(self, bm: int, bn: int) -> tuple[int, int, int, int, int, tuple[Primitive, ...]]:
        """Return tiles for programs that wait for their loads: four per multiprocessor keep as many loads in flight.

        Where the sum runs along the rows of the larger operand they have few rows, else the sum is split.
        """
        large = max(self._sides(), key=self.shape.elements)
        along = self.shape.last_label(large) in self.dot.labels
        if along:
            return (16, bn, 256, 4, 3, ()) if bm >= bn else (bm, 16, 256, 4, 3, ())
        return bm, bn, 64, 4, 3, ()

    def _sides(self) -> list[str]:
        sides = (side for dot in (self.dot, *self.dots) for side in (dot.left, dot.right))
        return list(dict.fromkeys(side.tensor for side in sides if isinstance(side, ex.Access)))

    def _is_bandwidth_bound(self, m: int, n: int, k: int, batch: int) -> bool:
        """Return whether reading the longer operand bounds the product.

        It is read once if a tile holds the narrower side whole: blocks are then few, and the sum is split over programs.
        """
        few = 10 * self._blocks(m, n, 128, 128, batch) < 9 * self.shape.target.multiprocessors
        return self.shape.itemsize == 2 and NARROW < min(m, n) <= 2 * NARROW < max(m, n) and few and k >= 2048

    def _fit_shared_memory(self, bm: int, bn: int, depth: int, stages: int) -> tuple[int, int, int]:
        rows = self._width(bm, bn)
        while depth > 32 and 3 * rows * depth * self.shape.itemsize > self.shape.target.shared_bytes:
            depth //= 2
        while stages > 2 and rows * depth * stages * self.shape.itemsize > self.shape.target.shared_bytes:
            stages -= 1
        return depth, 4, stages

    def _blocks(self, m: int, n: int, bm: int, bn: int, batch: int) -> int:
        return batch * -(-m // bm) * -(-n // bn)

    def _descriptors(self) -> tuple[Primitive, ...]:
        """Use tensor descriptors and persistent programs for large products.

        Operands whose rows are not aligned are copied first: that costs a tenth of what the product gains.
        """
        shape, root, sides = self.shape, self.root, tuple(self._sides())
        if not shape.target.has_tma:
            return ()
        loose = [t for t in sides if not shape.aligned({t})]
        extra = [Primitive(t, "align") for t in loose if t in shape.algorithm]
        extra += [Primitive(root, "stage", copied)] if (copied := tuple(t for t in loose if t in shape.algorithm.inputs)) else []
        names = (*sides, *([root] if shape.aligned({root}) else []))
        persistent = (Primitive(root, "persistent"),) if may_be_persistent(shape, self.dots) else ()
        return *persistent, Primitive(root, "descriptor", names), *extra

    def _tail(self, bm: int, bn: int, waves: float) -> tuple[Primitive, ...]:
        """Cut the blocks of a last wave that is at most half full into quarters, so that it takes less time than a whole wave."""
        rest = waves - math.floor(waves)
        if waves < 1 or not 0 < rest <= 0.5 or not may_be_persistent(self.shape, self.dots):
            return ()
        pieces = [Sized(self.rows[-1], bm // 2), Sized(self.columns[-1], bn // 2)]
        longest = max(self.dot.labels, key=lambda label: self.shape.sizes[label])
        return (Primitive(self.root, "tail", (*pieces, Sized(longest, 128))),)

    def _depth(self, bm: int, bn: int, warps: int) -> tuple[int, int, int]:
        depth, stages = self.shape.depth(self._width(bm, bn))
        return depth, warps, stages


@dataclass
class _Chain:
    """A product of a product: rows in blocks, the intermediate in tiles or whole, everything else whole if it is narrow."""

    shape: SchedulingProblem
    root: str
    members: list[str]
    rows: list[str]
    columns: list[str]

    def tiles(self) -> tuple[Primitive, ...]:
        shape, algorithm, root = self.shape, self.shape.algorithm, self.root
        sizes, itemsize = shape.sizes, shape.itemsize
        labels = algorithm[root].labels
        wide = max((next_power_of_two(sizes[c]) for c in self.columns), default=1)
        tile: dict[str, int] = {}
        block: dict[str, int] = {}
        packed = self._packed_groups()
        bm, step, warps, stages = self._measured_tile_sizes(wide, bool(packed))
        short = self._rows_underfill_gpu(bm)
        few = short and self._has_narrow_product()
        blocks = {label: bm if label in self.rows[-1:] else CUT_SIDE if label in self.columns else 1 for label in labels if few or label not in self.columns}
        idle = shape.programs(blocks) < 2 * shape.target.multiprocessors
        bm = 16 if short and idle and (itemsize == 4 or not few) else bm  # without tensor cores a small tile takes no longer
        loose = () if few else self._loose()
        warps, stages = (warps, 2) if few else (8, 3) if loose else (warps, stages)
        for label in labels:
            if label in packed:
                block[label], tile[label] = packed[label]
            elif label in self.rows[-1:]:
                block[label] = tile[label] = min(bm, max(16, next_power_of_two(sizes[label])))
            elif label in self.columns and sizes[label] <= (CUT_SIDE if few else WHOLE_SIDE):
                tile[label] = 0
            elif label in self.columns[-1:]:
                tile[label] = CUT_SIDE if few else 256 // itemsize
                block |= {label: CUT_SIDE} if few else {}
            else:
                block[label] = tile[label] = 1
        held = {label for m in self.members[1:] if shape.dots(m) and shape.holds_chain(m, root) for label in algorithm[m].labels}
        tile |= {label: 0 for m in self.members for label in algorithm[m].labels if label not in labels and m in shape.outputs}
        tile |= self._reduction_tiles(tile, held, step)
        loads = loose or self._through_descriptors(few) or (self._descriptors_inside(tile) if self._has_narrow_product() else ())
        extra = (*self._order(), *self._program_order(block, packed), *loads, *self._rows(tile))
        return shape.statements(root, block, tile, warps, stages, share=1 if packed else 2, extra=extra)

    def _rows(self, tile: dict[str, int]) -> tuple[Primitive, ...]:
        """Copies with aligned rows of the numbers, one a row of an operand, that a loop reads in tiles.

        Where their rows start anywhere each is loaded by itself, by every thread that needs it, in every step: on an H200 attention's
        backward of 4001 rows took 1.2 to 1.6 times as long. A copy takes as long as a step or two of a long loop.
        """
        found = self._lower_rank_operands() if self.shape.itemsize == 2 and self._accumulator_count() > 1 else {}
        odd = tuple(t for t, k in found.items() if self.shape.sizes[k] % 16 and tile.get(k, 0) and self.shape.sizes[k] // tile[k] >= LONG)
        return (Primitive(self.root, "stage", odd),) if odd else ()

    def _lower_rank_operands(self) -> dict[str, str]:
        """Tensor read from memory that has fewer dimensions than others -> the label that its rows and the loop share."""
        algorithm, outputs = self.shape.algorithm, self.shape.outputs
        read = dict.fromkeys(a.tensor for m in self.members for a in ex.accesses(algorithm[m].expr) if a.tensor not in (*self.members, *outputs))
        labels = {t: algorithm[t].labels if t in algorithm else algorithm.plain_labels(t) for t in read}
        most = max(map(len, labels.values()), default=0)
        looped = reduction_labels(algorithm, self.root)
        return {t: str(own[-1]) for t, own in labels.items() if own and None not in own and len(own) < most and own[-1] in looped}

    def _descriptors_inside(self, tile: dict[str, int]) -> tuple[Primitive, ...]:
        """Descriptors of operands of the products that are computed inside, in loops that would wait for them."""
        found: list[Primitive] = []
        for m in self.members[1:]:
            longest = max((self.shape.sizes[k] // tile[k] for k in reduction_labels(self.shape.algorithm, m) if tile.get(k)), default=0)
            for dot in self.shape.dots(m):
                found += loaded_ahead(self.shape, self.root, self.members, dot, longest)
        return tuple(found)

    def _rows_underfill_gpu(self, bm: int) -> bool:
        """Return whether blocks of rows alone idle multiprocessors, and the inner product is short enough to recompute for blocks of columns."""
        shape = self.shape
        inner = [shape.sizes[k] for m in self.members[1:] for k in reduction_labels(shape.algorithm, m)]
        blocks = shape.programs({x: bm if x in self.rows[-1:] else 1 for x in shape.algorithm[self.root].labels if x not in self.columns})
        return bool(inner) and 2 * blocks <= shape.target.multiprocessors and max(inner) <= WHOLE_CHAIN

    def _loose(self) -> tuple[Primitive, ...]:
        """Load small operands through descriptors, from aligned copies, where rows of the large one are not aligned.

        The kernel then waits only for the large operand, which it cannot load ahead.
        """
        shape, found = self.shape, self._operands()
        if not found or shape.aligned({found[0]}):
            return ()
        small = tuple(t for t in found[1:] if 8 * shape.elements(t) <= shape.elements(found[0]))
        copied = tuple(t for t in small if not shape.aligned({t}))
        stage = (Primitive(self.root, "stage", copied),) if copied else ()
        return (*stage, Primitive(self.root, "descriptor", small)) if small else ()

    def _through_descriptors(self, few: bool) -> tuple[Primitive, ...]:
        """Everything by descriptors where the intermediate is wide: addresses of pointers would take its registers."""
        found = (*self._operands(), self.root)
        carried = max((self.shape.sizes[k] for k in reduction_labels(self.shape.algorithm, self.root)), default=0)
        wide = not few and len(found) > 2 and next_power_of_two(carried) >= 64 and self.shape.aligned(set(found))
        return (Primitive(self.root, "descriptor", found),) if wide else ()

    def _operands(self) -> tuple[str, ...]:
        """Return inputs of the products of a narrow chain of long loops, the largest first; none where they are read otherwise."""
        shape = self.shape
        sides = [s for m in self.members for dot in shape.dots(m) for s in (dot.left, dot.right)]
        names = dict.fromkeys(s.tensor for s in sides if isinstance(s, ex.Access) and s.tensor not in self.members)
        inner = [shape.sizes[k] for m in self.members[1:] for k in reduction_labels(shape.algorithm, m)]
        if not self._has_narrow_product() or shape.itemsize != 2 or not shape.target.has_tma or max(inner, default=0) < 128 * MERGED:
            return ()
        return tuple(sorted(names, key=shape.elements, reverse=True)) if names.keys() <= {*shape.algorithm.inputs} else ()

    def _order(self) -> tuple[Primitive, ...]:
        """Of several labels that are reduced together the longest goes innermost: its loop is the one that is pipelined."""
        own = reduction_labels(self.shape.algorithm, self.root)
        longest_last = tuple(sorted(own, key=lambda label: self.shape.sizes[label]))
        return (Primitive(self.root, "reorder", longest_last),) if len(own) > 1 and longest_last != own else ()

    def _program_order(self, block: dict[str, int], packed: dict) -> tuple[Primitive, ...]:
        if packed or len(block) < 2 or not self.rows or self.rows[-1] not in block or not self._has_mask():
            return ()
        return causal_program_order(self.shape, self.root, self.members, block, self.rows[-1])

    def _measured_tile_sizes(self, wide: int, packed: bool) -> tuple[int, int, int, int]:
        """Return (rows, elements of the intermediate, warps, stages): as much as registers hold; measured on an H200 for 64, 128 and 256 columns.

        Under a mask tiles are smaller, since on its edge they are work for nothing.
        """
        itemsize, products = self.shape.itemsize, self._products()
        if self._has_narrow_product():
            return 64, 256 // itemsize, 4, 4
        if packed:
            return 16, 128 if wide <= 128 and itemsize == 2 else 32, 4, self._stages(16, 128, wide, 3)
        if itemsize == 4:
            return 64, 16 if wide >= 128 else 32, 8 if wide >= 128 else 4, self._stages(64, 32, wide, 2)
        if wide <= 64 or wide <= 128 and products == 2:
            rows, step, warps, stages = 64, 64, 4, 3
        elif wide > 128:
            rows, step, warps, stages = (128, 64, 8, 2) if products == 2 else (128, 32, 8, 3) if self._accumulator_count() == 1 else (64, 64, 8, 2)
        elif self._accumulator_count() == 1:
            rows, step, warps, stages = 128, 64, 8, 3
        else:
            rows, step, warps, stages = (64, 64, 4, 2) if self._has_mask() and not self._is_large_and_unaligned() else (128, 64, 8, 3)
        return rows, step, warps, self._stages(rows * (2 if products > 2 else 1), step, wide, stages)

    def _is_large_and_unaligned(self) -> bool:
        """Return whether the loop reads copies with aligned rows, and there are blocks of 128 rows for two waves of programs."""
        blocks = self.shape.programs({label: 128 if label in self.rows[-1:] else 1 for label in self.shape.algorithm[self.root].labels if label not in self.columns})
        return bool(self._rows({k: 64 for k in reduction_labels(self.shape.algorithm, self.root)})) and blocks >= 2 * self.shape.target.multiprocessors

    def _stages(self, rows: int, step: int, wide: int, stages: int) -> int:
        """Return as many of ``stages`` as shared memory holds."""
        while stages > 1 and (rows + 2 * stages * step) * wide * self.shape.itemsize > self.shape.target.shared_bytes:
            stages -= 1
        return stages

    def _has_narrow_product(self) -> bool:
        return any(self.shape.holds_chain(m, self.root) for m in self.members[1:])

    def _products(self) -> int:
        return sum(len(self.shape.dots(m)) for m in self.members)

    def _accumulator_count(self) -> int:
        """Count the accumulators that a program holds at once."""
        return 1 + sum(1 for m in self.members[1:] if m in self.shape.outputs and self.shape.dots(m))

    def _has_mask(self) -> bool:
        """Return whether a comparison of a row with the intermediate's label masks the loop."""
        inner = set(reduction_labels(self.shape.algorithm, self.root))
        nodes = [
            n for m in self.members for n in self.shape.algorithm[m].expr.walk() if isinstance(n, ex.Binary) and n.op in ex.COMPARISONS
        ]
        return any(ex.free_labels(n) & inner and ex.free_labels(n) & set(self.rows) for n in nodes)

    def _reduction_tiles(self, tile: dict[str, int], held: set[str], step: int) -> dict[str, int]:
        """Return the tiles of the labels that are reduced."""
        shape = self.shape
        found: dict[str, int] = {}
        sides = {label for m in self.members if shape.dots(m) for label in shape.algorithm[m].labels}
        for m in self.members:
            own = reduction_labels(shape.algorithm, m)
            for k in own:
                if len(own) > 1 and k != max(own, key=lambda label: shape.sizes[label]):
                    found[k] = min(ROWS, max(16, next_power_of_two(shape.sizes[k]))) if m == self.root and not shape.dots(m) and k in sides else 1
                elif k in held:
                    found[k] = 0
                elif k not in tile and k not in found:
                    narrow = shape.sizes[k] <= WHOLE_SIDE and m != self.root and k not in reduction_labels(shape.algorithm, self.root)
                    found[k] = 0 if narrow else min(max(16, next_power_of_two(shape.sizes[k])), step)
        return found

    def _packed_groups(self) -> dict[str, tuple[int, int]]:
        """Return (block, tile) of a label whose elements in one group share the other side of the product, where rows are fewer than those.

        Decoding is such: one query, and heads that share keys. A tile then holds the group, so that what it shares is read once.
        """
        algorithm, sizes = self.shape.algorithm, self.shape.sizes
        labels = algorithm[self.root].labels
        for dot in (d for m in self.members for d in self.shape.dots(m)):
            for index in (i for a in ex.accesses(dot.right) for i in a.index):
                match index:
                    case ex.Binary("/", ex.Label(label), ex.Const(size)) if label in labels and 1 < size <= 64 and self.rows:
                        if max(sizes[r] for r in self.rows) * 2 <= size:
                            return {label: (int(size), max(16, next_power_of_two(int(size)))), **{r: (1, 1) for r in self.rows}}
        return {}
