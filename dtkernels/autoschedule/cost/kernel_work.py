"""Count what one kernel does at given sizes: its programs, and what each of them loads, multiplies, computes and stores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...codegen.held_terms import FLOAT8_DEPTH, HELD_BY_WARP, MOST_IMPRECISE
from ...codegen.powers_of_two import UNITS, binary_parts, last_power_of_two, next_power_of_two, two_tiles
from .memory_sum_work import added_bytes, cleared_bytes, meeting_terms
from .outline import SECTOR, VECTOR, FuncOutline, Product, Read
from .window_work import WindowCount, places_of_windows
from .work import Stores, Work

if TYPE_CHECKING:
    from ...codegen.target import Target
    from .kernel_plan import Access, KernelPlan

HALF_SECTORS = 2.25  #: times as long as others take tiles of rows that begin in the middle of a sector: products on an H100 took up to 1.67 times as long (benchmarks/h100/row_strides.txt)
L2_KEEPS = 0.5  #: the part of the L2 that holds what several waves read, or one program twice: to ask for such rows to be evicted last gained nothing (softmax, an H100)
ASYNC = 4  #: bytes of the smallest load that goes to shared memory by itself; smaller ones pass through registers
PACKED = 8  #: most elements packed in one
MULTIPROCESSOR = 1.004  #: shared memory of a multiprocessor over what one block may take
WIDE = 16  #: elements of a tile from which on they are one vector, not several sums
BASE, VALUE, READ, CARRIED = 22, 0.3, 0.38, 0.55  #: registers of a thread, and of each element: by what ptxas gave 336 kernels of rows and columns, to 13%
#: operations for each element of a tile that is not summed, above which so many registers are live for it: 8 elements of a thread took 220 registers and 32 spilled 1424 bytes (the gradient of a
#: group norm, tanh, hard swish and a log of a sum). Triton emits each operation for all elements of a thread, one operation after the other
MANY_OPERATIONS, LIVE_OF_MANY = 60, 16.0
SINGLE = 1.0  #: registers that an element takes besides where it is loaded by itself, and has an address: ptxas gave five kernels of softmax 0.9 to 1.3
SINGLE_DOWN = 1.2  #: the same besides, of loads and stores beside more than ``FITTED`` sums down columns: 16 elements of a thread took 171 registers, 8 took 90 (DyT's gradients, odd rows)
FITTED = 2  #: sums of a loop, of those kernels; more down columns take registers of their own each: four of 8 elements spilled 224 bytes at 64
AHEAD = 3.5  #: registers of each copy of 16 bytes that a loop of several products has under way: attention's gradients took 3.4 to 7 for one and two
SPILLING = 0.8  #: the part of its registers from which on a thread of such a kernel spilled some
EXCHANGED = 11  #: times as long as its terms: a sum over all pairs of rows whose threads add up several terms of each step (five tiles on an H100)
WARPS, BLOCKS = 64, 32  #: that a multiprocessor holds
#: instructions of a thread for each load or store, each operation, and each exchange of values with other threads: what ptxas gave 629 kernels of rows, to 20%
PER_LOAD, PER_OPERATION, PER_EXCHANGE, ANYWAY = 7.0, 0.7, 2.2, 48.0
BANKS = 32  #: of shared memory, each 4 bytes wide
OVER_WARPS = 3  #: exchanges that take the time of one through shared memory


class KernelCount:
    """The counting of one kernel at one set of sizes."""

    def __init__(self, plan: KernelPlan, sizes: dict[str, int], itemsize: int, target: Target):
        self.plan, self.sizes, self.itemsize, self.target = plan, sizes, itemsize, target
        self.extent: dict[str, float] = {}  #: what one program covers of a label, on the average
        self.filled: dict[str, float] = {}  #: the same, by whole tiles
        self.step: dict[str, int] = {}  #: elements of a tile, and those of them that are loaded
        self.loaded: dict[str, int] = {}
        self.count: dict[str, int] = {}  #: blocks along a label
        self.halved = frozenset(label for c in plan.config.choices() for label in c.two_tiles)
        for label in plan.domain:
            n = max(sizes.get(label, 1), 1)
            tile = plan.tiles.get(label, 1) or self._whole_tile(label, n)
            block, parts = plan.blocks.get(label, 0), plan.split.get(label, 0)
            if block:
                self.count[label] = count = -(-n // block)
                self.extent[label], self.filled[label] = n / count, float(max(block, tile))
            elif parts:
                self.count[label], tiles = parts, -(-n // tile)
                self.extent[label], self.filled[label] = n / parts, float(-(-tiles // parts) * tile)
            else:
                self.extent[label], self.filled[label] = float(n), float(-(-n // tile) * tile)
            self.step[label], self.loaded[label] = tile, min(tile, block or tile, n)
        for label, parts_of in plan.merged.items():
            self._share_tile(label, parts_of)
        self.longest = 1.0  #: iterations of the longest program over those of the average one
        self.windows = WindowCount(self)
        for label in plan.bounded:
            parts = 1 if label in plan.blocks else plan.split.get(label, 1)
            if label in self.filled and self.count.get(label, 1) == parts and sizes.get(label, 1) > 1:
                seen, most = self._seen_share(label)
                seen += min(1 - seen, self.step[label] / (parts * self.filled[label]))
                self.filled[label] *= seen
                self.extent[label] *= seen
                self.longest *= max(1.0, most / seen)
        for label in {x for f, _ in plan.members if f.name in plan.config.added for x in f.picked_labels()}:
            self.extent[label] = self.filled[label] = 1.0
            self.step[label] = self.loaded[label] = 1
        self.float8 = target.has_float8 and bool(plan.products) and self._depth() >= FLOAT8_DEPTH and all(f.name in plan.known.float8 for f, _ in plan.members if f.products)

    def _seen_share(self, label: str) -> tuple[float, float]:
        """Return the shares of a label's elements that a comparison with another label leaves on the average and at most: a half and all, unless the places themselves are compared."""
        for low, high in self.plan.ordered:
            if label in (low, high) and low in self.sizes and high in self.sizes:
                below, above = max(self.sizes[low], 1), max(self.sizes[high], 1)
                return (above / (2 * below) if above <= below else 1 - below / (2 * above)), (min(1.0, above / below) if label == low else 1.0)
        return 0.5, 1.0

    def _whole_tile(self, label: str, n: int) -> int:
        """Return the elements of the one or two tiles that hold a whole extent."""
        least = UNITS if self.plan.products else 1
        return sum(two_tiles(n, least)) if label in self.halved else max(next_power_of_two(n), least)

    def _share_tile(self, merged: str, parts: tuple[str, ...]) -> None:
        """Give the labels that a merged one stands for their parts of its tile, the last label first."""
        sizes = [max(1, self.sizes.get(x, 1)) for x in parts]
        block, tile = self.plan.blocks.get(merged, 0), self.plan.tiles.get(merged, 1)
        left = float(block or tile)
        if block:
            self.count[merged] = -(-math.prod(sizes) // block)
            self.extent[merged] = self.filled[merged] = 1.0
        for label, n in reversed([*zip(parts, sizes)]):
            share = min(float(n), max(1.0, left))
            self.step[label] = self.loaded[label] = max(1, round(share))
            if block:
                self.extent[label] = self.filled[label] = share
            left /= share
        self.step[merged] = self.loaded[merged] = 1
        if parts_of_sum := self.plan.split.get(merged, 0):
            self.count[merged] = parts_of_sum
            self.extent[parts[0]] /= parts_of_sum
            self.filled[parts[0]] = max(self.filled[parts[0]] / parts_of_sum, 1.0)

    def of(self, table: dict, label: str) -> float:
        """Return the entry of a label, or of the labels that stand in its place."""
        found = table.get(label)
        if found is None:
            found = 1.0
            for x in self.plan.known.aliases.get(label, ()):
                found *= table.get(x, 1.0)
        return found

    def times(self, around: tuple[str, ...], whole: tuple[str, ...]) -> float:
        """Return how often loops repeat something, and blocks that it runs over whole."""
        found = 1.0
        together = {x for name, parts in self.plan.merged.items() if name not in self.plan.blocks for x in parts}  # one loop, and each element is loaded all the same
        for x in around:
            found *= max(1.0, self.filled.get(x, 1.0) / (1 if x in together else self.step.get(x, 1)))
        for x in whole:
            found *= self.count.get(x, 1)
        return found

    def elements(self, table: dict, labels: tuple[str, ...]) -> float:
        found = 1.0
        for x in labels:
            found *= self.of(table, x)
        return found

    def bytes_of(self, tensor: str) -> int:
        """Return the bytes of an element: what products read, products that are normalized, and outputs have the dtype of the call, other Funcs are float32 or casts."""
        known = self.plan.known
        if tensor in known.bytewise:
            return 1
        if tensor not in known.funcs or tensor in known.narrow or tensor in known.outputs:
            return self.itemsize
        return known.cast.get(tensor, 4)

    def work(self, live: float) -> Work:
        plan, programs, streamed, sizes = self.plan, math.prod(self.count.values()), self._is_streamed(), self.sizes
        moved = requests = short = tile_bytes = held_bytes = copied = issued = apart = strips = runs = addresses = 0.0
        narrow, widened, reads, single, copies = False, False, [], dict[str, float](), 0
        for access in plan.accesses:
            read, each = self._without_units(access.read) if streamed or not plan.products else access.read, self.bytes_of(access.read.tensor)
            amount, asked, vector, tile = self._load(read, each)
            times = self.times(access.around, access.whole) * access.sweeps
            amount, asked = amount * times * self.windows.reach(read), asked * times * self.windows.loads(read)
            aligned = read.tensor in plan.aligned
            moved += amount * (HALF_SECTORS if plan.products and not streamed and not aligned and self._starts_within_sectors(read, each) else 1)
            if aligned and not self._across(read) > 1 or vector >= VECTOR:
                requests += asked / VECTOR
            else:
                short += asked / vector
            dims = [x for x, _ in read.labels if not streamed or sizes.get(x, 1) > 1]  # Triton knows a stride of 1
            narrow = narrow or (vector < ASYNC and not aligned and len(dims) > 1 and not plan.config.specialized)  # whose producer copies words
            widened = widened or (each > self.itemsize and sum(self.step.get(x, 1) > 1 for x in dims) > 1)
            tile_bytes, held_bytes = (tile_bytes + tile, held_bytes) if access.looped else (tile_bytes, held_bytes + tile)
            single[read.tensor] = tile / each if vector < ASYNC and not aligned else 0.0
            addresses += single[read.tensor] if sum(self.step.get(x, 1) > 1 for x, _ in read.labels) > 1 else 0.0
            if access.looped:
                issued += self._registers(access, tile, VECTOR if aligned else vector)
                apart += tile if vector < ASYNC and not aligned else 0.0
            reads.append((access, each, amount))
            strips += programs * amount / self._run(read.last, each) if vector < VECTOR and not aligned else 0.0
            if read.tensor in plan.config.copies and not access.again:
                copied, copies = copied + 2 * self._unique(read, each), copies + 1
        multiplied, rows, columns = (0.0, 0, 0) if streamed else self._multiplied()
        ordinary = any(self._is_ordinary(p) for p, *_ in plan.products)
        addressed = SINGLE * sum(single.values())
        if not plan.products and self._sums_down(self._largest_result()) > FITTED:
            addressed += SINGLE_DOWN * (sum(single.values()) + self._stored_singly())
        held, spilled = self._resident(rows, streamed, tile_bytes, held_bytes + apart - plan.config.stages * apart, issued if plan.products else addressed, addresses, live)
        at_once = min(programs, held * self.target.multiprocessors)
        memory = self._memory(reads, programs, at_once)
        stores = self._stores(streamed, programs)
        runs += sum(self._runs(f.labels[-1:], n := self.bytes_of(f.name), programs * n * self.elements(self.extent, f.labels)) for f in plan.writes)
        memory, strips, requests, merged = memory + stores.memory, strips + stores.strips, requests + stores.requests, stores.merged
        parts = math.prod(self.count[x] for x in plan.split)
        for func, _ in plan.members if plan.apart else ():
            merged += 4.0 * programs * self.elements(self.extent, func.labels) if {*plan.split} & {*func.reduced} else 0.0
        heavy, light = self._arithmetic()
        light += places_of_windows(self, reads) + (multiplied / 2 / min(self._depth(), MOST_IMPRECISE) if self._promotes() else 0.0)
        if streamed:
            light, requests = light + (terms := self._multiplied()[0]), requests + terms / (2 * VECTOR / self.itemsize)
        gathered = self._sums_over_threads() if streamed else 0.0 if plan.products else self._summed()
        exchanges, passes = (0.0, 0.0) if plan.products else self._exchanges()
        parted = any(x not in self.halved and len(binary_parts(self.step.get(x, 1))) > 1 for p, *_ in plan.products for x in (*p.rows, *p.columns))
        return Work(programs, held, spilled, moved, requests, short, memory, stores.written, multiplied, ordinary, rows, columns, len(plan.products), heavy, light,
                    self._steps(), tile_bytes or held_bytes, merged, parts, copied, narrow, bool(plan.config.descriptors) and not narrow, self.itemsize,
                    stores.added, stores.cleared, len(plan.added), strips, parted, gathered, plan.paired, merges=plan.apart or int(merged > 0), float8=self.float8,
                    summed=plan.sums_operands and len(plan.products) == 1, parted_boxes=self._parts_boxes(),
                    computed=narrow and plan.computes_operands, widened=widened, short_stores=stores.short, stored_strips=stores.short_strips,
                    issued=0.0 if plan.products else self._issued(requests + short, heavy + light, exchanges), passes=passes,
                    runs=0.0 if plan.products else runs, longest=self.longest, one_by_one=self._merges_one_by_one(), copies=copies, pairs=plan.pairs,
                    meeting=meeting_terms(self), **self._float32_products())  # fmt: skip

    def _merges_one_by_one(self) -> bool:
        """Return whether a merge takes one part after another: blocks of the result have several labels (split_k_merge.py)."""
        return sum(self.step.get(x, 1) > 1 for x in self.plan.root.labels) > 1

    def _parts_boxes(self) -> bool:
        """Return whether a box of a descriptor has a single element between its tiles: ``A[b, g, c]`` with tiles along ``b`` and ``c``."""
        joined = {x for parts in self.plan.merged.values() for x in parts}
        for access in (a for a in self.plan.accesses if a.read.tensor in self.plan.config.descriptors):
            tiled = [x in joined or self.step.get(x, 1) > 1 for x, _ in access.read.labels if self.sizes.get(x, 1) > 1]
            if not all(tiled[tiled.index(True) :] if True in tiled else ()):
                return True
        return False

    def _stores(self, streamed: bool, programs: int) -> Stores:
        """Count what the kernel stores, or adds to sums in memory."""
        plan = self.plan
        written = memory = strips = merged = requests = short = short_strips = added = cleared = 0.0
        for func in plan.writes:
            each, last = self.bytes_of(func.name), self._last_of(func.labels) if streamed or not plan.products else func.labels[-1:]
            amount = each * self.elements(self.extent, func.labels)
            if last and last[0] in self.count and (not plan.products or self.sizes.get(last[0], 1) > self.loaded[last[0]]):  # parts of sectors
                amount *= max(1.0, SECTOR / max(1.0, each * self.elements(self.loaded, last)))
            written += amount
            if func.name in plan.added:
                added, cleared = added + added_bytes(self, func), cleared + cleared_bytes(self, func)
                continue
            parted = func.name in plan.config.parted or any(x in plan.split for x in func.reduced)
            memory += 0.0 if parted else amount * programs
            unaligned = not parted and self._vector(last, each) < VECTOR and not plan.config.aligned
            strips += amount * programs / self._run(last, each) if unaligned else 0.0
            merged += 4.0 * programs * self.elements(self.extent, func.labels) if parted else 0.0
            vector = min(VECTOR, self._vector(last, each) if not plan.config.aligned else VECTOR)
            requests += amount / vector
            if unaligned and (plan.config.persistent or self._is_looped(func.labels)):
                short += amount / vector
                short_strips += amount * programs / min(self._run(last, each), max(1.0, each * self.elements(self.loaded, last)))
        return Stores(written, memory, strips, requests, merged, short, short_strips, added, cleared)

    def _depth(self) -> int:
        """Return the terms of the sum in a step, of the shallowest product."""
        return min(max((self.of(self.plan.tiles if x in self.plan.merged else self.step, x) for x in self._unmerged(p.reduced)), default=1) for p, *_ in self.plan.products)  # type: ignore[return-value]

    def _promotes(self) -> bool:
        """Return whether each step's sums are added to those in float32 by the cores: the matrix units of compute capability 9.0 keep too few bits."""
        return self.float8 and self.target.arch == 90 and not self._approximates()

    def _approximates(self) -> bool:
        return any(name == "rdot" for c in self.plan.config.choices() for name, _ in c.approximations)

    def _float32_products(self) -> dict[str, Any]:
        """Return what the time of float32 products depends on besides their tile: see ``Work``."""
        if self.itemsize < 4 or not self.plan.products:
            return {}
        lying = [self.plan.crossed(product) for product, *_ in self.plan.products]
        crossed = [x for _, columns in lying for x in columns]
        masked = not self.plan.config.descriptors and any(self.sizes.get(x, 1) % VECTOR for x in crossed)
        return {"tripled": self._approximates(), "crossed": bool(crossed), "masked": masked, "depth": self._depth(), "across": any(rows for rows, _ in lying)}

    def _registers(self, access: Access, tile: float, vector: float) -> float:
        """Return registers of a tile's loads: an address each, or address and data where no copy to shared memory runs by itself."""
        config = self.plan.config
        if access.read.tensor in config.descriptors and vector >= VECTOR:
            return 0.0
        alone = vector >= ASYNC and not config.persistent
        if alone and self.plan.chained:
            return tile / vector * AHEAD * (config.stages - 1) if config.stages > 1 else tile / 4
        return tile / vector * (1.0 if alone else 1.0 + max(1.0, vector / 4))

    def _run(self, last: tuple[str, ...], each: int) -> float:
        """Return the bytes of a row of a program's block: what lies contiguous."""
        return each * max(1.0, self.elements(self.extent, last))

    def _runs(self, last: tuple[str, ...], each: int, amount: float) -> float:
        """Return the number of pieces that lie contiguous among ``amount`` bytes of all blocks; none where blocks have whole rows."""
        cut = bool(last) and self.elements(self.extent, last) < math.prod(self.sizes.get(x, 1) for x in last)
        return amount / self._run(last, each) if cut else 0.0

    def _last_of(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the last label that has several elements: those before labels of one lie contiguous, which Triton sees in a stride of 1."""
        return next(((x,) for x in reversed(labels) if self.sizes.get(x, 2) > 1), labels[-1:])

    def _without_units(self, read: Read) -> Read:
        """Return an access whose last label has several elements."""
        single = bool(read.last) and all(self.sizes.get(x, 2) == 1 for x in read.last)
        return read._replace(last=self._last_of(tuple([x for x, _ in read.labels]))) if single else read

    def _sums_over_threads(self) -> float:
        """Return how many sums a program adds up over its threads at the end: each row of its block has its own, if its terms are in vectors."""
        own = self.plan.root.labels
        vectors = any(self.step.get(x, 1) > 1 for x in self.plan.root.reduced)
        along = max(own, key=lambda x: self.step.get(x, 1), default="")
        return math.prod(self.step.get(x, 1) for x in own if x != along or self.step.get(x, 1) < WIDE) if vectors else 0.0

    def _summed(self) -> float:
        """Return how many sums a program reduces over its threads, weighted by the cost of reducing over warps."""
        count = 0.0
        for func, _ in self.plan.members:
            if func.reduced and any(self.step.get(x, 1) > 1 for x in func.reduced):
                count += self._times_reduced(func)
        return count * (1 + math.log2(self.plan.config.warps))

    def _times_reduced(self, func: FuncOutline) -> float:
        """Return how often a sum of a tile is added up over threads: once for each block of rows, or in each step where the sum is rescaled."""
        loops = (*func.labels, *func.reduced) if func.name in self.plan.rescaled else func.labels
        return math.prod(max(1.0, self.filled.get(x, 1.0) / self.step.get(x, 1)) for x in loops)

    def _issued(self, loads: float, operations: float, exchanges: float) -> float:
        """Return the instructions of a warp, for all loads and stores of threads and all operations of a program."""
        threads = self.target.warp_size * self.plan.config.warps
        return ANYWAY + PER_EXCHANGE * exchanges + (PER_LOAD * loads + PER_OPERATION * operations) / threads

    def _exchanges(self) -> tuple[float, float]:
        """Return how often a thread passes on a value to add up sums, and how often shared memory is passed through for that."""
        found, passes, warps = 0.0, 0.0, self.plan.config.warps
        for func, _ in self.plan.members:
            if not func.reduced or self.elements(self.step, func.reduced) <= 1:
                continue
            lanes, across, own = self._sharing(func)
            each, times = max(1.0, self.elements(self.step, func.labels) / own[0]), self._times_reduced(func)
            found += times * each * (math.log2(lanes) + (OVER_WARPS + math.log2(across) if across > 1 else 0.0))
            if across > 1:  # the parts of a sum lie side by side, so that lanes of other sums are that far apart, and the values of a thread too
                conflicts = min(own[1], max(1.0, own[1] * across * own[2] / BANKS))
                passes += times * 2 * each * conflicts * warps
        return found, passes

    def _sharing(self, func: FuncOutline) -> tuple[float, float, tuple[float, float, float]]:
        """Return how many lanes and how many warps add up one sum; threads of other sums, lanes of them, and the sums side by side of a thread.

        Triton gives lanes, then warps, to the dimension that lies contiguous, then to the others from the left.
        """
        read = max((a.read for a in self.plan.accesses), key=lambda r: self.elements(self.step, tuple([x for x, _ in r.labels])), default=None)
        labels = (*func.labels, *func.reduced)
        last = [x for x in (read.last if read else ()) if x in labels]
        order = list(dict.fromkeys([*last, *(x for x, _ in (read.labels if read else ()) if x in labels), *labels]))
        size = {x: self.of(self.step, x) for x in order}
        threads, lanes, warps = float(self.target.warp_size), float(self.target.warp_size), float(self.plan.config.warps)
        each = max(1.0, math.prod(size.values()) / (threads * warps))
        vector = min(each, max((self._vector(a.read.last, n) / n for a in self.plan.accesses if (n := self.bytes_of(a.read.tensor))), default=1.0))
        shared, apart = [1.0, 1.0], [1.0, 1.0]
        for x in order:
            left = max(1.0, size[x] / (vector if x in last else 1.0))
            wide, to = min(lanes, left), shared if x in func.reduced else apart
            high = min(warps, max(1.0, left / wide))
            lanes, warps, to[0], to[1] = lanes / wide, warps / high, to[0] * wide, to[1] * high
        return shared[0], shared[1], (apart[0] * apart[1], apart[0], vector if last and last[0] not in func.reduced else 1.0)

    def _load(self, read: Read, each: int) -> tuple[float, float, float, float]:
        """Return (bytes that a program loads once, bytes it asks for with masks, bytes of one load of a thread, bytes of one iteration's tile)."""
        amount = asked = tile = float(each)
        for x, by in read.labels:
            divisor = 1 if x in self.plan.scattered else by
            amount *= max(1.0, self.of(self.extent, x) / divisor)
            asked *= max(1.0, self.of(self.filled, x) / divisor)
            tile *= max(1.0, self.of(self.loaded, x) / divisor)
        run = float(each)
        for x in read.last:
            run *= self.of(self.loaded, x)
        if run < SECTOR and read.last and (read.last[0] in self.count or read.tensor in self.plan.config.copies):
            amount *= SECTOR / run
        if self.plan.products and (shared := math.prod(by for x, by in read.labels if x in read.last and x not in self.count)) > 1 and not self._packed(read):
            return amount, asked * shared, float(each), tile  # ``W[n, k / 2]``: every element by itself, in a product's loop
        if (lines := self._lines(read)) > 1:
            return amount, asked * lines, float(each), tile
        vector = float(each) if self.slides(read) else max(each, min(self._vector(read.last, each), run, self.windows.run_of_thread(each)))
        return amount, asked, vector, tile

    def _lines(self, read: Read) -> float:
        """Return how many lines of memory the threads of a warp load at once: a product's tiles run across rows, or labels counted together run faster than the last."""
        lines = self._across(read)
        for name, parts in self.plan.merged.items():
            if read.last and read.last[-1] in parts and name not in self.plan.blocks:
                lines *= math.prod(max(1, self.sizes.get(x, 1)) for x in parts[parts.index(read.last[-1]) + 1 :])
        return min(lines, float(self.target.warp_size))

    def _across(self, read: Read) -> float:
        """Return by how many elements those of a tile lie apart, where a product's loop goes along the last label element by element."""
        if not self.plan.products or len(read.last) != 1 or self.of(self.loaded, read.last[0]) > 1 or read.last[0] in self.count or read.tensor in self.plan.config.copies:
            return 1.0
        apart = 1.0
        for x, _ in reversed(read.labels):
            if self.step.get(x, 1) > 1:
                return apart
            apart *= max(1, self.sizes.get(x, 1))
        return 1.0

    def slides(self, read: Read) -> bool:
        """Return whether rows are read from any element on: ``A[c, x + r]``."""
        return not {*read.last} <= {x for x, _ in read.labels}

    def _packed(self, read: Read) -> bool:
        """Return whether a load of ``W[n, k / 2]`` reads each element of a tile once (codegen/transforms/tiles/packed_codes.py)."""
        tiles = [(self.step.get(x, 1), by) for x, by in read.labels if x in read.last and by > 1]
        return not self._is_streamed() and all(by % step == 0 or by <= PACKED and step / by >= UNITS for step, by in tiles)

    def _starts_within_sectors(self, read: Read, each: int) -> bool:
        """Return whether every second row begins in the middle of a sector; rows of other odd lengths count as short loads."""
        return len(read.labels) > 1 and len(read.last) == 1 and self.sizes.get(read.last[0], 1) * each % SECTOR == VECTOR

    def _vector(self, last: tuple[str, ...], each: int) -> float:
        """Return the bytes of one load, by the alignment of rows."""
        one = len(last) == 1 or last in self.plan.merged.values()
        return float(math.gcd(math.prod(self.sizes.get(x, 1) for x in last) * each, VECTOR)) if one else float(VECTOR)

    def _resident(self, rows: int, streamed: bool, tile_bytes: float, held_bytes: float, loads: float, addresses: float, live: float) -> tuple[int, float]:
        """Return (programs that a multiprocessor holds at once, registers asked for over those there are).

        ``loads``: registers of loads under way; ``addresses``: of elements that lie apart, each of which stays to be read or written again.
        """
        config, target = self.plan.config, self.target
        threads = target.warp_size * config.warps
        most = self._largest_result()
        if streamed:
            most = max(most, sum(self.elements(self.step, p.labels) for p, *_ in self.plan.products))
        each = (self._results_at_once() if rows and self.plan.chained else most) / threads
        room = 255.0
        if rows:
            operands = tile_bytes / self.itemsize / threads if self.itemsize > 2 else loads / threads
            operands += held_bytes / 4 / threads if self.plan.chained and not config.specialized else 0.0  # what the loop reads again stays
            registers, shared = 44 + each * (2 if self._promotes() else 1) + operands, config.stages * tile_bytes + held_bytes
        else:
            registers = 28 + each * live if streamed else BASE + each * self._values(most)
            shared = max(config.all_of("stages_of").values(), default=0) * tile_bytes
            room = registers if streamed else min(room, target.registers / threads)
        taken = registers if rows or streamed else registers + loads / threads
        held = min(WARPS // config.warps, int(target.registers / (min(taken, 255.0, room) * threads)), BLOCKS)
        if shared:
            held = min(held, int(target.shared_bytes * MULTIPROCESSOR / (shared + 1024)))
        return max(1, 1 if config.specialized else held), max(1.0, registers / 255 if rows or streamed else (registers + addresses / threads) / (SPILLING * room))

    def _largest_result(self) -> float:
        """Return the elements of the largest tile that the kernel computes, at least 1."""
        return max([1.0, *(self.elements(self.step, labels) for labels in self.plan.results)])

    def _results_at_once(self) -> float:
        """Return the elements of the products' results that a program of several holds at once: its sums, and those that it makes in each step, two at most."""
        written = {f.name for f in self.plan.writes}
        sums, inner = 0.0, [0.0, 0.0]
        for func, _ in self.plan.members:
            size = self.elements(self.step, func.labels) if func.products else 0.0
            if func is self.plan.root or func.name in written:
                sums += size
            else:
                inner.append(size)
        return sums + sum(sorted(inner)[-2:])

    def _is_looped(self, labels: tuple[str, ...]) -> bool:
        """Return whether a loop takes one tile after another along one of the labels."""
        return any(x not in self.plan.blocks and self.step.get(x, 1) < self.sizes.get(x, 1) for x in labels)

    def _values(self, most: float) -> float:
        """Return the registers for an element of a tile of ``most`` elements: values that are loaded for sums, or for all else where there are none, and accumulators of loops."""
        plan = self.plan
        summed = {r.tensor for f, _ in plan.members if f.reduced for r in f.reads}
        held = summed if any(a.read.tensor in summed for a in plan.accesses) else {a.read.tensor for a in plan.accesses}
        wide = {a.read.tensor for a in plan.accesses if a.read.tensor in held and 2 * self.elements(self.step, tuple([x for x, _ in a.read.labels])) >= most}
        carried = self._carried(most)
        operations = sum(special + other for labels, special, other, *_ in plan.arithmetic if 2 * self.elements(self.step, labels) >= most)
        sums = any(2 * self.elements(self.step, (*f.labels, *f.reduced)) >= most for f, _ in plan.members if f.reduced)
        if operations > MANY_OPERATIONS and not sums:
            return LIVE_OF_MANY
        fitted = VALUE + READ * len(wide) + CARRIED * carried
        return max(fitted, carried + len(wide) / 2) if self._sums_down(most) > FITTED else fitted

    def _carried(self, most: float) -> int:
        """Return the number of sums that a loop carries for each element of a tile of ``most``."""
        sums = [f for f, _ in self.plan.members if f.name not in self.plan.rescaled and self._is_looped(f.reduced)]
        return sum(2 * self.elements(self.step, (*f.labels, *f.reduced)) >= most for f in sums)

    def _sums_down(self, most: float) -> int:
        """Return the same of sums down columns, 0 of sums along rows."""
        return 0 if {*self.plan.root.reduced} & {x for a in self.plan.accesses for x in a.read.last} else self._carried(most)

    def _stored_singly(self) -> float:
        """Return the elements of a step that are stored one by one, as rows begin anywhere."""
        odd = (f for f in self.plan.writes if self._vector(f.labels[-1:], self.bytes_of(f.name)) < ASYNC and not self.plan.config.aligned)
        return sum(self.elements(self.step, f.labels) for f in odd)

    def _unique(self, read: Read, each: int) -> float:
        found = float(each)
        for x, divisor in read.labels:
            found *= max(1.0, self._reach(x) / divisor)
        return found

    def _reach(self, label: str) -> int:
        """Return the extent of a label as far as loops over it go: no place lies above the last one that it is compared with."""
        n = self.sizes.get(label, 1)
        above = [self.sizes[high] for low, high in self.plan.ordered if low == label and high in self.sizes]
        return min([n, *above]) if label not in self.count else n

    def _memory(self, reads: list[tuple[Access, int, float]], programs: int, at_once: int) -> float:
        """Return the bytes that all programs take from memory: each tensor once, and again where the L2 has dropped it."""
        covered, total = self._covered(at_once), 0.0
        keeps = self.target.l2_bytes * L2_KEEPS
        passes = sum([amount for a, _, amount in reads if not a.again]) * (programs if self.plan.apart else at_once)
        for access, each, amount in reads:
            read, wave = access.read, float(each)
            unique = self._unique(read, each)
            if access.again:
                total += unique * max(0.0, 1 - keeps / passes) if unique > keeps else 0.0
                continue
            if unique <= keeps:
                total += unique * (1.0 if self.plan.products else self._drops(read, at_once, passes / at_once))
                continue
            for x, divisor in read.labels:
                n = max(1.0, self._reach(x) / divisor)
                wave *= min(n, max(1.0, covered[x] * self.extent[x] / divisor)) if x in self.count else n
            if wave > self.target.l2_bytes:  # each iteration of the loops around it finds nothing of the one before
                wave *= self.times(access.around, access.whole)
            total += max(unique, min(wave * programs / at_once, amount * programs))
        return total

    def _drops(self, read: Read, at_once: int, each: float) -> float:
        """Return how often a tensor comes from memory because the L2 dropped it between blocks that read the same: programs move ``each`` bytes, and write about as many."""
        own, inner, times = {x for x, _ in read.labels}, 1.0, 1.0
        for label, group, _ in reversed(self.plan.order):
            count = self.count.get(label, 1)
            far = inner > at_once and 2 * each * inner > L2_KEEPS * self.target.l2_bytes
            times *= count if far and label not in own and not group else 1
            inner *= count
        return times

    def _covered(self, at_once: int) -> dict[str, float]:
        """Return how many blocks along each label the programs that run at once cover."""
        left, covered = float(at_once), dict.fromkeys(self.count, 1.0)
        for label, group, outer in reversed(self.plan.order):
            blocks = self.count.get(label, 1)
            blocks = max(1, -(-blocks // group)) if outer else min(group, blocks) if group else blocks
            took = min(left, blocks)
            covered[label] = covered.get(label, 1.0) * took
            left = max(1.0, left / took)
        for label in (x for x in self.plan.split if x not in self.plan.blocks):
            covered[label] = min(left, self.count.get(label, 1))
        return covered

    def _arithmetic(self) -> tuple[float, float]:
        heavy = light = 0.0
        for labels, special, other, around, whole, passes, paired, func in self.plan.arithmetic:
            elements = self.elements(self.filled, labels) * self.times(around, whole) * self.windows.evaluations(func) * (passes if passes > 1 and self._is_looped(labels) else 1)
            elements *= EXCHANGED if any(self.step.get(x, 1) > 1 for x in paired) else 1.0
            heavy, light = heavy + special * elements, light + other * elements
        return heavy, light

    def _multiplied(self) -> tuple[float, int, int]:
        total, rows, columns = 0.0, 0, 0
        for product, around, whole, sweeps in self.plan.products:
            total += 2.0 * self.elements(self.filled, product.labels) * self.times(around, whole) * sweeps
            own, other = self._side(product.rows), self._side(product.columns)
            if product.rows and product.columns and self._comes_later(product.rows[-1], product.columns[-1]):
                own, other = other, own  # the product comes out transposed
            rows, columns = min(rows or own, own), min(columns or other, other)
        return total, rows, columns

    def _side(self, labels: tuple[str, ...]) -> int:
        """Return the rows or columns of a tile; of one in parts, of each part on the average; of two that hold a whole extent, of the first."""
        held = {x: max(last_power_of_two(self.step[x]), UNITS) for x in self.halved & {*labels}}
        sizes = [held.get(x) or self.of(self.plan.tiles if x in self.plan.merged else self.step, x) for x in self._unmerged(labels)]
        return max(1, int(math.prod(sizes) / math.prod(max(1, len(binary_parts(int(n)))) for n in sizes)))

    def _is_streamed(self) -> bool:
        """Return whether the terms of all products are added up without matrix units, each by itself: the kernel only moves memory then."""
        held = HELD_BY_WARP * self.plan.config.warps
        return bool(self.plan.products) and all(self._is_ordinary(p) and self.elements(self.step, p.labels) <= held for p, *_ in self.plan.products)

    def _is_ordinary(self, product: Product) -> bool:
        """Return whether a product has no two matrices of whole rows: several products in one tile, or a side that is too short."""
        both = {*product.labels} - {*product.rows, *product.columns, *product.reduced} | {x for x in product.rows if x in self.plan.scattered}
        sides = [[n for x in self._unmerged(side) if (n := self.of(self.plan.tiles if x in self.plan.merged else self.step, x)) > 1] for side in (product.rows, product.columns, product.reduced)]
        return any(self.of(self.step, x) > 1 for x in both) or any(len(side) != 1 or side[0] < UNITS for side in sides)

    def _unmerged(self, side: tuple[str, ...]) -> list[str]:
        """Return the labels of a side, several that are one in its place."""
        name = {x: merged for merged, parts in self.plan.merged.items() for x in parts}
        return list(dict.fromkeys(name.get(x, x) for x in side))

    def _comes_later(self, label: str, other: str) -> bool:
        """Return whether the kernel's results have ``label`` to the right of ``other``."""
        labels = self.plan.root.labels
        return label in labels and other in labels and labels.index(label) > labels.index(other)

    def _steps(self) -> float:
        """Return the iterations of the longest nest of loops."""
        most = 1.0
        for labels, whole in self.plan.loops:
            own = self.times(whole=whole, around=())
            for x in labels:
                own *= max(1.0, self.of(self.filled, x) / max(1.0, self.of(self.step, x) * self.windows.steps(x)))
            most = max(most, own)
        return most
