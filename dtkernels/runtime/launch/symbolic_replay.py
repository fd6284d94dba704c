"""Replay a wrapper at other sizes: trace its arithmetic on sizes and strides symbolically, once, and evaluate it for later calls.

A growing KV cache calls at new sizes with every token. A wrapper computes little from them: strides, a grid, whether a tile divides a
length. The wrapper, and the choice of kernels after it, run once on symbolic integers that record each operation. A comparison is
recorded with its outcome as a guard: where sizes give another outcome, the trace does not apply. Anything beyond integer arithmetic
raises, and such a wrapper runs at each new size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from .bound_launch import BoundLaunch, row_major

_SETTINGS = ("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled")
_PLAIN = frozenset(("Tensor", "backends", "finfo", "promote_types", "version", *_SETTINGS))  #: attributes of torch that neither allocate nor compute


class Unknown(Exception):
    """An operation beyond integer arithmetic on sizes."""


class Tape:
    """Record integer arithmetic as the body of a Python function, which returns None where a guard fails."""

    def __init__(self):
        self.lines: list[str] = []
        self.given: list[str] = []  #: the function's parameters
        self._numbers: dict[str, Number] = {}
        self._guarded: set[str] = set()

    def take(self, value: int) -> Number:
        """Add a parameter to the function."""
        self.given.append(f"s{len(self.given)}")
        return Number(self, self.given[-1], value)

    def number(self, text: str, value: int) -> Number:
        """Record an expression. Equal expressions give the same object."""
        if text not in self._numbers:
            self._numbers[text] = Number(self, f"n{len(self._numbers)}", value)
            self.lines.append(f"{self._numbers[text].name} = {text}")
        return self._numbers[text]

    def add_guard(self, text: str, outcome: bool) -> bool:
        """Record the outcome of a comparison as a guard."""
        if text not in self._guarded:
            self._guarded.add(text)
            self.lines.append(f"if {f'not ({text})' if outcome else text}: return None")
        return outcome

    def function(self, result: object) -> Callable[[list[int]], tuple | None]:
        """Compile the function: (the parameters) -> ``result``, nested tuples of numbers."""
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
    """A symbolic integer that records the arithmetic on it. ``isinstance`` says int; code that needs a real int fails."""

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
        return self.tape.add_guard(self.name, bool(self.value))

    def bit_length(self) -> int:
        found = self.value.bit_length()
        self.tape.add_guard(f"{self.name}.bit_length() == {found}", True)
        return found


def _value(x: object) -> int:
    return x.value if type(x) is Number else x  # type: ignore[return-value]


def _recorded_operator(text: str, compute: Callable, swapped: bool = False) -> Callable:
    def noted(self, other):
        a, b = (other, self) if swapped else (self, other)
        return self.tape.number(f"{_text(a)} {text} {_text(b)}", compute(_value(a), _value(b)))

    return noted


def _guarded_comparison(text: str, compute: Callable) -> Callable:
    def add_guard(self, other):
        if other is None or type(other) is str:
            return NotImplemented
        return self.tape.add_guard(f"{self.name} {text} {_text(other)}", compute(self.value, _value(other)))

    return add_guard


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("floordiv", "//"), ("mod", "%")):
    setattr(Number, f"__{_name}__", _recorded_operator(_sign, getattr(int, f"__{_name}__")))
    setattr(Number, f"__r{_name}__", _recorded_operator(_sign, getattr(int, f"__{_name}__"), swapped=True))
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    setattr(Number, f"__{_name}__", _guarded_comparison(_sign, getattr(int, f"__{_name}__")))


class Shaped:
    """A symbolic tensor without contents, aligned to 16 bytes. ``isinstance`` says tensor."""

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
    """Stand in for torch in a wrapper: record allocations in ``allocated``."""

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
    """Tell whether every tensor is aligned to 16 bytes, as the traces assume."""
    return not any(isinstance(v, torch.Tensor) and v.data_ptr() & 15 for v in values)


def stand_ins(values: tuple) -> tuple[Tape, tuple]:
    """Return a tape, and the values with symbolic tensors in place of tensors."""
    tape = Tape()
    found = [
        Shaped(tuple(map(tape.take, v.shape)), tuple(map(tape.take, v.stride())), v.dtype, v.device) if isinstance(v, torch.Tensor) else v
        for v in values
    ]
    return tape, tuple(found)


def template_key(values: tuple) -> tuple:
    """Return the key of everything that a trace depends on besides sizes and strides."""
    return tuple([(v.dim(), v.dtype, v.device) if isinstance(v, torch.Tensor) else (type(v), v if isinstance(v, int) else v > 0) for v in values])


class LaunchTemplate:
    """Bound kernels whose launch data are evaluated for the sizes of each call."""

    def __init__(self, tape: Tape, bound: BoundLaunch):
        self.bound, grids = bound, tuple([grid for _, grid, _, _ in bound._plans])
        maps = [(shape, strides) for _, shape, strides, _ in bound._maps]
        self._numbers = tape.function((bound._raw(), grids, [shape for shape, _ in bound.allocations], bound._strides, maps))

    def at(self, values: tuple) -> BoundLaunch | None:
        """Return the bound kernels for these values; None where a guard fails."""
        given: list[int] = []
        for v in values:
            if isinstance(v, torch.Tensor):
                given += v.shape
                given += v.stride()
        found = self._numbers(given)
        return None if found is None else self.bound.numbered(*found)
