"""What the formula asks of an algorithm at given sizes, whatever kind of kernel it is for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..algebra.operand_types import OperandTypes
from ..codegen.analysis.product_types import BYTES, InputTypes
from ..codegen.powers_of_two import last_power_of_two
from ..codegen.target import Target
from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.schedule import Grouped, Primitive, Sized
from ..lang.schedule_checks import reduction_labels

WHOLE_SIDE = 256  #: widest output side of a chained product held in one tile
WHOLE_CHAIN = 128  #: widest intermediate of a chained product held in one tile
LONG = 1024  #: elements of a sum from which on it is worth a kernel of its own
ROWS = 64  #: of a block of a chained product
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

    def operand_bytes(self, dot: ex.Dot) -> int:
        """Bytes an element of what a product multiplies."""
        return BYTES[self.types.operand(OperandTypes(self.algorithm).of(dot))] if self.types else self.itemsize

    def result_bytes(self) -> int:
        """Bytes an element of the outputs."""
        return BYTES[self.types.result(self.algorithm)] if self.types else self.itemsize

    def dots(self, func: str) -> list[ex.Dot]:
        """The matrix products in the definition of ``func``."""
        return [n for n in self.algorithm[func].expr.walk() if isinstance(n, ex.Dot)]

    def beside(self, root: str, members: list[str]) -> bool:
        """Whether all products of a kernel are of what ``root`` is, and none is made of another."""
        products = [m for m in members if self.dots(m)]
        sides = [side for m in products for d in self.dots(m) for side in (d.left, d.right)]
        fed = self.algorithm.needed_by(tuple(a.tensor for side in sides for a in ex.accesses(side) if a.tensor in self.algorithm))
        return not set(fed) & set(products) and all(set(self.algorithm[m].labels) == set(self.algorithm[root].labels) for m in products)

    def holds_chain(self, func: str, root: str) -> bool:
        """Whether a product feeds another through an intermediate narrow enough to hold whole."""
        carried = [label for label in reduction_labels(self.algorithm, root) if label in self.algorithm[func].labels]
        missing = [label for label in self.algorithm[root].labels if label not in self.algorithm[func].labels]
        if not self.dots(func) or not carried or any(self.sizes[c] > WHOLE_CHAIN for c in carried):
            return False
        few = self._inner(func) <= WHOLE_CHAIN and 2 * self._row_blocks(func, root) <= self.target.multiprocessors and func not in self.outputs
        return not self.starves(func, root) and any(self.sizes[n] > (CUT_SIDE if few else WHOLE_SIDE) for n in missing)

    def starves(self, func: str, root: str) -> bool:
        """Whether a long product into a narrow intermediate leaves a third of the multiprocessors idle where it is computed by
        blocks of rows of ``root``: in a kernel of its own it can be cut over programs."""
        narrow = all(self.sizes[c] <= WHOLE_CHAIN for c in reduction_labels(self.algorithm, root) if c in self.algorithm[func].labels)
        return narrow and self._inner(func) >= LONG and 3 * self._row_blocks(func, root) < 2 * self.target.multiprocessors

    def _inner(self, func: str) -> int:
        return max((self.sizes[k] for k in reduction_labels(self.algorithm, func)), default=0)

    def _row_blocks(self, func: str, root: str) -> int:
        shared = [label for label in self.algorithm[root].labels if label in self.algorithm[func].labels]
        return self.programs({label: ROWS if label == shared[-1] else 1 for label in shared})

    def depth(self, sides: int) -> tuple[int, int]:
        """(elements, stages) of a product's loop, both of whose tiles together are ``sides`` wide: 128 bytes deep and up to 4 stages,
        as far as shared memory holds them."""
        depth = 128 // self.itemsize
        while depth > 16 and 2 * sides * depth * self.itemsize > self.target.shared_bytes:
            depth //= 2
        return depth, max(2, min(4, self.target.shared_bytes // (sides * depth * self.itemsize)))

    def pitch(self, tensor: str) -> int:
        """Elements from one row of a tensor to the next if it is laid out in order; 1 where that is not known."""
        label = self.last_label(tensor)
        return self.sizes[label] if label is not None else 1

    def last_label(self, tensor: str) -> str | None:
        """The label of a tensor's last dimension; None where it has none, or one of unknown extent."""
        labels = self.algorithm[tensor].labels if tensor in self.algorithm else self.algorithm.plain_labels(tensor)
        return labels[-1] if labels else None

    def elements(self, tensor: str) -> int:
        """Elements of an input or a Func; a dimension of unknown extent counts as 1."""
        labels = self.algorithm[tensor].labels if tensor in self.algorithm else self.algorithm.plain_labels(tensor)
        return math.prod(self.sizes.get(label, 1) if label else 1 for label in labels)

    def aligned(self, tensors: set[str]) -> bool:
        """Whether rows of these tensors, laid out one after the other, start at multiples of 16 bytes."""
        return all(self.pitch(t) * self.itemsize % 16 == 0 for t in tensors)

    def statements(
        self,
        root: str,
        block: dict[str, int],
        tile: dict[str, int],
        warps: int,
        stages: int,
        grouped: tuple[str, str, int] | None = None,
        share: int = 0,
        extra: tuple[Primitive, ...] = (),
    ) -> tuple[Primitive, ...]:
        """The primitives of one kernel. ``grouped``: (row label, column label, blocks of rows in a group); ``share``: programs
        wanted a multiprocessor, to which a long reduction is split if need be."""
        found = []
        if block:
            found.append(Primitive(root, "block", tuple(Sized(k, v) for k, v in block.items())))
        if tile:
            found.append(Primitive(root, "tensorize", tuple(Sized(k, v) for k, v in tile.items())))
        if grouped and -(-self.sizes[grouped[0]] // block[grouped[0]]) > grouped[2]:
            row, column, size = grouped
            rest = tuple(label for label in block if label not in grouped)
            inner = self.unused(row)
            found.append(Primitive(root, "map", (*rest, Grouped(row, inner, size), column, inner)))
        parts = self._parts(root, block, tile, share)
        if parts:
            found.append(Primitive(root, "split", parts))
        return (*found, *extra, Primitive(root, "num_warps", (warps,)), Primitive(root, "num_stages", (stages,)))

    def unused(self, label: str) -> str:
        """A name for the place inside a group of ``label``."""
        return next(name for i in range(1, 99) if (name := f"{label}{i}") not in self.algorithm.labels)

    def programs(self, block: dict[str, int]) -> int:
        """Blocks of the grid."""
        count = 1
        for label, size in block.items():
            count *= -(-self.sizes[label] // size)
        return count

    def _parts(self, root: str, block: dict[str, int], tile: dict[str, int], share: int) -> tuple[Sized, ...]:
        """A long reduction cut over programs where the blocks alone would leave multiprocessors without work."""
        programs = self.programs(block)
        looped = [k for k in reduction_labels(self.algorithm, root) if tile.get(k, 0) > 0]
        wanted = self.target.multiprocessors * share
        if not looped or 2 * programs > wanted:
            return ()
        longest = max(looped, key=lambda k: self.sizes[k] // tile[k])
        others = math.prod(-(-self.sizes[k] // tile[k]) for k in looped if k != longest)
        parts = min(wanted // max(programs, 1), self.sizes[longest] // tile[longest] // max(1, 4 // max(1, others)))
        return (Sized(longest, whole_parts(parts)),) if parts >= 2 else ()


def whole_parts(parts: int) -> int:
    """At most ``parts``, as many as a merge takes in whole steps (split_k_merge.py)."""
    return parts // 16 * 16 if parts >= 16 else last_power_of_two(parts)
