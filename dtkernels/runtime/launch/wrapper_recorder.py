"""The host half of an emitted file, run without Triton: what a call allocates, and what it launches with what.

The wrapper that the compiler printed is the only place that knows it. It is run once for each new kind of call, in a
namespace where Triton is a stand-in and kernels take notes; what they note is replayed from then on.
"""

from __future__ import annotations

import ast
import builtins
import types
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, cast

import torch

from ...codegen.emit.host_helpers import SUPPORT
from ..torch_support.tf32 import dot_precision
from .host_helpers import READY

ENTRY = "call"  #: the wrapper that returns all outputs


@dataclass
class RecordedLaunch:
    """One kernel launch that a wrapper asked for."""

    kernel: str
    names: tuple[str, ...]  #: of the kernel's parameters
    grid: tuple[int, ...]
    args: tuple
    constants: dict[str, object]
    options: dict[str, object] = field(default_factory=dict)
    compiled: Any = None  #: Triton's compiled kernel, where Triton launched it


@dataclass
class Record:
    """What one call of a wrapper did."""

    results: tuple[torch.Tensor, ...]
    allocated: list[torch.Tensor]
    launches: list[RecordedLaunch]


@lru_cache(maxsize=256)
def host_text(source: str) -> str:
    """The emitted ``source`` with the bodies of its kernels, and what is there for readers, left out."""
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
    """Run the wrapper of a host text on tensors and note what it does.

    Without ``module`` nothing is launched: results are allocated and not yet computed. With the imported emitted file
    its kernels are launched by Triton, and each note has the compiled kernel. ``allocating`` stands for torch where the tensors
    have no contents; what it allocates it lists itself.
    """
    notes = Record((), [], [])
    wrapper = _load(host, notes, module, allocating or _Torch(notes))
    try:
        results = wrapper(*args)
    finally:
        wrapper.__globals__.clear()  # a function and its globals hold each other, and here also every tensor that was allocated
    notes.results = results if isinstance(results, tuple) else (results,)
    return notes


class _Kernel:
    """Stands for a kernel: ``kernel[grid](...)`` takes a note, and launches where there is something to launch."""

    def __init__(self, function, notes: Record, module: types.ModuleType | None):
        code = function.__code__
        self.name, self.names, self.notes, self.module = function.__name__, code.co_varnames[: code.co_argcount], notes, module

    def __getitem__(self, grid: tuple[int, ...]):
        def note(*args, **kwargs):
            own = frozenset(self.names)
            constants = {k: v for k, v in kwargs.items() if k in own}
            compiled = getattr(self.module, self.name)[grid](*args, **kwargs) if self.module else None
            options = {k: v for k, v in kwargs.items() if k not in own}
            self.notes.launches.append(RecordedLaunch(self.name, self.names, tuple(grid), args, constants, options, compiled))

        return note


class _Torch:
    """torch, taking a note of what is allocated."""

    def __init__(self, notes: Record):
        self._notes = notes

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty(self, *args, **kwargs) -> torch.Tensor:
        tensor = torch.empty(*args, **kwargs)
        self._notes.allocated.append(tensor)
        return tensor


class _Language:
    """triton.language: names stand for themselves."""

    def __getattr__(self, name: str) -> str:
        return f"tl.{name}"


_ALLOWED = (
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "getattr", "hasattr", "int", "isinstance", "len", "list", "map", "max",
    "min", "range", "set", "sorted", "str", "sum", "tuple", "zip", "RuntimeError", "TypeError", "ValueError",
)  # fmt: skip


@lru_cache(maxsize=256)
def _compiled(host: str) -> tuple[types.CodeType, tuple[types.FunctionType, ...]]:
    """(the code of a host text, functions that it leaves to host_support)"""
    found: list[types.FunctionType] = []
    for text, function in _ready().items():
        if f"\n{text}" in host:
            host, found = host.replace(text, ""), [*found, function]
    return compile(host, "<host>", "exec"), tuple(found)


@cache
def _ready() -> dict[str, types.FunctionType]:
    """Functions by the texts that stand for them in host texts: those that are printed, without the line for readers."""
    texts = {f: SUPPORT[f.__name__].strip().split("\n") for f in cast("tuple[types.FunctionType, ...]", READY)}
    return {"\n".join([head, *rest, ""]): f for f, (head, _, *rest) in texts.items()}


def _load(host: str, notes: Record, module: types.ModuleType | None, allocating):
    """The wrapper; made anew for each record, so that threads do not share notes."""
    language = module.tl if module else _Language()  # type: ignore[attr-defined]
    triton = _Triton(language, module, lambda f: _Kernel(f, notes, module))
    gluon = _Gluon(module, triton.jit)
    known = {"torch": allocating, "triton": triton, "triton.language": triton, **dict.fromkeys(_GLUON, gluon)}

    def find(name, _globals=None, _locals=None, fromlist=(), level=0):
        if name not in known or level:
            raise ImportError(f"a host text imports torch and triton; found {name}")
        return known[name]

    space: dict[str, Any] = {"__builtins__": {**{n: getattr(builtins, n) for n in _ALLOWED}, "__import__": find}, "__name__": "dtkernels_host"}
    code, ready = _compiled(host)
    space |= {f.__name__: types.FunctionType(f.__code__, space) for f in ready}
    exec(code, space)  # what the compiler printed; that of a store is checked against its checksum
    if "dot_precision" in space:
        space["dot_precision"] = dot_precision
    return space[ENTRY]


_GLUON = (
    "triton.experimental", "triton.experimental.gluon", "triton.experimental.gluon.language.nvidia", "triton.experimental.gluon.language.nvidia.hopper",
)  # fmt: skip


class _Gluon:
    """What emitted files import of triton.experimental; all of it."""

    def __init__(self, module: types.ModuleType | None, jit):
        self.jit = jit
        for imported, name in (("language", "gl"), ("hopper", "hopper"), ("mbarrier", "mbarrier"), ("tma", "tma")):
            setattr(self, imported, getattr(module, name, _Language()))

    @property
    def gluon(self) -> _Gluon:
        """Not an attribute: it would hold itself, and all that was noted, until Python looks for cycles."""
        return self


class _Triton:
    """triton, as far as wrappers ask for it."""

    __version__ = "99.0"  # kernels that are already compiled need no particular one

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
        return 1 << max(0, n - 1).bit_length()

    @property
    def runtime(self):
        """Where a launch that finds too little shared memory says so; only Triton itself launches."""
        return self._real.runtime

    def set_allocator(self, allocator) -> None:
        """A bound call brings the memory itself. Triton keeps what it is given, and this namespace is emptied: it gets the module's own."""
        if self._real:
            self._real.set_allocator(getattr(self._module, allocator.__name__, allocator))
