"""What every op function carries besides its call: the operator behind it and the source of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.bind.library_ops import call_entry, signature
from ..runtime.signature.arguments import Interface, refuse_layout, told
from .registry import interfaces, shipped

compiling = torch.compiler.is_dynamo_compiling


class _Traced:
    """Stands for an operator while torch.compile reads a call: a name, nothing that the compiler would have to look into."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args, **kwargs):
        return call_entry(self.name, _signature(self.name), args, kwargs)

    def fresh(self, tensors: tuple, settings: tuple, given: dict):
        return self(**given)


def _signature(name: str) -> str:
    shipped(name)
    return signature(name)


_signature._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without its import


def op(*, broadcast: bool = False, **arguments: str) -> Callable[[Any], Any]:
    """Attach ``operator`` and ``source`` of the spec that bears the function's name.

    ``arguments`` say what the function calls the spec's inputs and scalars, and which shapes inputs may have:
    ``A="x (..., C)"``. ``broadcast``: leading dimensions of different inputs broadcast; otherwise they are the same.
    """

    def attached(function: Any) -> Any:
        name = function.__name__
        interfaces[name] = Interface(arguments, broadcast)

        def operator():
            return _Traced(name) if compiling() else shipped(name)

        def source(shape=None, gpu="h200", **options):
            """The emitted file for labels of extents ``shape`` (the output's, then the reduced ones) on ``gpu``."""
            return operator().source(shape, gpu, **options)

        function.operator, function.source = operator, source
        return function

    return attached


def only_tensors(name: str, **given: object) -> None:
    """Raise TypeError, one line, where an argument is not a tensor with a shape, before it is asked for one."""
    for argument, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: {argument} is {told(value)}; allowed: a tensor")
        if value.is_nested:
            refuse_layout(name, argument, value)
