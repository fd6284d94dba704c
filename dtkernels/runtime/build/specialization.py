"""Specialize kernels: choose which compiled kernel may run a launch, and which builds a row needs.

A kernel has up to five builds, from the most specialized to the most general. What each assumes of a launch:

| build      | row count | row length | strides  | pointers aligned |
|------------|-----------|------------|----------|------------------|
| aligned    | same      | same       | same     | yes              |
| ragged     | any       | same       | same     | yes              |
| stepped    | any       | 16 bytes   | 16 bytes | yes              |
| contiguous | any       | any        | any      | yes              |
| any        | any       | any        | any      | no               |

- Row length is the extent that is innermost in the tensors of the highest rank.
- "same": divisible by the same power of two, up to 16, as in the launch that the kernel was built for. "16 bytes": a multiple of 16 bytes.
- Strides that were 1 are constants in every build but ``any``, which also has 64-bit sizes.
- ``ragged`` and ``stepped`` assume nothing of the strides of a tensor whose innermost extent is a row count.
- ``stepped`` exists only for kernels without a matrix product.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ..launch.tensor_map import map_type
from ..tables.kernel_store import StoredKernel
from .triton_compile import POINTERS, KernelLaunch, compile_kernel, plain_constant, plain_types

if TYPE_CHECKING:
    from ...codegen.target import Target

ANY_PRECISION = "any"  #: of a kernel whose code does not depend on the precision setting of float32 products
PARTS = "_part"  #: ends the label that numbers the parts of a split sum: not a dimension of what is computed
_WIDEST = 16  #: bytes of the widest load
LARGE = 1 << 21  #: bytes of a tensor: softmax of 34852 x 326 bf16 takes 22.9 us by loads of 2 bytes and 18.4 by loads of 4, of 3000 x 326 7.3 and 7.1; 34999 x 44 11.6 by loads of 2, compile 8.1
_STEPS = re.compile(r"_stride_|_size_|^size_")  #: of parameters that offsets are made of: strides, sizes of dimensions, extents


def fits(entry: StoredKernel, names: tuple[str, ...], args: tuple, constants: dict[str, object]) -> bool:
    """Tell whether the kernel of ``entry`` is correct for a launch with these arguments."""
    if entry.names != names:
        return False
    pointers, integers, floats, baked, maps = entry.checked_parameters
    given = len(args)
    if not all(i < given for i in (*(p[0] for p in pointers[-1:]), *(n[0] for n in integers[-1:]), *floats[-1:], *(m[0] for m in maps[-1:]))):
        return False
    if not all(map_type(args[i]) == kind for i, kind in maps):
        return False
    for i, name, value in baked:
        if not (args[i] == value if i < given else name in constants and _constant_fits(name, value, constants[name], entry)):
            return False
    for i, wide, step in integers:
        value = args[i]
        if not isinstance(value, int) or value % step or not (wide or -(2**31) <= value < 2**31):
            return False
    for i, kind, step in pointers:
        value = args[i]
        if not isinstance(value, torch.Tensor) or POINTERS.get(value.dtype) != kind or value.data_ptr() % step:
            return False
    return all(isinstance(args[i], float) for i in floats)


def loses_alignment(entry: StoredKernel, names: tuple[str, ...], args: tuple) -> bool:
    """Tell whether loads of a tensor's rows are narrower than their alignment allows, since the kernel does not assume it.

    Such a kernel is correct, and slower than one compiled for the call: up to ten times where rows are aligned to 16 bytes, up to two where
    they are to fewer. The latter counts in calls with ``LARGE`` tensors alone, where it takes microseconds. Tensors of lower rank are small
    and do not count. Neither do tensors whose own pointer is unaligned.
    """
    known, types, strides = entry.multiples, entry.types, _strides_of_most(names)
    if all(known.get(names[i]) == _WIDEST or types[names[i]] == "constexpr" for i, _, _ in strides):
        return False
    pitches: dict[str, tuple[int, str]] = {}
    loads = _load_widths(dict(zip(names, args)))
    for place, tensor, pointer in strides:
        value = args[place]
        if isinstance(value, int) and value > 1 and not (pointer is not None and args[pointer].data_ptr() % _WIDEST):
            pitches[tensor] = min(pitches.get(tensor, (value, names[place])), (value, names[place]))
    asked = [(value, known.get(name, 1), loads.get(tensor, _WIDEST)) for tensor, (value, name) in pitches.items() if types[name] != "constexpr"]
    if any(step % widest and value % widest == 0 for value, step, widest in asked):
        return True
    large = any(isinstance(v, torch.Tensor) and v.numel() * v.element_size() >= LARGE for v in args)
    return large and any(step < widest and value % (2 * step) == 0 for value, step, widest in asked)


@lru_cache(maxsize=1024)
def _strides_of_most(names: tuple[str, ...]) -> tuple[tuple[int, str, int | None], ...]:
    """Return (place of a stride, its tensor, place of its pointer) for the tensors of the highest rank; the parts of a split sum are no dimension."""
    strided = [(i, name.split("_stride_")[0]) for i, name in enumerate(names) if "_stride_" in name and not name.endswith(PARTS)]
    ranks = Counter(tensor for _, tensor in strided)
    places = {name: i for i, name in enumerate(names)}
    return tuple((i, tensor, places.get(f"{tensor}_ptr")) for i, tensor in strided if ranks[tensor] == max(ranks.values()))


def _constant_fits(name: str, built: object, asked: object, entry: StoredKernel) -> bool:
    if built == asked or built == plain_constant(asked):
        return True
    if name.startswith("EVEN_"):
        return built is False  # masks that are always true do no harm
    if name == "INDEX":
        return built == "tl.int64"
    return name == "PRECISION" and (built == ANY_PRECISION or "*fp32" not in entry.types.values())


def _innermost(strides: list[str], ones: set[str], parts: bool) -> tuple[set[str], set[str]]:
    """Return (innermost labels of the tensors of the highest rank, tensors whose innermost label is one of these).

    ``parts``: whether the label that numbers the parts of a split sum is a dimension. It is none of what is computed.
    """
    ranks = Counter(n.split("_stride_")[0] for n in strides if parts or not n.endswith(PARTS))
    inner = {tensor: label for tensor, label in (n.split("_stride_") for n in strides if n in ones)}
    highest = max(ranks.values(), default=0)  # a kernel that adds up the parts of a single number has no other tensor
    close = {label for tensor, label in inner.items() if tensor in ranks and ranks[tensor] == highest}
    return close, {tensor for tensor in ranks if inner.get(tensor) in {*close, None}}


@dataclass(frozen=True)
class Build:
    """How to compile a kernel: parameter types, constants, and known divisors of parameters (powers of two up to 16)."""

    types: dict[str, str]
    constants: dict[str, object]
    multiples: dict[str, int]


def builds(names: tuple[str, ...], args: tuple, constants: dict[str, object], types: dict[str, str], wide: object, *, product: bool = False) -> list[Build]:
    """Return the distinct builds of one launch, the most specialized first. ``wide`` is the 64-bit index type.

    ``product``: the kernel has a matrix product.
    """
    found: list[Build] = []
    for build in _candidate_builds(names, args, constants, types, wide, product):
        if build not in found:
            found.append(build)
    return found


def narrowest(names: tuple[str, ...], args: tuple, constants: dict[str, object], types: dict[str, str]) -> Build:
    """Return the first of ``builds``."""
    return next(_candidate_builds(names, args, constants, types, None, False))


def shared_build(names: tuple[str, ...], args: tuple, constants: dict[str, object], types: dict[str, str]) -> Build:
    """Return the build to compile where none is prebuilt: the most specialized, without details that merely distinguish lengths.

    It depends on the launch alone, so that calls in any order share it. Divisibility of an extent by 16 matters where the extent is
    innermost, since loads are then as wide as their masks allow, and where tiles divide it. A KV cache that grows by single rows needs
    one build for the lengths that tiles divide and one for the others. An extent of 1 is a constant, as in Triton's own builds: a loop
    over one query vanishes. Strides of tensors of any rank, and extents that offsets are made of, are known by the power of two that divides them.
    """
    single = dict.fromkeys((n for n, value in zip(names, args) if n.startswith("size_") and type(value) is int and value == 1), 1)
    narrow = narrowest(names, args, constants | single, types | dict.fromkeys(single, "constexpr"))
    inner = {n.partition("_stride_")[2] for n, value in zip(names, args) if "_stride_" in n and value == 1}
    told = {n for n in narrow.multiples if n.startswith("size_") and n[5:] not in inner and constants.get(f"EVEN_{n[5:]}") is not True}
    outer = {n.partition("_stride_")[2] for n in names if "_stride_" in n} - inner
    lengths = {n: math.gcd(v, _WIDEST) for n, v in zip(names, args) if isinstance(v, int) and v > 1 and _STEPS.search(n) and n.removeprefix("size_") not in outer}
    multiples = {n: step for n, step in narrow.multiples.items() if n not in told} | {n: step for n, step in lengths.items() if step > 1}
    return Build(narrow.types, narrow.constants, {n: multiples[n] for n in names if n in multiples})


def _candidate_builds(names: tuple[str, ...], args: tuple, constants: dict[str, object], types: dict[str, str], wide: object, product: bool) -> Iterator[Build]:
    """Yield the builds, possibly with repetitions."""
    given = dict(zip(names, args))
    ints = {n: v for n, v in given.items() if isinstance(v, int) and not isinstance(v, bool)}
    strides = {n for n in ints if "_stride_" in n}
    ones = {n for n in strides if ints[n] == 1}
    pointers = dict.fromkeys((n for n, v in given.items() if isinstance(v, torch.Tensor) and v.data_ptr() % 16 == 0), 16)
    regular = {n: 16 for n in ints if n not in ones and ints[n] % 16 == 0}

    def multiples_of(parts: bool) -> tuple[set[str], dict[str, int]]:
        close, steady = _innermost([n for n in names if n in strides], ones, parts)
        found = {n: math.gcd(ints[n], 16) for n in ints if n.split("_stride_")[0] in steady and n in strides or n.removeprefix("size_") in close}
        return close, {n: step for n, step in found.items() if step > 1}

    operands, (close, results) = multiples_of(False)[1], multiples_of(True)  # the operands of a split sum have a dimension less than its parts
    kept = operands | results
    loads = _load_widths(given)
    steps = {n: loads.get(n.split("_stride_")[0], max(loads.values(), default=_WIDEST)) for n in kept}
    stepped = {n: step for n, step in steps.items() if kept[n] >= step}
    evens = {n for n in constants if n.startswith("EVEN_")}
    steady_evens = {f"EVEN_{label}" for label in close}
    ways: list[tuple[dict[str, int], set[str], set[str] | None]] = [(pointers | kept | regular, ones, evens), (pointers | kept, ones, steady_evens)]
    ways += [] if product else [(pointers | stepped, ones, set())]
    ways += [(pointers, ones, set()), ({}, set(), None)]
    for multiples, baked, even in ways:
        fixed = {n: v if n not in evens or even and n in even else False for n, v in constants.items()} | dict.fromkeys(baked, 1)
        kinds = types | dict.fromkeys(baked, "constexpr")
        if even is None:
            kinds |= dict.fromkeys(ints, "i64")
            fixed |= {"INDEX": wide} if "INDEX" in fixed else {}
        yield Build(kinds, fixed, {n: multiples[n] for n in names if n in multiples})


def specialized(launch: KernelLaunch, target: Target):
    """Compile the kernel for all known divisors of a launch; None where they are all 16, which Triton detects itself."""
    build = narrowest(tuple(launch.kernel.arg_names), launch.args, launch.constants, plain_types(launch))
    if set(build.multiples.values()) <= {16}:
        return None
    return compile_kernel(launch.kernel, build.types, build.constants, build.multiples, launch.options, target)


def _load_widths(given: dict[str, object]) -> dict[str, int]:
    """Return the number of elements in the widest load of each tensor."""
    return {n.removesuffix("_ptr"): _WIDEST // v.element_size() for n, v in given.items() if isinstance(v, torch.Tensor)}
