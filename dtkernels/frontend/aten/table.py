"""Map the name of each supported ATen operation to the function that builds its DT form.

An entry takes the builder, then the operation's arguments: tensors as ``Value``, the rest as they are. It returns a ``Value``, or a tuple of them.
In-place forms (``add_``) use the entry of their plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TABLE: dict[str, Callable[..., Any]] = {}
GROUPS: dict[str, list[str]] = {}  #: group -> operations, for the documentation
VIEWS: set[str] = set()  #: operations that torch does outside the kernels where their argument is an input


def op(*names: str, group: str, view: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function for the ATen operations ``names``."""

    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            TABLE[name] = function
            GROUPS.setdefault(group, []).append(name)
            if view:
                VIEWS.add(name)
        return function

    return entered


def supported() -> dict[str, tuple[str, ...]]:
    """Return the supported ATen operations by group."""
    from . import creation, elementwise, indexing, networks, products, randomness, reductions, scans, scatters, views, windows  # noqa: F401  # they fill the table
    from .decompositions import DECOMPOSITIONS, FUNCTIONS

    others = {*(name.rstrip("_") for name in DECOMPOSITIONS), *(function.__name__ for function in FUNCTIONS)}
    return {**{group: tuple(sorted(names)) for group, names in GROUPS.items()}, "written in others": tuple(sorted(others))}
