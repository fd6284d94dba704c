"""Answer what scheduling rules ask about an algorithm at given sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..algebra.operand_types import OperandTypes
from ..codegen.analysis.dtype_propagation import narrow_buffers
from ..codegen.analysis.product_types import BYTES, InputTypes, cast_bytes
from ..codegen.powers_of_two import last_power_of_two
from ..codegen.target import Target
from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.extents.linear_form import linear_form
from ..lang.reserved_names import clashes
from ..lang.schedule import Primitive
from ..lang.schedule_checks import reduction_labels
from .cost.kernel_config import KernelConfig, Sizes
from .cost.outline import Known

TF32_SINCE = 80  #: compute capability of the first matrix units for TF32
Way = tuple[tuple[Primitive, ...], dict[str, KernelConfig]]  #: statements that fuse, and the choices for each kernel
WHOLE_SIDE = 256  #: widest output side of a chained product held in one tile
WHOLE_CHAIN = 128  #: widest intermediate of a chained product held in one tile
DEEP = 64  #: elements of a label that fill the depth of a product's tile
LONG = 1024  #: elements of a sum from which on it is worth a kernel of its own
ROWS = 64  #: of a block of a chained product
RANKS = 32  #: widest short label of constant extent
BETTER = 0.7  #: the part of the rows of the busiest multiprocessor below which smaller blocks take less time
VECTOR = 64  #: fewest parts that are numbers and that a merge loads together: 528, which it adds up one by one, took 20 microseconds (an H100)
CUT_SIDE = 64  #: what is held of the output's side where blocks of rows are few


@dataclass
class SchedulingProblem:
    """An algorithm with the extents of its labels, the bytes of an element, and the GPU.

    ``types``: of inputs that differ in dtype; ``itemsize`` is then that of the operands of the product with the most work.
    """

    algorithm: Algorithm
    outputs: tuple[str, ...]
    sizes: dict[str, int]
    itemsize: int
    target: Target
    types: InputTypes | None = None
    chosen: dict[tuple, KernelConfig] = field(default_factory=dict, init=False)  #: what was chosen for kernels of this very problem: root, members and where they are fused

    @cached_property
    def known(self) -> Known:
        """What the cost model needs of the algorithm."""
        return Known.of(self.algorithm, self.outputs)

    @property
    def triples_float32(self) -> bool:
        """Whether products are of float32, and the default schedule may compute each as three in TF32: the GPU has it, and DTKERNELS_FP32_PRODUCTS is not ``ieee``."""
        tf32 = self.target.backend == "cuda" and int(self.target.arch) >= TF32_SINCE
        return self.itemsize == 4 and tf32 and os.environ.get("DTKERNELS_FP32_PRODUCTS", "") != "ieee"

    @cached_property
    def narrow(self) -> frozenset[str]:
        """The Funcs that are not stored in float32 between kernels."""
        return narrow_buffers(self.algorithm)

    def is_short(self, label: str) -> bool:
        """Return whether a label counts a few values and indexes no input, as the ranks of ``rtopk``: a block of sums holds it whole."""
        read = (a for d in self.algorithm.definitions for a in ex.accesses(d.expr) if a.tensor in self.algorithm.inputs)
        return 1 < (self.algorithm.constant_extent(label) or 0) <= RANKS and not any(ex.Label(label) in a.index for a in read)

    def operand_bytes(self, dot: ex.Dot) -> int:
        """Return the bytes per element of the operands of products."""
        return BYTES[self.types.operand(OperandTypes(self.algorithm).of(dot))] if self.types else self.itemsize

    def of_operands(self, dots: Iterable[ex.Dot]) -> SchedulingProblem:
        """Return the problem with the bytes of an element of these products' operands: 1 where the matrix units multiply all of them in float8."""
        types = OperandTypes(self.algorithm)
        narrow = self.itemsize == 2 and self.target.has_float8 and self.algorithm.has_float8 and all(types.of(dot).float8 for dot in dots)
        return replace(self, itemsize=1) if narrow else self

    def input_bytes(self, tensor: str) -> int:
        """Return the bytes of an element of an input."""
        dtype = dict(self.types.of).get(tensor) if self.types else None
        return BYTES.get(dtype, 8) if dtype else self.itemsize

    def stored_bytes(self, func: str) -> int:
        """Return the bytes of an element of a Func that lies between kernels, or is an output."""
        if func in self.outputs:
            return min(self.itemsize, 4)
        return cast_bytes(self.algorithm, func) or (min(self.itemsize, 4) if func in self.narrow else 4)

    def result_bytes(self) -> int:
        """Return bytes an element of the outputs."""
        return BYTES[self.types.result(self.algorithm)] if self.types else self.itemsize

    def share_iteration_space(self, func: str, other: str) -> bool:
        """Return whether both reduce over the same labels and have the same labels."""
        labels = [reduction_labels(self.algorithm, f) for f in (func, other)]
        return labels[0] == labels[1] != () and self.algorithm[func].labels == self.algorithm[other].labels

    def dots(self, func: str) -> list[ex.Dot]:
        """Return the matrix products in the definition of ``func``."""
        return [n for n in ex.reductions(self.algorithm[func].expr) if isinstance(n, ex.Dot)]

    def has_products_alone(self, root: str, members: list[str]) -> bool:
        """Return whether a kernel has products, and either one Func of them or none that is an operand of another."""
        main = next((m for m in members if self.dots(m)), None)
        inner = {label for m in members if m != main for d in self.dots(m) for label in ex.free_labels(d)}
        return main is not None and (not inner or self.has_only_sibling_products(root, members))

    def has_only_sibling_products(self, root: str, members: list[str]) -> bool:
        """Return whether all products of a kernel have the labels of ``root`` and none is an operand of another."""
        products = [m for m in members if self.dots(m)]
        sides = [side for m in products for d in self.dots(m) for side in (d.left, d.right)]
        fed = self.algorithm.needed_by(tuple(a.tensor for side in sides for a in ex.accesses(side) if a.tensor in self.algorithm))
        return not set(fed) & set(products) and all(set(self.algorithm[m].labels) == set(self.algorithm[root].labels) for m in products)

    def tells_bounds(self, func: str) -> bool:
        """Return whether ``func`` tells between which elements of a label that it reduces others reduce: each block, and each step, would look at all of them."""
        return any((func, label) in self._compared for label in reduction_labels(self.algorithm, func))

    @cached_property
    def _compared(self) -> frozenset[tuple[str, str]]:
        """The tensors and Funcs with whose elements labels are compared, each with such a label."""
        tests = (n for d in self.algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Binary) and n.op in ex.COMPARISONS)
        sides = (pair for t in tests for pair in ((t.left, t.right), (t.right, t.left)))
        return frozenset((a.tensor, b.name) for a, b in sides if isinstance(a, ex.Access) and isinstance(b, ex.Label))

    @cached_property
    def largest_input(self) -> int:
        """The elements of the largest input."""
        return max(map(self.elements, self.algorithm.inputs))

    def holds_chain(self, func: str, root: str) -> bool:
        """Return whether a product feeds another through an intermediate narrow enough to hold whole."""
        carried = [label for label in reduction_labels(self.algorithm, root) if label in self.algorithm[func].labels]
        missing = [label for label in self.algorithm[root].labels if label not in self._labels_where_read(func)]
        if not self.dots(func) or not carried or any(self.sizes[c] > WHOLE_CHAIN for c in carried):
            return False
        few = self.longest_sum(func) <= WHOLE_CHAIN and 2 * self._row_blocks(func, root) <= self.target.multiprocessors and func not in self.outputs
        few = few and len(carried) == len(reduction_labels(self.algorithm, root))  # another loop is split over programs instead
        return not self.underfills_gpu(func, root) and any(self.sizes[n] > (CUT_SIDE if few else WHOLE_SIDE) for n in missing)

    def underfills_gpu(self, func: str, root: str) -> bool:
        """Return whether a long product into a narrow intermediate, computed by row blocks of ``root``, idles a third of the multiprocessors.

        In a kernel of its own it can be split over programs.
        """
        narrow = all(self.sizes[c] <= WHOLE_CHAIN for c in self.algorithm[func].labels if c not in self.algorithm[root].labels)
        return narrow and self.longest_sum(func) >= LONG and 3 * self._row_blocks(func, root) < 2 * self.target.multiprocessors

    def longest_sum(self, func: str) -> int:
        """Return the most terms that a label is summed over in the definition of ``func``."""
        return max((self.sizes[k] for k in reduction_labels(self.algorithm, func)), default=0)

    def _row_blocks(self, func: str, root: str) -> int:
        shared = [label for label in self.algorithm[root].labels if label in self._labels_where_read(func)]
        return self.programs({label: ROWS if label == shared[-1] else 1 for label in shared})

    def _labels_where_read(self, func: str) -> set[str]:
        """Return the labels of a Func, and those that others put in their place: ``K_1`` and ``h_in`` for the head of a query."""
        return {x for label in self.algorithm[func].labels for x in (label, *self.known.aliases.get(label, ()))}

    def depth(self, sides: int) -> tuple[int, int]:
        """Return (elements, stages) of a product's loop whose two tiles together are ``sides`` wide.

        Tiles are 128 bytes deep, in up to 4 stages, as far as shared memory holds them.
        """
        depth = 128 // self.itemsize
        while depth > 16 and 2 * sides * depth * self.itemsize > self.target.shared_bytes:
            depth //= 2
        return depth, max(2, min(4, self.target.shared_bytes // (sides * depth * self.itemsize)))

    def several(self, labels: Iterable[str]) -> set[str]:
        """Return those of ``labels`` that have more than one element."""
        return {label for label in labels if self.sizes[label] != 1}

    def row_stride(self, tensor: str) -> int:
        """Return the elements between rows of a contiguous tensor; 1 if unknown."""
        label = self.last_label(tensor)
        return self.sizes.get(label, 1) if label is not None else 1

    def last_label(self, tensor: str) -> str | None:
        """Return the label of a tensor's last dimension; None where it has none, or one of unknown extent."""
        labels = self.algorithm[tensor].labels if tensor in self.algorithm else self.algorithm.plain_labels(tensor)
        return labels[-1] if labels else None

    def elements(self, tensor: str) -> int:
        """Return the number of elements of an input or a Func: of a dimension without a label, as many as the sums of labels reach that index it."""
        if tensor in self.algorithm:
            return math.prod(self.sizes.get(label, 1) for label in self.algorithm[tensor].labels)
        labels = self.algorithm.plain_labels(tensor)
        return math.prod(self.sizes.get(label, 1) if label else self._reached.get((tensor, d), 1) for d, label in enumerate(labels))

    @cached_property
    def _reached(self) -> dict[tuple[str, int], int]:
        """The elements that the longest index of a dimension spans, ``y + r`` of 30 and 3 elements 32, where it is no bare label."""
        found: dict[tuple[str, int], int] = {}
        for a in (a for d in self.algorithm.definitions for a in ex.accesses(d.expr) if a.tensor in self.algorithm.inputs):
            for d, i in enumerate(a.index):
                if not isinstance(i, ex.Label):
                    steps = sum(abs(by) * (self.sizes.get(x.name, 1) - 1) for x, by in linear_form(i).items() if isinstance(x, ex.Label))
                    found[a.tensor, d] = max(found.get((a.tensor, d), 1), 1 + steps)
        return found

    def aligned(self, tensors: set[str], to: int = 16) -> bool:
        """Return whether rows of these tensors, laid out one after the other, start at multiples of ``to`` bytes."""
        return all(self.row_stride(t) * self.itemsize % to == 0 for t in tensors)

    def config(
        self,
        root: str,
        block: dict[str, int],
        tile: dict[str, int],
        warps: int,
        stages: int,
        grouped: tuple[str, str, int] | None = None,
        share: int = 0,
        parts: int = 0,
        **more: Any,
    ) -> KernelConfig:
        """Return the choices for one kernel. ``grouped``: (row label, column label, blocks of rows in a group); ``share``: programs
        wanted a multiprocessor, to which a long reduction is split if need be; ``parts``: into how many it is split instead; ``more``:
        other fields of ``KernelConfig``."""
        rows = -(-self.sizes[grouped[0]] // block[grouped[0]]) if grouped else 0
        if grouped and (rows > grouped[2] or rows > 1 and self.programs(block) > self.target.multiprocessors):  # else all run at once
            row, column, size = grouped
            inner = self.unused_label(row)
            more["order"] = (*((label, "", 0) for label in block if label not in grouped), (row, inner, size), (column, "", 0), (inner, "", 0))
        split = more.pop("split", ()) or self._split_parts(root, block, tile, share, parts)
        return KernelConfig(root, tuple(block.items()), tuple(tile.items()), split=split, num_warps=warps, num_stages=stages, **more)

    def unused_label(self, label: str, bare: bool = False) -> str:
        """Return an unused name for the position inside a group of ``label``; with ``bare``, for a label of that name."""
        names = (label if bare and not i else f"{label}{i}" for i in range(not bare, 99))
        return next(name for name in names if not (clashes(name, self.algorithm.names) if bare else name in self.algorithm.labels))

    def programs(self, block: dict[str, int]) -> int:
        """Return the number of blocks of the grid."""
        count = 1
        for label, size in block.items():
            count *= -(-self.sizes[label] // size)
        return count

    def fills_better(self, block: dict[str, int], label: str, size: int) -> bool:
        """Return whether blocks of only ``size`` along ``label`` leave the busiest multiprocessor well less to do.

        Smaller blocks take longer for the same work. At 270 blocks of 128 rows on 132 multiprocessors attention's kernels took 0.81 to 0.84 of the time in
        blocks of 64 (an H100), at 160 blocks 1.00 to 1.07 (an H200).
        """
        most = [-(-self.programs({**block, label: rows}) // self.target.multiprocessors) * rows for rows in (block[label], size)]
        return most[1] < BETTER * most[0]

    def is_picked(self, e: ex.Expr, label: str) -> bool:
        """Return whether each row of the sum ``e`` over ``label`` needs one element of it, the one that data names."""
        for n in e.walk():
            match n:
                case ex.Binary("==", a, ex.Label(name)) | ex.Binary("==", ex.Label(name), a) if name == label:
                    if any(ex.accesses(a)) and label not in ex.free_labels(a):
                        return True
        return False

    def longest(self, dot: ex.Dot) -> str:
        """Return the longest label that a product sums over, preferring one along which an operand is contiguous, if that fills a tile.

        Labels of which each row needs one element are left out if there are others.
        """
        walked = [label for label in dot.labels if not self.is_picked(dot, label)]
        ends = {x for side in (dot.left, dot.right) for a in ex.accesses(side) if a.index for x in ex.free_labels(a.index[-1])}
        return max(walked or dot.labels, key=lambda label: (label in ends and self.sizes[label] >= DEEP, self.sizes[label], label in ends))

    def _split_parts(self, root: str, block: dict[str, int], tile: dict[str, int], share: int, parts: int) -> Sizes:
        """Split the longest reduction into ``parts``; without a number, over ``share`` programs a multiprocessor, if blocks alone are half as many."""
        programs = self.programs(block)
        looped = [k for k in reduction_labels(self.algorithm, root) if tile.get(k, 0) > 0 and not self.is_picked(self.algorithm[root].expr, k)]
        wanted = self.target.multiprocessors * share
        if not looped or not parts and 2 * programs > wanted:
            return ()
        longest = max(looped, key=lambda k: self.sizes[k] // tile[k])
        if parts:
            return ((longest, parts),)
        others = math.prod(-(-self.sizes[k] // tile[k]) for k in looped if k != longest)
        parts = min(wanted // max(programs, 1), self.sizes[longest] // tile[longest] // max(1, 4 // max(1, others)))
        return ((longest, self.whole_parts(root, tile, parts)),) if parts >= 2 else ()

    def whole_parts(self, root: str, tile: dict[str, int], parts: int) -> int:
        """Round ``parts`` of a sum of ``root`` down to whole steps of its merge: ``VECTOR`` at a time where a part of a block is one number."""
        number = all(tile.get(x, 1) == 1 for x in self.algorithm[root].labels)
        return parts // VECTOR * VECTOR if number and parts >= 4 * VECTOR else whole_parts(parts)


def whole_parts(parts: int) -> int:
    """Round ``parts`` down to whole steps of a merge (split_k_merge.py)."""
    return parts // 16 * 16 if parts >= 16 else last_power_of_two(parts)
