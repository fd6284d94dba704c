"""Which compiled kernel may run a launch, and which ones are worth building for a row.

Of one kernel there are up to five builds, from the narrowest to the one that takes anything: ``aligned`` for sizes as
regular as the row's; ``ragged`` for any number of rows: what lies contiguous in the tensors of most dimensions is still
regular, and so are their strides, but not the strides of tensors in which a number of rows lies innermost; ``stepped``, of
kernels without a product, for any size whose rows start at multiples of 16 bytes; ``contiguous`` for any size; ``any`` for
any size and layout.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .build import POINTERS, Launch, compile_kernel, plain, plain_types
from .store import Entry

if TYPE_CHECKING:
    from ..codegen.target import Target

ANY_PRECISION = "any"  #: of a kernel whose code does not depend on the precision of float32 products
_WIDEST = 16  #: bytes of a load


def fits(entry: Entry, names: tuple[str, ...], args: tuple, constants: dict[str, object]) -> bool:
    """Whether the kernel of ``entry`` does what a launch with these arguments asks for."""
    if tuple(entry.types) != names:
        return False
    single = "*fp32" in entry.types.values()
    given, multiples = dict(zip(names, args)), entry.multiples
    for name, kind in entry.types.items():
        if name in constants:
            if kind != "constexpr" or not _constant(name, entry.constants[name], plain(constants[name]), single):
                return False
        elif name not in given or not _argument(kind, given[name], entry.constants.get(name), multiples.get(name, 1)):
            return False
    return True


def loses_alignment(entry: Entry, names: tuple[str, ...], args: tuple) -> bool:
    """Whether rows of some tensor start at multiples of 16 bytes and the kernel does not know: its loads are then narrow.

    Such a kernel is right and up to ten times slower than one compiled for the call. Tensors of fewer dimensions than others
    are small beside them, and of one that itself starts elsewhere nothing is lost.
    """
    pitches: dict[str, tuple[int, str]] = {}
    strided = [name.split("_stride_")[0] for name in names if "_stride_" in name]
    ranks = {tensor: strided.count(tensor) for tensor in strided}
    most = {tensor for tensor, rank in ranks.items() if rank == max(ranks.values())}
    askew = {name.removesuffix("_ptr") for name, value in zip(names, args) if isinstance(value, torch.Tensor) and value.data_ptr() % 16}
    for name, value in zip(names, args):
        tensor = name.split("_stride_")[0]
        if tensor != name and tensor in most and tensor not in askew and isinstance(value, int) and value > 1:
            pitches[tensor] = min(pitches.get(tensor, (value, name)), (value, name))
    known, loads = entry.multiples, _loads(dict(zip(names, args)))
    aligned = ((name, loads.get(tensor, _WIDEST)) for tensor, (value, name) in pitches.items() if value % loads.get(tensor, _WIDEST) == 0)
    return any(known.get(name, 1) % step and entry.types[name] != "constexpr" for name, step in aligned)


def _constant(name: str, built: object, asked: object, single: bool) -> bool:
    if built == asked:
        return True
    if name.startswith("EVEN_"):
        return built is False  # masks that are always true do no harm
    if name == "INDEX":
        return built == "tl.int64"
    return name == "PRECISION" and (built == ANY_PRECISION or not single)


def _argument(kind: str, value: object, baked: object, multiple: int) -> bool:
    if isinstance(value, torch.Tensor):
        return kind.replace("u1", "i1") == POINTERS.get(value.dtype) and value.data_ptr() % multiple == 0
    if isinstance(value, float):
        return kind == "fp32"
    if not isinstance(value, int):
        return False
    if kind == "constexpr":
        return value == baked
    return (kind == "i64" or kind == "i32" and -(2**31) <= value < 2**31) and value % multiple == 0


def _innermost(strides: list[str], ones: set[str]) -> tuple[set[str], set[str]]:
    """(labels that lie contiguous in the tensors of most dimensions, tensors whose strides do not depend on other labels)."""
    ranks = Counter(n.split("_stride_")[0] for n in strides)
    inner = {tensor: label for tensor, label in (n.split("_stride_") for n in strides if n in ones)}
    close = {label for tensor, label in inner.items() if ranks[tensor] == max(ranks.values())}
    return close, {tensor for tensor in ranks if inner.get(tensor) in {*close, None}}


@dataclass(frozen=True)
class Build:
    """How to compile a kernel: the parameters' types, the constants, and the powers of two up to 16 that parameters are multiples of."""

    types: dict[str, str]
    constants: dict[str, object]
    multiples: dict[str, int]


def builds(names: tuple[str, ...], args: tuple, constants: dict[str, object], types: dict[str, str], wide: object, *, product: bool = False) -> list[Build]:
    """The builds of one launch, narrowest first, each different from those before. ``wide`` is the 64-bit index type.

    ``product``: the kernel has a matrix product.
    """
    given = dict(zip(names, args))
    ints = {n: v for n, v in given.items() if isinstance(v, int) and not isinstance(v, bool)}
    strides = {n for n in ints if "_stride_" in n}
    ones = {n for n in strides if ints[n] == 1}
    pointers = dict.fromkeys((n for n, v in given.items() if isinstance(v, torch.Tensor) and v.data_ptr() % 16 == 0), 16)
    close, steady = _innermost([n for n in names if n in strides], ones)
    regular = {n: 16 for n in ints if n not in ones and ints[n] % 16 == 0}
    kept = {n: math.gcd(ints[n], 16) for n in ints if n.split("_stride_")[0] in steady and n in strides or n.removeprefix("size_") in close}
    kept = {n: step for n, step in kept.items() if step > 1}
    loads = _loads(given)
    steps = {n: loads.get(n.split("_stride_")[0], max(loads.values(), default=_WIDEST)) for n in kept}
    stepped = {n: step for n, step in steps.items() if kept[n] >= step}
    evens = {n for n in constants if n.startswith("EVEN_")}
    steady_evens = {f"EVEN_{label}" for label in close}
    ways: list[tuple[dict[str, int], set[str], set[str] | None]] = [(pointers | kept | regular, ones, evens), (pointers | kept, ones, steady_evens)]
    ways += [] if product else [(pointers | stepped, ones, set())]
    ways += [(pointers, ones, set()), ({}, set(), None)]
    found: list[Build] = []
    for multiples, baked, even in ways:
        fixed = {n: v if n not in evens or even and n in even else False for n, v in constants.items()} | dict.fromkeys(baked, 1)
        kinds = types | dict.fromkeys(baked, "constexpr")
        if even is None:
            kinds |= dict.fromkeys(ints, "i64")
            fixed |= {"INDEX": wide} if "INDEX" in fixed else {}
        build = Build(kinds, fixed, {n: multiples[n] for n in names if n in multiples})
        if build not in found:
            found.append(build)
    return found


def specialized(launch: Launch, target: Target):
    """The kernel compiled for all that is known of a launch's alignment; None where that is multiples of 16, which Triton itself sees."""
    build = builds(tuple(launch.kernel.arg_names), launch.args, launch.constants, plain_types(launch), None)[0]
    if set(build.multiples.values()) <= {16}:
        return None
    return compile_kernel(launch.kernel, build.types, build.constants, build.multiples, launch.options, target)


def _loads(given: dict[str, object]) -> dict[str, int]:
    """Tensor -> elements in the widest load of it."""
    return {n.removesuffix("_ptr"): _WIDEST // v.element_size() for n, v in given.items() if isinstance(v, torch.Tensor)}
