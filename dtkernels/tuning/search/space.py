"""Span the space of one kernel's schedules: its dimensions, the values of each, and draws from all of it.

A step sets one dimension to any of its other values: a tile, the warps, the parts of a split, the order of the blocks. Few steps give
a mutation, many a draw from anywhere in the space.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ...autoschedule.rules.candidates.two_tiles import fits_two_tiles
from ...autoschedule.rules.reduction import reread
from ...codegen.powers_of_two import next_power_of_two
from ...lang import expr as ex
from ...lang.algorithm import Algorithm, with_operands
from ...lang.parser import parse_schedule
from ...lang.schedule import (
    SHARES,
    AccumulateAt,
    Approximate,
    Argument,
    Bare,
    Evict,
    Grouped,
    Map,
    Named,
    Names,
    Number,
    Primitive,
    Schedule,
    Share,
    Sized,
    Sizes,
    SpecializeWarps,
    Stage,
)
from ...lang.schedule_checks import reduction_labels
from .candidates import KernelCandidate

MOST_WARPS, MOST_STAGES, SHORTEST_LOOP, LARGEST_TILE = 32, 6, 1024, 256
PARTS = (2, 3, 4, 6, 8, 12, 16, 32, 64, 128)  #: of a split


@dataclass(frozen=True)
class Tiling:
    """The statements of a candidate by kind. ``rest`` are those that no step changes."""

    root: str
    block: dict[str, int] = field(default_factory=dict)
    tile: dict[str, int] = field(default_factory=dict)
    split: dict[str, int] = field(default_factory=dict)
    order: tuple[str | Grouped, ...] = ()
    persistent: bool = False
    descriptor: tuple[str, ...] = ()
    specialized: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 3
    rest: tuple[Primitive, ...] = ()

    @staticmethod
    @lru_cache(maxsize=16384)
    def of(plan: KernelCandidate) -> Tiling:
        """Parse a candidate."""
        schedule: Schedule = parse_schedule(plan.tiles)
        known = ("block", "tensorize", "split", "map", "persistent", "descriptor", "specialize_warps", "num_warps", "num_stages")
        apart = split_sums(plan) | stored_operands(plan)
        funcs = tuple(dict.fromkeys(p.func for p in schedule.primitives if p.func not in apart))
        tile = {k: v for f in funcs for k, v in schedule.sizes(f, "tensorize").items()}
        split = {k: v for f in funcs for k, v in schedule.sizes(f, "split").items()}
        mine = [p for p in schedule.primitives if p.func not in apart]
        maps = [p.order for p in mine if isinstance(p, Map)]
        return Tiling(
            plan.root,
            schedule.sizes(plan.root, "block"),
            tile,
            split,
            maps[-1] if maps else (),
            any(p.name == "persistent" for p in mine),
            tuple(t for p in mine if isinstance(p, Names) and p.name == "descriptor" for t in p.names),
            tuple(p.label for p in mine if isinstance(p, SpecializeWarps)),
            schedule.number(plan.root, "num_warps") or 4,
            schedule.number(plan.root, "num_stages") or 3,
            tuple(p for p in schedule.primitives if p.name not in known or p.func in apart),
        )

    def text(self) -> str:
        """Return the statements."""
        found: list[Primitive] = []

        def say(name: str, args: tuple[Argument, ...]) -> None:
            found.append(Primitive(self.root, name, args))

        if self.block:
            say("block", tuple(Sized(k, v) for k, v in self.block.items()))
        if self.tile:
            say("tensorize", tuple(Sized(k, v) for k, v in self.tile.items()))
        if self.order:
            say("map", self.order)
        if self.split:
            say("split", tuple(Sized(k, v) for k, v in self.split.items()))
        if self.persistent:
            say("persistent", ())
        if self.descriptor:
            say("descriptor", self.descriptor)
        if self.specialized:
            say("specialize_warps", self.specialized)
        fits = all(a.size <= self.block.get(a.label, a.size) for p in self.rest if isinstance(p, Sizes) and p.name == "tail" for a in p.sizes)
        left_out = ("num_warps", "num_stages") + (() if self.persistent and self.descriptor and not self.split and fits else ("tail", "stream"))
        left_out += () if self.persistent and self.descriptor and self.specialized and self.warps == 8 else ("ping_pong",)
        before = [p for p in self.rest if p.name not in left_out or p.func != self.root and p.name not in ("tail", "stream")]
        return "\n".join(map(str, (*found, *before, Number(self.root, "num_warps", (self.warps,)), Number(self.root, "num_stages", (self.stages,)))))


@dataclass(frozen=True)
class Surroundings:
    """Facts about the kernel that steps need: its labels, those it reduces, its inputs, the sizes."""

    algorithm: Algorithm
    members: tuple[str, ...]
    sizes: dict[str, int]
    products: int
    tensors: tuple[str, ...]
    tma: bool
    exponentials: bool = False
    wide: bool = False  #: float32
    ordered: tuple[str, ...] = ()  #: labels of whose blocks each makes a part of a sum that is added up in a fixed order

    @staticmethod
    def of(algorithm: Algorithm, plan: KernelCandidate, sizes: dict[str, int], tma: bool, wide: bool = False) -> Surroundings:
        """Collect them for the kernel of ``plan``."""
        algorithm = with_operands(algorithm, stored_operands(plan))
        fused = parse_schedule(plan.fused).fused()
        members = [plan.root]
        for m in members:
            members += [g for g, (host, _) in fused.items() if host == m and g not in members]
            members += [a.tensor for a in ex.accesses(algorithm[m].expr) if a.tensor in fused and a.tensor not in members]
        nodes = [n for m in members for n in algorithm[m].expr.walk()]
        dots = [n for n in nodes if isinstance(n, ex.Dot)]
        read = [a.tensor for n in dots for a in ex.accesses(n) if a.tensor in algorithm.inputs or a.tensor not in members]
        exponentials = any(isinstance(n, ex.Call) and n.fn == "exp" for n in nodes)
        tensors = tuple(dict.fromkeys((*read, plan.root)))
        return Surroundings(algorithm, tuple(members), sizes, len(dots), tensors, tma, exponentials, wide, _ordered(algorithm, plan))

    def loose(self) -> tuple[str, ...]:
        """Return the inputs among the operands whose rows do not all start at multiples of 16 bytes."""
        labels = {x: self.algorithm.plain_labels(x)[-1:] for x in self.tensors if x in self.algorithm.inputs}
        return tuple(x for x, last in labels.items() if last and last[0] and self.sizes.get(last[0], 0) % (4 if self.wide else 8))

    @property
    def product(self) -> bool:
        """Return whether the kernel uses tensor cores."""
        return self.products > 0

    def looped(self, tiling: Tiling) -> list[str]:
        """Return labels that the kernel loops over in tiles and that are not labels of its output."""
        own = self.algorithm[tiling.root].labels
        return [k for k, v in tiling.tile.items() if k not in own and v and self.sizes.get(k, 0) > v]


def _ordered(algorithm: Algorithm, plan: KernelCandidate) -> tuple[str, ...]:
    """Return the labels that sums run over which the kernel of ``plan`` adds up in a fixed order."""
    sums = [p.func for p in parse_schedule(plan.fused).primitives if isinstance(p, AccumulateAt) and p.ordered and p.consumer == plan.root]
    return tuple(dict.fromkeys(x for f in sums for x in reduction_labels(algorithm, f)))


def split_sums(plan: KernelCandidate) -> set[str]:
    """Return Funcs whose sums this kernel makes, in parts or by additions, and another one finishes: no step changes their statements."""
    return {p.func for p in parse_schedule(plan.fused).primitives if p.name in ("parts_at", "accumulate_at")}


@lru_cache(maxsize=16384)
def stored_operands(plan: KernelCandidate) -> frozenset[str]:
    """Return the operands of its products that a kernel of their own computes first, with what is fused into that: no step changes their statements."""
    hosts = {f: host for f, (host, _) in parse_schedule(plan.fused).fused().items()}
    found = set()
    for func in parse_schedule(plan.tiles).subjects() - {plan.root}:
        root = func
        while root in hosts:
            root = hosts[root]
        found |= {func} if root != plan.root else set()
    return frozenset(found)


def drawn(plan: KernelCandidate, around: Surroundings, steps: int, rng: random.Random) -> KernelCandidate:
    """Return a candidate some random steps away from ``plan``; it may be illegal."""
    t = Tiling.of(plan)
    for _ in range(steps):
        found = dimensions(t, around)
        t = replace(t, **rng.choice(rng.choice(found))) if found else t
    return KernelCandidate(plan.fused, plan.root, t.text())


def neighbours(plan: KernelCandidate, around: Surroundings) -> list[KernelCandidate]:
    """Return every candidate that differs in one dimension, each once; not all of them are legal."""
    t = Tiling.of(plan)
    texts = dict.fromkeys(replace(t, **change).text() for values in dimensions(t, around) for change in values)
    return [KernelCandidate(plan.fused, plan.root, text) for text in texts if text != t.text()]


def dimensions(t: Tiling, around: Surroundings) -> list[list[dict[str, Any]]]:
    """Return, for each dimension of the space around ``t``, what each of its values changes."""
    every = (_tiles, _two_tiles, _launch, _splits, _blocked_sums, _parts, _program_orders, _rows, _prefetching, _descriptors, _single, _last_wave, _shared_exponentials,
             _split_products, _eviction_hints)  # fmt: skip
    return [values for dimension in every for values in dimension(t, around) if values]


Dimensions = Iterator[list[dict[str, Any]]]  #: what each value of each dimension of a kind changes


def _tiles(t: Tiling, around: Surroundings) -> Dimensions:
    for label, now in t.tile.items():
        size = around.sizes.get(label, 1)
        if now == 0 and (around.product or size <= SHORTEST_LOOP):
            continue
        smallest, whole = 16 if around.product and now >= 16 else 1, next_power_of_two(size)
        largest = min(whole, max(LARGEST_TILE, now)) if around.product else whole
        yield [_resized(t, around, label, 1 << i) for i in range(smallest.bit_length() - 1, largest.bit_length())]


def _resized(t: Tiling, around: Surroundings, label: str, new: int) -> dict[str, Any]:
    """Return the change to a tile of ``new`` elements, and its block if the two were equal or the block would be smaller."""
    now, size = t.tile[label], around.sizes.get(label, 1)
    if label in t.block:
        block = new if t.block[label] in (now, next_power_of_two(size)) else max(new, t.block[label])
        return dict(tile={**t.tile, label: new}, block={**t.block, label: block})
    if new >= size and label not in around.algorithm[t.root].labels and not around.product:
        new = 0
    return dict(tile={**t.tile, label: new})


def _launch(t: Tiling, around: Surroundings) -> Dimensions:
    most = 16 if around.product else MOST_WARPS
    yield [dict(warps=1 << i) for i in range(most.bit_length())]
    if around.product or around.looped(t):
        yield [dict(stages=n) for n in range(1, MOST_STAGES + 1)]


def _splits(t: Tiling, around: Surroundings) -> Dimensions:
    """Vary the number of programs that share a reduction (split-K)."""
    for label in around.looped(t) or list(t.split):
        rest = {k: v for k, v in t.split.items() if k != label}
        most = around.sizes.get(label, 1) // (2 * max(1, t.tile.get(label, 1)))
        yield [dict(split=rest), *(dict(split={**rest, label: n}) for n in PARTS if n <= most)]


def _blocked_sums(t: Tiling, around: Surroundings) -> Dimensions:
    """Vary whether each step of a reduction is a program of its own."""
    for label in around.looped(t):
        rest = {k: v for k, v in t.block.items() if k != label}
        yield [dict(block=rest), dict(block={**rest, label: t.tile[label]}, split={})]


def _parts(t: Tiling, around: Surroundings) -> Dimensions:
    """Vary the tiles that a block adds to its part of a sum in a fixed order, one after another."""
    for label in (x for x in around.ordered if x in t.block and t.tile.get(x)):
        blocks = [t.tile[label] << i for i in range(8) if t.tile[label] << i < 2 * around.sizes.get(label, 1)]
        yield [dict(block={**t.block, label: n}) for n in blocks]


def _program_orders(t: Tiling, around: Surroundings) -> Dimensions:
    """Vary the order of the blocks, and whether programs are persistent."""
    groups = [a for a in t.order if isinstance(a, Grouped)]
    if groups:
        yield [dict(order=tuple(replace(a, size=size) if a == groups[0] else a for a in t.order)) for size in (4, 8, 16)]
    elif around.product and len(t.block) >= 2:
        row, column = _row_and_column_labels(t, around)
        if row and column:
            rest = tuple(label for label in t.block if label not in (row, column))
            inner = next(n for i in range(1, 99) if (n := f"{row}{i}") not in around.algorithm.labels)
            yield [dict(order=(*rest, Grouped(row, inner, size), column, inner)) for size in (4, 8, 16)]
    yield [dict(persistent=not t.persistent)]


def _rows(t: Tiling, around: Surroundings) -> Dimensions:
    """Vary the rows that a program takes one after another."""
    for label in t.block if not around.product else ():
        if t.tile.get(label) == 1:
            yield [dict(block={**t.block, label: 1 << i}) for i in range(7) if 1 << i <= around.sizes.get(label, 1)]


def _prefetching(t: Tiling, around: Surroundings) -> Dimensions:
    """Make programs persistent and prefetch their next blocks, with this number of stages."""
    others = tuple(p for p in t.rest if p.name != "stages")
    label = next((label for label, size in t.block.items() if size == t.tile.get(label) and around.sizes.get(label, 1) >= 256), None)
    if not around.product and (label is not None or len(others) < len(t.rest)):
        ahead = (Sizes(t.root, "stages", (Sized(label, stages),)) for stages in (2, 3, 4) if label is not None)
        yield [dict(rest=others), *(dict(persistent=True, rest=(*others, p)) for p in ahead)]


def _shared_exponentials(t: Tiling, around: Surroundings) -> Dimensions:
    """Compute a share of the exponentials by multiply-adds, next to products that take as long."""
    now = [p for p in t.rest if p.func == t.root and isinstance(p, Approximate) and any(isinstance(a, Share) for a in p.functions)]
    if now:
        yield [dict(rest=tuple(p for p in t.rest if p not in now))]
    elif around.products > 1 and around.exponentials:
        yield [dict(rest=(*t.rest, Approximate(t.root, "approximate", (Share("exp", *SHARES[0]),))))]


def _split_products(t: Tiling, around: Surroundings) -> Dimensions:
    """Make float32 products of several in TF32."""
    now = [p for p in t.rest if p.func == t.root and isinstance(p, Approximate) and "rdot" in p.functions]
    if now:
        yield [dict(rest=tuple(p for p in t.rest if p not in now))]
    elif around.wide and around.product:
        yield [dict(rest=(*t.rest, Approximate(t.root, "approximate", ("rdot",))))]


def _two_tiles(t: Tiling, around: Surroundings) -> Dimensions:
    """Hold whole extents by two tiles, all or those that are summed over alone, or by one."""
    others = tuple(p for p in t.rest if p.name != "two_tiles")
    labels = tuple(label for label, tile in t.tile.items() if tile == 0 and label in around.sizes and fits_two_tiles(around.sizes, label))
    if len(others) < len(t.rest):
        yield [dict(rest=others)]
    elif labels and around.product:
        summed = tuple(x for x in labels if x not in around.algorithm[t.root].labels)
        yield [dict(rest=(*t.rest, Names(t.root, "two_tiles", each))) for each in dict.fromkeys((labels, summed)) if each]


def _row_and_column_labels(t: Tiling, around: Surroundings) -> tuple[str | None, str | None]:
    """Return the row and column labels of the kernel's product: the two output labels with the largest tiles."""
    large = [label for label in around.algorithm[t.root].labels if t.block.get(label, 1) > 1]
    return (large[-2], large[-1]) if len(large) >= 2 else (None, None)


