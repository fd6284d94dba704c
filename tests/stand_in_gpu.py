"""A GPU that is not there: tensors in main memory are taken for its own, and a launch computes the reference through the pointers it is given.

What is tested so is all that a call does on the host: keys, bound arguments, what is saved, what is allocated.
What the ops of the process cached before is set aside until the test ends, and what they cache in it ends with it.
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.ops import op_decorator, registry
from dtkernels.runtime import path_counters
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.bounded_cache import BoundedCache
from dtkernels.runtime.build.jit_kernels import CompiledKernels
from dtkernels.runtime.dispatch import dispatcher
from dtkernels.runtime.dispatch.call_cache import CallCache
from dtkernels.runtime.launch import bound_launch
from dtkernels.runtime.launch.wrapper_recorder import host_text, record
from dtkernels.runtime.reference.evaluator import evaluate
from dtkernels.runtime.select.schedule_selection import by_default_schedule
from dtkernels.runtime.tables.kernel_store import StoredKernel


class Computing(bound_launch.BoundLaunch):
    """Bound kernels of one program; the last launch of a call computes what the program does."""

    def __init__(self, owner, notes, tensors: dict, scalars: dict, values: tuple):
        self.owner = owner
        named = {id(v): n for n, v in zip((*tensors, *scalars), values)} | {id(r): o for r, o in zip(notes.results, owner.outputs)}
        self.named = named
        self.unread = {n: (t.shape, t.dtype) for n, t in tensors.items()}  #: what no kernel reads still tells extents
        self.numbers_given = {n: v for n, v in scalars.items() if not isinstance(v, torch.Tensor)}  # no tensor of a call outlives it
        places = {n: len(tensors) + i for i, (n, v) in enumerate(scalars.items()) if isinstance(v, float)}
        self.remaining, self.found, self.numbers = 0, {}, {}
        self.last = len(notes.launches)
        super().__init__(notes, values, places, [(self._entry(note), None) for note in notes.launches], values[0].device)
        self._launch = self._compute

    def _entry(self, note) -> StoredKernel:
        given = dict(zip(note.names, note.args))
        kinds = {torch.Tensor: "*", float: "fp32"}
        types = {n: "constexpr" if n in note.constants else kinds.get(type(given[n]), "i32") for n in note.names}
        return StoredKernel(note.kernel, "", "", 90, types, {}, (), 128, 0)

    def _plan(self, note, entry, function):
        given = dict(zip(note.names, note.args))
        order = [n for n, kind in entry.types.items() if kind != "constexpr"]
        own = {order.index(n): (self.named[id(v)], v.shape, v.stride(), v.dtype) for n, v in given.items() if n in order and isinstance(v, torch.Tensor) and id(v) in self.named}
        floats = {order.index(n): n for n in order if entry.types[n] == "fp32" and n in self._scalars}
        signs = {s: note.constants[f"{s}_positive"] for s in floats.values() if f"{s}_positive" in note.constants}
        return *super()._plan(note, entry, function)[:3], (own, floats, signs)

    def _compute(self, reference, function, params, extra) -> int:
        own, floats, signs = function
        found, numbers = self.found, self.numbers
        for place, (name, shape, strides, dtype) in own.items():
            address = ctypes.c_uint64.from_address(params[place]).value
            assert address % 16 == 0 or not self.grain, f"{name} is not where its kernel takes it to be"
            if 0 in shape:
                found[name] = torch.empty_strided(shape, strides, dtype=dtype)
                continue
            reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
            memory = torch.frombuffer((ctypes.c_char * (reach * dtype.itemsize)).from_address(address), dtype=dtype)
            found[name] = memory.as_strided(shape, strides)
        numbers |= {n: ctypes.c_float.from_address(params[place]).value for place, n in floats.items()}
        assert all((numbers[n] > 0) == positive for n, positive in signs.items()), "a kernel for numbers of another sign"
        self.remaining = (self.remaining or self.last) - 1
        if self.remaining:
            return 0
        a = self.owner.algorithm()
        inputs = {n: found[n] if n in found else torch.zeros(self.unread[n][0], dtype=self.unread[n][1]) for n in a.inputs}
        results = evaluate(a, inputs, {n: numbers.get(n, found.get(n, self.numbers_given.get(n, 0.0))) for n in a.scalars}, self.owner.outputs)
        for name, result in zip(self.owner.outputs, results):
            if result.numel():  # else it is allocated, and nothing is launched for it
                found[name].copy_(result)
        found.clear()
        return 0


def _evaluated(owner, tensors: dict, scalars: dict, values: tuple) -> list[torch.Tensor]:
    given = dict(zip((*tensors, *scalars), values))
    return list(evaluate(owner.algorithm(), {n: given[n] for n in tensors}, {n: given[n] for n in scalars}, owner.outputs))


def _routes(owner) -> BoundedCache:
    return BoundedCache(dispatcher.REMEMBERED)


#: every cache of a process that leads from a call to its launch: the keys of a stand-in's calls are those of the CPU's
CACHES: dict[tuple[type, str], Callable] = {
    (Operator, "_call_cache"): lambda op: CallCache(op.manifest.products),
    (dispatcher.Dispatcher, "_routes"): _routes,
    (dispatcher.Dispatcher, "_templates"): _routes,
    (dispatcher.Dispatcher, "_default_wins"): _routes,
    (dispatcher.Dispatcher, "_kernels"): lambda owner: CompiledKernels(),
}
ATTENTION_CALLS = "dtkernels.integrations.huggingface.attention.attention_call_cache"


class _Apart:
    """In place of an attribute of a class: it has a value of its own per object, and the object keeps the one that it had."""

    def __init__(self, name: str, empty: Callable):
        self.name, self.empty = name, empty
        self.held: WeakKeyDictionary = WeakKeyDictionary()

    def __get__(self, owner, kind=None):
        if owner is None:
            return self
        if owner not in self.held:
            self.held[owner] = self.empty(owner)
        return self.held[owner]

    def __set__(self, owner, value) -> None:
        self.held[owner] = value
        if self.name not in vars(owner):  # an object that outlives the test starts empty
            vars(owner)[self.name] = self.empty(owner)


def caches_apart(monkeypatch) -> None:
    """Start every op's caches of calls empty, and go back to what they held when the test ends."""
    for (kind, name), empty in CACHES.items():
        monkeypatch.setattr(kind, name, _Apart(name, empty), raising=False)
    monkeypatch.setattr(path_counters, "_unable", {})
    if (calls := sys.modules.get(ATTENTION_CALLS)) is not None:  # it is imported with the integration
        monkeypatch.setattr(calls, "_seen", ())
        monkeypatch.setattr(calls, "_named", BoundedCache(calls.REMEMBERED))


