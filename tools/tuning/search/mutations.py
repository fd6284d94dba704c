"""Mutate a kernel candidate by one step: a tile of twice or half the size, more warps, another order of blocks, and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from dtkernels.autoschedule.rules.reduction import reread
from dtkernels.codegen.powers_of_two import next_power_of_two
from dtkernels.lang import expr as ex
from dtkernels.lang.algorithm import Algorithm
from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import (
    SHARES,
    Approximate,
    Argument,
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
)

from .candidates import KernelCandidate

MOST_WARPS, MOST_STAGES, SHORTEST_LOOP = 32, 6, 1024


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
    def of(plan: KernelCandidate) -> Tiling:
        """Parse a candidate."""
        schedule: Schedule = parse_schedule(plan.tiles)
        known = ("block", "tensorize", "split", "map", "persistent", "descriptor", "specialize_warps", "num_warps", "num_stages")
        apart = split_sums(plan)
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
        left_out = ("num_warps", "num_stages") + (() if self.persistent and self.descriptor and not self.split else ("tail",))
        before = [p for p in self.rest if p.name not in left_out or p.func != self.root and p.name != "tail"]
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

    @staticmethod
    def of(algorithm: Algorithm, plan: KernelCandidate, sizes: dict[str, int], tma: bool) -> Surroundings:
        """Collect them for the kernel of ``plan``."""
        fused = parse_schedule(plan.fused).fused()
        members = [plan.root]
        for m in members:
            members += [g for g, (host, _) in fused.items() if host == m and g not in members]
            members += [a.tensor for a in ex.accesses(algorithm[m].expr) if a.tensor in fused and a.tensor not in members]
        nodes = [n for m in members for n in algorithm[m].expr.walk()]
        dots = [n for n in nodes if isinstance(n, ex.Dot)]
        read = [a.tensor for n in dots for a in ex.accesses(n) if a.tensor in algorithm.inputs or a.tensor not in members]
        return Surroundings(algorithm, tuple(members), sizes, len(dots), tuple(dict.fromkeys((*read, plan.root))), tma, any(isinstance(n, ex.Call) and n.fn == "exp" for n in nodes))

    @property
    def product(self) -> bool:
        """Return whether the kernel uses tensor cores."""
        return self.products > 0

    def looped(self, tiling: Tiling) -> list[str]:
        """Return labels that the kernel loops over in tiles and that are not labels of its output."""
        own = self.algorithm[tiling.root].labels
        return [k for k, v in tiling.tile.items() if k not in own and v and self.sizes.get(k, 0) > v]


def split_sums(plan: KernelCandidate) -> set[str]:
    """Return Funcs that another kernel sums from parts that this kernel makes: no step changes their statements."""
    return {p.func for p in parse_schedule(plan.fused).primitives if p.name == "parts_at"}


def neighbours(plan: KernelCandidate, around: Surroundings) -> list[KernelCandidate]:
    """Return candidates one step away, the usual steps first, each once; not all of them are legal."""
    tiling = Tiling.of(plan)
    found: dict[str, KernelCandidate] = {}
    for step in (_tiles, _launch, _pairs, _splits, _program_orders, _descriptors, _single, _last_wave, _shared_exponentials, _eviction_hints):
        for new in step(tiling, around):
            if new.text() != tiling.text():
                found.setdefault(new.text(), KernelCandidate(plan.fused, plan.root, new.text()))
    return list(found.values())


Step = Callable[[Tiling, Surroundings], Iterator[Tiling]]


def _resized(t: Tiling, around: Surroundings, label: str, up: bool) -> Tiling | None:
    """Return the tile of ``label`` one size up or down, with its block if the two are equal."""
    now, size = t.tile.get(label, 1), around.sizes.get(label, 1)
    smallest = 16 if around.product and now >= 16 else 1
    if now == 0:
        if up or around.product or size <= SHORTEST_LOOP:
            return None
        new = next_power_of_two(size) // 2
    else:
        new = now * 2 if up else now // 2
        if new < smallest or up and now >= next_power_of_two(size):
            return None
    if label in t.block:
        if t.block[label] not in (now, next_power_of_two(size)) and not (up and new <= t.block[label]):
            return None
        return replace(t, tile={**t.tile, label: new}, block={**t.block, label: max(new, t.block[label]) if t.block[label] != now else new})
    if new >= size and label not in around.algorithm[t.root].labels and not around.product:
        new = 0
    return replace(t, tile={**t.tile, label: new})


def _tiles(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    for label in t.tile:
        for up in (True, False):
            if (new := _resized(t, around, label, up)) is not None:
                yield new


def _launch(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    for warps in (t.warps * 2, t.warps // 2):
        if 1 <= warps <= (16 if around.product else MOST_WARPS):
            yield replace(t, warps=warps)
    if around.product or around.looped(t):
        for stages in (t.stages + 1, t.stages - 1):
            if 1 <= stages <= MOST_STAGES:
                yield replace(t, stages=stages)


def _pairs(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    """Combine steps that only help together: a larger tile with more warps, a deeper one with fewer stages, one side for the other."""
    own = [label for label in t.tile if label in t.block]
    for label in own:
        if (up := _resized(t, around, label, True)) is not None and t.warps < 16:
            yield replace(up, warps=t.warps * 2)
        if (down := _resized(t, around, label, False)) is not None and t.warps > 1:
            yield replace(down, warps=t.warps // 2)
    for a in own:
        for b in own:
            if a != b and (up := _resized(t, around, a, True)) and (both := _resized(up, around, b, False)):
                yield both
    for label in t.tile:
        if label not in t.block and around.product:
            if (up := _resized(t, around, label, True)) is not None and t.stages > 2:
                yield replace(up, stages=t.stages - 1)
            if (down := _resized(t, around, label, False)) is not None and t.stages < MOST_STAGES:
                yield replace(down, stages=t.stages + 1)


def _splits(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    """Vary the number of programs that share a reduction (split-K)."""
    for label in around.looped(t) or list(t.split):
        now = t.split.get(label, 1)
        for parts in (now * 2, now * 4, now // 2):
            rest = {k: v for k, v in t.split.items() if k != label}
            if parts == 1 and now > 1:
                yield replace(t, split=rest)
            elif 2 <= parts <= 128 and parts * t.tile.get(label, 1) * 2 <= around.sizes.get(label, 1):
                yield replace(t, split={**rest, label: parts})


def _program_orders(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    """Vary the order of the blocks, and whether programs are persistent."""
    groups = [a for a in t.order if isinstance(a, Grouped)]
    for size in (4, 8, 16):
        if groups and groups[0].size != size:
            yield replace(t, order=tuple(replace(a, size=size) if a == groups[0] else a for a in t.order))
    if not groups and around.product and len(t.block) >= 2:
        row, column = _row_and_column_labels(t, around)
        if row and column:
            rest = tuple(label for label in t.block if label not in (row, column))
            taken = {*around.algorithm.labels}
            inner = next(n for i in range(1, 99) if (n := f"{row}{i}") not in taken)
            yield replace(t, order=(*rest, Grouped(row, inner, 8), column, inner))
    yield replace(t, persistent=not t.persistent)
    if not around.product:
        yield from _prefetching(t, around)
    for label, size in t.block.items():
        if t.tile.get(label) == 1 and not around.product:
            if size < 64 and around.sizes.get(label, 1) >= 2 * size:
                yield replace(t, block={**t.block, label: size * 2})
            if size > 1:
                yield replace(t, block={**t.block, label: size // 2})


def _prefetching(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    """Make programs persistent and prefetch their next blocks, with this number of stages."""
    now = [p for p in t.rest if p.name == "stages"]
    others = tuple(p for p in t.rest if p.name != "stages")
    if now:
        yield replace(t, rest=others)
    label = next((label for label, size in t.block.items() if size == t.tile.get(label) and around.sizes.get(label, 1) >= 256), None)
    if label is not None:
        for stages in (2, 3, 4):
            yield replace(t, persistent=True, rest=(*others, Sizes(t.root, "stages", (Sized(label, stages),))))


def _shared_exponentials(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    """Compute a share of the exponentials by multiply-adds, next to products that take as long."""
    now = [p for p in t.rest if p.func == t.root and isinstance(p, Approximate) and any(isinstance(a, Share) for a in p.functions)]
    if now:
        yield replace(t, rest=tuple(p for p in t.rest if p not in now))
    elif around.products > 1 and around.exponentials:
        yield replace(t, rest=(*t.rest, Approximate(t.root, "approximate", (Share("exp", *SHARES[0]),))))


def _row_and_column_labels(t: Tiling, around: Surroundings) -> tuple[str | None, str | None]:
    """Return the row and column labels of the kernel's product: the two output labels with the largest tiles."""
    large = [label for label in around.algorithm[t.root].labels if t.block.get(label, 1) > 1]
    return (large[-2], large[-1]) if len(large) >= 2 else (None, None)


