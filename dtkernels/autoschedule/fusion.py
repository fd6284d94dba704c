"""Choose which Funcs share a kernel: ways to fuse, timed by the cost model, and a legal schedule of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ..algebra.operand_types import rows_of
from ..codegen.analysis.product_types import InputTypes, cast_bytes, typed
from ..codegen.pipeline import lower, prelower
from ..codegen.powers_of_two import next_power_of_two
from ..codegen.target import Target
from ..codegen.transforms.warp_specialize.backend_select import backend
from ..lang import expr as ex
from ..lang.algorithm import Algorithm, with_operands
from ..lang.errors import DTError
from ..lang.parts.shared_sums import shared_sum_names
from ..lang.schedule import AccumulateAt, Bare, FuseAt, Primitive, Program, Schedule, host
from ..lang.schedule_checks import reduction_labels
from .accumulated_outputs import FINISHING, whole_sum_ways
from .added_terms import added_terms, problem_of_terms, share_of_additions, with_additions
from .cost.candidate_time import CandidateTime
from .cost.kernel_config import KernelConfig, joined
from .cost.kernel_plan import plans
from .cost.predicted_time import predicted_time
from .fit_resources import fit_registers, fit_resources
from .kept_sums import goes_over_again, with_kept_sums
from .memory_limit import MUCH_FASTER, limit_beside, pieces_within_limit, share_for_memory
from .output_fusion import fused_outputs, in_one_launch, in_rows, inputs_at, inputs_below_at, read_outputs, stores_redundantly
from .problem import WHOLE_SIDE, SchedulingProblem, Way
from .recomputation import (
    STORED,
    feeds_products,
    goes_over_windows,
    is_long_operand,
    is_made_again,
    is_number_of_few,
    recompute_is_costly,
    stored_for_windows,
)
from .rules.gemm_row_reduction import feeds_row_reduction, recomputes_product_rows, reduced_product_labels
from .rules.product_sides import NARROW
from .rules.reduction import ROW_LIMIT, starts_anywhere
from .rules.registry import kernel_config
from .rules.scan import scan_consumer, scan_host
from .rules.sibling_gemms import are_sibling_products, loads_sum_operands
from .rules.skinny_gemm_pair import shared_pass_tiles, shared_passes
from .rules.warp_specialized import warpgroup_tiles
from .stand_ins.rearranged_outputs import RearrangedOutputs
from .stored_elements import (
    feeds_another_output,
    is_compared_across_tiles,
    is_compared_for_equality,
    products_of_outputs,
    stored_elements,
    with_stored_outputs,
)
from .stored_operands import computed_operand_slowdown, operand_beside, stored_operands, sums_held_rows
from .summed_products import SummedProduct, beside, summed_product

FASTER = 0.9  #: the part of the usual way's predicted time below which another way to fuse is taken
SHARED = 0.985  #: the same for a way that computes less and stores no more than sums
SPECIALIZED = 1.05  #: where warp groups are predicted to take less than this part of other warps' time they were faster at 30 of 31 measured sizes of more than 64 columns
SEVERAL = 1.0  #: the same for kernels of three and four products, whose times the model knows from fewer sizes
HOST = 1.0  #: microseconds that the host takes for another launch
MOST_STORED = 4  #: Funcs that other kernels store for one way to fuse, at most
LITTLE = 1.1  #: times as many bytes that a way may write: 1 MB of correlations beside 32 MB of their operands
KEPT = 1 << 25  #: bytes of intermediate results that a faster way may write: they stay in the L2
OPTIONAL = ("descriptor", "persistent", "stage", "align", "tail", "stream")  #: primitives that a form of accesses may refuse


def fusion(algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target) -> Fusion:
    """Return the choice for an algorithm, or for the one that stands for it where outputs rearrange Funcs (rearranged_outputs.py)."""
    moved = RearrangedOutputs.of(algorithm, outputs)
    algorithm, width = typed(moved.algorithm, sizes, itemsize)
    return Fusion(SchedulingProblem(algorithm, moved.outputs, sizes, width, target, None if isinstance(itemsize, int) else itemsize), moved)


def stated(fused: tuple[Primitive, ...], kernels: dict[str, KernelConfig], compiled: tuple[Primitive, ...]) -> Schedule:
    """Return the schedule of kernels, given how they fuse."""
    return Schedule((*fused, *(p for k in joined(kernels.values()) for p in k.statements()), *compiled))


@dataclass
class Fusion:
    """What is computed in which kernel, and where in it.

    ``recomputing``: whether each kernel that reads a product of short sums makes it again, however small it is. That takes fewer launches, and no
    reads of rows that start anywhere. None: as such reads ask for. ``stored``: operands of products with kernels of their own (stored_operands.py).
    ``once``: products, their computed operands, and sums that several kernels read have kernels of their own: no kernel makes them again.
    ``moved``: the outputs that the kernels store in place of those of ``shape``.
    """

    shape: SchedulingProblem
    moved: RearrangedOutputs
    recomputing: bool | None = None
    stored: frozenset[str] = frozenset()
    once: bool = False
    rescues: tuple[tuple[Primitive, ...], ...] = ()  #: what is proposed for that alone

    @property
    def algorithm(self) -> Algorithm:
        return self.shape.algorithm

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.shape.outputs

    @property
    def compiled(self) -> tuple[Primitive, ...]:
        return tuple(Bare(o, "compile") for o in self.outputs)

    def ways(self) -> Iterator[Way]:
        """Yield ways to fuse, the usual one first, each with the choices for its kernels."""
        found = [read_outputs(self.shape, fused) for fused in self.placements()]
        self.rescues = () if found.count(self._making_once) > 1 else (self._making_once,)
        for fused in dict.fromkeys(found):
            tiles = {root: self.tiles(root, fused) for root in self.algorithm.needed_by(self.outputs) if root not in {p.func for p in fused if p.name == "fuse_at"}}
            if not stores_redundantly(self.shape, fused, tiles) and not self.may_never_store(fused):
                yield self._with_stored_elements((fused, tiles))

    def _with_stored_elements(self, way: Way) -> Way:
        """Return the way, with Funcs stored by kernels that read the same elements where that is predicted to be faster."""
        if 0 in self.sizes.values() or next(self._pieces(way), None):
            return way
        for _ in range(MOST_STORED):
            found = []
            for p in stored_elements(self.shape, list(way[1]), lambda root, fused=way[0]: self._members(root, fused)):  # type: ignore[misc]
                fused = (*way[0], *p)
                found.append((fused, {root: self.tiles(root, fused) if root == p[0].args[0] else c for root, c in way[1].items() if root != p[0].func}))
            best = min(found, key=self.time, default=way)
            if best is way or self.time(best) >= self.time(way):
                return way
            way = best
        return way

    def _pieces(self, way: Way) -> Iterator[tuple[Primitive, ...]]:
        """Yield the ``chunk`` statements that bring a way within the memory limit, and that each of its kernels can follow, best first."""
        found = pieces_within_limit(self.shape, tuple(way[1]), {root: self._members(root, way[0]) for root in way[1]})
        yield from (more for more in found if any(self.is_legal(form + Schedule(more), prelower) for form in self._forms(*way)))

    def _forms(self, fused: tuple[Primitive, ...], kernels: dict[str, KernelConfig]) -> tuple[Schedule, Schedule]:
        """Return the schedule of a way, and the one without what a form of accesses may refuse."""
        schedule = stated(fused, kernels, self.compiled)
        return schedule, Schedule(tuple(p for p in schedule.primitives if p.name not in OPTIONAL))

    def is_legal(self, schedule: Schedule, run: Callable[[Program], object] = lower) -> bool:
        """Return whether ``run`` accepts the kernels, and those that store the outputs that were asked for."""
        try:
            run(Program(self.algorithm, schedule))
            if self.moved.left_out:
                run(self.moved.program(self.algorithm, schedule))
        except DTError:
            return False
        return True

    def by_time(self, ways: list[Way]) -> list[Way]:
        """Sort ways to fuse: the usual one first, after any that is predicted to be well faster."""
        if len(ways) < 2 or 0 in self.sizes.values():
            return ways
        usual, faster = self.time(ways[0]), 1.0 if self.reads_twice(ways[0]) else FASTER
        timed = sorted((self.time(way) + HOST * max(0, len(way[1]) - len(ways[0][1])), i) for i, way in enumerate(ways[1:], 1))
        ahead = [i for t, i in timed if t < usual * self.share(ways[i], faster, ways[0])]
        return [ways[i] for i in (*ahead, *(i for i in range(len(ways)) if i not in ahead))]

    def share(self, way: Way, faster: float, usual: Way) -> float:
        """Return the part of the time of ``usual`` below which ``way`` is taken: ``faster`` where it keeps hardly more bytes, or what the L2 holds."""
        most = max(int(LITTLE * self.keeps(usual)), KEPT)
        share = faster if (kept := self.keeps(way)) <= most else share_for_memory(self.shape, most, self.keeps(way, long=False), kept)
        return min(share, MUCH_FASTER) if way[0] in self.rescues else share

    @cached_property
    def _making_once(self) -> tuple[Primitive, ...]:
        """The way to fuse that makes no product again: for programs whose other ways do so for single elements; attention's take less time than predicted."""
        return read_outputs(self.shape, replace(self, once=True)._fused(streaming=True, within=True))

    def reads_twice(self, way: Way) -> bool:
        """Return whether the kernel that goes over the most elements reads volumes twice, from memory the second time too, or by too few programs.

        Two kernels took 0.7 to 0.95 of the time of such a one on an H100.
        """
        root = max(way[1], key=lambda root: max(self._elements(reduction_labels(self.algorithm, m) + self.algorithm[m].labels) for m in self._members(root, way[0])))
        config, members = way[1][root], self._members(root, way[0])
        if not any(len(reduction_labels(self.algorithm, m)) > 1 for m in members) or any(map(self.shape.dots, members)):
            return False
        programs = self.shape.programs(dict(config.blocks)) * math.prod(n for _, n in config.split)
        again = [t for t, policy in config.evictions if policy == "reread"]
        held = sum(self.shape.elements(t) for t in again) * self.shape.itemsize * min(1.0, self.shape.target.multiprocessors / programs)
        return programs < self.shape.target.multiprocessors or held > self.shape.target.l2_bytes

    def time(self, way: Way) -> float:
        """Return the predicted microseconds of all kernels."""
        return self.time_of(stated(*way, self.compiled))

    def time_of(self, schedule: Schedule) -> float:
        return predicted_time(str(schedule), self.shape.known, self.sizes, self.shape.itemsize, self.shape.target)

    def sharing_sums(self, usual: Way) -> list[tuple[Fusion, Way]]:
        """Return the best way that computes each sum once that several sums share (lang/parts/shared_sums.py), if predicted to be well faster than ``usual``."""
        names = shared_sum_names(self.algorithm) if 0 not in self.sizes.values() else {}
        changed = with_operands(self.algorithm, names)
        g = replace(self, shape=replace(self.shape, algorithm=changed.limited_to(self.outputs)))
        ways = g.by_time(list(g.ways())) if names else []
        return [(g, way) for way in ways[:1] if g.time(way) < SHARED * self.time(usual)]

    def finishing_sums(self, usual: Way) -> list[tuple[Fusion, Way]]:
        """Return the best way that finishes an output in the kernel of another (accumulated_outputs.py), if predicted to be well faster than ``usual``."""
        if 0 in self.sizes.values():
            return []
        best = min(whole_sum_ways(self.shape), key=self.time, default=None)
        if best is None or self.time(best) >= FINISHING * self.time(usual):
            return []
        fitting = self.scheduled(*best, self.shape.types or self.shape.itemsize)  # where a GPU has less room, smaller tiles would be added up in memory
        return [] if fitting is None or any(plan.added for plan in plans(str(fitting), self.shape.known)) else [(self, best)]

    def adding_terms(self, usual: Way) -> list[tuple[Fusion, Way]]:
        """Return the way that adds the terms of sums to memory where their indices say (added_terms.py), if predicted to be well faster than ``usual``."""
        names = added_terms(self.shape) if 0 not in self.sizes.values() else {}
        if not names:
            return []
        whole, rest = problem_of_terms(self.shape, names)
        g, h = replace(self, shape=whole), replace(self, shape=rest)
        usable = [way for way in h.by_time(list(h.ways())) if names.keys() <= way[1].keys()]
        best = [min((with_additions(whole, names, way, named) for named in (False, True)), key=g.time) for way in usable[:1]]
        return [(g, way) for way in best if g.time(way) < share_of_additions(whole, names) * self.time(usual)]

    def storing_operands(self, usual: Way | None = None) -> list[tuple[Fusion, Way]]:
        """Return ways that compute operands of products in kernels of their own, if predicted to be well faster than any that is ``usual``, best first."""
        found: list[tuple[float, int, Fusion, Way]] = []
        for names in stored_operands(self.shape) if 0 not in self.sizes.values() else ():
            shape = replace(self.shape, algorithm=with_operands(self.algorithm, names))
            g = replace(self, shape=shape, stored=frozenset(names))
            if ways := g.by_time(list(g.ways())):
                found.append((g.time(ways[0]) * computed_operand_slowdown(shape), len(found), g, ways[0]))
        most = FASTER * self.time(usual) * computed_operand_slowdown(self.shape) if found and usual else math.inf
        return [(g, way) for time, _, g, way in sorted(found, key=lambda f: f[:2]) if time < most]

    def keeps(self, way: Way, long: bool = True) -> int:
        """Return the bytes of Funcs that are written for other kernels, in float32; without ``long``, of products of long sums only those beyond the memory limit that no pieces bring within it."""
        written = [root for root in way[1] if root not in self.outputs]
        products = [root for root in written if not long and any(self.shape.longest_sum(m) >= STORED for m in self._members(root, way[0]) if self.shape.dots(m))]
        limit = limit_beside(self.shape, products)
        within = not limit or sum(4 * self.shape.elements(root) for root in products) <= limit or not long and next(self._pieces(way), None) is not None
        return sum(4 * self.shape.elements(root) for root in written if not (within and root in products))

    def scheduled(self, fused: tuple[Primitive, ...], kernels: dict[str, KernelConfig], itemsize: int | InputTypes) -> Schedule | None:
        """Return the legal schedule of one way to fuse, within the memory limit and the room of the GPU; None if there is none."""
        tiles = dict(kernels)
        for root in kernels:
            if not any(isinstance(p, AccumulateAt) and p.consumer == root for p in fused):
                tiles[root] = self.warp_specialized_tiles(root, fused, tiles, self.compiled) or tiles[root]
        forms = self._forms(fused, tiles)
        for tried in (*(form + Schedule(more) for more in self._pieces((fused, kernels)) for form in forms), *forms):
            if self.is_legal(tried):
                fitting = fit_resources(Program(self.algorithm, tried), self.sizes, itemsize, self.shape.target)
                return self.moved.restored(fit_registers(fitting, self.sizes, itemsize, self.shape.target, self.time_of).schedule)
        return None

    @cached_property
    def scans(self) -> frozenset[str]:
        """The Funcs that are scans."""
        return frozenset(d.name for d in self.algorithm.definitions if isinstance(d.expr, ex.Scan))

    @property
    def sizes(self) -> dict[str, int]:
        return self.shape.sizes

    def placements(self):
        """Yield ways to fuse, best first: chains of reductions in one pass, in several passes, not at all."""
        if self.scans:  # where what reads it runs along with it, or its only reader does, or each in a kernel of its own, with what it is made from
            yield self._fused(streaming=True)
            yield self._fused(streaming=True, scanning=True)
            yield self._fused(streaming=False)
            yield ()
            return
        first = self._fused(streaming=True, within=True, passing=True)
        for streaming in (True, False) if len(self.outputs) > 1 else ():
            fused = self._fused(streaming, within=True, passing=True, rows=True)
            if self._own_kernels(fused) < self._own_kernels(first) and not self._writes_redundantly(fused):
                yield fused
        if products_of_outputs(self.shape):
            yield self._fused(streaming=True, within=True, passing=True, beside=True)
        yield first
        yield from in_one_launch(self.shape, first)
        yield self._fused(streaming=True, within=True, alone=True)
        yield self._fused(streaming=True, within=True, apart=True)
        yield from (replace(self, recomputing=again)._fused(streaming=True, within=True, passing=True) for again in (True, False))
        yield self._fused(streaming=True, within=True, storing=True)
        yield self._fused(streaming=True, within=True)
        if (summed := summed_product(self.shape)) and not all(self.algorithm[o].labels for o in self.outputs):
            yield self._beside(summed)
        yield self._fused(streaming=True)
        yield self._fused(streaming=True, within=True, ahead=True)
        yield with_kept_sums(self.shape, self._fused(streaming=True, within=True))
        yield self._fused(streaming=False)
        if any(feeds_row_reduction(self.shape, f) for f in self.algorithm.funcs if f not in self.outputs):
            yield self._fused(streaming=True, within=True, stored=True)
        if any(is_long_operand(self.shape, f) for f in self.algorithm.funcs):
            yield self._fused(streaming=True, within=True, operands=True)
        if any(map(self.shape.dots, self.algorithm.funcs)):
            yield self._making_once
        yield ()

    def _beside(self, product: SummedProduct) -> tuple[Primitive, ...]:  # one kernel makes the product and reduces its rows
        return beside(self.shape, product, lambda rest: replace(self, shape=rest)._fused(streaming=True, within=True, passing=True))

    def tiles(self, root: str, fused: tuple[Primitive, ...]) -> KernelConfig:
        """Return the choices for one kernel."""
        if any(p.primitive() in fused for p in shared_passes(self.shape)) and (found := shared_pass_tiles(self.shape, root)):
            return found
        members = self._members(root, fused)
        written = with_stored_outputs(self.shape, tuple(p.func for p in fused if p.name == "store" and p.func in members))
        shape = self.shape if written == self.outputs else replace(self.shape, outputs=written)
        return kernel_config(shape, root, members, self._placed(members, fused))

    def _placed(self, members: list[str], fused: tuple[Primitive, ...]) -> dict[str, tuple[str, str]]:
        """Return where a kernel's members are fused."""
        return {p.func: (str(p.args[0]), str(p.args[1])) for p in fused if p.func in members and p.name == "fuse_at"}

    def _members(self, root: str, fused: tuple[Primitive, ...]) -> list[str]:
        """Return the Funcs that the kernel of ``root`` computes."""
        members = [root]
        inside = {p.func for p in fused if p.name == "fuse_at"} - {p.func for p in fused if p.name == "store"} - set(self.outputs)
        for m in members:
            members += [p.func for p in fused if isinstance(p, FuseAt) and p.name == "fuse_at" and p.consumer == m and p.func not in members]
            again = [
                a.tensor for a in ex.accesses(self.algorithm[m].expr) if a.tensor in inside
            ]  # fused elsewhere, and computed here once more
            members += [f for f in dict.fromkeys(again) if f not in members]
        return members

    def warp_specialized_tiles(self, root: str, fused: tuple, tiles: dict[str, KernelConfig], compiled: tuple[Primitive, ...]) -> KernelConfig | None:
        """Return tiles for specialized warps if they are not predicted to be slower and the GPU's backend accepts the resulting kernel, else None."""
        members = self._members(root, fused)
        found = warpgroup_tiles(self.shape, root, members)
        if not found:
            return None
        time = CandidateTime(self.shape, root, members, self._placed(members, fused)).microseconds
        several = sum(len(self.shape.dots(m)) for m in members) > 2
        if time(found) > (SEVERAL if several else SPECIALIZED) * time(tiles[root]):
            return None
        try:
            kernels = lower(Program(self.algorithm, stated(fused, {**tiles, root: found}, compiled)))
        except DTError:
            return None
        return found if any(k.func == root and k.descriptors and backend(k, self.shape.target)[0] == "gluon" for k in kernels) else None

    def may_never_store(self, fused: tuple[Primitive, ...]) -> bool:
        """Return whether a Func is stored from inside loops of another, of which one may be empty: it would never be written."""
        return 0 in self.sizes.values() and any(p.name == "store" for p in fused)

    def _own_kernels(self, fused: tuple[Primitive, ...]) -> int:
        """Count the outputs that are not fused."""
        return len(set(self.outputs) - {p.func for p in fused if p.name == "fuse_at"})

    def _writes_redundantly(self, fused: tuple[Primitive, ...]) -> bool:
        """Return whether several programs of another output's kernel write an output, each for a block of a label that it lacks."""
        for output, root in ((o, host(o, Schedule(fused).fused())) for o in self.outputs):
            config, own = self.tiles(root, fused), self.algorithm[output].labels
            for label, size in config.blocks:
                parts = config.merges.get(label, (label,))
                if not {*parts} <= {*own} and self._elements(parts) > size:
                    return True
        return False

    def _fused(
        self, streaming: bool, within: bool = False, storing: bool = False, passing: bool = False, rows: bool = False, apart: bool = False, beside: bool = False,
        stored: bool = False, ahead: bool = False, operands: bool = False, alone: bool = False, scanning: bool = False,
    ) -> tuple[Primitive, ...]:
        """``beside``: outputs that are products of which other outputs are made in any way are computed where those are, as if they were none.
        ``within``: outputs that are products of which others are made are computed where those are, as if they were none.
        ``storing``: what several kernels read is computed in one of them, which stores it for the others, where it feeds a product there.
        ``ahead``: sums that are read along what they are sums of have kernels of their own, which run first and may be split over programs.
        ``operands``: operands of products that are made of products of long sums have kernels of their own.
        ``passing``: large operands are read once (skinny_gemm_pair.py).
        ``apart``: outputs are not computed in the kernels of others. ``alone``: sums are not computed in those of products.
        ``stored``: products whose rows are reduced have kernels of their own, with what is made of them element by element.
        ``rows``: outputs without products are computed where others are made from them, or from what they are made from, in rows held whole.
        ``scanning``: scans are computed in the kernels that read them, with the sums along them."""
        shared = shared_passes(self.shape) if passing else ()
        joined = {} if apart else fused_outputs(self.shape, partial(self._loads_sum_operands, alone=alone), rows) | {p.func: (p.host, p.loop) for p in shared if not p.cut}
        walked = {*self.scans, *(scan_consumer(self.shape, f) for f in self.scans)}  # kernels that run along a label
        joined = {o: place for o, place in joined.items() if not {o, place[0]} & walked}
        within = within and 0 not in self.sizes.values()
        if beside:
            joined = {o: place for o, place in joined.items() if not {o, place[0]} & products_of_outputs(self.shape)}
        inner = {o for o in self.outputs if within and o not in joined and self.shape.dots(o) and feeds_another_output(self.shape, o)}
        used = {o for o in self.outputs if rows and within and o not in joined} - inner
        inner |= used | (products_of_outputs(self.shape) if beside and within else set())
        hosts: dict[str, set[str]] = {o: {joined.get(o, (o, ""))[0]} for o in self.outputs}
        found: list[Primitive] = [FuseAt(o, "fuse_at", place) for o, place in joined.items()]
        found += [p.primitive() for p in shared if p.cut]
        for d in reversed(self.algorithm.definitions):
            if d.name in self.scans and streaming and (kernels := scan_host(self.shape, d.name, hosts, scanning)):
                hosts[d.name] = {*kernels}
                found.append(FuseAt(d.name, "fuse_at", (kernels[0], self.algorithm[d.name].expr.label)))  # type: ignore[attr-defined]
                continue
            if d.name in self.outputs and d.name not in inner or d.name in self.scans or d.name in {p.func for p in shared if p.cut}:
                hosts.setdefault(d.name, {d.name})
                continue
            users = [u.name for u in self.algorithm.definitions if any(a.tensor == d.name for a in ex.accesses(u.expr))]
            roots = set().union(*(hosts.get(u, {u}) for u in users))
            if d.name in used and (len(roots) != 1 or d.name in roots or not in_rows(self.shape, d.name, *roots)):
                continue
            if (operand := operand_beside(self.shape, d.name, self.stored)) and roots != {operand}:
                found, hosts[d.name] = [*found, Bare(d.name, "store"), FuseAt(d.name, "fuse_at", (operand, d.labels[-1]))], {operand}
                continue
            first = next(f for f in self.algorithm.needed_by(self.outputs) if f in roots)
            again = (len(roots) == 1 or self._is_recomputed(d.name)) and not self._is_reread_operand(d.name, roots) and not is_compared_across_tiles(self.shape, d.name, roots)
            apart_by_way = d.name in self.stored or stored and feeds_row_reduction(self.shape, d.name) or ahead and goes_over_again(self.shape, d.name, roots)
            apart_by_way = apart_by_way or stored_for_windows(self.shape, d.name, roots)
            apart_by_way = apart_by_way or len(roots) > 1 and self._rounds_stored_product(d.name) or operands and is_long_operand(self.shape, d.name)
            apart_by_way = apart_by_way or self.once and is_made_again(self.shape, d.name, roots & {*users})
            feeds_scan = self._scans_in(roots, found) and reduction_labels(self.algorithm, d.name)  # a scan takes sums from memory, or from before its loop
            place = self._fusion_point(d.name, first, streaming and not feeds_scan) if again and not apart_by_way and (scanning or not feeds_scan) else None
            hosts[d.name] = roots if place else {d.name}
            if not place and streaming and (root := self._row_reduction_to_join(d.name, roots, hosts)):
                hosts[d.name] = {root}
                found += [Bare(d.name, "store"), FuseAt(d.name, "fuse_at", (root, reduction_labels(self.algorithm, root)[-1]))]
            elif not place and storing and (root := self._consumer_to_join(d.name, roots)):
                hosts[d.name], common = {root}, [label for label in self.algorithm[root].labels if label in d.labels]
                found += [Bare(d.name, "store"), FuseAt(d.name, "fuse_at", (root, common[-1]))]
            elif place:
                found.append(FuseAt(d.name, "fuse_at", self._share_reduction_pass(d.name, place, found, hosts)))
        return (*reversed(found), *self._stored_sums({p.func for p in found}))

    def _scans_in(self, roots: set[str], found: list[Primitive]) -> bool:
        """Return whether a kernel of ``roots`` is a scan, or has one fused into it."""
        fused = {p.func for p in found if isinstance(p, FuseAt) and p.name == "fuse_at" and p.consumer in roots}
        return bool(self.scans & (roots | fused))

    def _loads_sum_operands(self, output: str, root: str, alone: bool = False) -> bool:
        if self.shape.dots(output) or not self.shape.dots(root):
            return True
        if alone or any(goes_over_windows(self.shape, dot) for dot in self.shape.dots(root)):
            return False
        return loads_sum_operands(self.shape, output, [f for f in self.algorithm.needed_by((root,)) if not self._is_reread_operand(f, {root})])

    def _stored_sums(self, fused: set[str]) -> tuple[Primitive, ...]:
        """Fuse and store sums that a later kernel reads and that share the loop of an output, or of another sum with a kernel of its own."""
        found: list[Primitive] = []
        for f in self.algorithm.needed_by(self.outputs):
            hosts = {p.consumer for p in found if isinstance(p, FuseAt)}
            if f in {*fused, *hosts, *self.outputs, *self.scans} or self.shape.dots(f):
                continue
            reduced, own = reduction_labels(self.algorithm, f), self.algorithm[f].labels
            placed = {*fused, f, *self.scans, *(p.func for p in found)}
            for o in (*self.outputs, *(g for g in self.algorithm.needed_by(self.outputs) if g not in self.outputs and not self.shape.dots(g))):
                same = o not in placed and reduced and reduction_labels(self.algorithm, o) == reduced and self.algorithm[o].labels == own
                both, others = {*own, *reduced}, {*self.algorithm.needed_by((f,))} - {f}
                read = [{a.tensor for a in ex.accesses(self.algorithm[g].expr) if both <= ex.free_labels(a)} for g in (f, o)]
                if same and self._precedes_readers(o, f) and read[0] & read[1] and others < {*self.algorithm.needed_by((o,))}:
                    found += [FuseAt(f, "fuse_at", (o, reduced[-1])), Bare(f, "store")]
                    break
        return tuple(found)

    def _precedes_readers(self, host: str, func: str) -> bool:
        """Return whether the kernel of ``host`` comes before all kernels that read ``func``."""
        order = self.algorithm.needed_by(self.outputs)
        users = [u for u in order if any(a.tensor == func for a in ex.accesses(self.algorithm[u].expr))]
        return all(order.index(host) < order.index(u) for u in users)

    def _consumer_to_join(self, func: str, roots: set[str]) -> str | None:
        """Return the first of ``roots`` to run that reads the product ``func`` as a narrow operand, if fusing it there pays.

        The two then overlap and take no longer than the reads and writes. Blocks of rows alone must keep the GPU busy.
        """
        order = [f for f in self.algorithm.needed_by(self.outputs) if f in roots]
        if len(order) < 2 or not self.shape.holds_chain(func, order[0]) or is_compared_for_equality(self.algorithm, func):
            return None
        carried = [label for label in reduction_labels(self.algorithm, order[0]) if label in self.algorithm[func].labels]
        shared = [label for label in self.algorithm[order[0]].labels if label in self.algorithm[func].labels]
        narrow = all(self.sizes[label] <= NARROW // 2 for label in carried) and self.shape.row_stride(func) % 16 == 0
        blocks = self._elements(tuple(shared)) // NARROW
        return order[0] if shared and narrow and 2 * blocks >= self.shape.target.multiprocessors else None

    # -- what is fused where ------------------------------------------------------------------------------------------

    def _is_reread_operand(self, func: str, roots: set[str]) -> bool:
        """Return whether large products reread the operand ``func`` for each of their blocks; it then gets a kernel of its own.

        ``func`` is made of inputs and sums, or of products that other kernels make and sums of its own rows.
        """
        reduced = [f for f in self.algorithm.needed_by((func,)) if reduction_labels(self.algorithm, f)]
        made = [f for f in reduced if self.shape.dots(f)]
        if func in reduced or made and not all(f in made or sums_held_rows(self.shape, f, func) for f in reduced):
            return False
        for root in roots & set(self.algorithm.funcs):
            elsewhere = all(recompute_is_costly(self.shape, f, root) and not self.shape.underfills_gpu(f, root) for f in made)
            if elsewhere and any(self._rereads(f, func) for f in self.algorithm.needed_by((root,))):
                return True
        return False

    def _rereads(self, product: str, func: str) -> bool:
        """Return whether ``func`` is an operand of ``product``, which reads it again for each block of a long side."""
        taken = any(rows.tensor == func for dot in self.shape.dots(product) for s in (dot.left, dot.right) if (rows := rows_of(s)))
        return taken and any(self.sizes[label] > WHOLE_SIDE for label in self.algorithm[product].labels if label not in self.algorithm[func].labels)

    def _share_reduction_pass(self, func: str, place: tuple[str, str], found: list[Primitive], hosts: dict[str, set[str]]) -> tuple[str, str]:
        """Fuse ``func`` into the loop of the reduction that uses it, if both then share one pass over a row, or a volume, too large to hold."""
        reduced = reduction_labels(self.algorithm, func)
        if sibling := next((p.func for p in found if p.args == place and are_sibling_products(self.shape, func, p.func)), None):
            return (sibling, reduced[-1])
        longest, held = max((self.sizes[r] for r in reduced), default=0), math.prod(next_power_of_two(self.sizes[r]) for r in reduced)
        loose = any(starts_anywhere(self.shape, r, list(ex.accesses(self.algorithm[func].expr))) for r in reduced)
        most = ROW_LIMIT // 2 if loose else ROW_LIMIT
        if self.shape.dots(func) or (longest <= WHOLE_SIDE if self._reduces_product_rows(func, hosts, place[0]) else held <= most):
            return place
        for user in (p.func for p in found if p.args == place and self.shape.share_iteration_space(func, p.func)):
            if any(a.tensor == func for a in ex.accesses(self.algorithm[user].expr)) or self._reads_beside(func, user):
                return (user, reduced[-1])
        return place

    def _reads_beside(self, func: str, user: str) -> bool:
        """Return whether two sums over the same elements of an input do not wait for each other: one kernel of parts then makes both."""
        both = (*self.algorithm[func].labels, *reduction_labels(self.algorithm, func))
        waits = func in self.algorithm.needed_by((user,)) or any(map(self.shape.dots, (func, user)))
        return not waits and bool(inputs_below_at(self.shape, func, both) & inputs_below_at(self.shape, user, both))

    def _needs_own_row_reduction(self, func: str, root: str) -> bool:
        """Return whether ``func`` is faster in a kernel of its own because rows of a product are reduced.

        Either ``func`` reduces them, or it is the stored product.
        """
        products = [f for f in self.algorithm.funcs if self.shape.dots(f)]
        if func in products and not self._is_recomputed(func):
            return any(recomputes_product_rows(self.shape, f, root, (func,)) for f in self.algorithm.needed_by((root,)) if f != root)
        return recomputes_product_rows(self.shape, func, root, [f for f in products if self._is_recomputed(f)])

    def _row_reduction_to_join(self, func: str, roots: set[str], hosts: dict[str, set[str]]) -> str | None:
        """Return the first of ``roots`` to run that reduces the same rows: of an input, of a product that is recomputed wherever it is read, or of one that is stored."""
        order = [f for f in self.algorithm.needed_by(self.outputs) if f in roots]
        same = self.shape.share_iteration_space(func, order[0]) and any(a.tensor == func for a in ex.accesses(self.algorithm[order[0]].expr))
        both = (*self.algorithm[func].labels, *reduction_labels(self.algorithm, func))
        read = inputs_at(self.shape, func, both) & inputs_at(self.shape, order[0], both) and not any(map(self.shape.dots, (func, order[0])))
        return order[0] if same and (read or self._reduces_product_rows(func, hosts, order[0]) or self._read_one_product(func, order[0])) else None

    def _rounds_stored_product(self, func: str) -> bool:
        """Return whether ``func`` is a product in fewer bytes, which others read: it is stored instead of the product."""
        e = self.algorithm[func].expr
        made = e.arg.tensor if isinstance(e, ex.Cast) and isinstance(e.arg, ex.Access) else ""
        return made in self.algorithm.funcs and bool(self.shape.dots(made)) and cast_bytes(self.algorithm, func) < 4 and not self._is_recomputed(made)

    def _read_one_product(self, func: str, other: str) -> bool:
        """Return whether both read one product that has a kernel of its own, or what that kernel makes of it."""
        read = [{a.tensor for a in ex.accesses(self.algorithm[f].expr)} & {*self.algorithm.funcs} for f in (func, other)]
        made = [f for t in read[0] & read[1] for f in self.algorithm.needed_by((t,)) if self.shape.dots(f)]
        return bool(made) and not any(map(self._is_recomputed, made))

    def _reduces_product_rows(self, func: str, hosts: dict[str, set[str]], root: str) -> bool:
        """Return whether ``func`` reduces rows of a product that is computed where it is read: in ``root`` or elsewhere."""

        def readers(made: str) -> set[str]:
            """Return the Funcs that read ``made``, or what is made of it element by element and has no place yet."""
            users = {d.name for d in self.algorithm.definitions if any(a.tensor == made for a in ex.accesses(d.expr))}
            through = {u for u in users if u not in hosts and u != func and not reduction_labels(self.algorithm, u)}
            return (users - through).union(*map(readers, through))

        def here(product: str) -> bool:
            return self._is_recomputed(product) or all(hosts.get(u) == {root} for u in readers(product) if u != func)

        return any(reduced_product_labels(self.shape, func, f) and here(f) for f in self.algorithm.needed_by((func,)))

    def _is_recomputed(self, func: str) -> bool:
        """Return whether several kernels each compute ``func``: it is cheap, or larger than its inputs."""
        if not reduction_labels(self.algorithm, func):
            return True
        if self.once:
            return False
        if feeds_products(self.shape, func) and (self._is_unaligned(func) if self.recomputing is None else self.recomputing):
            return True
        long = max((self._elements(dot.labels) for dot in self.shape.dots(func)), default=0) >= STORED
        return self._elements(self.algorithm[func].labels) > (8 if long else 2) * self.shape.largest_input

    def _is_unaligned(self, func: str) -> bool:
        """Return whether rows of ``func`` in 16 bits start anywhere.

        Each element is loaded by itself then, and what is loaded ahead lies in registers: on an H100 attention's gradients of 247 keys took 695 us so.
        """
        return self.shape.itemsize == 2 and self.shape.row_stride(func) % 8 != 0

    def _elements(self, labels: tuple[str | None, ...]) -> int:
        return math.prod(self.sizes.get(label, 1) if label else 1 for label in labels)

    def _fusion_point(self, func: str, root: str, streaming: bool) -> tuple[str, str] | None:
        own, reduced = self.algorithm[func].labels, reduction_labels(self.algorithm, func)
        outer, inner = self.algorithm[root].labels, reduction_labels(self.algorithm, root)
        shared = [label for label in outer if label in own]
        if recompute_is_costly(self.shape, func, root) or self._needs_own_row_reduction(func, root) or reduced and not outer:
            return None  # a root without labels is one program
        if streaming and reduced and set(reduced) == set(inner) and set(own) <= set(outer):
            return (root, inner[-1])
        carried = [label for label in inner if label in own]
        if carried and not self.shape.holds_chain(func, root):
            return (root, carried[-1])
        return (root, shared[-1]) if shared else (root, outer[-1]) if is_number_of_few(self.shape, func, root) else None
