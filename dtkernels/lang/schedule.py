"""Represent the schedule: blocks, tiles, loops, fusion. A tuple of frozen primitives that print as DT statements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar, overload

from .algorithm import Algorithm
from .errors import Position
from .expr import Expr


@dataclass(frozen=True)
class Sized:
    """``x:128``"""

    label: str
    size: int

    def __str__(self) -> str:
        return f"{self.label}:{self.size}"


@dataclass(frozen=True)
class Grouped:
    """``x:x1/8``: groups of ``size`` blocks along ``label``; ``inner`` names the place inside a group."""

    label: str
    inner: str
    size: int

    def __str__(self) -> str:
        return f"{self.label}:{self.inner}/{self.size}"


@dataclass(frozen=True)
class Named:
    """``A:first``"""

    name: str
    choice: str

    def __str__(self) -> str:
        return f"{self.name}:{self.choice}"


@dataclass(frozen=True)
class Share:
    """``exp:1/4``: ``part`` of every ``whole`` evaluations."""

    name: str
    part: int
    whole: int

    def __str__(self) -> str:
        return f"{self.name}:{self.part}/{self.whole}"


Argument = Sized | Grouped | Named | Share | str | int

#: primitive -> the form of its arguments; ``*`` means one or more
PRIMITIVES = {
    "block": "label:size*", "tensorize": "label:size*", "map": "label or label:inner/size*", "fuse_at": "func, label",
    "num_warps": "number", "num_stages": "number", "compile": "", "compile_to_kernel": "",
    "persistent": "", "ping_pong": "", "split": "label:size*", "descriptor": "tensor*", "stages": "label:size*", "unroll": "label:size*",
    "specialize_warps": "label", "cluster": "number", "evict": "tensor:policy*", "maxnreg": "number",
    "specialize": "label*", "reorder": "label*", "merge": "name, label, label*", "store": "", "approximate": "function or function:part/whole*", "stage": "tensor or tensor:label*", "align": "",
    "two_tiles": "label*", "parts_at": "func, label", "tail": "label:size*", "stream": "label:size", "chunk": "label:size",
    "accumulate_at": "func, label or func, label, ordered or func, label, named",
}  # fmt: skip
ORDERED, NAMED = "ordered", "named"  #: words of accumulate_at
WRITTEN = ("store", "compile", "compile_to_kernel")  #: primitives that cause a Func to be stored to memory
EVICTION_POLICIES = ("first", "last", "reread")
#: functions with a form of few instructions that is exact enough for 16-bit results, and products
APPROXIMATIONS = ("tanh", "log", "log2", "log1p", "expm1", "erfc", "rdot")
SHARES = ((1, 8), (1, 4), (3, 8), (1, 2))  #: fractions of exponentials that a polynomial may compute: part, whole


@dataclass(frozen=True)
class Primitive:
    """One schedule statement, ``func.name(args);``. ``Primitive(...)`` makes one of the class of its form, a subclass."""

    func: str
    name: str
    args: tuple[Argument, ...] = ()
    pos: Position | None = field(default=None, compare=False, repr=False)

    takes: ClassVar[tuple[type, ...]] = ()  #: types of an argument
    count: ClassVar[tuple[int, int]] = (1, 99)  #: fewest and most arguments

    def __new__(cls, func: str = "", name: str = "", args: tuple[Argument, ...] = (), pos: Position | None = None) -> Primitive:
        """Choose the class; copies and pickles give no arguments."""
        return object.__new__(_class_of(name, args) if cls is Primitive else cls)

    @classmethod
    def fits(cls, args: tuple[Argument, ...]) -> bool:
        """Return whether ``args`` are of the form."""
        return cls.count[0] <= len(args) <= cls.count[1] and all(isinstance(a, cls.takes) for a in args)

    def __str__(self) -> str:
        return f"{self.func}.{self.name}({', '.join(map(str, self.args))});"


@dataclass(frozen=True)
class Bare(Primitive):
    """``f.store()``"""

    name: Literal["compile", "compile_to_kernel", "persistent", "ping_pong", "store", "align"]
    args: tuple[()] = ()
    count = (0, 0)


@dataclass(frozen=True)
class Sizes(Primitive):
    """``f.block(x:16, y:128)``"""

    name: Literal["block", "tensorize", "split", "stages", "unroll", "tail", "stream", "chunk"]
    args: tuple[Sized, ...]
    takes = (Sized,)

    @property
    def sizes(self) -> tuple[Sized, ...]:
        """Return the labels with their sizes."""
        return self.args


@dataclass(frozen=True)
class OneSize(Sizes):
    """``f.chunk(y:4096)``, ``f.stream(k:4)``"""

    count = (1, 1)


@dataclass(frozen=True)
class Number(Primitive):
    """``f.num_warps(8)``"""

    name: Literal["num_warps", "num_stages", "cluster", "maxnreg"]
    args: tuple[int]
    takes = (int,)
    count = (1, 1)

    @property
    def number(self) -> int:
        """Return the argument."""
        return self.args[0]


@dataclass(frozen=True)
class Names(Primitive):
    """``f.descriptor(A, B)``: tensors; ``f.reorder(i, j)``: labels"""

    name: Literal["descriptor", "specialize", "reorder", "two_tiles"]
    args: tuple[str, ...]
    takes = (str,)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the tensors or labels."""
        return self.args


