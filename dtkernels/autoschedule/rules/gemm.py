"""Tile kernels with one matrix product, or several side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...codegen.analysis.product_types import BYTES
from ...codegen.powers_of_two import next_power_of_two
from ...lang import expr as ex
from ...lang.extents.linear_form import is_at_label
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig, Sizes, combined
from ..cost.outline import SECTOR
from ..problem import SchedulingProblem
from . import gemm_candidates
from .gemm_candidates import GemmTile
from .product_sides import (
    CODES,
    MERGED,
    MOST_PACKED,
    NARROW,
    bytes_of_term,
    leaves_out_terms,
    lies_in_tiles,
    loaded_ahead,
    main_product,
    packed,
    sides,
)
from .sibling_gemms import adds_up_products, each_of, may_be_persistent, picked_rows, products, tiles_read, width

FULL = 8  #: warps of the programs of a persistent product that a multiprocessor holds at once
CONTIGUOUS = 8  #: a tile of 16 elements that lie side by side takes fewer sectors of memory than one of 128 that do not
TILED = 128  #: extent that fills a tile
LEAST_BOX = 64  #: rows and columns of tiles from which on descriptors bring no less than pointers
WIDE = 128 * 128  #: elements of the accumulators of the tiles that reach the highest rates
FEW_ROWS = 16  #: rows or columns beside which codes are converted in small programs
LINE = 128  #: bytes of a line of memory
PICKED = GemmTile(128, 128, 32, 4, 5)  #: of sums whose terms data picks: 167 us on an H100 for 8 experts of 2048 x 4096 and 4096 rows, 128 x 256 with 64 terms in a step 233
SHORT = 384  #: terms of a sum up to which, from more than half a step on, smaller results, which are stored sooner, take less time
#: of large results of such: on an H100 68.8 us for 71.0 by 128 x 256 of 128 terms (64 x 1024 x 1024), 891 for 1009 and 68.6 for 80.3 of 256 (1048576 x 768,
#: 2688 x 14976), 302 for 322 of 384 and 367 for 368 of 512 (262144 x 768); benchmarks/h100/product_schedules.json
SHORT_SUM = GemmTile(128, 128, 128, 8, 3)
#: of sums that a comparison cuts short, differently in each block: two triangular matrices of 4096 rows took 85.7 us so on an H100, 92 by 128 x 256, a whole product 180
BOUNDED = GemmTile(128, 128, 64, 4, 3)
WAITING = 4  #: programs a multiprocessor that have enough loads on the way where none is ahead of its use


def product_configs(shape: SchedulingProblem, root: str, members: list[str], written: str | None = None) -> Iterator[KernelConfig]:
    """Yield the usual choices for a kernel of products that none feeds another, then others. ``written``: what it writes in place of ``root``, "" for sums alone."""
    if not shape.has_products_alone(root, members):
        return
    main, dot = main_product(shape, members)
    shape = shape.of_operands(products(shape, members))
    labels = shape.algorithm[root].labels
    both = zip(sides(shape, root, dot), (dot.left, dot.right))
    rows, columns = (sorted(side, key=lambda label, e=operand: _worth(shape, root, e, dot, label)) for side, operand in both)  # type: ignore[misc]  # tiles lie along the last
    if rows and columns and labels.index(rows[-1]) > labels.index(columns[-1]):  # the wider side is the one that lies contiguous
        rows, columns, dot = columns, rows, ex.Dot(dot.right, dot.left, dot.labels)
    yield from _Product(shape, root, members, main, dot, rows, columns, root if written is None else written).configs()


def _worth(shape: SchedulingProblem, root: str, operand: ex.Expr, dot: ex.Dot, label: str) -> int:
    """Return how much a label of an operand is worth as a tile's side: its extent, as far as a tile is filled.

    Where the operand and what is written are contiguous along it, as along the rows of an image, a part of a tile is worth more than a whole one elsewhere.
    """
    contiguous = any(ex.free_labels(a.index[-1]) - {*dot.labels} for a in ex.accesses(operand) if a.index)
    along = contiguous and label == shape.algorithm[root].labels[-1]
    return min(shape.sizes[label], TILED) * (CONTIGUOUS if along else 1)


@dataclass
class _Product:
    shape: SchedulingProblem
    root: str
    members: list[str]
    main: str
    dot: ex.Dot
    rows: list[str]
    columns: list[str]
    written: str  #: what the kernel writes of the product: the root, what is made of it element by element, or "" for sums alone

    @cached_property
    def dots(self) -> tuple[ex.Dot, ...]:
        return products(self.shape, self.members)

    def configs(self) -> Iterator[KernelConfig]:
        """Yield the usual choices, then candidates."""
        yield self._usual()
        plain = all(tiles_read(self.shape, self.members, side) == 1 for dot in self.dots for side in (dot.left, dot.right))
        if plain and not self._slides() and not self._picks_terms():
            yield from self._candidates()
            if self.shape.triples_float32:
                yield from self._tripled()

    @cached_property
    def _extents(self) -> tuple[int, int, int, int]:
        """The extents of rows, columns and sum, and the products side by side in a batch."""
        shape = self.shape
        m, n = (max([shape.sizes[x] for x in side], default=1) for side in (self.rows, self.columns))
        batch = math.prod(shape.sizes[label] for label in shape.algorithm[self.root].labels if label not in self.rows[-1:] + self.columns[-1:])
        return m, n, shape.sizes[shape.longest(self.dot)] if self.dot.labels else 1, batch

    def _tile(self, of: GemmTile) -> dict[str, int]:
        """Return the tile of each label: all of a product's sums but the longest advance by one."""
        shape = self.shape
        tile = {x: of.rows if x in self.rows[-1:] else of.columns if x in self.columns[-1:] else 1 for x in shape.algorithm[self.root].labels}
        for dot in self.dots:
            longest = shape.longest(dot)
            tile |= {k: max(16, min(next_power_of_two(shape.sizes[k]), of.depth)) if k == longest else 1 for k in dot.labels}
        return tile

    def _steps(self, tile: dict[str, int]) -> int:
        return max((self.shape.sizes[label] // tile[label] for label in reduction_labels(self.shape.algorithm, self.main) if label in tile), default=0)

    def _config(self, of: GemmTile, more: dict[str, Any] | None = None, share: int = 0, parts: int = 0, group: int = 0) -> KernelConfig:
        """Return the choices of a tile; ``share`` and ``parts`` as in ``SchedulingProblem.config``, the first for long sums alone.

        ``group``: the rows of blocks that go together.
        """
        tile = self._tile(of)
        block = {label: tile[label] for label in self.shape.algorithm[self.root].labels}
        more = combined(more or {}, self._padded)
        grouped = (self.rows[-1], self.columns[-1], group or (4 if more.get("persistent") else 8)) if self.rows and self.columns else None
        share = share if self._steps(tile) >= MERGED else 0
        stages = of.stages if more.get("persistent") else min(of.stages, self._rounds(tile) + 1)  # more would hold shared memory that no load needs
        return self.shape.config(self.root, block, tile, of.warps, stages, grouped, share, parts, **more)

    def _rounds(self, tile: dict[str, int]) -> int:
        """Return the steps of all loops of the sum."""
        return math.prod(-(-self.shape.sizes[label] // tile[label]) for label in reduction_labels(self.shape.algorithm, self.main) if tile.get(label))

    def _candidates(self) -> Iterator[KernelConfig]:
        """Yield schedules of this kernel: tiles, each plain, split, or with descriptors and persistent programs."""
        m, n, k, batch = self._extents
        cores, through = self.shape.target.multiprocessors, self._through()
        copied = [{"descriptors": tuple(self._sides()), "staged": more["staged"]} for more in through if more.get("staged")]
        for of in gemm_candidates.tiles(m, n * len(self.dots), k, batch, cores, self.shape.itemsize):
            if of in gemm_candidates.PARTED and len(self.dots) > 2:
                continue
            of = of._replace(rows=(cut := each_of(self.dots, of.rows, of.columns))[0], columns=cut[1])
            room = self.shape.target.shared_bytes // (self._width(of.rows, of.columns) * of.depth * self.shape.itemsize)
            if room < 2:
                continue
            of, blocks = of._replace(stages=min(of.stages, room)), self._blocks(m, n, of.rows, of.columns, batch)
            large = blocks >= cores // 2 and min(of.rows, of.columns) >= 64
            blocked = through[0] if large and through and self.shape.itemsize == 1 else {}
            yield self._config(of, {**blocked, "persistent": False})  # float8 by pointers: 33 us where descriptors take 29, at 1000 x 3000 x 2000 on an H100
            steps = k // of.depth
            for count in gemm_candidates.parts(blocks, steps, cores):
                yield self._config(of, parts=count)
                yield from (self._config(of, copies, parts=count) for copies in copied)
            if through and min(of.rows, of.columns) >= LEAST_BOX:
                yield from self._by_blocks(of, through[0])
            for more in through if large else ():
                yield from self._described(self._with_room(of), more, blocks, steps)
            if self.shape.itemsize == 2 and min(m, n) <= NARROW and (ahead := combined(*(loaded_ahead(self.shape, self.members, dot, steps) for dot in self.dots))):
                yield self._config(of, ahead)

        yield from self._by_few_loads()
        yield from self._by_warpgroups(through, batch)

    def _by_few_loads(self) -> Iterator[KernelConfig]:
        """Yield schedules of few rows or columns beside rows that start at no multiple of 16 bytes: a thread loads few elements, and many programs run."""
        m, n, k, batch = self._extents
        largest = max(map(self.shape.elements, self._sides()), default=0) * self.shape.itemsize
        if not (self._loose() and self.shape.itemsize == 2 and min(m, n) <= NARROW and len(self.dots) == 1 and largest >= gemm_candidates.LOOSE_BYTES):
            return
        cores = self.shape.target.multiprocessors
        for of in gemm_candidates.tiles(m, n, k, batch, cores, known=gemm_candidates.LOOSE):
            yield self._config(of)
            for count in gemm_candidates.parts(self._blocks(m, n, of.rows, of.columns, batch), k // of.depth, cores, gemm_candidates.LOOSE_WAVES):
                yield self._config(of, parts=count)

    def _by_blocks(self, of: GemmTile, through: dict[str, Any]) -> Iterator[KernelConfig]:
        """Yield schedules of a tile with descriptors and a program for each block; the result is stored by pointers, or through shared memory."""
        read, alone = tuple(self._sides()), {**through, "persistent": False}
        yield self._config(of, {**alone, "descriptors": read})
        if through["descriptors"] != read:
            yield self._config(self._with_room(of), alone)

    def _by_warpgroups(self, through: list[dict[str, Any]], batch: int) -> Iterator[KernelConfig]:
        """Yield schedules of one product by specialized warps: consumers in turn, which hide what follows a short sum, and tiles in parts that fill a wave.

        On an H200, in us, beside the best of other forms and cuBLAS without the function after it: 8832 x 1152 sums of 512 in turn 24.8 (28.5, 21.2); 1160 x 2048
        sums of 4096 by tiles of 160 columns 36.6 (40.9, 30.9), 1536 cubed by 144 18.9 (20.1, 15.8), 3200 x 832 sums of 7040 by 192 63.8 (65.1, 59.6).
        """
        m, n, k, _ = self._extents
        for more in filter(None, map(self._warpgroups, through)):
            for of in (*gemm_candidates.IN_TURNS, *gemm_candidates.IN_PARTS):
                turns = of in gemm_candidates.IN_TURNS
                if turns and self.written not in more["descriptors"]:
                    continue
                if k >= of.depth and n > of.columns // 2 and self._blocks(m, n, of.rows, of.columns, batch) >= self.shape.target.multiprocessors // (1 if turns else 2):
                    yield self._config(of, {**more, "ping_pong": turns})

    def _warpgroups(self, through: dict[str, Any]) -> dict[str, Any]:
        """Return the choices of a product by specialized warps; none where the form does not suit. Beside the operands it may read numbers of rows and columns."""
        suits = self.shape.target.arch == 90 and self.shape.itemsize == 2 and self.written and through.get("persistent")
        if not suits or len(self.dots) > 1:
            return {}
        sides = {*self._sides(), *self.members}
        beside = (a for f in self.members for a in ex.accesses(self.shape.algorithm[f].expr) if a.tensor not in sides)
        return {**through, "specialized": (self.shape.longest(self.dot),)} if all(len(ex.free_labels(a)) < 2 for a in beside) else {}

    def _described(self, of: GemmTile, through: dict[str, Any], blocks: int, steps: int) -> Iterator[KernelConfig]:
        """Yield schedules of a tile with descriptors and persistent programs."""
        cores = self.shape.target.multiprocessors
        yield self._config(of, through)
        if of.rows * of.columns * len(self.dots) >= WIDE:
            yield self._config(of, through, group=8)
        if tail := self._tail(of.rows, of.columns, blocks / cores):
            yield self._config(of, {**through, "tail": tail})
        for stream in self._streams(blocks, steps, cores * max(1, FULL // of.warps)):
            yield self._config(of, {**through, "stream": stream})

    def _with_room(self, of: GemmTile) -> GemmTile:
        """Return a tile of persistent programs with as many stages as its result leaves room for in shared memory."""
        stored = of.rows * of.columns * self._result_bytes
        room = (self.shape.target.shared_bytes - stored) // (self._width(of.rows, of.columns) * of.depth * self.shape.itemsize)
        return of._replace(stages=max(2, min(of.stages, room)))

    @cached_property
    def _result_bytes(self) -> int:
        """The bytes of an element of the result, as it is stored."""
        if not self.written:
            return 0
        if self.shape.itemsize == 1:
            return self.shape.result_bytes() if self.written in self.shape.outputs else 4
        return self.shape.stored_bytes(self.written)

    def _tripled(self) -> Iterator[KernelConfig]:
        """Yield schedules of float32 products as three in TF32 each."""
        m, n, k, batch = self._extents
        cores, more = self.shape.target.multiprocessors, {"approximations": (("rdot", ""),)}
        copied = {**more, **found, "persistent": False} if (found := self._descriptors()) and (found["staged"] or found["aligns"]) else {}
        for of in gemm_candidates.tiles(m, n * len(self.dots), k, batch, cores, self.shape.itemsize, tripled=True):
            rows, columns = each_of(self.dots, of.rows, of.columns)
            of = of._replace(rows=rows, columns=columns)
            yield self._config(of, more)
            if copied and self._blocks(m, n, rows, columns, batch) >= cores // 2:  # rows that start anywhere: a mask of each load takes elements one by one
                yield self._config(of, copied)
            for count in gemm_candidates.parts(self._blocks(m, n, rows, columns, batch), k // of.depth, cores):
                yield self._config(of, more, parts=count)

    def _usual(self) -> KernelConfig:
        """Return the schedule that sizes decide."""
        m, n, k, batch = self._extents
        tile, more = self._choose(m, n, k, batch)
        tile = self._with_room(tile) if more.get("persistent") else tile
        steps = self._steps(self._tile(tile))
        alone = min(m, n) <= NARROW or self._is_bandwidth_bound(m, n, k, batch)
        waits = min(m, n) <= NARROW and self.shape.itemsize == 2 and self._loose()
        few = self._codes(m, n)
        share = WAITING if waits else 2 if few and self._run() else 1 if few or alone or more or len(self.dots) > 1 or self._converts_once(m, n) else 2
        ahead = [loaded_ahead(self.shape, self.members, dot, steps) for dot in self.dots] if alone else []
        return self._config(tile, combined(more, *ahead), share)

    def _choose(self, m: int, n: int, k: int, batch: int) -> tuple[GemmTile, dict[str, Any]]:
        """Return a tile and further choices; the figures were measured on an H200.

        Of several products side by side the tiles are those of one of as many columns as all have, cut to what each has of them.
        """
        shape, several = self.shape, len(self.dots) > 1
        plain = all(tiles_read(shape, self.members, side) == 1 for dot in self.dots for side in (dot.left, dot.right))
        bm, bn = min(128, max(16, next_power_of_two(m))), max(16, next_power_of_two(n * len(self.dots)))
        if self._slides():
            return self._sliding_tile(bm, bn), {}
        if narrow := self._codes(m, n):
            return self._few_rows_of_codes(m, n, narrow), {}
        if self._converts_once(m, n):
            return GemmTile(2 * TILED, TILED, 64, 8, 3), {}  # each code is unpacked once
        if shape.itemsize == 1 and plain:
            return self._float8_tile(m, n, batch)
        if self._picks_terms():
            rows, columns = each_of(self.dots, PICKED.rows, PICKED.columns)
            return PICKED._replace(rows=rows, columns=columns), {}
        bounded = any(leaves_out_terms(shape, dot) for dot in self.dots)
        if shape.itemsize != 2 or not plain:
            bm, bn = each_of(self.dots, bm, min(128 if bounded else 256 if shape.itemsize == 2 else 128 * len(self.dots), bn))
            while bm * bn > 64 * 64 and self._blocks(m, n, bm, bn, batch) < shape.target.multiprocessors:
                bm, bn = (bm, bn // 2) if bn >= bm else (bm // 2, bn)
            return BOUNDED._replace(rows=bm, columns=bn) if bounded else GemmTile(bm, bn, *self._depth(bm, bn, 8 if bm * bn >= 128 * 128 else 4)), {}
        if min(m, n) <= NARROW:
            bm, bn = min(bm, 64), min(max(16, next_power_of_two(n)), 64)  # each program streams alone: few, deep ones keep the most bytes in flight
            return self._latency_bound_tile(bm, bn) if self._loose() else GemmTile(bm, bn, *self._fit_shared_memory(bm, bn, 128, 5)), {}
        if self._is_bandwidth_bound(m, n, k, batch):
            bn = min(128, next_power_of_two(n))
            bm, bn = (64, bn) if n <= m else (bm, 64)
            return GemmTile(bm, bn, *self._fit_shared_memory(bm, bn, 128, 4)), {}
        narrow_loads = any(shape.row_stride(t) % 16 for t in self._sides())  # by pointers: Triton knows no row's start to be aligned then
        full = (bm, min(bn, 256))
        waves = self._blocks(m, n, *each_of(self.dots, *full), batch) / shape.target.multiprocessors
        if full == (128, 256) and k >= 64 and (waves >= 1.5 or several and waves >= 0.9 or narrow_loads and waves >= 0.5):
            through = self._descriptors()
            if SHORT_SUM.depth < 2 * k <= 2 * SHORT and through.get("persistent") and self._is_alone():
                turns = self._warpgroups(through) if self.written in through["descriptors"] else {}
                return (gemm_candidates.IN_TURNS[-1], {**turns, "ping_pong": True}) if turns else (SHORT_SUM, through)
            if several and not narrow_loads and adds_up_products(shape, self.main, self.dots) and 10 * self._blocks(m, n, *full, batch) >= 9 * shape.target.multiprocessors:
                return GemmTile(*full, 64, 8, 3), {}
            bm, bn = each_of(self.dots, *full)
            if through and narrow_loads and (tail := self._tail(bm, bn, waves)):
                through["tail"] = tail
            return (GemmTile(bm, bn, 64, 8, 3) if through else GemmTile(bm, bn, *self._depth(bm, bn, 8))), through
        bn = min(bn, 128)
        for small in ((bm, bn), (min(bm, 64), bn), (min(bm, 64), min(bn, 64))):
            if 10 * self._blocks(m, n, *each_of(self.dots, *small), batch) >= 9 * shape.target.multiprocessors:
                break
        bm, bn = each_of(self.dots, *small)
        if narrow_loads and small[0] * small[1] >= 64 * 128 and (through := self._descriptors()):
            return GemmTile(bm, bn, 64, 8 if small == (128, 128) else 4, 4), through
        alone = self._blocks(m, n, bm, bn, batch) <= shape.target.multiprocessors  # each has all of the shared memory of one
        deep = 128 if alone and self._width(bm, bn) * 128 * 4 * shape.itemsize <= shape.target.shared_bytes else 64
        return GemmTile(bm, bn, *self._fit_shared_memory(bm, bn, deep, 4 if deep == 128 or bm * bn < 128 * 128 else 3)), {}

    def _bytes_of_term(self) -> float:
        """Return the bytes of memory of the operand that is converted from the fewest."""
        return min(bytes_of_term(self.shape, self.members, side) for dot in self.dots for side in (dot.left, dot.right))

    def _codes(self, m: int, n: int) -> float:
        """Return the bytes of an element of an operand that is converted from fewer bytes beside few rows or columns; 0 where there is none."""
        narrow = self._bytes_of_term()
        return narrow if self.shape.itemsize == 2 and narrow < 2 and min(m, n) <= FEW_ROWS and len(self.dots) == 1 else 0.0

    def _converts_once(self, m: int, n: int) -> bool:
        """Return whether a tile of all rows, beside which each code is unpacked once, is worth its size."""
        return self.shape.itemsize == 2 and len(self.dots) == 1 and TILED < m <= 2 * TILED <= n and self._bytes_of_term() < 1

    def _run(self) -> float:
        """Return the bytes that codes take along a dimension of the result, where they lie contiguous along that; 0 where it is the sum."""
        types = dict(self.shape.types.of) if self.shape.types else {}
        every = (a for side in (self.dot.left, self.dot.right) for a in ex.accesses(side) if a.index and types.get(a.tensor) in CODES and ex.free_labels(side) == ex.free_labels(a))
        return max((BYTES[types[a.tensor]] / packed(replace(a, index=a.index[-1:])) for a in every if ex.free_labels(a.index[-1]) - {*self.dot.labels}), default=0.0)

    def _float8_tile(self, m: int, n: int, batch: int) -> tuple[GemmTile, dict[str, Any]]:
        """Return the largest tile whose blocks fill the GPU: the accumulators of 128 columns leave registers for the sums of a step beside them."""
        bm, bn = min(128, max(16, next_power_of_two(m))), min(128, max(16, next_power_of_two(n * len(self.dots))))
        if min(m, n) <= NARROW:
            bm, bn = min(bm, 64), min(bn, 64)
            return GemmTile(bm, bn, *self._fit_shared_memory(bm, bn, 256, 5)), {}
        for small in ((bm, bn), (min(bm, 64), bn), (min(bm, 64), min(bn, 64))):
            if 10 * self._blocks(m, n, *each_of(self.dots, *small), batch) >= 9 * self.shape.target.multiprocessors:
                break
        bm, bn = each_of(self.dots, *small)
        depth, _, stages = self._fit_shared_memory(bm, bn, 128, 4)
        return GemmTile(bm, bn, depth, 8 if bm * bn >= 128 * 128 else 4, stages), self._descriptors() if small[0] >= 64 else {}

    def _few_rows_of_codes(self, m: int, n: int, narrow: float) -> GemmTile:
        """Return a tile for few rows beside an operand that is converted from fewer bytes; as many of these are on the way as of a plain one.

        Programs are small, so that several of a multiprocessor convert while others wait. Where codes lie contiguous along the columns, tiles have whole
        lines of memory. A step has one scale of a group, and enough elements of each place in a pack for the matrix units.
        """
        sizes = [packed(a) for dot in self.dots for a in ex.accesses(dot)]
        run, small = self._run(), max(16, next_power_of_two(min(m, n)))
        long = 128 if run and 64 * run < LINE else 64
        depth = max(128, int(128 / min(1.0, narrow)) * 64 // long)
        depth = max(min([depth, *(max(64, d) for d in sizes if d > MOST_PACKED)]), 16 * max(d for d in sizes if d <= MOST_PACKED))
        each = int(depth * (long * narrow + small * self.shape.itemsize))
        return GemmTile(*((small, long) if m <= n else (long, small)), depth, long // 16, max(2, min(5, self.shape.target.shared_bytes // 2 // each)))

    def _picks_terms(self) -> bool:
        """Return whether data picks the terms of a large product, the same of both operands: the gradient of the weights of each expert. Loops run over a few of them."""
        if self.shape.itemsize != 2 or not self.dot.labels or min(self._extents[:2]) < TILED:
            return False
        label = self.shape.longest(self.dot)
        return all(picked_rows(side) and any(label in ex.free_labels(a) for a in ex.accesses(side.args[0])) for side in (self.dot.left, self.dot.right))  # type: ignore[attr-defined]

    def _slides(self) -> bool:
        """Return whether an operand is read in windows along its contiguous dimension, so that elements are loaded one by one."""
        types = dict(self.shape.types.of) if self.shape.types else {}
        read = ((a, dot) for dot in self.dots for side in (dot.left, dot.right) for a in ex.accesses(side) if a.index)
        last = ((a.index[-1], dot) for a, dot in read if not (types.get(a.tensor) in ex.INTEGERS and packed(a) > 1))
        return any(not is_at_label(i) and ex.free_labels(i) - {*dot.labels} for i, dot in last)

    def _sliding_tile(self, bm: int, bn: int) -> GemmTile:
        """Return tiles whose loads, each with an address of its own, leave registers for the accumulator: 16 of 16 bits a thread, 8 of 32."""
        kept = any(reduction_labels(self.shape.algorithm, m) for m in self.members if m != self.main)  # beside the accumulator
        bm, bn = min(bm, 128 if self.shape.itemsize <= 2 and not kept else 64), min(bn, 64)
        return GemmTile(bm, bn, 32 if self.shape.itemsize <= 2 else 16, 8 if kept or bm * bn > 64 * 64 else 4, 3)

    def _width(self, bm: int, bn: int) -> int:
        return width(self.shape, self.members, dict.fromkeys(self.rows[-1:], bm) | dict.fromkeys(self.columns[-1:], bn))

    def _loose(self) -> bool:
        """Return whether rows of the larger operand are not aligned to 16 bytes, so that its loads cannot be pipelined."""
        return not self.shape.aligned({max(self._sides(), key=self.shape.elements)}) if self._sides() else False

    def _latency_bound_tile(self, bm: int, bn: int) -> GemmTile:
        """Return tiles for programs that wait for their loads: four per multiprocessor keep as many loads in flight.

        Where the sum runs along the rows of the larger operand they have few rows, else the sum is split.
        """
        large = max(self._sides(), key=self.shape.elements)
        along = self.shape.last_label(large) in self.dot.labels
        if along:
            return GemmTile(16, bn, 256, 4, 3) if bm >= bn else GemmTile(bm, 16, 256, 4, 3)
        return GemmTile(bm, bn, 64, 4, 3)

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

    @cached_property
    def _padded(self) -> dict[str, Any]:
        """Rows of operands that other kernels compute start where sectors of memory do, which costs nothing.

        Others than of whole vectors gain by descriptors alone: by pointers their masks have elements loaded one by one.
        """
        own = tuple(t for t in self._half() if t in self.shape.algorithm and t not in (*self.members, *self.shape.outputs))
        return {"aligns": own} if own else {}

    def _half(self) -> list[str]:
        """Return the operands of whose rows every second one starts in the middle of a sector."""
        return [t for t in self._sides() if self.shape.aligned({t}) and not self.shape.aligned({t}, SECTOR)]

    def _through(self) -> list[dict[str, Any]]:
        """Return the ways to read operands through descriptors: as they lie, and from copies of those whose rows start in the middle of a sector.

        A tile of such rows takes up to twice the loads; along the sum of the product few enough to be hidden, unless the other's are such too.
        """
        found = [self._descriptors()] if self.shape.itemsize <= 2 else []
        half = [t for t in self._half() if t in self.shape.algorithm.inputs]
        if not found or not found[0] or not half:
            return [f for f in found if f]
        across = [t for t in half if self.shape.last_label(t) not in self.dot.labels]
        main = [t for t in half if any(t == side.tensor for side in (self.dot.left, self.dot.right) if isinstance(side, ex.Access))]
        return [*found, *(combined(found[0], {"staged": tuple(copied)}) for copied in dict.fromkeys(map(tuple, (half, across, main))) if copied)]

    def _is_alone(self) -> bool:
        """Return whether the kernel computes one product and reads nothing else: a result made from more took twice as long in SHORT_SUM (8192 x 8192 distances, 194 us for 94)."""
        read = {a.tensor for m in self.members for a in ex.accesses(self.shape.algorithm[m].expr)} - {*self.members}
        return len(self.dots) == 1 and read == {a.tensor for d in self.dots for side in (d.left, d.right) for a in ex.accesses(side)}

    def _descriptors(self) -> dict[str, Any]:
        """Use tensor descriptors and persistent programs for large products.

        Operands whose rows are not aligned are copied first: that costs a tenth of what the product gains.
        """
        shape, sides = self.shape, tuple(self._sides())
        tiled = [(x,) for x in {*self.rows[-1:], *self.columns[-1:], *(shape.longest(dot) for dot in (self.dot, *self.dots) if dot.labels)}]
        read = [side for dot in (self.dot, *self.dots) for side in (dot.left, dot.right)]
        if not shape.target.has_tma or any(map(picked_rows, read)) or not all(lies_in_tiles(s.index, tiled) for s in read if isinstance(s, ex.Access)):
            return {}
        loose = [t for t in sides if not shape.aligned({t})]
        found: dict[str, Any] = {"persistent": True} if may_be_persistent(shape, self.dots) else {}
        found["descriptors"] = (*sides, *([self.written] if self._stores_aligned() else []))
        found["aligns"] = tuple(t for t in loose if t in shape.algorithm)
        found["staged"] = tuple(t for t in loose if t in shape.algorithm.inputs)
        return found

    def _stores_aligned(self) -> bool:
        """Return whether the product is written, in rows that start at multiples of 16 bytes."""
        if not self.written:
            return False
        each = self._result_bytes if self.shape.itemsize == 1 else self.shape.itemsize
        return self.shape.row_stride(self.written) * each % 16 == 0

    def _tail(self, bm: int, bn: int, waves: float) -> Sizes:
        """Cut the blocks of a last wave that is at most half full into quarters or sixths, so that it takes less time than a whole wave."""
        rest = waves - math.floor(waves)
        if waves < 1 or not 0 < rest <= 0.5 or not may_be_persistent(self.shape, self.dots):
            return ()
        longest = self.shape.longest(self.dot)
        return (self.rows[-1], min(bm // 2, bm & -bm)), (self.columns[-1], min(bn // 2, bn & -bn)), (longest, 256 // self.shape.itemsize)

    def _streams(self, blocks: int, steps: int, at_once: int) -> Iterator[Sizes]:
        """Yield parts for the sums of a last wave, if programs that run ``at_once`` take less time for them than for whole sums."""
        rest = blocks % at_once if blocks > at_once and may_be_persistent(self.shape, self.dots) else 0
        for parts in gemm_candidates.streams(rest, steps, at_once):
            yield ((self.shape.longest(self.dot), parts),)

    def _depth(self, bm: int, bn: int, warps: int) -> tuple[int, int, int]:
        depth, stages = self.shape.depth(self._width(bm, bn))
        return depth, warps, stages
