"""What every op function carries besides its call: the operator behind it and the source of its kernels."""

from __future__ import annotations

from collections.abc import Callable

from .registry import shipped


def op(function: Callable) -> Callable:
    """Attach ``operator`` and ``source`` of the spec that bears the function's name."""

    def operator():
        return shipped(function.__name__)

    def source(shape=None, gpu="h200", **options):
        """The emitted file for labels of extents ``shape`` (the output's, then the reduced ones) on ``gpu``."""
        return operator().source(shape, gpu, **options)

    function.operator, function.source = operator, source
    return function