@dataclass(frozen=True)
class Merge(Primitive):
    """``f.merge(p, y, x)``: a new label that stands for others together"""

    name: Literal["merge"]
    args: tuple[str, ...]
    takes = (str,)
    count = (3, 99)

    @property
    def label(self) -> str:
        """Return the new label."""
        return self.args[0]

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the labels that it stands for, slowest first."""
        return self.args[1:]


@dataclass(frozen=True)
class Stage(Primitive):
    """``f.stage(A, B:c)``: tensors, and for some the label that lies along the rows of the copy"""

    name: Literal["stage"]
    args: tuple[str | Named, ...]
    takes = (str, Named)

    @property
    def copies(self) -> tuple[tuple[str, str], ...]:
        """Return the tensors, each with the label of the rows of its copy, "" for that of its own rows."""
        return tuple((a.name, a.choice) if isinstance(a, Named) else (a, "") for a in self.args)


@dataclass(frozen=True)
class SpecializeWarps(Primitive):
    """``f.specialize_warps(k)``"""

    name: Literal["specialize_warps"]
    args: tuple[str]
    takes = (str,)
    count = (1, 1)

    @property
    def label(self) -> str:
        """Return the label of the loop."""
        return self.args[0]


@dataclass(frozen=True)
class FuseAt(Primitive):
    """``f.fuse_at(g, k)``, or in parts ``f.parts_at(g, n)``"""

    name: Literal["fuse_at", "parts_at", "accumulate_at"]
    args: tuple[str, ...]
    takes = (str,)
    count = (2, 2)

    @property
    def consumer(self) -> str:
        """Return the Func whose kernel computes this one."""
        return self.args[0]

    @property
    def label(self) -> str:
        """Return the label of the consumer's loop, or blocks."""
        return self.args[1]


@dataclass(frozen=True)
class AccumulateAt(FuseAt):
    """``f.accumulate_at(g, k)``; in a fixed order ``f.accumulate_at(g, k, ordered)``; where data names few elements ``f.accumulate_at(g, k, named)``"""

    count = (2, 3)

    @classmethod
    def fits(cls, args: tuple[Argument, ...]) -> bool:
        """Return whether ``args`` are of the form."""
        return super().fits(args) and args[2:] in ((), (ORDERED,), (NAMED,))

    @property
    def ordered(self) -> bool:
        """Return whether the order of the additions is fixed."""
        return self.args[2:] == (ORDERED,)

    @property
    def named(self) -> bool:
        """Return whether only elements that data names are cleared before, and read after."""
        return self.args[2:] == (NAMED,)


@dataclass(frozen=True)
class Map(Primitive):
    """``f.map(x:x1/8, y, x1)``"""

    name: Literal["map"]
    args: tuple[str | Grouped, ...]
    takes = (str, Grouped)

    @property
    def order(self) -> tuple[str | Grouped, ...]:
        """Return the labels, slowest first."""
        return self.args

    @property
    def groups(self) -> tuple[Grouped, ...]:
        """Return the labels in groups."""
        return tuple(a for a in self.args if isinstance(a, Grouped))


