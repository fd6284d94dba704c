"""Tile kernels with a product of a product, such as attention: back-to-back products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...codegen.analysis.resources import MOST_REGISTERS
from ...codegen.powers_of_two import next_power_of_two
from ...lang import expr as ex
from ...lang.schedule_checks import reduction_labels
from ..cost.kernel_config import KernelConfig, combined
from ..problem import CUT_SIDE, ROWS, WHOLE_CHAIN, WHOLE_SIDE, SchedulingProblem, whole_parts
from .product_sides import MERGED, loaded_ahead, main_product, sides
from .program_order import causal_program_order

LONG_STEP = 32  #: elements of a label from which on tiles along it alone are proposed
SMALLEST = 16  #: rows of a tile of the matrix units
EVEN = 4  #: programs a multiprocessor that a sum under a mask is split into: blocks differ in what the mask leaves of them
MOST_SHARED = 128  #: rows of a tile, for heads that share keys
WIDEST_SUM = 128 * 128  #: elements of an accumulator that four warps hold
#: registers for each element that has an address of its own
ADDRESSED = 3
LONG = 8  #: steps of a loop from which on a copy of what it reads in each costs little beside it
#: bytes of a warp's tile of a chain of vectors, columns from which on it is of one warp, and programs a multiprocessor that the loop's parts make: 32 heads of 30000 keys
#: of 128 columns took 135 us by one warp (16 keys a step, 64 parts), 208 by two, 149 to 333 by four; 2048 heads of 2000 keys of 64 columns 267 by two warps, 302 by one
#: and 297 to 506 by four (one query each, an H200; torch took 130 and 250)
VECTOR_TILE, ONE_WARP, VECTOR_PROGRAMS = 4096, 128, 16


def chain_configs(shape: SchedulingProblem, root: str, members: list[str]) -> Iterator[KernelConfig]:
    """Yield the usual choices for a kernel in which a product is an operand of another."""
    chain = Chain.of(shape, root, members)
    if chain is not None:
        yield chain.of_vectors() or chain.usual()


@dataclass
class Chain:
    """A product of a product: rows in blocks, the intermediate in tiles or whole, everything else whole if it is narrow."""

    shape: SchedulingProblem
    root: str
    members: list[str]
    rows: list[str]
    columns: list[str]
    packing: bool = True  #: whether heads that share keys may be the rows of a tile

    @staticmethod
    def of(shape: SchedulingProblem, root: str, members: list[str]) -> Chain | None:
        """Return the chain that a kernel computes, None if it computes none."""
        if not any(map(shape.dots, members)) or shape.has_products_alone(root, members):
            return None
        main, dot = main_product(shape, members)
        rows, columns = sides(shape, root, dot)
        inner = set().union(*(ex.free_labels(d) for m in members if m != main for d in shape.dots(m)))
        if columns and set(columns) <= inner and not inner & set(rows):  # blocks are of what both products have, whichever side that is
            rows, columns = columns, rows
        rows = sorted(rows, key=lambda label: not _counts_products(shape, label, [m for m in members if m != main]))  # a tile lies along the last
        return Chain(shape, root, members, rows, columns)

    def usual(self, walked: str = "") -> KernelConfig:
        """Return the choices that sizes decide. ``walked``: which of several labels that are summed over a tile has more of, the longest without."""
        shape, algorithm, root = self.shape, self.shape.algorithm, self.root
        sizes, itemsize = shape.sizes, shape.itemsize
        labels, walked = algorithm[root].labels, walked or max(self.summed(), key=lambda x: sizes[x], default="")
        wide = self.widest()
        tile: dict[str, int] = {}
        block: dict[str, int] = {}
        packed = self.packed_groups()
        bm, step, warps, stages = self._measured_tile_sizes(wide, max((tile for _, tile in packed.values()), default=0))
        step = self._step_with_room(bm, step, warps)
        short = self._rows_underfill_gpu(bm)
        few = short and self.has_narrow_product()
        blocks = {label: bm if label in self.rows[-1:] else CUT_SIDE if label in self.columns else 1 for label in labels if few or label not in self.columns}
        idle = shape.programs(blocks) < 2 * shape.target.multiprocessors
        bm = 16 if short and idle and (itemsize == 4 or not few) else bm  # without tensor cores a small tile takes no longer
        loose = {} if few else self._loose()
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
        tile |= self._reduction_tiles(tile, held, step, walked)
        if itemsize == 2 and not packed and tile.get(walked) and max((block[r] for r in self.rows[-1:] if r in block), default=ROWS) <= SMALLEST:
            warps = min(warps, 4)  # more would divide the columns of tiles of 16 rows: on an H100 22.8 us by two, 28.2 by eight, 43 by sixteen
        if self._unaligned_rows(tile):
            stages = 1
        loads = loose or self._through_descriptors(few) or (self._descriptors_inside(tile) if self.has_narrow_product() else {})
        more = combined(loads, self._rows(tile), self.even_split(block, tile))
        return shape.config(root, block, tile, warps, stages, share=1 if packed else 2, reordered=self._order(walked), order=self.program_order(block, bool(packed)), **more)

    def _step_with_room(self, rows: int, step: int, warps: int) -> int:
        """Return ``step``, or as many elements of the loop as registers hold the scores of, and of what is loaded for each of them with an address of its own."""
        each = 2 + ADDRESSED * self.addressed()
        while step > SMALLEST and each > 2 and rows * step * each > MOST_REGISTERS * self.shape.target.warp_size * warps:
            step //= 2
        return step

    def addressed(self) -> int:
        """Count the tensors read for each score, such as biases, in rows that start anywhere, if there are several: each element is loaded by itself.

        Two of 49 columns and the sums of a gradient had 64 x 64 scores spill 1704 bytes of a thread: 384 us on an H200 where 48 were predicted. One spills nothing.
        """
        shape, own = self.shape, {*self.rows[-1:]}
        sides = {a.tensor for m in self.members for dot in shape.dots(m) for side in (dot.left, dot.right) for a in ex.accesses(side)}
        every = (a for m in self.members for a in ex.accesses(shape.algorithm[m].expr) if a.tensor not in (*sides, *self.members))
        inner = {x for m in self.members if m != self.root and shape.dots(m) for x in shape.algorithm[m].labels} - {*shape.algorithm[self.root].labels}
        found = {a.tensor for a in every if own and own <= ex.free_labels(a) and a.index and ex.free_labels(a.index[-1]) & inner and not shape.aligned({a.tensor})}
        return len(found) if len(found) > 1 else 0

    def widest(self) -> int:
        """Return the elements of the tile that holds the most columns whole."""
        return max((next_power_of_two(self.shape.sizes[c]) for c in self.columns), default=1)

    def of_vectors(self) -> KernelConfig | None:
        """Return the choices for two products of one row each, which no matrix unit takes: few warps add up short steps among themselves. None for other chains."""
        shape, loops = self.shape, reduction_labels(self.shape.algorithm, self.root)
        if self.rows or len(loops) != 1 or not self.is_plain_pair() or self.packed_groups():
            return None
        usual, wide = self.usual(), self.widest()
        step, tiles = max(1, VECTOR_TILE // (wide * shape.itemsize)), dict(usual.tiles)
        if not tiles.get(loops[0]) or any(tiles.get(c, 1) for c in self.columns):  # no loop, or columns that a program does not hold whole
            return None
        step = min(step, next_power_of_two(shape.sizes[loops[0]]))
        parts = whole_parts(min(shape.sizes[loops[0]] // (2 * step), VECTOR_PROGRAMS * shape.target.multiprocessors // max(1, shape.programs(dict(usual.blocks)))))
        return replace(usual, tiles=tuple((tiles | {loops[0]: step}).items()), split=((loops[0], parts),) if parts > 1 else (), num_warps=1 if wide >= ONE_WARP else 2, num_stages=1)

    def _rows(self, tile: dict[str, int]) -> dict[str, Any]:
        """Copy the numbers that a loop reads in tiles, one for each row of an operand, to aligned rows.

        Where their rows start anywhere each is loaded by itself, by every thread that needs it, in every step: on an H200 attention's
        backward of 4001 rows took 1.2 to 1.6 times as long. A copy takes as long as a step or two of a long loop.
        """
        found = self._lower_rank_operands() if self.shape.itemsize == 2 and self.accumulators() > 1 else {}
        odd = tuple(t for t, k in found.items() if self.shape.sizes[k] % 16 and tile.get(k, 0) and self.shape.sizes[k] // tile[k] >= LONG)
        return {"staged": odd} if odd else {}

    def _unaligned_rows(self, tile: dict[str, int]) -> bool:
        """Return whether the loop reads tiles that other kernels wrote in rows that start anywhere.

        What is loaded ahead of its use then lies in registers, with an address for each element: at 10187 columns on an H100 three stages took
        1990 us, two 639 and one 175.
        """
        algorithm, single = self.shape.algorithm, self._lower_rank_operands()
        read = dict.fromkeys(a.tensor for m in self.members for a in ex.accesses(algorithm[m].expr) if a.tensor not in (*self.members, *self.shape.outputs))
        ranks = {t: len(algorithm[t].labels if t in algorithm else algorithm.plain_labels(t)) for t in read}
        made = [t for t in read if t in algorithm and ranks[t] == max(ranks.values()) and t not in single]
        return any(self.shape.row_stride(t) % 8 for t in made if tile.get(algorithm[t].labels[-1], 1) != 1)

    def _lower_rank_operands(self) -> dict[str, str]:
        """Tensor read from memory that has fewer dimensions than others -> the label that its rows and the loop share."""
        algorithm, outputs = self.shape.algorithm, self.shape.outputs
        read = dict.fromkeys(a.tensor for m in self.members for a in ex.accesses(algorithm[m].expr) if a.tensor not in (*self.members, *outputs))
        labels = {t: algorithm[t].labels if t in algorithm else algorithm.plain_labels(t) for t in read}
        most = max(map(len, labels.values()), default=0)
        looped = reduction_labels(algorithm, self.root)
        return {t: str(own[-1]) for t, own in labels.items() if own and None not in own and len(own) < most and own[-1] in looped}

    def _descriptors_inside(self, tile: dict[str, int]) -> dict[str, Any]:
        """Load operands of inner products through descriptors, in loops that would wait for them."""
        found: dict[str, Any] = {}
        for m in self.members[1:]:
            longest = max((self.shape.sizes[k] // tile[k] for k in reduction_labels(self.shape.algorithm, m) if tile.get(k)), default=0)
            for dot in self.shape.dots(m):
                found = combined(found, loaded_ahead(self.shape, self.members, dot, longest))
        return found

    def _rows_underfill_gpu(self, bm: int) -> bool:
        """Return whether blocks of rows alone idle multiprocessors, and the inner product is short enough to recompute for blocks of columns."""
        shape = self.shape
        inner = [shape.sizes[k] for m in self.members[1:] for k in reduction_labels(shape.algorithm, m)]
        blocks = shape.programs({x: bm if x in self.rows[-1:] else 1 for x in shape.algorithm[self.root].labels if x not in self.columns})
        return bool(inner) and 2 * blocks <= shape.target.multiprocessors and max(inner) <= WHOLE_CHAIN

    def _loose(self) -> dict[str, Any]:
        """Load small operands through descriptors, from aligned copies, where rows of the large one are not aligned.

        The kernel then waits only for the large operand, which it cannot load ahead.
        """
        shape, found = self.shape, self._operands()
        if not found or shape.aligned({found[0]}):
            return {}
        small = tuple(t for t in found[1:] if 8 * shape.elements(t) <= shape.elements(found[0]))
        copied = tuple(t for t in small if not shape.aligned({t}))
        return {"staged": copied, "descriptors": small} if small else {}

    def _through_descriptors(self, few: bool) -> dict[str, Any]:
        """Load and store everything through descriptors where the intermediate is wide: addresses of pointers would take its registers."""
        found = (*self._operands(), self.root)
        carried = max((self.shape.sizes[k] for k in reduction_labels(self.shape.algorithm, self.root)), default=0)
        wide = not few and len(found) > 2 and next_power_of_two(carried) >= 64 and self.shape.aligned(set(found))
        return {"descriptors": found} if wide else {}

    def _operands(self) -> tuple[str, ...]:
        """Return inputs of the products of a narrow chain of long loops, the largest first; none where they are read otherwise."""
        shape = self.shape
        sides = [s for m in self.members for dot in shape.dots(m) for s in (dot.left, dot.right)]
        names = dict.fromkeys(s.tensor for s in sides if isinstance(s, ex.Access) and s.tensor not in self.members)
        inner = [shape.sizes[k] for m in self.members[1:] for k in reduction_labels(shape.algorithm, m)]
        if not self.has_narrow_product() or shape.itemsize != 2 or not shape.target.has_tma or max(inner, default=0) < 128 * MERGED:
            return ()
        return tuple(sorted(names, key=shape.elements, reverse=True)) if names.keys() <= {*shape.algorithm.inputs} else ()

    def _order(self, walked: str) -> tuple[str, ...]:
        """Order the labels of a reduction: ``walked`` is the innermost loop, which is the one that is pipelined."""
        own = reduction_labels(self.shape.algorithm, self.root)
        longest_last = tuple(sorted(own, key=lambda label: (label == walked, self.shape.sizes[label])))
        return longest_last if len(own) > 1 and longest_last != own else ()

    def program_order(self, block: dict[str, int], packed: bool) -> tuple[tuple[str, str, int], ...]:
        if packed or len(block) < 2 or not self.rows or self.rows[-1] not in block or not self.has_mask():
            return ()
        return causal_program_order(self.shape, self.root, self.members, block, self.rows[-1])

    def _measured_tile_sizes(self, wide: int, packed: int) -> tuple[int, int, int, int]:
        """Return (rows, elements of the intermediate, warps, stages): as much as registers hold; measured on an H200 for 64, 128 and 256 columns.

        Under a mask tiles are smaller, since on its edge they are work for nothing. ``packed``: rows of the tile of a packed group, 0 without.
        """
        itemsize, products = self.shape.itemsize, self.products()
        if self.has_narrow_product():
            return 64, 256 // itemsize, 4, 4
        if packed:
            step = max(32, 2048 // packed) if wide <= 128 and itemsize == 2 else 32  # as many scores for any group
            return 16, step, 8 if packed * wide > WIDEST_SUM else 4, self.stages(packed, step, wide, 3)
        if itemsize == 4:
            alone = self.accumulators() == 1
            step, stages = (64, 3) if wide <= 64 and alone else (32 if wide < 128 or not alone else 16, 2)
            return 64, step, 8 if wide >= 128 else 4, self.stages(64, step, wide, stages)
        if wide <= 64 or wide <= 128 and products == 2:
            rows, step, warps, stages = 64, 64, 4, 3
        elif wide > 128:
            rows, step, warps, stages = (128, 64, 8, 2) if products == 2 else (128, 32, 8, 3) if self.accumulators() == 1 else (64, 64, 8, 2)
        elif self.accumulators() == 1:
            rows, step, warps, stages = 128, 64, 8, 3
        else:
            rows, step, warps, stages = (64, 64, 4, 2) if self.has_mask() and not self._is_large_and_unaligned() else (128, 64, 8, 3)
        return rows, step, warps, self.stages(rows * (2 if products > 2 else 1), step, wide, stages)

    def _is_large_and_unaligned(self) -> bool:
        """Return whether the loop reads copies with aligned rows, and there are blocks of 128 rows for two waves of programs."""
        blocks = self.shape.programs({label: 128 if label in self.rows[-1:] else 1 for label in self.shape.algorithm[self.root].labels if label not in self.columns})
        return bool(self._rows({k: 64 for k in reduction_labels(self.shape.algorithm, self.root)})) and blocks >= 2 * self.shape.target.multiprocessors

    def stages(self, rows: int, step: int, wide: int, stages: int) -> int:
        """Return as many of ``stages`` as shared memory holds."""
        while stages > 1 and (rows + 2 * stages * step) * wide * self.shape.itemsize > self.shape.target.shared_bytes:
            stages -= 1
        return stages

    def has_narrow_product(self) -> bool:
        return any(self.shape.holds_chain(m, self.root) for m in self.members[1:])

    def summed(self) -> tuple[str, ...]:
        """Return the labels that the kernel's own sum goes over, of which a tile may have more than one element: if any is long, the long ones.

        Steps of one query and 15 heads took 4.6 ms on an H200 (gradients of 132 x 30 heads that share two, 268 queries of 72 columns), cuDNN 1.3. Of long ones those
        that index by themselves: steps along heads that an index adds to others took 370 us and more there, along 44 queries 240 (39 x 113 heads that share one, 160 columns).
        """
        labels = reduction_labels(self.shape.algorithm, self.root)
        long = tuple(x for x in labels if self.shape.sizes[x] >= LONG_STEP)
        added = {x for a in ex.accesses(self.shape.algorithm[self.root].expr) for i in a.index if len(ex.free_labels(i)) > 1 for x in ex.free_labels(i)}
        return tuple(x for x in long if x not in added) or long or labels

    def products(self) -> int:
        """Count the products of the kernel."""
        return sum(len(self.shape.dots(m)) for m in self.members)

    def accumulators(self) -> int:
        """Count the accumulators that a program holds at once."""
        return 1 + sum(1 for m in self.members[1:] if m in self.shape.outputs and self.shape.dots(m))

    def is_plain_pair(self) -> bool:
        """Return whether the chain is two products with one accumulator that reads the other's result in wide tiles."""
        return self.products() == 2 and self.accumulators() == 1 and not self.has_narrow_product()

    def even_split(self, block: dict[str, int], tile: dict[str, int], programs: int = EVEN) -> dict[str, Any]:
        """Split, under a mask, a long sum that it does not cut short: its parts take equally long, those of a triangle do not. ``programs``: of a multiprocessor.

        On an H100 gradients of 25 heads that share keys took 1.6 times as long for their work as those of heads that share none.
        """
        own, bounded = reduction_labels(self.shape.algorithm, self.root), self._masked_labels()
        steps = {k: -(-self.shape.sizes[k] // tile[k]) for k in own if tile.get(k)}
        even = [k for k in steps if k not in bounded]
        if not even or not bounded & set(own):
            return {}
        longest = max(even, key=lambda k: steps[k])
        wanted = programs * self.shape.target.multiprocessors // max(1, self.shape.programs(block))
        parts = whole_parts(min(wanted, steps[longest], math.prod(steps.values()) // LONG))
        return {"split": ((longest, parts),)} if parts >= 2 else {}

    def has_mask(self) -> bool:
        """Return whether a comparison of a row with the intermediate's label masks the loop."""
        return bool(self._masked_labels() & set(reduction_labels(self.shape.algorithm, self.root)))

    def comparisons(self) -> list[ex.Binary]:
        """Return the comparisons of a row with something else: one of a causal mask, two of a window or of segments."""
        nodes = [n for m in self.members for n in self.shape.algorithm[m].expr.walk() if isinstance(n, ex.Binary) and n.op in ex.COMPARISONS]
        return [n for n in dict.fromkeys(nodes) if ex.free_labels(n) & set(self.rows)]

    def _masked_labels(self) -> set[str]:
        """Return labels that are compared with a row, and the rows."""
        return set().union(*(ex.free_labels(n) for n in self.comparisons()))

    def _reduction_tiles(self, tile: dict[str, int], held: set[str], step: int, walked: str) -> dict[str, int]:
        """Return the tiles of the labels that are reduced: of several in one sum those of one, ``walked`` in the kernel's own.

        Scores may add up two products, each with a label of its own: both have tiles.
        """
        shape = self.shape
        found: dict[str, int] = {}
        sides = {label for m in self.members for d in shape.dots(m) for label in ex.free_labels(d.left) ^ ex.free_labels(d.right)}
        for m, own in [(f, n.labels) for f in self.members for n in ex.reductions(shape.algorithm[f].expr)]:
            for k in own:
                if len(own) > 1 and k != (walked if walked in own else max(own, key=lambda label: shape.sizes[label])):
                    found[k] = min(ROWS, max(16, next_power_of_two(shape.sizes[k]))) if m == self.root and not shape.dots(m) and k in sides else 1
                elif k in held:
                    found[k] = 0
                elif k not in tile and k not in found:
                    narrow = shape.sizes[k] <= WHOLE_SIDE and m != self.root and k not in reduction_labels(shape.algorithm, self.root)
                    found[k] = 0 if narrow else min(max(16, next_power_of_two(shape.sizes[k])), step)
        return found

    def packed_groups(self) -> dict[str, tuple[int, int]]:
        """Return (block, tile) of a label whose elements in one group share the other side of the product, where rows are fewer than those.

        Decoding is such: one query, and heads that share keys. A tile then holds the group, so that what it shares is read once.
        """
        algorithm, sizes = self.shape.algorithm, self.shape.sizes
        labels = algorithm[self.root].labels
        for dot in (d for m in self.members for d in self.shape.dots(m) if self.packing):
            for index in (i for a in ex.accesses(dot.right) for i in a.index):
                match index:
                    case ex.Binary("/", ex.Label(label), ex.Const(size)) if label in labels and 1 < size <= MOST_SHARED:
                        if max((sizes[r] for r in self.rows), default=1) * 2 <= size:
                            return {label: (int(size), max(16, next_power_of_two(int(size)))), **{r: (1, 1) for r in self.rows}}
        return {}


def _counts_products(shape: SchedulingProblem, label: str, funcs: list[str]) -> bool:
    """Return whether a product in ``funcs`` is one of many along ``label``, as those of attention's scores along heads: its tiles have no side along it."""
    return any(label in ex.free_labels(dot.left) and label in ex.free_labels(dot.right) for f in funcs for dot in shape.dots(f))
