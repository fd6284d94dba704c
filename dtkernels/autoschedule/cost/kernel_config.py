"""Represent the choices of a schedule, kernel by kernel; read them from its text and print them.

Reading needs no parser and no algorithm: a first call reads the rows of a table so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...lang.schedule import Primitive

_SIZED = re.compile(r"(\w+'*)\s*:\s*(\d+)")
_STATEMENT = re.compile(r"(\w+)\.(\w+)\(([^)]*)\)")
Sizes = tuple[tuple[str, int], ...]
Pairs = tuple[tuple[str, str], ...]
ORDERED, ANY_ORDER, NAMED = "ordered", "any order", "named"
WARPS, STAGES = 4, 3  #: of a kernel without num_warps, num_stages


@dataclass(frozen=True)
class Choices:
    """What a schedule states of one Func. A tile of 0 holds a label whole; None and empty: not stated."""

    func: str
    blocks: Sizes = ()
    tiles: Sizes = ()
    order: tuple[tuple[str, str, int], ...] = ()  #: of ``map``: label, name inside a group and blocks of a group; the label, "", 0 where it has none
    reordered: tuple[str, ...] = ()
    split: Sizes = ()
    persistent: bool = False
    ping_pong: bool = False  #: whether two consumer warpgroups take blocks in turn
    descriptors: tuple[str, ...] = ()
    staged: tuple[str, ...] = ()  #: tensors that are copied to aligned rows first, ``A:c`` where ``c`` lies along these rows
    aligned: bool = False  #: its rows are written aligned
    stages_of: Sizes = ()  #: pipeline depth of single loops
    specialized: tuple[str, ...] = ()  #: labels whose loops run by specialized warps
    unrolled: Sizes = ()
    tail: Sizes = ()  #: smaller blocks of the last wave
    stream: Sizes = ()  #: the parts of its sum
    chunked: Sizes = ()  #: the label of which memory holds a piece, and its size
    evictions: Pairs = ()
    approximations: Pairs = ()  #: function, and the share of its evaluations, "" for all
    two_tiles: tuple[str, ...] = ()  #: labels held whole by two tiles
    constants: tuple[str, ...] = ()  #: labels whose extent is a compile-time constant
    cluster: int | None = None
    maxnreg: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    merged: tuple[str, ...] = ()  #: ``p, y, x`` of each label that stands for several

    @property
    def copies(self) -> dict[str, str]:
        """Return the tensors that are copied first, each with the label along the rows of its copy, "" for that of its own rows."""
        return {tensor: label for tensor, _, label in (one.partition(":") for one in self.staged)}

    @property
    def merges(self) -> dict[str, tuple[str, ...]]:
        """Return the labels that stand for several, each with these, slowest first."""
        return {name: tuple(parts) for name, *parts in (one.split(", ") for one in self.merged)}

    @property
    def warps(self) -> int:
        return WARPS if self.num_warps is None else self.num_warps

    @property
    def stages(self) -> int:
        return STAGES if self.num_stages is None else self.num_stages

    def _stated(self) -> Iterator[tuple[str, Any]]:
        """Yield primitives with the values of their fields, always in one order."""
        for name, field in _FIELDS.items():
            value = getattr(self, field)
            if name == "merge":
                yield from ((name, one) for one in value)
            elif value is not None and value is not False and value != ():
                yield name, value


@dataclass(frozen=True)
class FusedFunc:
    """A Func computed in the kernel of another."""

    func: str
    consumer: str
    loop: str
    stored: bool = False
    parted: bool = False  #: each program makes a part of its sums; its own kernel adds them up
    added: str = ""  #: programs add to its sums in memory: "any order", "ordered", or "named"
    own: Choices | None = None  #: what is stated of it besides

    def placed(self) -> str:
        """Return the statement that fuses it."""
        word = "accumulate_at" if self.added else "parts_at" if self.parted else "fuse_at"
        return f"{self.func}.{word}({self.consumer}, {self.loop}{f', {self.added}' if self.added in (ORDERED, NAMED) else ''});"


@dataclass(frozen=True)
class KernelConfig(Choices):
    """What a schedule chooses for the kernel of ``func`` and the Funcs fused into it.

    ``aligns``: Funcs of other kernels whose rows this one wants aligned. ``joined`` moves them to those kernels, where text states them.
    """

    fused: tuple[FusedFunc, ...] = ()
    aligns: tuple[str, ...] = ()

    @cached_property
    def members(self) -> Pairs:
        """Return the fused Funcs, each with the label of its loop, ``consumer.label`` where that is not the kernel's own Func."""
        return tuple([(f.func, f.loop if f.consumer == self.func else f"{f.consumer}.{f.loop}") for f in self.fused])

    @cached_property
    def written(self) -> frozenset[str]:
        """Return the fused Funcs that the kernel writes, whole or in parts, or adds to."""
        return frozenset([f.func for f in self.fused if f.stored or f.parted or f.added])

    @cached_property
    def parted(self) -> frozenset[str]:
        """Return the Funcs of which each program writes a part of a sum."""
        return frozenset([f.func for f in self.fused if f.parted])

    @cached_property
    def pieces(self) -> int:
        """Return into how many a tail cuts a block of the last wave."""
        tail = dict(self.tail)
        return math.prod(max(1, size // tail[label]) for label, size in self.blocks if label in tail)

    @cached_property
    def single(self) -> dict[str, int]:
        """Return the labels of the result whose blocks are unrolled, element by element, with the sizes of these blocks."""
        return {label: size for label, size in self.unrolled if size > 1 and (label, size) in self.blocks and (label, size) in self.tiles}

    @cached_property
    def added(self) -> dict[str, str]:
        """Return the Funcs to whose sums the programs add in memory, and in which order."""
        return {f.func: f.added for f in self.fused if f.added}

    def all_of(self, field: str) -> dict[str, int]:
        """Return label -> size of a field of sizes, stated of the kernel's Func or of one fused into it."""
        return dict([pair for c in self.choices() for pair in getattr(c, field)])

    def reading(self, outputs: Collection[str]) -> KernelConfig:
        """Return the same choices with results stored by pointers, inputs alone read through descriptors."""
        return replace(self, descriptors=tuple([t for t in self.descriptors if t not in outputs]))

    def choices(self) -> tuple[Choices, ...]:
        """Return what is stated of the kernel's Func, and of Funcs fused into it."""
        return (self, *[f.own for f in self.fused if f.own])

    def texts(self) -> tuple[str, ...]:
        """Return the statements without those that fuse and store."""
        own = [f"{c.func}.{name}({_PRINTED[name](value)});" for c in self.choices() for name, value in c._stated()]
        return (*(f"{t}.align();" for t in self.aligns), *own)

    def statements(self) -> tuple[Primitive, ...]:
        """Return what ``texts`` prints, as primitives."""
        from ...lang.schedule import Primitive

        aligns = [Primitive(t, "align") for t in self.aligns]
        return (*aligns, *(Primitive(c.func, name, _arguments(name, value)) for c in self.choices() for name, value in c._stated()))

    def __str__(self) -> str:
        return " ".join((*_fusion([self]), *self.texts()))


@dataclass(frozen=True)
class ScheduleConfig:
    """The kernels of a schedule that it has statements on, and the Funcs that it compiles, each with that statement."""

    kernels: tuple[KernelConfig, ...]
    compiled: Pairs = ()

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset([func for func, _ in self.compiled])

    @cached_property
    def stored_inside(self) -> frozenset[str]:
        """Return the fused Funcs that are written, in loops of another. What is added to is cleared before, and so is written anyhow."""
        return frozenset([f for k in self.kernels for f, _ in k.members if f not in k.added and (f in k.written or f in self.outputs)])

    @cached_property
    def unordered_sums(self) -> frozenset[str]:
        """Return the Funcs that programs add up in any order: not bitwise reproducible."""
        return frozenset([f for k in self.kernels for f, order in k.added.items() if order != ORDERED])

    def __str__(self) -> str:
        """Return the text: what is fused, then kernel by kernel, then what is compiled."""
        lines = (" ".join(k.texts()) for k in self.kernels)
        return "\n".join(filter(None, (*_fusion(self.kernels), *lines, *(f"{func}.{name}();" for func, name in self.compiled))))


def _fusion(kernels: Iterable[KernelConfig]) -> Iterator[str]:
    for f in (f for k in kernels for f in k.fused):
        yield f.placed()
        if f.stored:
            yield f"{f.func}.store();"


def joined(kernels: Iterable[KernelConfig]) -> tuple[KernelConfig, ...]:
    """Return the kernels of one schedule, each aligned where another wants that."""
    found = tuple(kernels)
    wanted = {t for k in found for t in k.aligns}
    return tuple(replace(k, aligned=k.aligned or k.func in wanted, aligns=tuple(t for t in k.aligns if all(t != o.func for o in found))) for k in found)


def combined(*several: dict[str, Any]) -> dict[str, Any]:
    """Return fields of ``KernelConfig`` that hold all that several hold, names in order."""
    found: dict[str, Any] = {}
    for more in several:
        for field, value in more.items():
            found[field] = tuple(dict.fromkeys((*found.get(field, ()), *value))) if isinstance(value, tuple) else value
    return found


def _sizes(sizes: Sizes) -> str:
    return ", ".join([f"{label}:{size}" for label, size in sizes])


def _order(order: tuple[tuple[str, str, int], ...]) -> str:
    return ", ".join([f"{label}:{inner}/{size}" if inner else label for label, inner, size in order])


def _same(one: str) -> str:
    return one


def _pairs(pairs: Pairs) -> str:
    return ", ".join([f"{name}:{choice}" if choice else name for name, choice in pairs])


#: primitive -> field, in the order in which they are printed
_FIELDS = {
    "merge": "merged",
    "block": "blocks", "tensorize": "tiles", "two_tiles": "two_tiles",
    "map": "order", "reorder": "reordered", "split": "split", "persistent": "persistent", "ping_pong": "ping_pong", "descriptor": "descriptors",
    "stage": "staged", "align": "aligned", "stages": "stages_of", "specialize_warps": "specialized", "unroll": "unrolled", "tail": "tail",
    "stream": "stream", "chunk": "chunked", "evict": "evictions", "approximate": "approximations", "specialize": "constants",
    "cluster": "cluster", "maxnreg": "maxnreg", "num_warps": "num_warps", "num_stages": "num_stages",
}  # fmt: skip
_FORMS = (
    (_sizes, ("block", "tensorize", "split", "stages", "unroll", "tail", "stream", "chunk")),
    (_order, ("map",)), (_pairs, ("evict", "approximate")), (str, ("cluster", "maxnreg", "num_warps", "num_stages")),
    (_same, ("merge",)), (", ".join, ("two_tiles", "reorder", "descriptor", "stage", "specialize_warps", "specialize")), (lambda _: "", ("persistent", "ping_pong", "align")),
)  # fmt: skip
_PRINTED = {name: form for form, names in _FORMS for name in names}


def _arguments(name: str, value: Any) -> tuple:
    """Return the arguments of a primitive."""
    from ...lang.schedule import Grouped, Named, Share, Sized

    form = _PRINTED[name]
    if form is _sizes:
        return tuple(Sized(*pair) for pair in value)
    if form is _order:
        return tuple(Grouped(*step) if step[1] else step[0] for step in value)
    if name == "evict":
        return tuple(Named(*pair) for pair in value)
    if name == "stage":
        return tuple(Named(*one.split(":")) if ":" in one else one for one in value)
    if name == "approximate":
        return tuple(Share(function, *map(int, share.split("/"))) if share else function for function, share in value)
    if name == "merge":
        return tuple(value.split(", "))
    return (value,) if form is str else () if value is True else value


def _read_value(name: str, inside: str, before: Any) -> Any:
    """Return the value of a field after one more statement."""
    form = _PRINTED[name]
    if form is _sizes:
        found = tuple([(label, int(size)) for label, size in _SIZED.findall(inside)])
        return tuple((dict(before) | dict(found)).items()) if before else found
    if form is str:
        return int(inside)
    if form is _same:
        return (*(before or ()), ", ".join([part.strip() for part in inside.split(",")]))
    if not inside:
        return True
    parts: list = [part.strip() for part in inside.split(",")]
    if form is _order:
        return tuple([_placed(part) for part in parts])
    if form is _pairs:
        parts = [(name, choice) for name, _, choice in (part.partition(":") for part in parts)]
    return tuple(dict.fromkeys((*(before or ()), *parts)))


def _placed(part: str) -> tuple[str, str, int]:
    label, _, group = part.partition(":")
    inner, _, size = group.partition("/")
    return label.strip(), inner.strip(), int(size) if size else 0


@lru_cache(maxsize=4096)
def read_schedule(schedule: str) -> ScheduleConfig:
    """Return what the text of a schedule states, kernels with statements of their own in the order of the text, then others."""
    said: dict[str, dict] = {}
    placed: dict[str, tuple[str, str, str]] = {}
    stored: set[str] = set()
    compiled: dict[tuple[str, str], None] = {}
    for func, name, inside in _STATEMENT.findall(schedule):
        if name in ("fuse_at", "parts_at", "accumulate_at"):
            host, loop, *order = [part.strip() for part in inside.split(",")]
            placed[func] = host, loop, name if name != "accumulate_at" else order[0] if order in ([ORDERED], [NAMED]) else ANY_ORDER
        elif name == "store":
            stored.add(func)
        elif name in _FIELDS:
            own, field = said.setdefault(func, {}), _FIELDS[name]
            own[field] = _read_value(name, inside, own.get(field))
        elif name in ("compile", "compile_to_kernel"):
            compiled[func, name] = None
    inner: dict[str, list[FusedFunc]] = {}
    for func, (consumer, loop, how) in placed.items():
        root = consumer
        for _ in placed:  # statements may go round in a circle
            root = placed[root][0] if root in placed else root
        besides = said.pop(func, None) if how == "fuse_at" else None
        added = how if how in (ORDERED, ANY_ORDER, NAMED) else ""
        choices = Choices(func, **besides) if besides else None
        inner.setdefault(root, []).append(FusedFunc(func, consumer, loop, func in stored, how == "parts_at", added, choices))
    for root in (*inner, *(func for func, _ in compiled if func not in placed)):
        said.setdefault(root, {})
    return ScheduleConfig(tuple([KernelConfig(func, fused=tuple(inner.get(func, ())), **stated) for func, stated in said.items()]), tuple(compiled))


def read_kernels(schedule: str) -> tuple[KernelConfig, ...]:
    """Return the kernels that a schedule has statements on, in their order in the text."""
    return read_schedule(schedule).kernels


@lru_cache(maxsize=4096)
def tiled_labels(schedule: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return (labels with tiles of more than one element or held whole, labels held whole)."""
    sized = [found for k in read_kernels(schedule) for c in k.choices() for found in (*c.blocks, *c.tiles)]
    return frozenset(label for label, size in sized if size != 1), tuple(dict.fromkeys(label for label, size in sized if size == 0))


@lru_cache(maxsize=4096)
def tiles_of(schedule: str) -> tuple:
    """Return the blocks, tiles, warps and stages of each kernel of a schedule, and how it splits: what two schedules share that differ in copies."""
    return tuple([(k.func, k.fused, k.blocks, k.tiles, k.split, k.persistent, k.warps, k.stages) for k in read_kernels(schedule)])


@lru_cache(maxsize=4096)
def kernels_of(schedule: str) -> tuple[tuple[str, tuple[FusedFunc, ...], bool], ...]:
    """Return the kernels of a schedule, what is fused into each, and whether its sum is split: what two schedules share that differ in tiles."""
    return tuple([(k.func, tuple(replace(f, own=None) for f in k.fused), bool(k.split)) for k in read_kernels(schedule)])


@lru_cache(maxsize=4096)
def halved_labels(schedule: str) -> tuple[str, ...]:
    """Return the labels whose whole extent two tiles hold in a kernel."""
    return tuple(dict.fromkeys(label for k in read_kernels(schedule) for c in k.choices() for label in c.two_tiles))


def copied_inputs(schedule: str) -> tuple[str, ...]:
    """Return the tensors that a schedule copies to aligned rows first."""
    return tuple(dict.fromkeys(t for k in read_kernels(schedule) for t in k.copies))
