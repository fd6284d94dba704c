"""Represent the schedule: blocks, tiles, loops, fusion. A tuple of frozen primitives that print as DT statements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .algorithm import Algorithm
from .errors import Position


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
    "persistent": "", "split": "label:size*", "descriptor": "tensor*", "stages": "label:size*", "unroll": "label:size*",
    "specialize_warps": "label", "cluster": "number", "evict": "tensor:policy*", "maxnreg": "number",
    "specialize": "label*", "reorder": "label*", "store": "", "approximate": "function or function:part/whole*", "stage": "tensor*", "align": "",
    "parts_at": "func, label", "tail": "label:size*",
}  # fmt: skip
WRITTEN = ("store", "compile", "compile_to_kernel")  #: primitives that cause a Func to be stored to memory
EVICTION_POLICIES = ("first", "last", "reread")
APPROXIMATIONS = ("tanh",)  #: functions with an approximate hardware instruction
SHARES = ((1, 8), (1, 4), (3, 8), (1, 2))  #: fractions of exponentials that a polynomial may compute: part, whole


@dataclass(frozen=True)
class Primitive:
    """One schedule statement, ``func.name(args);``"""

    func: str
    name: str
    args: tuple[Any, ...] = ()  #: of type ``Argument``; the checks enforce the form in PRIMITIVES
    pos: Position | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.func}.{self.name}({', '.join(map(str, self.args))});"


@dataclass(frozen=True)
class Schedule:
    """Schedule statements in source order."""

    primitives: tuple[Primitive, ...] = ()

    def of(self, func: str, name: str) -> tuple[Primitive, ...]:
        """Return the statements ``func.name(...)``."""
        return tuple(p for p in self.primitives if p.func == func and p.name == name)

    def sizes(self, func: str, name: str) -> dict[str, int]:
        """Return label -> size over all statements ``func.name(label:size, ...)``; the last one wins."""
        return {a.label: a.size for p in self.of(func, name) for a in p.args if isinstance(a, Sized)}

    def number(self, func: str, name: str) -> int | None:
        """Return the argument of the last ``func.name(number)``; None if there is none."""
        found = self.of(func, name)
        return found[-1].args[0] if found else None  # type: ignore[return-value]

    def names(self, func: str, name: str) -> tuple[str, ...]:
        """Return the plain-name arguments of all statements ``func.name(a, b)``."""
        return tuple(a for p in self.of(func, name) for a in p.args if isinstance(a, str))

    def share(self, func: str) -> tuple[int, int] | None:
        """Return part and whole of the last ``func.approximate(exp:part/whole)``; None if there is none."""
        found = [a for p in self.of(func, "approximate") for a in p.args if isinstance(a, Share)]
        return (found[-1].part, found[-1].whole) if found else None

    def written(self) -> frozenset[str]:
        """Return the Funcs that a statement stores to memory."""
        return frozenset(p.func for p in self.primitives if p.name in WRITTEN)

    def fused(self) -> Fused:
        """Return func -> (consumer, label) of its ``fuse_at``."""
        return {p.func: (p.args[0], p.args[1]) for p in self.primitives if p.name == "fuse_at" and len(p.args) == 2}  # type: ignore[misc]

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
class Program:
    """An algorithm with its schedule."""

    algorithm: Algorithm
    schedule: Schedule = Schedule()
    counted: tuple[tuple[str, str, int], ...] = ()  #: (label, other, size): labels that count the blocks of ``size`` along another label

    def outputs(self) -> tuple[str, ...]:
        """Return the Funcs to compile, in the order of their ``compile()``; the last Func without one."""
        asked = tuple(dict.fromkeys(p.func for p in self.schedule.primitives if p.name in ("compile", "compile_to_kernel")))
        return asked or (self.algorithm.definitions[-1].name,)

    def implied(self) -> tuple[Primitive, ...]:
        """Return the implicit ``compile()`` of outputs. Passes that add Funcs state it, so that the outputs stay the same."""
        return tuple(Primitive(o, "compile") for o in self.outputs() if not any(self.schedule.of(o, n) for n in ("compile", "compile_to_kernel")))

    def without_wrapper(self) -> frozenset[str]:
        """Return the Funcs with ``compile_to_kernel()`` and no wrapper."""
        asked = {name: {p.func for p in self.schedule.primitives if p.name == name} for name in ("compile", "compile_to_kernel")}
        return frozenset(asked["compile_to_kernel"] - asked["compile"])

    def __str__(self) -> str:
        return "\n".join(filter(None, (str(self.algorithm), str(self.schedule)))) + "\n"
