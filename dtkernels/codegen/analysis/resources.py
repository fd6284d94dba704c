"""Estimate the shared memory, registers and threads of a kernel from its nest, and check that the GPU has them.

Shared memory holds the operands of matrix products, one copy for each pipeline stage. Registers hold accumulators, live named tiles,
addresses of loads, and on older matrix units the operand fragments. The estimates are compared with compiled kernels in
tests/compile/test_resources.py: shared memory within a few percent, registers within a fifth below and a half above for 16-bit products
and rows. Float32 products without TF32 run on the ordinary units, where ptxas trades registers for spills; their registers are a rough
guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from ...algebra.operand_types import CAST
from ...lang.errors import DTError
from ...lang.schedule_checks import MOST_ELEMENTS
from ..ir import nest
from ..ir.loops import is_single_reduction_loop
from ..ir.nest import (
    Accumulator,
    Axis,
    DescriptorLoad,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Statement,
    Tile,
    TileDot,
    axes_of,
    has_matrix_product,
    statements,
    unrolled_product,
    values,
)
from ..powers_of_two import next_power_of_two, two_tiles
from ..target import Target, triton_version
from ..transforms.memory.tensor_descriptors import use_pointers
from ..transforms.warp_specialize.backend_select import backend, descriptor_form
from .product_types import BYTES, ElementBytes

MOST_REGISTERS = 255  #: of one thread
EPILOGUE = 320  #: registers of a thread for what is made of a product, as estimated: the sums, and one and a half tiles as large
CROWDED = 2
MOST_UNROLLED = 4  #: unroll factor of a pipelined loop with a product, for Blackwell with Triton before 3.9
MOST_THREADS = 1024  #: of one program
MOST_OF_A_THREAD = 1024  #: elements of one tensor; a compiler that spills more of them takes minutes
OVERHEAD = 18  #: registers of any kernel: sizes, strides, indices
PRODUCT_OVERHEAD = 26


@dataclass(frozen=True)
class Resources:
    """Estimates for one program. ``accumulators`` is the part of ``registers`` that cannot be reduced."""

    shared_bytes: int
    registers: int
    accumulators: int
    threads: int
    largest: int  #: elements of the largest tensor


def resources(kernel: Kernel, sizes: dict[str, int], itemsizes: dict[str, int], target: Target, tf32: bool = False) -> Resources:
    """Estimate the resources for labels of extents ``sizes`` and buffers of ``itemsizes`` bytes an element (default 4)."""
    return _Estimate(kernel, sizes, itemsizes, target, tf32).result()


def check_resources(kernel: Kernel, sizes: dict[str, int], itemsizes: dict[str, int], target: Target, tf32: bool = False) -> Resources:
    """Estimate the resources. Raises DTError where the GPU does not have what the kernel needs.

    Where tiles are whole extents of unknown size, the wrapper lowers the number of stages at the call, so a single stage has to fit.
    """
    for tail in kernel.tail:
        check_resources(tail, sizes, itemsizes, target, tf32)
    checked = [_check_form(form, sizes, itemsizes, target, tf32) for form in _forms(kernel, target)]
    _check_triton(kernel, target)
    return checked[-1]


def spills(kernel: Kernel, sizes: dict[str, int], itemsizes: dict[str, int], target: Target) -> bool:
    """Return whether so many values live at once that ptxas is expected to spill hundreds of bytes.

    Each operation is done for a whole tile before the next one, so that all values with a name live as tiles. Beside a product, those after its last
    loop count; one that is stored and read again counts twice as long as it lives: a store has threads hold other elements than a product does.
    Against ptxas: of 260 kernels of benchmarks/kernelbench for an H100 the two with more than EPILOGUE spilled 1416 and 2704 bytes, one with 256 432,
    and others 104 at most. Of kernels without products the only one above CROWDED times the registers there are spilled 4184 bytes.
    """
    estimate = _Estimate(kernel, sizes, itemsizes, target, False)
    if has_matrix_product(kernel.body):
        return estimate.epilogue(kernel.body) > EPILOGUE
    return not estimate.dots and estimate.live_registers() > CROWDED * min(MOST_REGISTERS, target.registers // estimate.threads)


def _forms(kernel: Kernel, target: Target) -> list[Kernel]:
    """Return the forms of a kernel that Triton compiles: the pointer form, then the descriptor form if there is one.

    The Gluon form is not among them: it takes as many stages as fit.
    """
    if not kernel.descriptors:
        return [kernel]
    by_triton = target.has_tma and backend(kernel, target)[0] == "triton"
    return [use_pointers(kernel), *([descriptor_form(kernel)] if by_triton else [])]


def _check_form(kernel: Kernel, sizes: dict[str, int], itemsizes: dict[str, int], target: Target, tf32: bool) -> Resources:
    r = resources(kernel, sizes, itemsizes, target, tf32)
    if r.shared_bytes > target.shared_bytes and has_matrix_product(kernel.body) and whole_extent_labels((kernel,)):
        r = resources(replace(kernel, num_stages=1), sizes, itemsizes, target, tf32)
    limits = (
        ("elements of one tensor", r.largest, MOST_ELEMENTS),
        ("threads of one program", r.threads, MOST_THREADS),
        ("elements of one tensor in each thread", -(-r.largest // r.threads), MOST_OF_A_THREAD),
        ("registers of a thread for accumulators", r.accumulators, MOST_REGISTERS),
        ("bytes of shared memory", r.shared_bytes, target.shared_bytes),
    )
    for what, found, allowed in limits:
        if found > allowed:
            raise DTError(f"{kernel.name} on {target.name}: {what}", found=str(found), allowed=f"at most {allowed}")
    cap, least = dict(kernel.options).get("maxnreg"), r.accumulators + (PRODUCT_OVERHEAD if has_matrix_product(kernel.body) else 0)
    if cap is not None and target.has_tma and cap < least:
        raise DTError(f"{kernel.name} on {target.name}: maxnreg", found=str(cap), allowed=f"{least} or more")
    if any(name == "cluster" for name, _ in kernel.options) and not target.has_tma:
        raise DTError(f"{kernel.name} on {target.name}: clusters", found="cluster", allowed="GPUs of compute capability 9.0 or higher")
    return r


def _check_triton(kernel: Kernel, target: Target) -> None:
    """Raise DTError for a kernel that the installed Triton does not compile for this GPU."""
    times, triton = unrolled_product(kernel.body), triton_version()
    if times > MOST_UNROLLED and target.backend == "cuda" and int(target.arch) // 10 == 10 and triton and triton < (3, 9):
        found = f"{times} times by Triton {'.'.join(map(str, triton))}"
        raise DTError(f"{kernel.name} on {target.name}: a product's loop unrolled", found=found, allowed=f"{MOST_UNROLLED}, or Triton 3.9")
    if "cluster" in dict(kernel.options) and triton and triton < (3, 8):
        raise DTError(f"{kernel.name}: clusters", found=f"Triton {'.'.join(map(str, triton))}", allowed="Triton 3.8 or newer")


def whole_extent_labels(kernels: tuple[Kernel, ...]) -> tuple[str, ...]:
    """Return the labels whose whole extent is one tile somewhere: the resources of the kernels depend on their sizes."""
    axes = (s.axis for k in kernels for s in statements(k.body) if isinstance(s, nest.Index) and s.axis.tile == nest.WHOLE)
    return tuple(dict.fromkeys(a.label for a in axes))


class _Estimate:
    def __init__(self, kernel: Kernel, sizes: dict[str, int], itemsizes: dict[str, int], target: Target, tf32: bool):
        self.kernel, self.sizes, self.itemsizes, self.target, self.tf32 = kernel, sizes, itemsizes, target, tf32
        self.threads = kernel.num_warps * target.warp_size
        self.smallest = 16 if has_matrix_product(kernel.body) else 1
        self.loads = {s.name: s.value for s in statements(kernel.body) if isinstance(s, Let) and isinstance(s.value, (Load, DescriptorLoad))}
        plain = (s for s in statements(kernel.body) if isinstance(s, Let) and s.name not in self.loads)
        self.lets = {s.name: s.value for s in plain if not any(isinstance(n, TileDot) for n in s.value.walk())}
        self.dots = [n for value in values(kernel.body) for n in value.walk() if isinstance(n, TileDot)]
        self.chained = len(self.dots) > 1

    def result(self) -> Resources:
        tiles = [axes_of(n) for value in values(self.kernel.body) for n in value.walk() if not isinstance(n, nest.Const)]
        accumulators = int(self._peak_live_registers(self.kernel.body, set(), lambda s: self._value_registers(s) if isinstance(s, Accumulator) else 0, lambda s: 0))
        registers = min(MOST_REGISTERS, self.live_registers())
        return Resources(self._shared_bytes(), registers, accumulators, self.threads, max(map(self.elements, tiles), default=1))

    # -- sizes ------------------------------------------------------------------------------------------------------

    def length(self, axis: Axis) -> int:
        if axis.half:
            return two_tiles(self.sizes[axis.label], self.smallest)[axis.half - 1]
        return axis.tile or max(self.smallest, next_power_of_two(self.sizes[axis.label]))

    def elements(self, axes: frozenset[Axis] | tuple[Axis, ...]) -> int:
        count = 1
        for a in axes:
            count *= self.length(a)
        return count

    def each(self, elements: float) -> int:
        """Return the share of one thread."""
        return -int(-elements // self.threads)

    def bytes_of(self, buffer: str) -> int:
        return self.itemsizes.get(buffer, 4)

    def operand_bytes(self, dot: TileDot) -> int:
        """Return the bytes per element of an operand on the matrix units: those of the product's type, else of the loaded operand."""
        if dot.operands is not None and isinstance(self.itemsizes, ElementBytes):
            return BYTES[self.itemsizes.types.operand(dot.operands)]
        if dot.operands is not None and dot.operands.fixed:
            return max(BYTES[s.removeprefix(CAST)] if s.startswith(CAST) else self.bytes_of(s) for s in dot.operands.sources)
        found = [self.bytes_of(self.loads[s.name].buffer) for s in (dot.left, dot.right) if isinstance(s, Local) and s.name in self.loads]
        return min(found, default=min((self.bytes_of(b) for b in self.kernel.reads), default=4))

    def units(self, dot: TileDot) -> str:
        """Classify the units: ``shared`` ones read operands from shared memory, ``warp`` ones from registers, ``plain`` is no matrix unit."""
        if self.operand_bytes(dot) == 4 and not self.tf32:
            return "plain" if self.target.backend == "cuda" else "warp"
        rows = self.elements(axes_of(dot.left) - frozenset(dot.axes))
        new = isinstance(self.target.arch, int) and self.target.arch >= 90 and self.kernel.num_warps % 4 == 0
        return "shared" if new and rows >= 64 else "warp"

    # -- shared memory ----------------------------------------------------------------------------------------------

    def _shared_bytes(self) -> int:
        outside, scratch = 0, 0
        for s in _outside_loops(self.kernel.body):
            outside += self._operands(s, stages=self.ahead, everything=bool(self.kernel.block_stages) and self.ahead > 1)
        loops = [self._loop(s) for s in self.kernel.body if isinstance(s, Loop)]
        for value in values(self.kernel.body):
            for n in value.walk():
                if isinstance(n, nest.TileReduce):
                    scratch = max(scratch, 4 * self.kernel.num_warps * min(self.elements(axes_of(n)), self.threads))
        tiles, passing = outside + max(loops, default=0), max((self._staging_bytes(s) for s in statements(self.kernel.body)), default=0)
        pipelined_stores = {(s.axes, self.bytes_of(s.buffer)): self._bytes(s, s.buffer) for s in self.pipelined_stores}
        return max(tiles + passing if self.overlaps else max(tiles, passing), scratch) + sum(pipelined_stores.values())

    @cached_property
    def fused(self) -> bool:
        """Return whether Triton fuses the loop over blocks with the one inside."""
        return self.kernel.persistent and is_single_reduction_loop(self.kernel)

    @cached_property
    def depth(self) -> int:
        """Return the stages of the loop over blocks, or of the loop it is fused with."""
        own = [dict(s.options).get("num_stages") for s in self.kernel.body if isinstance(s, Loop)] if self.fused else []
        return int(self.kernel.block_stages or next(iter(own), None) or self.kernel.num_stages)

    @cached_property
    def ahead(self) -> int:
        """Return how many blocks have their tiles loaded at once, in a persistent kernel without an inner loop; 1: no prefetching."""
        alone = self.kernel.persistent and not any(isinstance(s, Loop) for s in self.kernel.body)
        return self.depth if alone and (self.dots or self.kernel.block_stages) else 1

    @cached_property
    def overlaps(self) -> bool:
        """Return whether tiles of the next block are loaded while a block is stored."""
        fetched = any(isinstance(v, DescriptorLoad) and self._feeds_products(n) for n, v in self.loads.items())
        return self.ahead > 1 or self.fused and self.depth > 1 and fetched

    @cached_property
    def pipelined_stores(self) -> list[nest.DescriptorStore]:
        """Return the stores by descriptors in pipelined loops: Triton allocates their tiles for the whole kernel."""

        def inside(body: tuple[Statement, ...], stages: int) -> Iterator[nest.DescriptorStore]:
            for s in body:
                if isinstance(s, Loop):
                    yield from inside(s.body, int(dict(s.options).get("num_stages") or self.kernel.num_stages))
                elif isinstance(s, nest.DescriptorStore) and stages > 1:
                    yield s

        return list(inside(self.kernel.body, self.depth if self.kernel.persistent else 1))

    def _bytes(self, s: Let | nest.Store | nest.DescriptorStore, buffer: str) -> int:
        return self.elements(s.axes) * self.bytes_of(buffer)

    def _staging_bytes(self, s: Statement) -> int:
        """Return the bytes of shared memory through which ``s`` moves a tile: by a descriptor, or for a layout conversion beside a product."""
        warpgroups = isinstance(self.target.arch, int) and self.target.arch // 10 == 9 and any(self.units(d) == "shared" for d in self.dots)
        relaid = bool(self.dots) and (self.overlaps or warpgroups)
        if isinstance(s, nest.DescriptorStore) and s not in self.pipelined_stores or isinstance(s, nest.Store) and relaid:
            return self._bytes(s, s.buffer)
        if isinstance(s, Let) and isinstance(s.value, (Load, DescriptorLoad)) and not self._feeds_products(s.name):
            return self._bytes(s, s.value.buffer) if isinstance(s.value, DescriptorLoad) or self.overlaps and self.dots else 0
        return 0

    def _loop(self, loop: Loop) -> int:
        inner = [s for s in loop.body if isinstance(s, Loop)]
        own = dict(loop.options).get("num_stages")
        copies = 1 if inner else self.depth if self.fused else int(own or self.kernel.num_stages)
        if self.target.backend == "hip":  # every step of an unrolled body gets its own buffers there
            copies = 1 + (copies - 1) * dict(loop.options).get("loop_unroll_factor", 1)
        here = sum(self._operands(s, copies, everything=bool(own) and not inner) + self._added_bytes(s) for s in _outside_loops(loop.body))
        return here + max((self._loop(s) for s in inner), default=0)

    def _added_bytes(self, s: Statement) -> int:
        """Return the shared memory through which a product that is added to memory in a loop gets another layout, in two halves."""
        return self._bytes(s, s.buffer) // 2 if isinstance(s, nest.Store) and s.onto and isinstance(s.value, TileDot) else 0

    def _operands(self, s: Statement, stages: int, everything: bool = False) -> int:
        """Return the shared memory that one statement needs: for a load that a product reads, or for a computed operand."""
        total = 0
        if isinstance(s, Let) and isinstance(s.value, (Load, DescriptorLoad)):
            uses = [d for d in self.dots if s.name in self._operand_names(d)]
            if self.fused and isinstance(s.value, Load):
                stages = 1  # of loads by pointers none runs ahead there
            if uses or everything:
                deep = any(self.units(d) == "shared" for d in uses)
                total += self.elements(s.axes) * self.bytes_of(s.value.buffer) * max(1, stages if deep else stages - 1)
            return total
        for n in s.value.walk() if hasattr(s, "value") else ():
            if isinstance(n, TileDot):
                for side, first in ((n.left, True), (n.right, False)):
                    computed = not (isinstance(side, Local) and side.name in self.loads) or self._converted(side, n)
                    if computed and (self.units(n) == "plain" or not first):
                        total += self.elements(axes_of(side)) * self.operand_bytes(n)
        return total

    def _converted(self, side: Local, dot: TileDot) -> bool:
        """Return whether a loaded tile must be converted before it is an operand."""
        known = dot.operands is not None and (dot.operands.fixed or isinstance(self.itemsizes, ElementBytes))
        return known and self.bytes_of(self.loads[side.name].buffer) != self.operand_bytes(dot)

    def _operand_names(self, dot: TileDot) -> set[str]:
        """Return the names that the operands of a product are computed from: Triton prefetches those loads too."""
        todo, found = [dot.left, dot.right], set()  # type: ignore[var-annotated]
        while todo:
            for name in todo.pop().local_names - found:
                found.add(name)
                todo += [self.lets[name]] if name in self.lets else []
        return found

    # -- registers --------------------------------------------------------------------------------------------------

    def live_registers(self) -> int:
        """Return the registers of a thread for all that lives at once, however many a thread may have."""
        products = bool(self.dots)
        live = self._peak_live_registers(self.kernel.body, set(), self._value_registers, self._temporary_registers)
        return int(live * (1 if products else 1.1)) + (PRODUCT_OVERHEAD if products else OVERHEAD)

    def _peak_live_registers(self, body: tuple[Statement, ...], after: set[str], width: Callable, working: Callable) -> float:
        """Return the most registers live at once in ``body``: ``width`` of each live named value, plus ``working`` of each statement."""
        uses = [self._names(s) for s in body]
        widths = {s.name: width(s) for s in body if isinstance(s, (Let, Accumulator))}
        live: dict[str, float] = {}
        most = 0.0
        for i, s in enumerate(body):
            later = after.union(*uses[i + 1 :])
            if isinstance(s, Loop):
                held = sum(w for n, w in live.items() if n in later or n in uses[i])
                most = max(most, held + self._peak_live_registers(s.body, set(), width, working))
            else:
                most = max(most, sum(live.values()) + working(s))
            if isinstance(s, (Let, Accumulator)):
                live[s.name] = widths[s.name]
            live = {n: w for n, w in live.items() if n in later}
            most = max(most, sum(live.values()))
        return most

    def epilogue(self, body: tuple[Statement, ...]) -> float:
        """Return the registers live among the statements that follow the last loop with a product.

        Functions after one another overlap in ptxas's order: what each holds beyond the tile that it hands on adds up. Of six products with one mish
        after them, which hold 256 registers, none spilled; with two, 384, five of six did, 728 to 1280 bytes.
        """
        loops = [i for i, s in enumerate(body) if isinstance(s, Loop) and has_matrix_product((s,))]
        if not loops:
            return 0.0
        widths = {s.name: self._value_registers(s) for s in body if isinstance(s, (Let, Accumulator))}
        uses, made = [self._names(s) for s in body], {s.name for s in body[: loops[-1]] if isinstance(s, (Let, Accumulator))}
        live, twice = list[float](), set()
        for i, s in enumerate(body[loops[-1] + 1 :], loops[-1] + 1):
            later = set().union(*uses[i + 1 :])
            twice |= uses[i] if isinstance(s, (nest.Store, nest.DescriptorStore)) else set()
            made |= {s.name} if isinstance(s, (Let, Accumulator)) else set()
            live.append(sum(widths.get(n, 0.0) * (1 + (n in twice)) for n in made & later))
        handed = min(filter(None, live), default=0.0)
        functions = [max(held) for more, held in groupby(live, lambda n: n > handed) if more]
        return max(self.epilogue(body[loops[-1]].body), handed + sum(n - handed for n in functions))  # type: ignore[attr-defined]

    def _names(self, s: Statement) -> set[str]:
        inner = s.body if isinstance(s, Loop) else (s,)
        return {name for v in values(inner) for name in v.local_names}

    def _value_registers(self, s: Let | Accumulator) -> float:
        """Return the registers of a thread for one named value."""
        load = s.value if isinstance(s, Let) and isinstance(s.value, (Load, DescriptorLoad)) else None
        if load is not None and self._feeds_products(s.name):
            vector = max(1, 16 // self.bytes_of(load.buffer))
            return 0 if isinstance(load, DescriptorLoad) else 2 * max(1, self.each(self.elements(s.axes) / vector))
        return self.each(self.elements(s.axes))

    def _feeds_products(self, name: str) -> bool:
        return any(isinstance(side, Local) and side.name == name for d in self.dots for side in (d.left, d.right))

    def _temporary_registers(self, s: Statement) -> float:
        """Return the registers that a statement takes beside its inputs: fragments and rounded operands of products."""
        most = 0.0
        for n in s.value.walk() if hasattr(s, "value") else ():
            if isinstance(n, TileDot):
                units = self.units(n)
                rounded = 0 if self._is_load(n.left) else self.each(self.elements(axes_of(n.left)) * self.operand_bytes(n) / 4)
                apart = units == "plain" or isinstance(s, (nest.Store, nest.DescriptorStore)) and s.onto
                result = 0 if isinstance(s, Let) or not apart else self.each(self.elements(axes_of(n)))
                most = max(most, rounded + result + (self._fragments(n) if units == "warp" else 0))
        return most

    def _is_load(self, tile: Tile) -> bool:
        return isinstance(tile, Local) and tile.name in self.loads

    def _fragments(self, dot: TileDot) -> float:
        """Return the registers of a thread for operand fragments, on units that read registers: each warp holds its rows and columns."""
        rows, columns = (self.elements(axes_of(side) - frozenset(dot.axes)) for side in (dot.left, dot.right))
        depth, down, across = self.elements(dot.axes), self.kernel.num_warps if self.chained else 1, 1
        while down * across < self.kernel.num_warps:
            if rows / 16 / down >= columns / 16 / across and down < rows // 16:
                down *= 2
            else:
                across *= 2
        held = max(16, rows // down) * depth + max(8, columns // across) * depth
        return held * self.operand_bytes(dot) / 4 / self.target.warp_size


def _outside_loops(body: tuple[Statement, ...]) -> Iterator[Statement]:
    return (s for s in body if not isinstance(s, Loop))
