"""Which compiled kernel may run a launch, and which ones are worth building for a row.

Of one kernel there are up to four builds, from the narrowest to the one that takes anything: ``aligned`` for sizes as
regular as the row's; ``ragged`` for any number of rows: what lies contiguous in the tensors of most dimensions is still
regular, and so are their strides, but not the strides of tensors in which a number of rows lies innermost;
``contiguous`` for any size; ``any`` for any size and layout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from .build import POINTERS, plain
from .store import Entry

ANY_PRECISION = "any"  #: of a kernel whose code does not depend on the precision of float32 products


def fits(entry: Entry, names: tuple[str, ...], args: tuple, constants: dict[str, object]) -> bool:
    """Whether the kernel of ``entry`` does what a launch with these arguments asks for."""
    if tuple(entry.types) != names:
        return False
    single = "*fp32" in entry.types.values()
    given = dict(zip(names, args))
    for name, kind in entry.types.items():
        if name in constants:
            if kind != "constexpr" or not _constant(name, entry.constants[name], plain(constants[name]), single):
                return False
        elif name not in given or not _argument(kind, given[name], entry.constants.get(name), name in entry.divisible):
            return False
    return True


def loses_alignment(entry: Entry, names: tuple[str, ...], args: tuple) -> bool:
    """Whether rows of some tensor start at multiples of 16 elements and the kernel does not know: its loads are then narrow.

    Such a kernel is right and up to ten times slower than one compiled for the call. Tensors of fewer dimensions than others
    are small beside them, and of one that itself starts elsewhere nothing is lost.
    """
    pitches: dict[str, tuple[int, str]] = {}
    ranks = Counter(name.split("_stride_")[0] for name in names if "_stride_" in name)
    askew = {name.removesuffix("_ptr") for name, value in zip(names, args) if isinstance(value, torch.Tensor) and value.data_ptr() % 16}
    for name, value in zip(names, args):
        tensor = name.split("_stride_")[0]
        if tensor != name and ranks[tensor] == max(ranks.values()) and tensor not in askew and isinstance(value, int) and value > 1:
            pitches[tensor] = min(pitches.get(tensor, (value, name)), (value, name))
    return any(value % 16 == 0 and name not in entry.divisible and entry.types[name] != "constexpr" for value, name in pitches.values())


def _constant(name: str, built: object, asked: object, single: bool) -> bool:
    if built == asked:
        return True
    if name.startswith("EVEN_"):
        return built is False  # masks that are always true do no harm
    if name == "INDEX":
        return built == "tl.int64"
    return name == "PRECISION" and (built == ANY_PRECISION or not single)


def _argument(kind: str, value: object, baked: object, divisible: bool) -> bool:
    if isinstance(value, torch.Tensor):
        return kind.replace("u1", "i1") == POINTERS.get(value.dtype) and not (divisible and value.data_ptr() % 16)
    if isinstance(value, float):
        return kind == "fp32"
    if not isinstance(value, int):
        return False
    if kind == "constexpr":
        return value == baked
    return (kind == "i64" or kind == "i32" and -(2**31) <= value < 2**31) and not (divisible and value % 16)


def _innermost(strides: list[str], ones: set[str]) -> tuple[set[str], set[str]]:
    """(labels that lie contiguous in the tensors of most dimensions, tensors whose strides do not depend on other labels)."""
    ranks = Counter(n.split("_stride_")[0] for n in strides)
    inner = {tensor: label for tensor, label in (n.split("_stride_") for n in strides if n in ones)}
    close = {label for tensor, label in inner.items() if ranks[tensor] == max(ranks.values())}
    return close, {tensor for tensor in ranks if inner.get(tensor) in {*close, None}}


@dataclass(frozen=True)
class Build:
    """How to compile a kernel: the parameters' types, the constants, and what is divisible by 16."""

    types: dict[str, str]
    constants: dict[str, object]
    divisible: tuple[str, ...]


def builds(names: tuple[str, ...], args: tuple, constants: dict[str, object], types: dict[str, str], wide: object) -> list[Build]:
    """The builds of one launch, narrowest first, each different from those before. ``wide`` is the 64-bit index type."""
    given = dict(zip(names, args))
    ints = {n: v for n, v in given.items() if isinstance(v, int) and not isinstance(v, bool)}
    strides = {n for n in ints if "_stride_" in n}
    ones = {n for n in strides if ints[n] == 1}
    regular = {n for n, v in ints.items() if n not in ones and v % 16 == 0}
    pointers = {n for n, v in given.items() if isinstance(v, torch.Tensor)}
    close, steady = _innermost([n for n in names if n in strides], ones)
    kept = {n for n in regular if n.split("_stride_")[0] in steady or n.removeprefix("size_") in close}
    evens = {n for n in constants if n.startswith("EVEN_")}
    found: list[Build] = []
    for divisible, baked, even in ((pointers | regular, ones, evens), (pointers | kept, ones, {f"EVEN_{label}" for label in close}), (pointers, ones, set()), (set(), set(), None)):
        fixed = {n: v if n not in evens or even and n in even else False for n, v in constants.items()} | dict.fromkeys(baked, 1)
        kinds = types | dict.fromkeys(baked, "constexpr")
        if even is None:
            kinds |= dict.fromkeys(ints, "i64")
            fixed |= {"INDEX": wide} if "INDEX" in fixed else {}
        build = Build(kinds, fixed, tuple(n for n in names if n in divisible))
        if build not in found:
            found.append(build)
    return found
