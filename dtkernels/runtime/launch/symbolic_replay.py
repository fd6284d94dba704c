"""A kind of call at other sizes: what a wrapper does with sizes and strides, noted once as arithmetic, and computed from then on.

A cache that grows is a call at sizes never seen before with every token. Its wrapper computes little from them: strides, a grid,
whether a tile divides a length. So it is run once more on numbers that note what is done to them, and so is what picks the kernels.
A comparison is noted with its outcome: where it comes out otherwise for other sizes, the notes say nothing about those. Whatever
is more than arithmetic of sizes raises, and such a wrapper is run for each call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from .bound_launch import BoundLaunch, row_major

_PLAIN = frozenset(("Tensor", "backends", "finfo", "promote_types", "version"))  #: of torch, what neither allocates nor computes


class Unknown(Exception):
    """Something that is more than arithmetic of sizes."""


class Tape:
    """The arithmetic so far, as the body of a Python function that gives None where a comparison comes out otherwise."""

    def __init__(self):
        self.lines: list[str] = []
        self.given: list[str] = []  #: names of what the function takes
        self._numbers: dict[str, Number] = {}
        self._told: set[str] = set()

    def take(self, value: int) -> Number:
        """One number more that the function takes."""
        self.given.append(f"s{len(self.given)}")
        return Number(self, self.given[-1], value)

    def number(self, text: str, value: int) -> Number:
        """What an expression gives; the same object for the same one."""
        if text not in self._numbers:
            self._numbers[text] = Number(self, f"n{len(self._numbers)}", value)
            self.lines.append(f"{self._numbers[text].name} = {text}")
        return self._numbers[text]

    def told(self, text: str, outcome: bool) -> bool:
        """The outcome of a comparison, on which what follows hangs."""
        if text not in self._told:
            self._told.add(text)
            self.lines.append(f"if {f'not ({text})' if outcome else text}: return None")
        return outcome

    def function(self, result: object) -> Callable[[list[int]], tuple | None]:
        """(the numbers) -> ``result``, nested tuples of numbers, as it is for those."""
        lines = [f"{', '.join(self.given)}, = given", *self.lines, f"return {_text(result)}"]
        space: dict = {"__builtins__": {}}
        exec("def computed(given):\n" + "".join(f"    {line}\n" for line in lines), space)
        return space["computed"]


def _text(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({''.join(f'{_text(v)}, ' for v in value)})"
    if type(value) is Number:
        return value.name
    if type(value) not in (int, bool):
        raise Unknown(f"a {type(value).__name__}")
    return f"({value!r})"


class Number:
    """An integer that notes what is computed from it; ``isinstance`` says int, and what takes nothing but a true one fails."""

    __slots__ = ("tape", "name", "value")

    def __init__(self, tape: Tape, name: str, value: int):
        self.tape, self.name, self.value = tape, name, value

    @property  # type: ignore[misc]  # isinstance asks for it
    def __class__(self):
        return int

    __hash__ = object.__hash__

    def __neg__(self):
        return self.tape.number(f"-{self.name}", -self.value)

    def __bool__(self):
        return self.tape.told(self.name, bool(self.value))

    def bit_length(self) -> int:
        found = self.value.bit_length()
        self.tape.told(f"{self.name}.bit_length() == {found}", True)
        return found


def _value(x: object) -> int:
    return x.value if type(x) is Number else x  # type: ignore[return-value]


def _noting(text: str, compute: Callable, swapped: bool = False) -> Callable:
    def noted(self, other):
        a, b = (other, self) if swapped else (self, other)
        return self.tape.number(f"{_text(a)} {text} {_text(b)}", compute(_value(a), _value(b)))

    return noted


def _telling(text: str, compute: Callable) -> Callable:
    def told(self, other):
        if other is None or type(other) is str:
            return NotImplemented
        return self.tape.told(f"{self.name} {text} {_text(other)}", compute(self.value, _value(other)))

    return told


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("floordiv", "//"), ("mod", "%")):
    setattr(Number, f"__{_name}__", _noting(_sign, getattr(int, f"__{_name}__")))
    setattr(Number, f"__r{_name}__", _noting(_sign, getattr(int, f"__{_name}__"), swapped=True))
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    setattr(Number, f"__{_name}__", _telling(_sign, getattr(int, f"__{_name}__")))


class Shaped:
    """A tensor as wrappers see it, without contents; ``isinstance`` says tensor. It lies at a multiple of 16 bytes."""

    is_meta, is_cuda = False, True

    def __init__(self, shape: tuple, strides: tuple, dtype: torch.dtype, device: torch.device):
        self.shape, self._strides, self.dtype, self.device = shape, strides, dtype, device

    @property  # type: ignore[misc]  # isinstance asks for it
    def __class__(self):
        return torch.Tensor

    def stride(self, dim: int | None = None):
        return self._strides if dim is None else self._strides[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self):
        found = 1
        for n in self.shape:
            found = found * n
        return found

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return 0

    def to(self, dtype: torch.dtype) -> Shaped:
        if dtype != self.dtype:
            raise Unknown("a tensor that is converted")
        return self


class Allocating:
    """torch, as wrappers ask for it; what they allocate is put to ``allocated``."""

    def __init__(self):
        self.allocated: list[Shaped] = []
        self.cuda = SimpleNamespace(
            device_of=lambda tensor: nullcontext(), get_device_capability=torch.cuda.get_device_capability, get_device_properties=torch.cuda.get_device_properties
        )

    def __getattr__(self, name: str):
        found = getattr(torch, name)
        if name not in _PLAIN and not isinstance(found, torch.dtype):
            raise Unknown(f"torch.{name}")
        return found

    def empty(self, shape: tuple, dtype: torch.dtype, device: torch.device) -> Shaped:
        self.allocated.append(Shaped(tuple(shape), row_major(tuple(shape)), dtype, device))
        return self.allocated[-1]


def traceable(values: tuple) -> bool:
    """Whether every tensor lies at a multiple of 16 bytes, as those of a trace do."""
    return not any(isinstance(v, torch.Tensor) and v.data_ptr() & 15 for v in values)


def stand_ins(values: tuple) -> tuple[Tape, tuple]:
    """Values of which sizes and strides are noted, and where."""
    tape = Tape()
    found = [
        Shaped(tuple(map(tape.take, v.shape)), tuple(map(tape.take, v.stride())), v.dtype, v.device) if isinstance(v, torch.Tensor) else v
        for v in values
    ]
    return tape, tuple(found)


def sort_of(values: tuple) -> tuple:
    """What the notes of a wrapper hang on beside sizes and strides."""
    return tuple([(v.dim(), v.dtype, v.device) if isinstance(v, torch.Tensor) else (type(v), v if isinstance(v, int) else v > 0) for v in values])


class LaunchTemplate:
    """Bound kernels whose numbers are computed for the sizes of each call."""

    def __init__(self, tape: Tape, bound: BoundLaunch):
        self.bound, grids = bound, tuple([grid for _, grid, _, _ in bound._plans])
        self._numbers = tape.function((bound._raw(), grids, [shape for shape, _ in bound.allocations], bound._strides))

    def at(self, values: tuple) -> BoundLaunch | None:
        """The kernels for these values; None where a comparison comes out otherwise for them."""
        given: list[int] = []
        for v in values:
            if isinstance(v, torch.Tensor):
                given += v.shape
                given += v.stride()
        found = self._numbers(given)
        return None if found is None else self.bound.numbered(*found)
