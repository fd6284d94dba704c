"""Read integer tensors of a graph as linear functions of their places: what ``arange``, sums, slices and lookups make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .canonical import WRITTEN, called, example, number_of

_CONSTANTS = {"zeros": 0, "ones": 1, "new_zeros": 0, "new_ones": 1, "zeros_like": 0, "ones_like": 1}
_RESHAPED = ("unsqueeze", "squeeze", "view", "reshape", "flatten", "expand", "expand_as", "contiguous", "clone", "to", "long", "int", "bool", "type", "type_as", "broadcast_to")


@dataclass(frozen=True)
class Looked:
    """What a tensor (sequences, places) that is not known holds at the index of an axis, in the sequences ``rows``."""

    table: fx.Node
    rows: fx.Node
    axis: int


@dataclass(frozen=True)
class Linear:
    """A number that each element of a tensor has: constant + the sum of factor * term.

    A term is an axis, counted from the last as -1, whose index it stands for, a node of a symbol or of one integer, or a Looked.
    """

    constant: int = 0
    terms: dict[int | fx.Node | Looked, int] = field(default_factory=dict)

    def plus(self, other: Linear, by: int = 1) -> Linear:
        """Return self + by * other."""
        terms: dict[int | fx.Node | Looked, int] = dict(self.terms)
        for term, factor in other.terms.items():
            terms[term] = terms.get(term, 0) + by * factor
        return Linear(self.constant + by * other.constant, {term: factor for term, factor in terms.items() if factor})

    def times(self, factor: int) -> Linear:
        """Return factor * self."""
        return Linear().plus(self, factor)

    @property
    def axes(self) -> dict[int, int]:
        return {term: factor for term, factor in self.terms.items() if isinstance(term, int)}


class Reader:
    """Reads nodes of one graph. ``visited``: the nodes that were read, which are pure, and dead where nothing else reads them."""

    def __init__(self) -> None:
        self.visited: dict[fx.Node, None] = {}

    def linear(self, value: Any) -> Linear | None:
        """Return an integer tensor, a symbol or a number as a linear function, or None."""
        if isinstance(value, bool):
            return Linear(int(value))
        if isinstance(value, int):
            return Linear(value)
        if not isinstance(value, fx.Node) or WRITTEN in value.meta:
            return None
        found = example(value)
        if isinstance(found, (int, torch.SymInt)):
            known = number_of(value)
            return Linear(known) if isinstance(known, int) else Linear(0, {value: 1})
        if not isinstance(found, torch.Tensor) or found.is_floating_point() or found.is_complex():
            return None
        read = self._read(value)
        if read is None or read.terms and found.dtype == torch.bool:
            return Linear(0, {value: 1}) if found.dim() == 0 and found.dtype != torch.bool else None
        self.visited[value] = None
        sizes = found.shape
        return Linear(read.constant, {t: f for t, f in read.terms.items() if not (isinstance(t, int) and statically_known_true(sizes[t] == 1))})

    def _read(self, node: fx.Node) -> Linear | None:
        name, args, kwargs = called(node), node.args, node.kwargs
        if name == "arange":
            return self._arange(args, kwargs)
        if name in _CONSTANTS:
            return Linear(_CONSTANTS[name])
        if name in ("full", "new_full", "full_like", "tensor"):
            number = args[{"full": 1, "new_full": 2, "full_like": 1, "tensor": 0}[name]] if len(args) > 1 or name == "tensor" else kwargs.get("fill_value")
            return Linear(int(number)) if isinstance(number, (int, bool)) else None
        if name in ("add", "sub", "mul", "neg") and not set(kwargs) - {"other"}:
            return self._arithmetic(name, [self.linear(a) for a in (*args, *kwargs.values())])
        if name in _RESHAPED:
            return self._reshaped(self.linear(args[0]), args[0], node)
        if name == "getitem":
            return self._item(node)
        if name == "diff":
            return self._diff(node)
        if name == "cumsum":
            inner = self.linear(args[0])
            return inner if inner is not None and not inner.terms and not inner.constant else None
        if name in ("eq", "ne", "le", "lt", "ge", "gt") and len(args) == 2:  # of numbers alone
            one, other = self.linear(args[0]), self.linear(args[1])
            if one is not None and other is not None and not (gap := one.plus(other, -1)).terms:
                return Linear(int(COMPARISONS[name](gap.constant)))
        return None

    def _arange(self, args: tuple, kwargs: Any) -> Linear | None:
        given = [*args, *(kwargs[n] for n in ("start", "end", "step") if n in kwargs)]
        if len(given) == 3 and given[2] != 1:
            return None
        start = self.linear(given[0]) if len(given) > 1 else Linear()
        return None if start is None or kwargs.get("dtype", torch.long) not in (torch.long, torch.int, torch.int32) else start.plus(Linear(0, {-1: 1}))

    def _arithmetic(self, name: str, given: list[Linear | None]) -> Linear | None:
        known = [one for one in given if one is not None]
        if len(known) != len(given) or not known:
            return None
        if name == "neg":
            return known[0].times(-1)
        one, other = known
        if name == "mul":
            number, rest = (one, other) if not one.terms else (other, one)
            return None if number.terms else rest.times(number.constant)
        return one.plus(other, 1 if name == "add" else -1)

    def _reshaped(self, inner: Linear | None, before: Any, node: fx.Node) -> Linear | None:
        if inner is None:
            return None
        places = axes_after(example(before).shape, example(node).shape)
        if any(places.get(t.axis) != t.axis if isinstance(t, Looked) else t not in places for t in inner.terms if not isinstance(t, fx.Node)):
            return None
        return Linear(inner.constant, {places[t] if isinstance(t, int) else t: f for t, f in inner.terms.items()})

    def _item(self, node: fx.Node) -> Linear | None:
        source, index = node.args
        if not isinstance(example(source), torch.Tensor):
            return None
        index = index if isinstance(index, tuple) else (index,)
        inner = self.linear(source)
        if index and all(isinstance(i, fx.Node) and isinstance(example(i), torch.Tensor) and example(i).dtype != torch.bool for i in index):
            return self._looked_up(inner, index, example(source).dim()) if inner is not None else self._unknown(source, index)
        if inner is None or any(isinstance(t, Looked) for t in inner.terms) or any(i is not None and i is not Ellipsis and not isinstance(i, slice) for i in index):
            return None
        rank = example(source).dim()
        slices = [i for i in index if isinstance(i, slice)]
        if Ellipsis in index:
            at = index.index(Ellipsis)
            behind = sum(isinstance(i, slice) for i in index[at:])
            axes = [*range(-rank, -rank + len(slices) - behind), *range(-behind, 0)]
        else:
            axes = list(range(-rank, -rank + len(slices)))
        result = inner
        for axis, part in zip(axes, slices, strict=True):
            if part.step not in (None, 1) or not (part.start is None or isinstance(part.start, int) and part.start >= 0):
                return None
            result = result.plus(Linear(inner.axes.get(axis, 0) * (part.start or 0)))
        cut = Linear(result.constant, {t: f for t, f in result.terms.items() if not (isinstance(t, int) and _one_left(t, axes, slices))})
        return _moved(cut, _axes_of_items(index, rank))

    def _looked_up(self, inner: Linear, index: tuple, rank: int) -> Linear | None:
        if len(index) != rank:
            return None
        result = Linear(inner.constant, {t: f for t, f in inner.terms.items() if not isinstance(t, int)})
        for axis, factor in inner.axes.items():
            place = self.linear(index[axis])
            if place is None or place.constant < 0:
                return None
            result = result.plus(place, factor)
        for one in index:  # dead once the lookup is
            if self.linear(one) is None:
                return None
        return result

    def _unknown(self, source: Any, index: tuple) -> Linear | None:
        """Return what a lookup of a sequence and a place gives, whatever the table holds."""
        if example(source).dim() != 2 or len(index) != 2 or WRITTEN in source.meta:
            return None
        sequence, place = self.linear(index[0]), self.linear(index[1])
        if sequence is None or place is None or place.constant or len(place.terms) != 1 or sequence not in (Linear(), Linear(0, {-4: 1})):
            return None
        (axis, factor), = place.terms.items()
        return Linear(0, {Looked(source, index[0], axis): 1}) if isinstance(axis, int) and factor == 1 else None

    def _diff(self, node: fx.Node) -> Linear | None:
        given = {**dict(zip(("input", "n", "dim", "prepend", "append"), node.args)), **node.kwargs}
        inner, before = self.linear(given["input"]), self.linear(given.get("prepend"))
        if inner is None or before is None or given.get("n", 1) != 1 or given.get("dim", -1) != -1 or given.get("append") is not None:
            return None
        step = inner.axes.get(-1, 0)
        first = Linear(inner.constant, {t: f for t, f in inner.terms.items() if t != -1}).plus(before, -1)
        return Linear(step) if not first.terms and first.constant == step else None


COMPARISONS = {"eq": lambda d: d == 0, "ne": lambda d: d != 0, "le": lambda d: d <= 0, "lt": lambda d: d < 0, "ge": lambda d: d >= 0, "gt": lambda d: d > 0}


def _one_left(axis: int, axes: list[int], slices: list[slice]) -> bool:
    """Return whether a slice leaves one element of an axis."""
    part = slices[axes.index(axis)] if axis in axes else None
    return part is not None and isinstance(part.stop, int) and part.stop == (part.start or 0) + 1


def _axes_of_items(index: tuple, rank: int) -> dict[int, int]:
    """Return axis before -> axis after, for an index of None, slices and an Ellipsis."""
    slices = sum(isinstance(i, slice) for i in index)
    whole: list[Any] = []
    for i in index if Ellipsis in index else (*index, Ellipsis):
        whole += [slice(None)] * (rank - slices) if i is Ellipsis else [i]
    kept = [place - len(whole) for place, i in enumerate(whole) if i is not None]
    return {axis - rank: after for axis, after in enumerate(kept)}


def _moved(inner: Linear, places: dict[int, int]) -> Linear:
    return Linear(inner.constant, {places[t] if isinstance(t, int) else t: f for t, f in inner.terms.items()})


def axes_after(before: Sequence, after: Sequence) -> dict[int, int]:
    """Return axis -> axis for a change of shape that adds and removes dimensions of 1, or repeats such; {} for another change."""
    if len(before) <= len(after) and all(statically_known_true(b == a) or statically_known_true(b == 1) for b, a in zip(before[::-1], after[::-1])):
        return {axis: axis for axis in range(-len(before), 0)}
    wide = [[axis - len(shape) for axis, size in enumerate(shape) if not statically_known_true(size == 1)] for shape in (before, after)]
    same = len(wide[0]) == len(wide[1]) and all(statically_known_true(before[b] == after[a]) for b, a in zip(*wide))
    return dict(zip(*wide)) if same else {}
