"""Find what a function reads besides its arguments: closed-over tensors, which become inputs, and settings, which select the program."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: settings: their values are part of the key of a program
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), slice)
_NOTHING = (types.ModuleType, type, types.BuiltinFunctionType)
DEPTH = 6


class State:
    """What a call reads. ``tensors`` with their names; ``key`` holds all else."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.key: list[Any] = []
        self._seen: set[int] = set()

    def add(self, value: Any, name: str, depth: int = 0) -> None:
        """Read a value and all that can be reached from it."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.tensors.append(value)
                self.names.append(name)
                self.key.append((name, tuple(value.shape), value.dtype))
        elif isinstance(value, _PLAIN):
            self.key.append((name, type(value), str(value) if isinstance(value, slice) else value))
        elif isinstance(value, _NOTHING):
            self.key.append((name, id(value)))
        elif id(value) in self._seen or depth > DEPTH:
            self.key.append((name, id(value)) if depth > DEPTH else name)
        else:
            self._seen.add(id(value))
            self.key.append((name, type(value)))
            for part, inner in _parts(value):
                self.add(inner, part, depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the parts of a value."""
    if isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "method", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, dict):
        yield from ((str(k), v) for k, v in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item{k}", v) for k, v in enumerate(value))
    elif isinstance(value, torch.nn.Module):
        for held in (value._parameters, value._buffers, value._modules):
            yield from ((str(k), v) for k, v in held.items())
        yield from ((k, v) for k, v in vars(value).items() if not k.startswith("_"))
        yield "forward", type(value).forward
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith("torch"):
        yield from ((k, v) for k, v in vars(value).items())
    else:
        yield "id", f"{id(value)}"


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function closes over, its defaults, and the globals that it names. Those of torch's own functions do not count."""
    if (function.__module__ or "").split(".")[0] in ("torch", "math", "functools", "dtkernels"):
        return
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
    for name in _global_names(function.__code__):
        if name in function.__globals__ and not isinstance(value := function.__globals__[name], types.ModuleType):
            yield name, value


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _global_names(inner)


def state_of(function: Callable, objects: list[tuple[str, Any]]) -> State:
    """Return the state that a function reads besides its tensor arguments. ``objects``: arguments that are neither tensors nor plain."""
    state = State()
    for name, value in objects:
        state.add(value, name)
    state.add(function, getattr(function, "__name__", "function"))
    return state