def tensors_on_it(monkeypatch) -> None:
    """Take tensors in main memory for those of a GPU of compute capability 9.0 until the test ends."""
    caches_apart(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "device_of", lambda t: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def use(monkeypatch) -> None:
    """Run kernels so until the test ends."""
    tensors_on_it(monkeypatch)
    for name, value in {"driver": lambda: SimpleNamespace(launch=None, overlaps=True), "raw_stream": lambda index: 0}.items():
        monkeypatch.setattr(bound_launch, name, value)

    def first(self, tensors: dict, scalars: dict):
        choice, gpu = self.choose(tensors), target("h200")
        program = by_default_schedule(self.algorithm(), self.outputs, choice.sizes, self.signature.result_dtype(tensors).itemsize, gpu)
        values = dispatcher._distinct_tensors(tensors, scalars)
        notes = record(host_text(emit(program, "call", gpu)), values)
        try:
            bound = Computing(self, notes, tensors, scalars, values)
        except bound_launch.NotBound:  # Triton launches such calls
            return dispatcher.Route(launched := lambda given: _evaluated(self, tensors, scalars, given), "compiled", None, choice), launched(values)
        return dispatcher.Route(bound, "prebuilt", None, choice), bound.first(values, notes)

    monkeypatch.setattr(dispatcher.Dispatcher, "_first", first)


def fresh_ops(monkeypatch) -> dict[str, Operator]:
    """Make the shipped ops anew for the length of a test. Returns those that were called, by name."""
    made: dict[str, Operator] = {}

    def shipped(name: str) -> Operator:
        if name not in made:
            made[name] = registry.shipped.__wrapped__(name)
        return made[name]

    monkeypatch.setattr(op_decorator, "shipped", shipped)
    return made