@dataclass(frozen=True)
class Evict(Primitive):
    """``f.evict(A:first)``"""

    name: Literal["evict"]
    args: tuple[Named, ...]
    takes = (Named,)

    @property
    def policies(self) -> tuple[Named, ...]:
        """Return the tensors with their policies."""
        return self.args


@dataclass(frozen=True)
class Approximate(Primitive):
    """``f.approximate(tanh, exp:1/4)``"""

    name: Literal["approximate"]
    args: tuple[str | Share, ...]
    takes = (str, Share)

    @property
    def functions(self) -> tuple[str | Share, ...]:
        """Return the functions, in whole or a share of their evaluations."""
        return self.args


@dataclass(frozen=True)
class IllFormed(Primitive):
    """A statement whose arguments do not have the form of its primitive; the checks refuse it."""


_CLASSES: dict[str, type[Primitive]] = {
    "": Bare, "label:size*": Sizes, "label:size": OneSize, "number": Number, "tensor*": Names, "label*": Names, "tensor or tensor:label*": Stage,
    "name, label, label*": Merge, "label": SpecializeWarps, "func, label": FuseAt,
    "func, label or func, label, ordered or func, label, named": AccumulateAt,
    "label or label:inner/size*": Map, "tensor:policy*": Evict, "function or function:part/whole*": Approximate,
}  # fmt: skip


def _class_of(name: str, args: tuple[Argument, ...]) -> type[Primitive]:
    """Return the class of the primitive's form, if the arguments have that form."""
    found = _CLASSES[PRIMITIVES[name]] if name in PRIMITIVES else IllFormed
    return found if found.fits(args) else IllFormed


P = TypeVar("P", bound=Primitive)


def subject(argument: Argument) -> str:
    """Return the label, tensor or function that an argument names."""
    if isinstance(argument, (Sized, Grouped)):
        return argument.label
    return argument.name if isinstance(argument, (Named, Share)) else str(argument)


@dataclass(frozen=True)
class Schedule:
    """Schedule statements in source order."""

    primitives: tuple[Primitive, ...] = ()

    @overload
    def of(self, func: str, name: str) -> tuple[Primitive, ...]: ...

    @overload
    def of(self, func: str, name: str, form: type[P]) -> tuple[P, ...]: ...

    def of(self, func: str, name: str, form: type[Primitive] = Primitive) -> tuple[Primitive, ...]:
        """Return the statements ``func.name(...)``, those of the class ``form``."""
        return tuple(p for p in self.primitives if p.func == func and p.name == name and isinstance(p, form))

    def sizes(self, func: str, name: str) -> dict[str, int]:
        """Return label -> size over all statements ``func.name(label:size, ...)``; the last one wins."""
        return {a.label: a.size for p in self.of(func, name, Sizes) for a in p.sizes}

    def number(self, func: str, name: str) -> int | None:
        """Return the argument of the last ``func.name(number)``; None if there is none."""
        found = self.of(func, name, Number)
        return found[-1].number if found else None

    def names(self, func: str, name: str) -> tuple[str, ...]:
        """Return the plain-name arguments of all statements ``func.name(a, b)``."""
        return tuple(a for p in self.of(func, name) for a in p.args if isinstance(a, str))

    def merged(self, func: str) -> dict[str, tuple[str, ...]]:
        """Return the labels that ``merge`` makes for loops of ``func``, each with the labels that it stands for, slowest first."""
        return {p.label: p.parts for p in self.of(func, "merge", Merge)}

    def share(self, func: str) -> tuple[int, int] | None:
        """Return part and whole of the last ``func.approximate(exp:part/whole)``; None if there is none."""
        found = [a for p in self.of(func, "approximate", Approximate) for a in p.functions if isinstance(a, Share)]
        return (found[-1].part, found[-1].whole) if found else None

    def subjects(self) -> frozenset[str]:
        """Return the Funcs that have statements."""
        return frozenset(p.func for p in self.primitives)

    def written(self) -> frozenset[str]:
        """Return the Funcs that a statement stores to memory."""
        return frozenset(p.func for p in self.primitives if p.name in WRITTEN)

    def fused(self) -> Fused:
        """Return func -> (consumer, label) of its ``fuse_at``."""
        return {p.func: (p.consumer, p.label) for p in self.primitives if isinstance(p, FuseAt) and p.name == "fuse_at"}

    def unordered_sums(self) -> tuple[str, ...]:
        """Return the Funcs that several programs accumulate in no fixed order: not bitwise reproducible."""
        return tuple(p.func for p in self.primitives if isinstance(p, AccumulateAt) and not p.ordered)

    def __add__(self, other: Schedule) -> Schedule:
        return Schedule(self.primitives + other.primitives)

    def __str__(self) -> str:
        return "\n".join(map(str, self.primitives))


