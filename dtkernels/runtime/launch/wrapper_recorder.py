"""Record what the host wrapper of an emitted file allocates and launches, without Triton.

Only the emitted wrapper knows this. It runs once per new kind of call, in a namespace with stand-ins for Triton and the kernels. The
record is replayed from then on.
"""

from __future__ import annotations

import ast
import builtins
import types
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, cast

import torch

from ...codegen.emit.host_helpers import READY, SUPPORT
from ...codegen.powers_of_two import next_power_of_two
from ..torch_support.tf32 import dot_precision, heeding_ieee
from .tensor_map import MAKERS, TensorMap

ENTRY = "call"  #: name of the wrapper that returns all outputs


@dataclass
class RecordedLaunch:
    """One kernel launch that a wrapper requested."""

    kernel: str
    names: tuple[str, ...]  #: the kernel's parameters
    grid: tuple[int, ...]
    args: tuple
    constants: dict[str, object]
    options: dict[str, object] = field(default_factory=dict)
    compiled: Any = None  #: Triton's compiled kernel, where Triton launched it


@dataclass
class Record:
    """The record of one call of a wrapper."""

    results: tuple[torch.Tensor, ...]
    allocated: list[torch.Tensor]
    launches: list[RecordedLaunch]
    views: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = field(default_factory=dict)  #: id of a view -> (its tensor, offset in bytes, the view)
    unordered: bool = False  #: whether programs add sums up in any order


@lru_cache(maxsize=256)
def host_text(source: str) -> str:
    """Return the emitted ``source`` without kernel bodies, docstrings and blank lines."""
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            if node.decorator_list:
                lines[first.lineno - 1 : node.end_lineno] = ["    ..."]
            elif ast.get_docstring(node) is not None:
                lines[first.lineno - 1 : first.end_lineno] = [] if node.body[1:] else ["    ..."]
    return "\n".join(line for line in lines if line.strip()) + "\n"


def record(host: str, args: tuple, module: types.ModuleType | None = None, allocating=None) -> Record:
    """Run the wrapper of a host text on tensors and record its actions.

    Without ``module`` nothing is launched: results are allocated but not computed. With the imported emitted file, Triton launches its
    kernels and each recorded launch has the compiled kernel. ``allocating`` replaces torch where the tensors have no contents; it lists
    its allocations itself.
    """
    notes = Record((), [], [])
    wrapper = _load(host, notes, module, allocating or _Torch(notes))
    try:
        results = wrapper(*args)
    finally:
        wrapper.__globals__.clear()  # a function and its globals form a cycle, which would keep every allocated tensor alive
    notes.results = results if isinstance(results, tuple) else (results,)
    return notes


class _Kernel:
    """Stand in for a kernel: ``kernel[grid](...)`` records the launch, and launches where a module is given."""

    def __init__(self, function, notes: Record, module: types.ModuleType | None):
        code = function.__code__
        self.name, self.names, self.notes, self.module = function.__name__, code.co_varnames[: code.co_argcount], notes, module

    def __getitem__(self, grid: tuple[int, ...]):
        def note(*args, **kwargs):
            own = frozenset(self.names)
            constants = {k: v for k, v in kwargs.items() if k in own}
            passed = (a.made_by(self.module) if isinstance(a, TensorMap) else a for a in args)
            compiled = getattr(self.module, self.name)[grid](*passed, **kwargs) if self.module else None
            options = {k: v for k, v in kwargs.items() if k not in own}
            self.notes.launches.append(RecordedLaunch(self.name, self.names, tuple(grid), args, constants, options, compiled))

        return note


class _Torch:
    """Stand in for torch: record allocations."""

    def __init__(self, notes: Record):
        self._notes = notes

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty(self, *args, **kwargs) -> torch.Tensor:
        tensor = torch.empty(*args, **kwargs)
        self._notes.allocated.append(tensor)
        return tensor


class _Language:
    """Stand in for triton.language: each name evaluates to its own text."""

    def __getattr__(self, name: str) -> str:
        return f"tl.{name}"


_ALLOWED = (
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "getattr", "hasattr", "int", "isinstance", "len", "list", "map", "max",
    "min", "range", "set", "sorted", "str", "sum", "tuple", "zip", "RuntimeError", "TypeError", "ValueError",
)  # fmt: skip


@lru_cache(maxsize=256)
def _compiled(host: str) -> tuple[types.CodeType, tuple[types.FunctionType, ...]]:
    """Return (the code of a host text without the ready helpers, those helpers)."""
    found: list[types.FunctionType] = []
    for text, function in _ready().items():
        if f"\n{text}" in host:
            host, found = host.replace(text, ""), [*found, function]
    return compile(host, "<host>", "exec"), tuple(found)


@cache
def _ready() -> dict[str, types.FunctionType]:
    """Map the printed texts of the precompiled helpers, without their docstrings, to the functions."""
    texts = {f: SUPPORT[f.__name__].strip().split("\n") for f in cast("tuple[types.FunctionType, ...]", READY)}
    return {"\n".join([head, *rest, ""]): f for f, (head, _, *rest) in texts.items()}