def _descriptors(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    """Use tensor descriptors, with and without warp specialization."""
    if not around.tma or not around.product:
        return
    if t.descriptor:
        yield replace(t, descriptor=(), specialized=())
        loops = around.looped(t)
        if not t.specialized and loops and t.warps == 4 and around.products == 1:
            yield replace(t, specialized=(loops[-1],))
    else:
        yield replace(t, descriptor=around.tensors)
        yield replace(t, descriptor=tuple(x for x in around.tensors if x != t.root))


def _single(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
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
            yield replace(t, descriptor=(tensor,), specialized=(), rest=others)
        elif tensor in algorithm.inputs:
            yield replace(t, descriptor=(tensor,), specialized=(), rest=(*others, Names(t.root, "stage", (tensor,))))


def _last_wave(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    """Cut the blocks of the last wave into quarters, in a separate kernel, or not."""
    others = tuple(p for p in t.rest if p.name != "tail")
    if len(others) < len(t.rest):
        yield replace(t, rest=others)
    elif t.persistent and t.descriptor and around.products == 1 and not t.split:
        row, column = _row_and_column_labels(t, around)
        if row and column and min(t.block[row], t.block[column]) >= 128:
            pieces = tuple(Sized(label, t.block[label] // 2) for label in (row, column))
            yield replace(t, rest=(*others, Sizes(t.root, "tail", pieces)))


def _eviction_hints(t: Tiling, around: Surroundings) -> Iterator[Tiling]:
    """Keep rows that are read again in the caches until then, or not."""
    others = tuple(p for p in t.rest if p.name != "evict")
    if len(others) < len(t.rest):
        yield replace(t, rest=others)
    elif again := reread(around.algorithm, around.sizes, t.root, t.tile, around.members):
        yield replace(t, rest=(*t.rest, Evict(t.root, "evict", tuple(Named(x, "reread") for x in again))))
