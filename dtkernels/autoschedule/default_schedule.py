"""Derive the default schedule of any algorithm at any size: fuse, then choose tiles by the rules and the cost model.

The default schedule is where tuning starts and what runs where nothing was tuned. It depends on the form of the algorithm only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from ..codegen.analysis.product_types import InputTypes
from ..codegen.target import Target
from ..lang.algorithm import Algorithm
from ..lang.schedule import Bare, Primitive, Program, Schedule
from .accumulated_outputs import accumulated_placements, accumulated_tiles
from .cost.candidate_time import CandidateTime
from .cost.kernel_config import KernelConfig
from .fit_resources import can_be_lowered, fit_resources
from .fusion import fusion, stated
from .rules.registry import proposals as rule_proposals
from .stand_ins.blocked_dimensions import with_blocked_dimensions
from .stand_ins.joined_slices import stored_by_slices
from .stand_ins.merged_labels import with_merged_labels
from .stand_ins.rearranged_outputs import RearrangedOutputs
from .stand_ins.sliced_products import made_where_taken

NARROWED = 1.1  #: how much longer than predicted for its tiles a way may take with those that the GPU has room for; else the next ways may be faster


def default_schedule(
    algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target, in_order: bool = False
) -> Schedule:
    """Return a legal schedule for a prepared algorithm whose labels have ``sizes`` and whose inputs take ``itemsize`` bytes an element.

    Where inputs have several dtypes, tiles suit the operands of the product with the most work. Among ways to fuse, the first is taken
    unless another one is predicted to be well faster and keeps little more in memory.

    Where the estimate (resources.py) says that the GPU has no room for it, tiles are narrowed until it has. ``in_order``: sums have a fixed order.
    """
    if (found := _in_two(algorithm, outputs, sizes, itemsize, target, in_order)) is not None:
        return found
    slices = stored_by_slices(algorithm, outputs, lambda a, wanted: default_schedule(a, wanted, sizes, itemsize, target, in_order))
    if slices is not None and can_be_lowered(Program(algorithm, slices)):
        return slices
    found = _best(algorithm, outputs, sizes, itemsize, target, in_order)
    found = made_where_taken(algorithm, outputs, sizes, itemsize, target, found, lambda a: _best(a, outputs, sizes, itemsize, target, in_order))
    found = with_merged_labels(algorithm, outputs, sizes, itemsize, target, found, lambda a, n: default_schedule(a, outputs, n, itemsize, target, in_order))
    return with_blocked_dimensions(algorithm, outputs, sizes, itemsize, target, found, lambda a, types: default_schedule(a, outputs, sizes, types, target, in_order))


def _best(algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target, in_order: bool) -> Schedule:
    """Return the schedule of the way to fuse that is predicted to be the fastest, of those that memory and the GPU have room for."""
    f = fusion(algorithm, outputs, sizes, itemsize, target)
    ways = f.by_time(list(f.ways()))
    added = [] if in_order else f.adding_terms(ways[0])
    found: list[tuple[float, int, Schedule]] = []
    usual = [(f, way) for way in ways]
    faster = (*added, *f.finishing_sums(ways[0]), *f.sharing_sums(ways[0]), *f.storing_operands(ways[0]), *usual[:1])
    others = (part for tried in (f.storing_operands, lambda: usual[1:]) for part in tried())
    for g, way in chain(faster, others):
        if (schedule := g.scheduled(*way, itemsize)) is None:
            continue
        taken, share = g.time_of(schedule), g.share(way, 1.0, ways[0]) if found and g is f else 1.0
        found.append((taken / share if share else math.inf, len(found), schedule))
        if 0 in sizes.values() or g.moved.left_out or taken <= NARROWED * g.time(way):
            break
    return min(found)[-1] if found else next(schedules(algorithm, outputs, sizes, itemsize, target), f.moved.restored(Schedule(f.compiled)))


def _in_two(
    algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target, in_order: bool
) -> Schedule | None:
    """Return a schedule that stores a Func in another order by the kernel that computes it, and the rest as if it were an input; None where there is no such Func."""
    found = RearrangedOutputs.between(algorithm, outputs)
    if found is None:
        return None
    made, rest = found
    (stored,) = made.stands_for.values()
    first = made.restored(default_schedule(made.algorithm, made.outputs, sizes, itemsize, target, in_order))
    second = default_schedule(rest, outputs, sizes, itemsize, target, in_order)
    before = tuple(Bare(stored, "store") if p.name == "compile" else p for p in first.primitives)
    whole = Schedule((*before, *second.primitives))
    return whole if can_be_lowered(Program(algorithm, whole)) else None


def schedules(
    algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target
) -> Iterator[Schedule]:
    """Yield schedules that fuse in different ways, each legal; then those that store operands, last those that add up an output in another one's kernel."""
    f = fusion(algorithm, outputs, sizes, itemsize, target)
    first: tuple[tuple[Primitive, ...], dict[str, KernelConfig]] | None = None
    for fused, tiles in f.ways():
        first = first or (fused, tiles)
        if (found := f.scheduled(fused, tiles, itemsize)) is not None:
            yield found
    if first is not None:
        yield from (found for g, way in f.storing_operands() if (found := g.scheduled(*way, itemsize)) is not None)
        fused, tiles = first
        for p in accumulated_placements(f.shape, fused, {root: f._members(root, fused) for root in tiles}):
            special = None if p.ordered else f.warp_specialized_tiles(p.consumer, fused, tiles, f.compiled)
            for form in (tiles, {**tiles, p.consumer: special}) if special else (tiles,):
                tried = stated((*fused, p), accumulated_tiles(f.shape, p, form), f.compiled)
                if f.is_legal(tried):
                    yield f.moved.restored(fit_resources(Program(f.algorithm, tried), sizes, itemsize, target).schedule)


def proposals(
    algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int | InputTypes, target: Target
) -> Iterator[tuple[Schedule, str, list[KernelConfig]]]:
    """Yield, for every way to fuse and each of its kernels: its schedule, the kernel's Func, and what the rules propose for it: the usual first, then by predicted time."""
    f = fusion(algorithm, outputs, sizes, itemsize, target)
    for fused, tiles in f.ways():
        for root in tiles:
            members = f._members(root, fused)
            usual, *more = dict.fromkeys(rule_proposals(f.shape, root, members))
            yield f.moved.restored(stated(fused, tiles, f.compiled)), root, [usual, *sorted(more, key=CandidateTime(f.shape, root, members, f._placed(members, fused)).microseconds)]


