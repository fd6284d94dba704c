"""Read a mask function of transformers as numbers: the range of keys that each query sees.

A mask function takes index tensors and returns whether a query sees a key. Here it is called with symbols instead, which record
the comparisons; what they say is then put as a window, flags of keys and numbers of segments:

    and_masks(sliding_window_overlay(4), causal_mask_function)     window (3, 0)
    chunked_causal_mask_function(4, left_padding)                  window (None, 0), segments (position - left_padding) // 4
    and_masks(causal_mask_function, packed_sequence_mask_function(numbers))  window (None, 0), segments numbers

Overlays live in closures, which torch.compile does not show. It traces the call with symbols like any other Python code.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from .traced_places import counts_up, is_uniform

_GETITEM = (torch.Tensor.__getitem__, operator.getitem)


class Symbol:
    """A symbolic value: ``op`` of ``args``. "batch", "head", "query" and "key" are the indices that a mask function takes."""

    def __init__(self, op: str, *args: Any):
        self.op, self.args = op, args
        self.device = self.dtype = None

    def to(self, *_: object, **__: object) -> Symbol:
        return self

    def new_ones(self, *_: object, **__: object) -> Symbol:
        return Symbol("true")

    def new_zeros(self, *_: object, **__: object) -> Symbol:
        return Symbol("false")

    def __add__(self, other: object) -> Symbol:
        return Symbol("+", self, other)

    def __sub__(self, other: object) -> Symbol:
        return Symbol("-", self, other)

    def __floordiv__(self, other: object) -> Symbol:
        return Symbol("//", self, other)

    def __and__(self, other: object) -> Symbol:
        return Symbol("and", self, other)

    def __or__(self, other: object) -> Symbol:
        return Symbol("or", self, other)

    def __abs__(self) -> Symbol:
        return Symbol("abs", self)

    def __le__(self, other: object) -> Symbol:
        return Symbol("<=", self, other)

    def __lt__(self, other: object) -> Symbol:
        return Symbol("<", self, other)

    def __ge__(self, other: object) -> Symbol:
        return Symbol(">=", self, other)

    def __gt__(self, other: object) -> Symbol:
        return Symbol(">", self, other)

    def equals(self, other: object) -> Symbol:
        return Symbol("==", self, other)

    def differs(self, other: object) -> Symbol:
        return Symbol("!=", self, other)

    def __bool__(self) -> bool:
        raise TypeError("a symbol is neither true nor false")

    __eq__, __ne__ = equals, differs  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class _Lookups(TorchFunctionMode):
    """Record ``tensor[symbols]``. Other functions of symbols are not known; those of tensors alone run."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _GETITEM:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any([isinstance(index, Symbol) for index in indices]):
                return Symbol("lookup", args[0], *indices)
        return Symbol("unknown") if any([isinstance(arg, Symbol) for arg in args]) else func(*args, **(kwargs or {}))


@dataclass
class Reading:
    """Query position p sees p - left <= l <= p + right (None: no limit), flagged keys, and keys of its own segments.

    ``flags``: tensors [B, keys]. ``numbered``: tensors [B, positions], one number a position. ``chunks``: (chunk size, first
    position of each row [B]). ``positions``: tensor [B, positions], the position of each token where those count within segments.
    """

    left: int | None = None
    right: int | None = None
    flags: list[torch.Tensor] = field(default_factory=list)
    numbered: list[torch.Tensor] = field(default_factory=list)
    chunks: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    positions: torch.Tensor | None = None


def read(function: Callable) -> Reading | None:
    """Return the Reading of a mask function, or None if a Reading cannot express it."""
    if function is masking_utils.causal_mask_function:
        return Reading(right=0)
    if torch.compiler.is_compiling() and not _of_transformers(function):
        return None  # what Symbols lack would end the trace
    try:
        with _Lookups():
            said = function(Symbol("batch"), Symbol("head"), Symbol("query"), Symbol("key"))
    except Exception:  # foreign code on values that it was not written for
        return None
    reading = Reading()
    known = isinstance(said, Symbol) and _add(said, reading)
    return reading if known and (reading.numbered or reading.positions is None) else None


_CODES = [
    code
    for maker in vars(masking_utils).values()
    if isinstance(maker, types.FunctionType) and maker.__module__ == masking_utils.__name__
    for code in (maker.__code__, *maker.__code__.co_consts)
    if isinstance(code, types.CodeType)
]


def _of_transformers(function: Callable) -> bool:
    return any(function.__code__ is code for code in _CODES)


