"""Attach the operator and the kernel source to each op function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.bind.library_ops import call_entry, signature
from ..runtime.signature.arguments import Interface, refuse_layout, type_name
from .registry import interfaces, shipped

compiling = torch.compiler.is_dynamo_compiling


class _Traced:
    """Stand in for an operator while torch.compile traces a call. Holds only a name, so that Dynamo has nothing to inspect."""

    traced = True

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args, **kwargs):
        return call_entry(self.name, _signature(self.name), args, kwargs)

    def fresh(self, tensors: tuple, settings: tuple, given: dict):
        return self(**given)


def operator_called(name: str):
    """Return the operator of a shipped op, or what stands in for it while torch.compile traces."""
    return _Traced(name) if compiling() else shipped(name)


def _signature(name: str) -> str:
    shipped(name)
    return signature(name)


_signature._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without importing it


def op(*, broadcast: bool = False, **arguments: str) -> Callable[[Any], Any]:
    """Attach ``operator`` and ``source`` of the spec with the function's name.

    ``arguments`` map the spec's inputs and scalars to the function's names and allowed shapes: ``A="x (..., C)"``. ``broadcast``: leading
    dimensions of different inputs broadcast; otherwise they must be equal.
    """

    def attached(function: Any) -> Any:
        name = function.__name__
        interfaces[name] = Interface(arguments, broadcast)

        def operator():
            return operator_called(name)

        def source(shape=None, gpu="h200", **options):
            """Return the emitted source on ``gpu`` for labels of extents ``shape`` (the output's, then the reduced ones)."""
            return operator().source(shape, gpu, **options)

        function.operator, function.source = operator, source
        return function

    return attached


def only_tensors(name: str, **given: object) -> None:
    """Raise TypeError, one line, where an argument is not a tensor with a shape, before its shape is used."""
    for argument, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: {argument} is {type_name(value)}; allowed: a tensor")
        refuse_layout(name, argument, value)


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor (..., N) as (M, N), also where N is 0."""
    return t.flatten(0, -2) if t.dim() > 1 else t[None]