Fused = dict[str, tuple[str, str]]  #: the result of ``Schedule.fused``


def host(func: str, fused: Fused) -> str:
    """Return the Func whose kernel computes ``func``."""
    while func in fused:
        func = fused[func][0]
    return func


@dataclass(frozen=True)
class Pieces:
    """A loop of the wrapper over pieces of a label, see chunked_funcs.py."""

    label: str
    size: int  #: elements of a piece; the last may have fewer
    kept: tuple[str, ...]  #: Funcs that memory holds one piece of
    roots: tuple[str, ...]  #: Funcs whose kernels run once for each piece
    sums: tuple[tuple[str, str], ...]  #: (Func that is added up over the pieces, Func whose statements it has)
    first: str  #: label whose extent is the number of elements before the piece
    whole: str  #: label whose extent is that of ``label``, all pieces together
    views: tuple[tuple[str, tuple[int, ...]], ...]  #: (tensor, dimensions along the label)


@dataclass(frozen=True)
class Accumulation:
    """A sum that programs of another Func's kernel add up in memory, see accumulated_sums.py."""

    func: str  #: Func whose buffer they add to
    result: str  #: Func that the schedule names: the same, or what is made of the finished sum
    host: str  #: Func whose kernel adds
    places: tuple[tuple[str, Expr], ...]  #: label of the sum or of its terms -> what it is in the loops of the host
    parts: tuple[str, ...] = ()  #: labels of ``func`` that number the blocks of the host, each with a part of its own
    ordered: bool = False
    plain: bool = False  #: ``result`` is the sum as it is, and in float32 needs no copy
    blocks: tuple[tuple[str, int], ...] = ()  #: of the kernels that clear and convert
    tiles: tuple[tuple[str, int], ...] = ()
    named: bool = False  #: only elements that data names are cleared before, by a kernel that goes through the terms too
    complete: bool = False  #: a program has all terms of its elements at once: nothing is added in memory, and ``result`` is stored there


@dataclass(frozen=True)
class Program:
    """An algorithm with its schedule."""

    algorithm: Algorithm
    schedule: Schedule = Schedule()
    counted: tuple[tuple[str, str, int], ...] = ()  #: (label, other, size): labels that count the blocks of ``size`` along another label
    pieces: Pieces | None = None
    accumulated: tuple[Accumulation, ...] = ()

    def outputs(self) -> tuple[str, ...]:
        """Return the Funcs to compile, in the order of their ``compile()``; the last Func without one."""
        asked = tuple(dict.fromkeys(p.func for p in self.schedule.primitives if p.name in ("compile", "compile_to_kernel")))
        return asked or (self.algorithm.definitions[-1].name,)

    def implied(self) -> tuple[Primitive, ...]:
        """Return the implicit ``compile()`` of outputs. Passes that add Funcs state it, so that the outputs stay the same."""
        return tuple(Bare(o, "compile") for o in self.outputs() if not any(self.schedule.of(o, n) for n in ("compile", "compile_to_kernel")))

    def without_wrapper(self) -> frozenset[str]:
        """Return the Funcs with ``compile_to_kernel()`` and no wrapper."""
        asked = {name: {p.func for p in self.schedule.primitives if p.name == name} for name in ("compile", "compile_to_kernel")}
        return frozenset(asked["compile_to_kernel"] - asked["compile"])

    def __str__(self) -> str:
        return "\n".join(filter(None, (str(self.algorithm), str(self.schedule)))) + "\n"
