"""Represent torch values during tracing: an expression over index variables, a few of them for each dimension.

A dimension of a torch value is a tuple of index variables, slowest first. ``()`` is a dimension of size 1, ``(i,)`` an ordinary one,
and ``(h, d)`` one that was flattened. Reshaping regroups index variables and moves nothing. Where a dimension is split,
its axis gets parts, and every tensor along that axis is read with that many indices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..lang import expr as ex

_numbers = itertools.count()


class Axis:
    """An extent that several dimensions share (union-find). ``parts``: the extents that it is a product of, once it is split."""

    def __init__(self, size: Any):
        self.size, self.parts = size, ()  # type: Any, tuple[Axis, ...]
        self._parent: Axis | None = None

    def root(self) -> Axis:
        """Return the representative of all axes unified with this one."""
        axis = self
        while axis._parent is not None:
            axis = axis._parent
        return axis

    def unify(self, other: Axis) -> None:
        """Make two axes one. Neither is split."""
        a, b = self.root(), other.root()
        if a is not b:
            b._parent = a

    def split(self, *sizes: Any) -> None:
        """Split an axis into parts of the given sizes, slowest first."""
        self.root().parts = tuple(map(Axis, sizes))

    def leaves(self) -> list[Axis]:
        """Return the unsplit axes that this one consists of."""
        root = self.root()
        return [leaf for part in root.parts for leaf in part.leaves()] if root.parts else [root]


class Index:
    """An index variable along an axis. ``name`` is unique; readable names are chosen when the program is written."""

    def __init__(self, axis: Axis, children: tuple[Index, ...] = ()):
        self.axis, self.name, self._children = axis, f"_{next(_numbers)}", children

    def leaves(self) -> list[Index]:
        """Return the index variables along the parts of the axis."""
        parts = self.axis.root().parts
        if not parts:
            return [self]
        self._children = self._children or tuple(map(Index, parts))
        return [leaf for child in self._children for leaf in child.leaves()]

    def onto(self, leaves: Iterator[Index]) -> Index:
        """Return an index variable along this axis whose leaves are taken from ``leaves``."""
        parts = self.axis.root().parts
        if not parts:
            return next(leaves)
        self.leaves()
        return Index(self.axis, tuple(child.onto(leaves) for child in self._children))


Dims = tuple[tuple[Index, ...], ...]


def flat(dim: Iterable[Index]) -> list[Index]:
    """Return the unsplit index variables of a dimension."""
    return [leaf for index in dim for leaf in index.leaves()]


@dataclass(frozen=True)
class IndexLabel(ex.Label):
    """A label that knows its index variable."""

    index: Any = None


def label(index: Index) -> IndexLabel:
    """Return the expression of an index variable."""
    return IndexLabel(index.name, index)


@dataclass(frozen=True)
class Joined(ex.Binary):
    """The position along a split index, from those along its leaves: ``left`` is that of all but the last leaf times the last one's extent."""

    own: tuple[Index, ...] = ()  #: the leaves

    def positions(self) -> tuple[ex.Expr, ...]:
        """Return the position along each leaf."""
        parts: list[ex.Expr] = []
        node: ex.Expr = self
        while len(parts) < len(self.own) - 1:
            assert isinstance(node, ex.Binary) and isinstance(node.left, ex.Binary)
            parts.insert(0, node.right)
            node = node.left.left
        return (node, *parts)


def joined(own: Sequence[Index], positions: Sequence[ex.Expr], sizes: Sequence[ex.Expr]) -> ex.Expr:
    """Return the position along a split index from the positions along its leaves. ``sizes``: the extents of all leaves but the first."""
    total = positions[0]
    for count, (size, one) in enumerate(zip(sizes, positions[1:]), 2):
        total = Joined("+", ex.Binary("*", total, size), one, own=tuple(own[:count]))
    return total


def divided(op: str, position: ex.Expr, size: ex.Expr) -> ex.Expr:
    """Return a quotient or a remainder of positions, worked out where both are numbers."""
    if isinstance(position, ex.Const) and isinstance(size, ex.Const) and size.value > 0:
        return ex.Const(int(position.value // size.value if op == "/" else position.value % size.value))
    return ex.Binary(op, position, size)


@dataclass(frozen=True)
class Size(ex.Expr):
    """An integer expression of the sizes of the inputs (sympy)."""

    value: Any


@dataclass(frozen=True)
class Value:
    """A torch tensor: its dimensions, the expression of an element, its dtype in torch."""

    dims: Dims
    expr: ex.Expr
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.dims)


@dataclass(frozen=True)
class Source:
    """A tensor that the program takes: an argument or a closed-over tensor, after some views that torch makes outside the kernels."""

    root: int  #: its number among the tensors of a call
    steps: tuple[tuple[Any, tuple, tuple], ...]  #: (operation, other arguments, keyword arguments)
    shape: tuple  #: sizes, sympy
    dtype: torch.dtype
    name: str


SEED = Source(-1, (), (), torch.int64, "seed")  #: a number that each call draws
