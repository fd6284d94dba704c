"""Copy a class's forward, with its decorators, so that an instance may run it with other globals or other code."""

from __future__ import annotations

import inspect
import types


class Globals(dict):
    """Some names; all others are looked up in a file's globals at the time of use."""

    def __init__(self, own: dict, file: dict):
        super().__init__(own, __builtins__=file["__builtins__"])
        self.file = file

    def __missing__(self, name: str) -> object:
        return self.file[name]


def copied(
    function: types.FunctionType, scope: dict, cells: tuple[types.CellType, ...] | None, code: types.CodeType | None = None
) -> types.FunctionType:
    """Return ``function`` with other globals, another closure and perhaps other code."""
    made = types.FunctionType(function.__code__ if code is None else code, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


def layers_of(function: object) -> list[types.FunctionType]:
    """Return a function without its decorators, last, after these; empty where one of them does not call the next by its closure."""
    found: list[types.FunctionType] = []
    while inspect.isfunction(function):
        found.append(function)
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return found
        if not any(_content(c) is inner for c in function.__closure__ or ()):
            return []
        function = inner
    return []


def redecorated(decorators: list[types.FunctionType], function: types.FunctionType) -> types.FunctionType:
    """Return ``function`` inside copies of decorators, outermost first, which ``layers_of`` returned."""
    for wrapper in reversed(decorators):  # each calls the next by a variable of its closure
        cells = tuple(types.CellType(function) if _content(c) is wrapper.__wrapped__ else c for c in wrapper.__closure__ or ())  # type: ignore[attr-defined]
        function = copied(wrapper, wrapper.__globals__, cells)
    return function


def _content(cell: types.CellType) -> object:
    """Return the value of a closure variable; None if it is unassigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