def _load(host: str, notes: Record, module: types.ModuleType | None, allocating):
    """Load the wrapper. Each record loads its own, so that threads do not share records."""
    language = module.tl if module else _Language()  # type: ignore[attr-defined]
    triton = _Triton(language, module, lambda f: _Kernel(f, notes, module))
    gluon = _Gluon(module, triton.jit)
    known = {"torch": allocating, "triton": triton, "triton.language": triton, **dict.fromkeys(_GLUON, gluon), **dict.fromkeys(_DESCRIPTORS, _Descriptors)}

    def find(name, _globals=None, _locals=None, fromlist=(), level=0):
        if name not in known or level:
            raise ImportError(f"a host text imports torch and triton; found {name}")
        return known[name]

    space: dict[str, Any] = {"__builtins__": {**{n: getattr(builtins, n) for n in _ALLOWED}, "__import__": find}, "__name__": "dtkernels_host"}
    code, ready = _compiled(host)
    space |= {f.__name__: types.FunctionType(f.__code__, space) for f in ready}
    exec(code, space)  # emitted by the compiler; texts from a store are verified by their checksum
    if "dot_precision" in space:
        space["dot_precision"] = dot_precision
    if "exact_products" in space:
        space["exact_products"] = heeding_ieee(space["exact_products"])
    if "in_any_order" in space:
        space["in_any_order"] = _unordered(notes, space["in_any_order"])
    if "float8_pointer" in space:
        space["float8_pointer"] = _noted_bits(notes, space["float8_pointer"])
    space |= {maker: partial(TensorMap, maker) for maker in MAKERS if maker in space}
    if "piece" in space:
        space["piece"] = _noted(notes, space["piece"])
    return space[ENTRY]


def _unordered(notes: Record, check: Any) -> Any:
    """Return the helper ``in_any_order``, which also notes that it was asked."""

    def note(func: str, name: str) -> None:
        check(func, name)
        notes.unordered = True

    return note


def _noted(notes: Record, piece: Any) -> Any:
    """Return the helper ``piece``, which also notes the view that it returns."""

    def note(tensor: torch.Tensor, dims: tuple[int, ...], first: int, size: int) -> torch.Tensor:
        view = piece(tensor, dims, first, size)
        notes.views[id(view)] = (tensor, first * sum(tensor.stride(d) for d in dims) * tensor.element_size(), view)
        return view

    return note


def _noted_bits(notes: Record, pointer: Any) -> Any:
    """Return the helper ``float8_pointer``, which also notes the view that it may return."""

    def note(tensor: torch.Tensor, native: bool) -> torch.Tensor:
        view = pointer(tensor, native)
        if view is not tensor:
            notes.views[id(view)] = (tensor, 0, view)
        return view

    return note


_GLUON = (
    "triton.experimental", "triton.experimental.gluon", "triton.experimental.gluon.language", "triton.experimental.gluon.language.nvidia",
    "triton.experimental.gluon.language.nvidia.hopper", "triton.experimental.gluon.language.nvidia.ampere",
)  # fmt: skip


_DESCRIPTORS = ("triton.tools.tensor_descriptor", "triton.experimental.gluon.nvidia.hopper")


class _Descriptors:
    """Stand in for the modules of Triton's descriptors, which no record makes."""

    TensorDescriptor = None


class _Gluon:
    """Stand in for all that emitted files import of triton.experimental."""

    def __init__(self, module: types.ModuleType | None, jit):
        self.jit = jit
        for imported, name in (("language", "gl"), ("hopper", "hopper"), ("mbarrier", "mbarrier"), ("tma", "tma"), ("async_copy", "async_copy")):
            setattr(self, imported, getattr(module, name, _Language()))
        self._core = types.SimpleNamespace(builtin=lambda function: function)  # what it decorates is called by kernels alone

    @property
    def gluon(self) -> _Gluon:
        """Return itself. An attribute would form a cycle and keep the record alive until the garbage collector runs."""
        return self


class _Triton:
    """Stand in for triton, as far as wrappers use it."""

    __version__ = "99.0"  # compiled kernels need no particular version

    def __init__(self, language: object, module: types.ModuleType | None, jit):
        self.language, self.jit, self._module = language, jit, module
        self._real = module.triton if module else None  # type: ignore[attr-defined]
        if self._real:
            self.__version__ = self._real.__version__

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return next_power_of_two(n)

    @property
    def runtime(self):
        """Return Triton's runtime, which defines the out-of-shared-memory error. Only Triton's own launches use it."""
        return self._real.runtime

    def set_allocator(self, allocator) -> None:
        """Pass an allocator to Triton. Triton keeps it while this namespace is cleared, so it gets the module's own function.

        A bound launch allocates the scratch memory itself.
        """
        if self._real:
            self._real.set_allocator(getattr(self._module, allocator.__name__, allocator))
