"""Launch the kernels of an imported file with all powers of two that divide their arguments.

Triton's JIT asks of an integer whether 16 divides it, and of a pointer whether it is a multiple of 16 bytes. Of rows of 5000 elements in
bfloat16 it does not learn that each starts at a multiple of 16 bytes, and loads them element by element. Here a launch for which 2, 4 or 8 is
known is compiled for that; Triton's JIT takes all others. Emitted files run by themselves are launched by the JIT.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch

from ...codegen.target import Target
from ..bounded_cache import BoundedCache
from ..launch.tensor_map import map_type
from .specialization import Build, shared_build
from .triton_compile import POINTERS, JitFunction, KernelLaunch, build, compile_here, compile_kernel, kernels_of, plain_types

REMEMBERED = 1024  #: kinds of launches, and builds, of one kernel
_WIDEST = 16  #: bytes of the widest load, and the largest divisor that Triton is told


def launch_aligned(module: ModuleType) -> None:
    """Replace the kernels of an imported file by ones compiled for all known divisors of their arguments."""
    for name, kernel in kernels_of(module).items():
        setattr(module, name, AlignedKernel(kernel))


class AlignedKernel:
    """A kernel that is launched like Triton's own: ``kernel[grid](*args, **constants)``. ``jit`` is Triton's own."""

    def __init__(self, jit: JitFunction):
        self.jit = jit
        self._launches: BoundedCache[tuple, Any] = BoundedCache(REMEMBERED)  #: kind of launch -> compiled kernel; None for the JIT's
        self._compiled: BoundedCache[tuple, Any] = BoundedCache(REMEMBERED)  #: device, build and options -> compiled kernel

    def __getattr__(self, name: str):
        if name == "jit":  # not set yet
            raise AttributeError(name)
        return getattr(self.jit, name)

    def __getitem__(self, grid):
        return lambda *args, **named: self._launch(grid, args, named)

    def _launch(self, grid, args: tuple, named: dict[str, Any]):
        if torch.compiler.is_compiling() or torch.version.hip or callable(grid):
            return self.jit[grid](*args, **named)  # type: ignore[index]
        device = torch.cuda.current_device()
        key = (device, *map(_kind, args), *named.items())
        compiled = self._launches.get(key, self)
        if compiled is self:
            compiled = self._launches.put(key, self._find(device, args, named))
        if compiled is None:
            return self.jit[grid](*args, **named)  # type: ignore[index]
        given = dict(zip(self.jit.arg_names, args)) | named
        compiled[(*grid, 1, 1)[:3]](*(given[n] for n in self.jit.arg_names))
        return compiled

    def _find(self, device: int, args: tuple, named: dict[str, Any]):
        """Return the kernel for a kind of launch, compiled; None where Triton's JIT knows as much."""
        launch = KernelLaunch(self.jit, (), args, {}, {})
        for name, value in named.items():
            (launch.constants if name in self.jit.arg_names else launch.options)[name] = value
        known = known_build(launch)
        if known is None or all(step == _WIDEST for step in known.multiples.values()):
            return None
        key = (device, *(tuple(what.items()) for what in (known.types, known.constants, known.multiples, launch.options)))
        if (found := self._compiled.get(key)) is None:
            found = self._compiled.put(key, compile_here(self.jit, known.types, known.constants, known.multiples, launch.options))
        return found


def _kind(value: object) -> object:
    """Return what the build of a kernel depends on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % _WIDEST
    if kind := map_type(value):
        return kind
    return float if isinstance(value, float) else (type(value), value)


def known_build(launch: KernelLaunch) -> Build | None:
    """Return the build with all that is known of the arguments; None for arguments that only the JIT takes."""
    names, args = tuple(launch.kernel.arg_names), launch.args
    if len(args) + len(launch.constants) != len(names) or not all(_is_plain(v) for v in args):
        return None
    shared = shared_build(names, args, launch.constants, plain_types(launch))
    divisors = dict(shared.multiples)
    for name, value in zip(names, args):
        if isinstance(value, torch.Tensor):
            divisors[name] = math.gcd(value.data_ptr(), _WIDEST)
        elif isinstance(value, int) and not name.startswith("size_") and shared.types[name] != "constexpr":
            divisors[name] = math.gcd(value, _WIDEST)
    return Build(shared.types, shared.constants, {n: divisors[n] for n in names if divisors.get(n, 1) > 1})


def compile_known(launch: KernelLaunch, target: Target):
    """Compile the kernel of a launch, for a GPU that need not be present, with all that is known of the arguments."""
    if (known := known_build(launch)) is None:
        return build(launch, target)
    return compile_kernel(launch.kernel, known.types, known.constants, known.multiples, launch.options, target)


def _is_plain(value: object) -> bool:
    return value.dtype in POINTERS if isinstance(value, torch.Tensor) else type(value) in (int, float) or map_type(value) is not None