def _descriptors(t: Tiling, around: Surroundings) -> Dimensions:
    """Use tensor descriptors, with and without warp specialization."""
    if not around.tma or not around.product:
        return
    others, loose = tuple(p for p in t.rest if p.name not in ("stage", "ping_pong")), around.loose()
    ways = [(), around.tensors, tuple(x for x in around.tensors if x != t.root)]
    found: list[dict[str, Any]] = [dict(descriptor=way, specialized=(), rest=others) for way in ways]
    loops = around.looped(t)
    if loose and loops:  # a descriptor reads aligned copies of these
        found += [dict(descriptor=way, specialized=(), rest=(*others, Stage(t.root, "stage", loose))) for way in ways[1:]]
    if t.descriptor and loops and t.warps == 4 and around.products == 1:
        found.append(dict(specialized=(loops[-1],)))
    turns = [way for way in ways[1:] if loops and around.products == 1 and not t.split and any(t.block.get(x) in (64, 128) for x in around.algorithm[t.root].labels)]
    found += [dict(descriptor=way, specialized=(loops[-1],), persistent=True, warps=8, rest=(*others, Bare(t.root, "ping_pong"))) for way in turns]
    yield found


def _single(t: Tiling, around: Surroundings) -> Dimensions:
    """Use a descriptor for one operand whose rows are no multiple of 16 elements, which pointers load by single elements; from an
    aligned copy if a descriptor's rows would not be aligned.
    """
    algorithm, others = around.algorithm, tuple(p for p in t.rest if p.name != "stage")
    for tensor in (x for x in around.tensors if around.tma and around.looped(t) and x != t.root):
        labels = algorithm[tensor].labels if tensor in algorithm else algorithm.plain_labels(tensor)
        length = around.sizes.get(labels[-1] or "", 0) if len(labels) > 1 else 0
        if length % 16 == 0 or t.descriptor == (tensor,):
            continue
        if length % 8 == 0:
            yield [dict(descriptor=(tensor,), specialized=(), rest=others)]
        elif tensor in algorithm.inputs:
            yield [dict(descriptor=(tensor,), specialized=(), rest=(*others, Stage(t.root, "stage", (tensor,))))]


def _last_wave(t: Tiling, around: Surroundings) -> Dimensions:
    """Cut the blocks of the last wave into quarters, in a separate kernel, or not."""
    others = tuple(p for p in t.rest if p.name not in ("tail", "stream"))
    if len(others) < len(t.rest):
        yield [dict(rest=others)]
    elif t.persistent and t.descriptor and around.products == 1 and not t.split:
        row, column = _row_and_column_labels(t, around)
        if row and column and min(t.block[row], t.block[column]) >= 128:
            pieces = tuple(Sized(label, t.block[label] // 2) for label in (row, column))
            yield [dict(rest=(*others, Sizes(t.root, "tail", pieces)))]


def _eviction_hints(t: Tiling, around: Surroundings) -> Dimensions:
    """Keep rows that are read again in the caches until then, or not."""
    others = tuple(p for p in t.rest if p.name != "evict")
    if len(others) < len(t.rest):
        yield [dict(rest=others)]
    elif again := reread(around.algorithm, around.sizes, t.root, t.tile, around.members):
        yield [dict(rest=(*t.rest, Evict(t.root, "evict", tuple(Named(x, "reread") for x in again))))]
