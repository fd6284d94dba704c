"""Find what a function reads besides its arguments: closed-over tensors, which become inputs, and settings, which select the program."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

#: settings: their values are part of the key of a program
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), slice, range, complex)
_EXACT = frozenset({bool, int, str, bytes, type(None), torch.dtype, torch.device})  #: compared and hashed as they are
_NOTHING = (types.ModuleType, type, types.BuiltinFunctionType)
_WITHOUT_SETTINGS = frozenset({"torch", "dtkernels", "numpy", *sys.stdlib_module_names}) - {"__main__"}  #: packages whose attributes are not read
DEPTH = 6


class Same:
    """Compare an object by identity. It stays alive: no later object has its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def setting(value: Any) -> tuple:
    """Return a plain value as part of a key: with its type and the sign of 0; a NaN is equal to itself."""
    if isinstance(value, slice):  # it has no hash
        return slice, str(value)
    if isinstance(value, float) and (value == 0 or value != value):
        return float, repr(value)
    return type(value), value


class State:
    """What a call reads. ``tensors`` with their names; ``key`` holds all else."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.key: list[Any] = []
        self._seen: dict[int, int] = {}  #: object -> its number

    def add(self, value: Any, name: str, depth: int = 0) -> None:
        """Read a value and all that can be reached from it."""
        kind = type(value)
        if kind in _EXACT:
            self.key.append((name, kind, value))
        elif kind is Same:
            self.key.append((name, value))
        elif isinstance(value, _PLAIN):
            self.key.append((name, *setting(value)))
        elif isinstance(value, _NOTHING):
            self.key.append((name, Same(value)))
        elif (number := self._seen.get(id(value))) is not None:
            self.key.append((name, number))
        elif isinstance(value, torch.Tensor):
            self._seen[id(value)] = len(self._seen)
            self.tensors.append(value)
            self.names.append(name)
            self.key.append((name, tuple(value.shape), value.dtype))
        elif depth > DEPTH or (parts := _parts(value)) is None:
            self.key.append((name, Same(value)))
        else:
            self._seen[id(value)] = len(self._seen)
            self.key.append((name, kind))
            for part, inner in parts:
                self.add(inner, part, depth + 1)


def _parts(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return (name, value) of the parts of a value; None if it is compared as a whole, by identity."""
    if isinstance(value, torch.nn.Module):
        return _of_module(value)
    if isinstance(value, types.MethodType):
        return ("self", value.__self__), ("method", value.__func__)
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, functools.partial):
        return ("function", value.func), ("arguments", value.args), ("named", value.keywords)
    if isinstance(value, dict):
        return ((str(k), v) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return ((f"item{k}", v) for k, v in enumerate(value))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return ("numbers", value.tobytes()), ("shape", str(value.shape)), ("dtype", str(value.dtype))
    if type(value).__module__.startswith("dtkernels.") and hasattr(value, "__wrapped__"):
        return (("wrapped", value.__wrapped__),)  # another fused function
    if type(value).__module__.split(".")[0] in ("torch", "dtkernels"):
        return None
    slots = [n for kind in type(value).__mro__ for n in _names_of_slots(kind) if hasattr(value, n)]
    if hasattr(value, "__dict__"):
        return (*vars(value).items(), *((n, getattr(value, n)) for n in slots))
    return tuple((n, getattr(value, n)) for n in slots) if slots else None


def _names_of_slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(n for n in found if n not in ("__dict__", "__weakref__"))


def _of_module(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for held in (module._parameters, module._buffers, module._modules):
        yield from ((str(k), v) for k, v in held.items())
    yield from ((k, v) for k, v in vars(module).items() if not k.startswith("_"))
    yield "forward", type(module).forward


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield its code, the variables that a function closes over, its defaults, and the globals that it names; for torch's own functions itself alone."""
    if (function.__module__ or "").split(".")[0] in ("torch", "math", "functools", "dtkernels"):
        yield "function", Same(function)
        return
    yield "code", Same(function.__code__)
    if hasattr(function, "__wrapped__"):
        yield "wrapped", function.__wrapped__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            yield name, None
    for k, value in enumerate(function.__defaults__ or ()):
        yield f"default{k}", value
    yield from (function.__kwdefaults__ or {}).items()
    named = _global_names(function.__code__)
    for name in named:
        if name not in function.__globals__:
            continue
        if not isinstance(value := function.__globals__[name], types.ModuleType):
            yield name, value
        elif value.__name__.split(".")[0] not in _WITHOUT_SETTINGS:  # settings.SCALE
            held = vars(value)
            yield from ((n, held[n]) for n in named if n in held and isinstance(held[n], (torch.Tensor, *_PLAIN)))


@functools.lru_cache(4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function's code, and in that of functions within it."""
    inner = (_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


def state_of(function: Callable, objects: list[tuple[str, Any]]) -> State:
    """Return the state that a function reads besides its tensor arguments. ``objects``: arguments that are neither tensors nor plain."""
    state = State()
    for name, value in objects:
        state.add(value, name)
    state.add(function, getattr(function, "__name__", "function"))
    return state