def _add(said: Symbol, reading: Reading) -> bool:
    """Add a condition to the reading. Returns False if it is none that a reading holds."""
    one, other = said.args if len(said.args) == 2 else (None, None)
    if said.op == "and":
        return all([isinstance(part, Symbol) and _add(part, reading) for part in said.args])
    if said.op == "true":
        return True
    if said.op == "lookup":
        return _add_flags(said, reading)
    if said.op == "==":
        return _add_segments(one, other, reading)
    if said.op in ("<", "<="):
        return _add_limit(one, other, int(said.op == "<"), reading)
    if said.op in (">", ">="):
        return _add_limit(other, one, int(said.op == ">"), reading)
    return False


def _add_flags(said: Symbol, reading: Reading) -> bool:
    flags, indices = said.args[0], said.args[1:]
    if not _are(indices, "batch", "key") or flags.dtype != torch.bool:
        return False
    reading.flags.append(flags)
    return True


def _add_limit(low: object, high: object, strict: int, reading: Reading) -> bool:
    """Add low + strict <= high."""
    if isinstance(low, Symbol) and low.op == "abs" and isinstance(high, int):
        ends = _difference(low.args[0], reading)
        return ends and _limit(reading, high - strict, high - strict)
    low, high = _position(low, reading), _position(high, reading)
    if low is None or high is None:
        return False
    slack = high[1] - low[1] - strict  # low's index <= high's index + slack
    if (low[0], high[0]) == ("key", "query"):
        return _limit(reading, None, slack)
    if (low[0], high[0]) == ("query", "key"):
        return _limit(reading, slack, None)
    return low[0] == "" and high[0] in ("query", "key") and slack >= 0  # 0 <= an index


def _difference(said: object, reading: Reading) -> bool:
    """Return whether this is query - key or key - query."""
    if not isinstance(said, Symbol) or said.op != "-":
        return False
    ends = [_position(end, reading) for end in said.args]
    return [end for end in ends if end is not None and end[1] == 0 and end[0]] == ends and {end[0] for end in ends if end} == {"query", "key"}


def _limit(reading: Reading, left: int | None, right: int | None) -> bool:
    if any(side is not None and side < 0 for side in (left, right)):
        return False
    reading.left = left if reading.left is None else reading.left if left is None else min(left, reading.left)
    reading.right = right if reading.right is None else reading.right if right is None else min(right, reading.right)
    return True


def _position(said: object, reading: Reading) -> tuple[str, int] | None:
    """Return (index, constant added to it); the index is "" for a number alone. None for anything else."""
    if isinstance(said, int):
        return "", said
    if not isinstance(said, Symbol):
        return None
    if said.op in ("query", "key"):
        return said.op, 0
    if said.op in ("+", "-") and isinstance(said.args[1], int):
        inner = _position(said.args[0], reading)
        return None if inner is None else (inner[0], inner[1] + (said.args[1] if said.op == "+" else -said.args[1]))
    if said.op == "lookup" and said.args[0].dtype != torch.bool:
        for index in ("query", "key"):
            if _are(said.args[1:], "batch", index):
                if not counts_up(said.args[0]):
                    reading.positions = said.args[0]
                return index, 0
    return None


def _are(indices: tuple, *names: str) -> bool:
    return len(indices) == len(names) and all([isinstance(i, Symbol) and i.op == name for i, name in zip(indices, names)])


def _add_segments(one: object, other: object, reading: Reading) -> bool:
    """Add that two numbers of segments are equal: looked up for a query and a key, or the chunks that positions lie in."""
    if not isinstance(one, Symbol) or not isinstance(other, Symbol) or one.op != other.op:
        return False
    if one.op == "lookup":
        ends = [next((name for name in ("query", "key") if _are(end.args[1:], "batch", name)), "") for end in (one, other)]
        if one.args[0] is not other.args[0] or sorted(ends) != ["key", "query"]:
            return False
        if not is_uniform(one.args[0]):
            reading.numbered.append(one.args[0])
        return True
    if one.op != "//" or not isinstance(one.args[1], int) or one.args[1] != other.args[1] or one.args[1] <= 0:
        return False
    starts = [_after(end.args[0], reading) for end in (one, other)]
    if starts[0] is None or starts[1] is None or starts[0][1] is not starts[1][1] or sorted([starts[0][0], starts[1][0]]) != ["key", "query"]:
        return False
    reading.chunks.append((one.args[1], starts[0][1]))
    return True


def _after(said: object, reading: Reading) -> tuple[str, torch.Tensor] | None:
    """Return (index, tensor) of "index - tensor[batch]"."""
    if not isinstance(said, Symbol) or said.op != "-":
        return None
    place, start = _position(said.args[0], reading), said.args[1]
    if place is None or place[1] != 0 or not isinstance(start, Symbol) or start.op != "lookup" or not _are(start.args[1:], "batch"):
        return None
    return place[0], start.args[0]
