"""Say where extents come from in plain tuples, and evaluate them. Calls use this module, so it imports no expressions.

``("A", 1)`` is the size of dimension 1 of A, ``4`` a number, ``("/", ("A", 1), 2)`` arithmetic on them; ``/`` rounds down.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

#: (input, dimension), a number, or (operator, source, source)
Source = tuple[str, int] | int | tuple[str, Any, Any]
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
}  # fmt: skip
_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2}


def size_from(source: Source, tensors: Mapping[str, Any], label: str = "") -> Any:
    """Return the extent that ``source`` gives for these tensors. Raises ValueError, one line, if that is negative."""
    size = computed(source, lambda tensor, dim: tensors[tensor].shape[dim])
    if size < 0:
        raise ValueError(f"the extent of {label} is {size}: {source_text(source)}; allowed: 0 or more")
    return size


def computed(source: Source, size_of: Callable[[str, int], Any]) -> Any:
    """Evaluate ``source``; ``size_of`` gives the size of a dimension of an input."""
    if not isinstance(source, tuple):
        return source
    if len(source) == 2:
        return size_of(*source)
    return ARITHMETIC[source[0]](computed(source[1], size_of), computed(source[2], size_of))


def source_text(source: Source, python: bool = False, outer: int = 0) -> str:
    """Print a source as DT text, or as Python on the shapes of tensors."""
    if not isinstance(source, tuple):
        return str(source) if source >= 0 else f"({source})"
    if len(source) == 2:
        return f"{source[0]}.shape[{source[1]}]" if python else f"{source[0]}[{source[1]}]"
    own = _BINDS[source[0]]
    sign = "//" if python and source[0] == "/" else source[0]
    text = f"{source_text(source[1], python, own)} {sign} {source_text(source[2], python, own + 1)}"
    return f"({text})" if own < outer else text
