"""Patch rotary embeddings: attention modules whose forward calls a function (q, k, cos, sin) of its modeling file.

That function is a global of the file, shared by every model. The instance gets a forward with the same code and the file's
globals, except that this one name is bound to the op. Neither the file nor the class changes.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import cast

import torch
from torch import nn

from ..patching.call_stats import CallRecord
from ..patching.forward_patching import plain, replace_forward, taken, unsupported
from ..patching.numeric_probe import normal, output_of, same
from ..patching.report import PatchReport

_record: ContextVar[CallRecord | None] = ContextVar("record of the attention module that runs", default=None)


class _Globals(dict):
    """Some names; all others are looked up in a file's globals at the time of use."""

    def __init__(self, own: dict, file: dict):
        super().__init__(own, __builtins__=file["__builtins__"])
        self.file = file

    def __missing__(self, name: str) -> object:
        return self.file[name]


def _copied(function: types.FunctionType, scope: dict, cells: tuple[types.CellType, ...] | None) -> types.FunctionType:
    """Return ``function`` with other globals and another closure."""
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


def _content(cell: types.CellType) -> object:
    """Return what a variable of a closure holds; None where nothing is assigned to it."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _layers(function: object) -> list[types.FunctionType]:
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


class Rebound:
    """The forward of a class with the global `name` bound to the op instead of `original`; ``function`` is the new forward."""

    def __init__(self, cls: type[nn.Module], name: str, original: Callable):
        self.cls, self.name, self.original = cls, name, original
        self.forward = cls.forward
        *decorators, forward = _layers(cls.forward)
        self.scope: dict = forward.__globals__
        function = _copied(forward, _Globals({name: partial(rotated, original)}, self.scope), forward.__closure__)
        for wrapper in reversed(decorators):  # each calls the next by a variable of its closure
            cells = tuple(types.CellType(function) if _content(c) is wrapper.__wrapped__ else c for c in wrapper.__closure__ or ())  # type: ignore[attr-defined]
            function = _copied(wrapper, wrapper.__globals__, cells)
        self.function = function

    def __reduce__(self):
        return rebound, (self.cls,)  # functions with globals of their own cannot be pickled: they are made anew

    def changed(self) -> str | None:
        """Return why the rebound forward is outdated: another rotary function, or another class forward. Else None."""
        if self.scope.get(self.name) is not self.original:
            return "its modeling file has another rotary function now"
        return None if self.cls.forward is self.forward else "its class has another forward now"


def rope_forward(record: CallRecord, module: nn.Module, bound: Rebound, *args, **kwargs):
    """Run the module's own forward with q and k rotated by the op; arguments and result as before."""
    if torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    if (reason := bound.changed()) is not None:
        record.count(reason)
        return type(module).forward(module, *args, **kwargs)
    token = _record.set(record)
    try:
        return bound.function(module, *args, **kwargs)
    finally:
        _record.reset(token)


def rotated(original: Callable, q, k=None, cos=None, sin=None, *args, **kwargs):
    """Rotate q and k by cos and sin. Unsupported calls go to the modeling file's function and are counted.

    Some of these functions rotate q alone, for the indexer of sparse attention.
    """
    reason = _unsupported(q, k, cos, sin, args, kwargs)
    if (record := _record.get()) is not None:
        record.count(reason, q)
    if reason is not None:
        return original(q, k, cos, sin, *args, **kwargs)
    from dtkernels import ops

    return ops.rope(q, k, cos, sin)


def _unsupported(q, k, cos, sin, args: tuple, kwargs: dict) -> str | None:
    if args or any(value is not None and not (key == "unsqueeze_dim" and value == 1) for key, value in kwargs.items()):
        return "arguments other than q, k, cos and sin"
    if k is None or cos is None or sin is None:
        return "no k, cos or sin"
    for x in (q, k, cos, sin):
        if (reason := unsupported(x)) is not None:
            return reason
    if len({x.dtype for x in (q, k, cos, sin)}) > 1 or len({x.device for x in (q, k, cos, sin)}) > 1 or not plain(q):
        return "q, k, cos and sin of different dtypes or devices"
    sizes = (q.shape[0], 1), (q.shape[2],) if q.dim() == 4 else (), (q.shape[-1],)
    if q.dim() != 4 or k.dim() != 4 or k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:]:
        return "q and k that are not (B, H, S, D) and (B, G, S, D)"
    if cos.dim() != 3 or cos.shape != sin.shape or any(n not in allowed for n, allowed in zip(cos.shape, sizes)):
        return "cos and sin that are not (B, S, D)"
    return None


def patch_rope(model: nn.Module, report: PatchReport) -> None:
    """Patch every attention module of `model` that rotates halves of its queries and keys against each other."""
    for name, module in model.named_modules():
        function = _rotary_name(type(module))
        if function is not None:
            bound = rebound(type(module))
            reason = _why_not_replaceable(type(module), function) if bound is None else taken(module, type(module))
            if bound is not None or reason is not None:  # a function that computes something else is not this op
                forward = partial(rope_forward, CallRecord(), module, cast(Rebound, bound))  # not installed where there is a reason
                replace_forward(name, module, "rope", forward, reason, report)


def _rotary_name(cls: type[nn.Module]) -> str | None:
    """Return the name of the global that the forward of a class calls with (q, k, cos, sin), or None."""
    forward = inspect.unwrap(cls.forward)
    if not inspect.isfunction(forward):
        return None
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function):
            code = function.__code__
            if code.co_varnames[: min(4, code.co_argcount)] == ("q", "k", "cos", "sin"):
                return name
    return None


def rebound(cls: type[nn.Module]) -> Rebound | None:
    """Return the forward of a class with its rotary function replaced; None if the function is not the op's."""
    name = _rotary_name(cls)
    layers = _layers(cls.forward)
    if name is None or not layers:
        return None
    original = layers[-1].__globals__[name]
    return _make_rebound(cast(type, cls), name, original, cls.forward) if _is_half_rotation(original) else None


@cache
def _make_rebound(cls: type[nn.Module], name: str, original: Callable, forward: Callable) -> Rebound:
    return Rebound(cls, name, original)


@cache
def _is_half_rotation(function: Callable) -> bool:
    """Return whether a function rotates element d of q and k with element d + D / 2, where cos and sin are (B, S, D)."""
    q, k, cos, sin = normal(2, 3, 5, 8), normal(2, 1, 5, 8, seed=1), normal(2, 5, 8, seed=2), normal(2, 5, 8, seed=3)
    result = output_of(function, q, k, cos, sin)
    if not isinstance(result, tuple) or len(result) != 2:
        return False
    turned = (torch.cat((-x[..., 4:], x[..., :4]), -1) for x in (q, k))
    wanted = [x * cos[:, None] + t * sin[:, None] for x, t in zip((q, k), turned)]
    return all(same(found, right) for found, right in zip(result, wanted))


def _why_not_replaceable(cls: type[nn.Module], name: str) -> str | None:
    """Return why the function cannot be examined or replaced; None if it computes something else."""
    layers = _layers(cls.forward)
    if not layers:
        return f"{cls.__name__}.forward is wrapped by a decorator that cannot be copied"
    if layers[-1].__globals__[name].__module__.partition(".")[0] != cls.__module__.partition(".")[0]:
        return f"{name} was already replaced by somebody else"
    return None
