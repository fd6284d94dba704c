"""Dispatch calls to kernels: look up a bound launch by shapes, strides, dtypes and alignment; bind one at the first such call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from ...autoschedule.cost.outline import Known, Outline
from ...codegen.target import Target
from ...lang.errors import error_line
from ..bounded_cache import BoundedCache
from ..build.jit_kernels import CompiledKernels
from ..build.specialization import fits, loses_alignment, specialized
from ..build.toolchain import NoCompiler, missing
from ..launch.bound_launch import BoundLaunch, NotBound
from ..launch.cuda_driver import DriverError, driver
from ..launch.symbolic_replay import Allocating, LaunchTemplate, stand_ins, template_key, traceable
from ..launch.wrapper_recorder import Record, RecordedLaunch, host_text, record
from ..log import log, warn_once
from ..reference.launch_context import one_kernel_at_a_time
from ..select.row_ranking import FAR, Candidate, bucket_of
from ..select.schedule_selection import Call, Choice, choose, nearest
from ..select.shape_buckets import DECIDED, PlannedKernel, ScheduleCache
from ..signature.signature import Signature, input_types
from ..tables.kernel_store import KernelStore, KernelStores, StoredKernel, StoreError, digest
from ..torch_support.determinism import fixed_order
from ..torch_support.dtypes import DTYPE_NAMES, float8_inputs
from ..torch_support.tf32 import allows_tf32

if TYPE_CHECKING:
    from ...codegen.analysis.product_types import InputTypes
    from ...lang.algorithm import Algorithm
    from ...lang.schedule import Program

TEMPLATES = 16  #: per kind of call; they differ in the divisibility of sizes
REMEMBERED = 1024  #: routes per dispatcher, of about 16 KiB each; the oldest is evicted


@dataclass(frozen=True)
class Route:
    """How a kind of call runs. ``launch`` maps the inputs, then the scalars, to the results."""

    launch: Callable[[tuple], list[torch.Tensor]]
    kind: str  #: "prebuilt", "compiled" (by Triton, in this process) or "interpreted"
    candidate: Candidate | None  #: the row, None for the default schedule
    choice: Choice | None  #: None where only the nearest row was looked up


def call_key(values: tuple, precision: bool) -> tuple:
    """Return everything that the kernels of a call depend on except the contents of tensors."""
    parts: list[object] = []
    for v in values:
        if isinstance(v, torch.Tensor):
            parts.append((v.shape, v.stride(), v.dtype, v.device, v.data_ptr() & 15 == 0))
        else:
            parts.append(v if isinstance(v, int) else (float, v > 0))  # kernels may be specialized on a number's sign
    return (*parts, precision and allows_tf32(), fixed_order())


class Dispatcher:
    """Dispatch the calls of one prepared algorithm. ``algorithm()`` returns it where something must be compiled."""

    def __init__(
        self,
        subject: Call,
        signature: Signature,
        algorithm: Callable[[], Algorithm],
        outputs: tuple[str, ...],
        device_target: Callable[[torch.device], Target],
    ):
        self.subject, self.signature, self.algorithm, self.outputs = subject, signature, algorithm, outputs
        self.device_target, self.precise = device_target, signature.precise
        fixed = frozenset(n for n, source in signature.sizes.items() if isinstance(source, int))
        self.programs = ScheduleCache(algorithm, outputs, fixed, lambda: Known(signature.outline or Outline.of(algorithm()), outputs))
        self._routes: BoundedCache[tuple, Route] = BoundedCache(REMEMBERED)
        #: by row and kind; empty after the first call, None where the wrapper cannot be traced
        self._templates: BoundedCache[tuple, list[LaunchTemplate] | None] = BoundedCache(REMEMBERED)
        self._default_wins: BoundedCache[tuple, bool] = BoundedCache(DECIDED)  #: bucket of sizes -> whether the default schedule is better than every row
        self._compiled: set[str] = set()  #: sources whose compilation was logged
        self._kernels = CompiledKernels()
        self._emitted: BoundedCache[tuple, str] = BoundedCache(REMEMBERED)  #: emitted source by schedule and GPU; one serves many sizes
        self._lock = threading.RLock()

    def __call__(self, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> list[torch.Tensor]:
        """Run one call and return its outputs."""
        values = (*tensors.values(), *scalars.values())
        route = self._routes.get(call_key(values, self.precise))
        return route.launch(values) if route is not None else self.bind(tensors, scalars)[1]

    def known(self, values: tuple) -> Route | None:
        """Return the cached route of a kind of call; None if it is new."""
        return self._routes.get(call_key(values, self.precise))

    def bind(self, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[Route, list[torch.Tensor]]:
        """Return the route of this kind of call and the results of this call."""
        values = (*tensors.values(), *scalars.values())
        key = call_key(values, self.precise)
        with self._lock:
            if key in self._routes:
                return self._routes[key], self._routes[key].launch(values)
            route, results = self._first(tensors, scalars)
            self._routes.put(key, route)
            return route, results

    def choose(self, tensors: dict[str, torch.Tensor], target: Target | None = None) -> Choice:
        """Rank the rows and the default schedule for these tensors, on ``target`` or their own device.

        Where the tensors' dtypes differ, the rows are those for the dtype of the product with the most work.
        """
        types = self.types(tensors)
        dtype = DTYPE_NAMES[self.signature.result_dtype(tensors)]
        if not isinstance(types, int):
            dtype = types.main(self.algorithm(), self.signature.extents(tensors))
        target = target or self.device_target(next(iter(tensors.values())).device)
        sizes = self.signature.extents(tensors)
        choice = self.programs.compete(choose(self.subject, dtype, sizes, target, self.known_outline), dtype, types, self.known_outline, target)
        self._default_wins.put(bucket_of(sizes, self.known_outline), choice.default is not None)
        return choice

    @property
    def known_outline(self) -> Known:
        """What the cost model knows of the algorithm."""
        return self.programs.known

    def types(self, tensors: dict[str, torch.Tensor]) -> int | InputTypes:
        """Return bytes per element of the inputs, or the dtype of each where products have dtypes of their own."""
        return input_types(tensors) if self.signature.typed(tensors) else self.signature.result_dtype(tensors).itemsize

    def _first(self, tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple[Route, list[torch.Tensor]]:
        on_gpu = next(iter(tensors.values())).is_cuda and not torch.version.hip
        stored = on_gpu and not self.signature.mixed(tensors)  # prebuilt kernels take inputs of one dtype
        if stored and self._templates and (route := self._replay_template(tensors, scalars)) is not None:
            return route
        choice = self.choose(tensors)
        route = self._stored(choice, tensors, scalars, coarse=False) if stored else None
        if route is not None:
            return route
        try:
            return self._by_triton(choice, tensors, scalars, on_gpu)
        except (torch.OutOfMemoryError, MemoryError):  # says nothing about compiling
            raise
        except Exception as error:  # for example no Triton or no compiler: a prebuilt kernel for any layout is slow but correct
            route = self._stored(choice, tensors, scalars, coarse=True) if stored else None
            if route is None:
                why = missing(error, self.device_target(next(iter(tensors.values())).device)) if on_gpu else None
                if why is None:
                    raise
                raise NoCompiler(why) from error
            warn_once(f"{self.subject.op} {self.subject.direction}: a kernel for any layout runs, since none can be compiled: {type(error).__name__}")
            return route

    def _stored(self, choice: Choice, tensors: dict, scalars: dict, coarse: bool) -> tuple[Route, list[torch.Tensor]] | None:
        """Bind the best row's prebuilt kernels. ``coarse``: also builds that assume less alignment than the tensors have."""
        if choice.table.store is None:
            return None
        for candidate in choice.usable if coarse else choice.similar():
            found = self._prebuilt(candidate, choice.table.store, tensors, scalars, coarse) if candidate.exact else None
            if found is not None:
                return Route(found[0], "prebuilt", candidate, choice), found[1]
        return None

    # -- prebuilt -------------------------------------------------------------------------------------------------

    def _prebuilt(self, candidate: Candidate, store: KernelStore | KernelStores, tensors: dict, scalars: dict, coarse: bool) -> tuple[BoundLaunch, list[torch.Tensor]] | None:
        try:
            if not candidate.row.binaries:
                return None
            entries, values = _LazyEntries(store, candidate.row.binaries), _distinct_tensors(tensors, scalars)
            host = store.host(next(iter(entries)).host)
            notes = record(host, values)
            kernels = self._fitting(notes.launches, entries, store, values[0].device, coarse)
            if kernels is None:
                return None
            bound = BoundLaunch(notes, values, self._places(tensors, scalars), kernels, values[0].device)
            results = bound.first(values, notes)
            if not coarse:
                self._trace(candidate, host, entries, store, tensors, scalars)
            return bound, results
        except NotBound:
            return None
        except (StoreError, DriverError, OSError) as error:
            warn_once(f"a prebuilt kernel of {self.subject.op} is not used: {error}", about=store.path if isinstance(error, StoreError) else None)
            return None

    def _fitting(self, launches: list[RecordedLaunch], entries: _LazyEntries, store: KernelStore | KernelStores, device: torch.device, coarse: bool) -> list[tuple] | None:
        """Load, for each launch, the first entry that fits it. None where a launch has none."""
        arch, kernels = self.device_target(device).arch, []
        for launch in launches:
            fitting = (e for e in entries if e.kernel == launch.kernel and e.arch == arch and fits(e, launch.names, launch.args, launch.constants))
            entry = next(fitting, None)
            if entry is None or not coarse and loses_alignment(entry, launch.names, launch.args):
                return None
            kernels.append((entry, driver().function(device.index, entry.code, lambda e=entry: store.code(e.code), entry.kernel, entry.shared)))
        return kernels

    def _trace(self, candidate: Candidate, host: str, entries: _LazyEntries, store: KernelStore | KernelStores, tensors: dict, scalars: dict) -> None:
        """Trace the wrapper symbolically and keep a template, from the second call of a kind on."""
        values = (*tensors.values(), *scalars.values())
        kind = self._kind(candidate, values)
        if kind not in self._templates:
            self._templates.put(kind, [])
        elif (known := self._templates[kind]) is not None and len(known) < TEMPLATES and traceable(values):
            (tape, stands), allocating = stand_ins(values), Allocating()
            try:
                notes = record(host, stands, None, allocating)
                notes.allocated = cast("list[torch.Tensor]", allocating.allocated)  # ``Shaped`` stands in for one
                kernels = self._fitting(notes.launches, entries, store, values[0].device, False)
                if kernels is not None:
                    known.append(LaunchTemplate(tape, BoundLaunch(notes, stands, self._places(tensors, scalars), kernels, values[0].device)))
            except Exception as error:  # a wrapper that does more than integer arithmetic on sizes runs at each new size
                self._templates[kind] = None
                log.debug("dtkernels: the wrapper of %s is run at each new length: %s: %s", self.subject.op, type(error).__name__, error)

    def _replay_template(self, tensors: dict, scalars: dict) -> tuple[Route, list[torch.Tensor]] | None:
        """Replay a template for a call that differs in its sizes alone and has the same row and kernels; None where no template applies."""
        values = (*tensors.values(), *scalars.values())
        if not traceable(values):
            return None
        dtype, target = DTYPE_NAMES[self.signature.result_dtype(tensors)], self.device_target(values[0].device)
        sizes = self.signature.extents(tensors)
        candidate = nearest(self.subject, dtype, sizes, target, self.known_outline)
        if candidate is None or candidate.distance > FAR and self._default_wins.get(bucket_of(sizes, self.known_outline), True):  # the default schedule competes
            return None
        for template in self._templates.get(self._kind(candidate, values)) or ():
            if (bound := template.at(values)) is not None:
                return Route(bound, "prebuilt", candidate, None), bound(values)
        return None

    def _kind(self, candidate: Candidate, values: tuple) -> tuple:
        return (candidate.row.schedule, candidate.row.binaries, self.precise and allows_tf32(), *template_key(values))

    def _places(self, tensors: dict, scalars: dict) -> dict[str, int]:
        """Return the place in ``values`` of each number that may differ from call to call."""
        return {name: len(tensors) + i for i, (name, v) in enumerate(scalars.items()) if not isinstance(v, (torch.Tensor, int))}

    # -- compiled here ----------------------------------------------------------------------------------------------

    def _by_triton(self, choice: Choice, tensors: dict, scalars: dict, on_gpu: bool) -> tuple[Route, list[torch.Tensor]]:
        gpu = self.device_target(next(iter(tensors.values())).device)
        types = self.types(tensors)
        planned = self.programs.plan(choice, types, gpu)
        if (candidate := planned.candidate) is not None:
            try:
                return self._compile(planned, choice, tensors, scalars, on_gpu)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # for example too large for this GPU: the default schedule fits
                warn_once(f"a row is passed over ({candidate.row.title()}): {error_line(error)}")
                planned = self.programs.default_plan(choice, types, gpu)
        return self._compile(planned, choice, tensors, scalars, on_gpu)

    def _compile(self, planned: PlannedKernel, choice: Choice, tensors: dict, scalars: dict, on_gpu: bool) -> tuple[Route, list[torch.Tensor]]:
        from ..build.source_cache import load_module

        candidate = planned.candidate
        target = self.device_target(next(iter(tensors.values())).device) if on_gpu else None
        integral = frozenset(n for n, t in tensors.items() if not t.is_floating_point())
        source = self._source(planned.program, target, not self.signature.mixed(tensors), integral, float8_inputs(tensors))
        module = load_module(source, f"{self.subject.op}_{self.subject.direction}")
        if source not in self._compiled:
            self._compiled.add(source)
            if on_gpu:
                where = f"row {candidate.row.title()}" if candidate else f"default rules, {choice.why_no_row()}"
                log.info(
                    "dtkernels: %s %s: compiling %s; schedule from %s", self.subject.op, self.subject.direction, module.__file__, where
                )

        def launch(values: tuple) -> list[torch.Tensor]:
            with one_kernel_at_a_time():
                result = module.call(*values)
            return list(result) if isinstance(result, tuple) else [result]

        if not on_gpu:
            return Route(launch, "interpreted", candidate, choice), launch((*tensors.values(), *scalars.values()))
        values = _distinct_tensors(tensors, scalars)
        with _allow_module_loads():
            if (found := self._bind_shared_builds(source, module, values, tensors, scalars)) is not None:
                return Route(found[0], "compiled", candidate, choice), found[1]
            try:
                notes = record(host_text(source), values, module)
            except (ImportError, NameError, SyntaxError) as error:  # the wrapper uses more than the recorder's stand-ins support
                log.debug("dtkernels: %s is launched by Triton: %s", self.subject.op, error)
                return Route(launch, "compiled", candidate, choice), launch(values)
        return Route(self._bind_compiled(notes, module, values, tensors, scalars) or launch, "compiled", candidate, choice), list(notes.results)

    def _bind_shared_builds(self, source: str, module, values: tuple, tensors: dict, scalars: dict) -> tuple[BoundLaunch, list[torch.Tensor]] | None:
        """Bind kernels whose builds serve many sizes; None where Triton must launch."""
        device = values[0].device
        target = self.device_target(device)
        try:
            notes = record(host_text(source), values)
            found = [self._kernels.kernel(source, module, note, target) for note in notes.launches]
            kernels = [(e, driver().function(device.index, e.code, lambda c=code: c, e.kernel, e.shared)) for e, code in found]
            bound = BoundLaunch(notes, values, self._places(tensors, scalars), kernels, device)
            return bound, bound.first(values, notes)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # Triton's own launch reports the error, if it is one
            log.debug("dtkernels: %s is launched by Triton first: %s: %s", self.subject.op, type(error).__name__, error)
            return None

    def _source(self, program: Program, target: Target | None, uniform: bool, integral: frozenset[str], float8: tuple[tuple[str, str], ...]) -> str:
        """Return the emitted source of a program of this algorithm. Sizes enter it through the schedule alone."""
        from ...codegen.emit.module import emit

        key = program.schedule, program.counted, target, uniform, integral, float8
        if (source := self._emitted.get(key)) is not None:
            return source
        program = replace(program, algorithm=replace(program.algorithm, integral=integral, float8=float8))
        return self._emitted.put(key, emit(program, "call", target, uniform))

    def _bind_compiled(self, notes: Record, module, values: tuple, tensors: dict, scalars: dict) -> BoundLaunch | None:
        """Bind the kernels that Triton compiled, so that later calls bypass Triton; None where that is impossible."""
        from ..build.triton_compile import KernelLaunch, kernel_named, stored_kernel_of

        device = values[0].device
        target = self.device_target(device)
        try:
            kernels = []
            for launch in notes.launches:
                asked = KernelLaunch(kernel_named(module, launch.kernel), launch.grid, launch.args, launch.constants, launch.options)
                compiled = specialized(asked, target) or launch.compiled
                entry: StoredKernel = stored_kernel_of(compiled, "", target.arch)
                if not fits(entry, launch.names, launch.args, launch.constants):
                    return None
                code = compiled.asm["cubin"]
                kernels.append((entry, driver().function(device.index, digest(code), lambda c=code: c, entry.kernel, entry.shared)))
            return BoundLaunch(notes, values, self._places(tensors, scalars), kernels, device)
        except (NotBound, DriverError, OSError, AttributeError, KeyError, TypeError) as error:
            log.debug("dtkernels: %s is launched by Triton: %s: %s", self.subject.op, type(error).__name__, error)
            return None


class _LazyEntries:
    """Iterate over the entries of a store with these names, in order. Each is read when it is reached: the first often fits."""

    def __init__(self, store: KernelStore | KernelStores, names: tuple[str, ...]):
        self.store, self.names = store, names
        self.read: list[StoredKernel] = []

    def __iter__(self) -> Iterator[StoredKernel]:
        for i, name in enumerate(self.names):
            if i == len(self.read):
                self.read.append(self.store.entry(name))
            yield self.read[i]


def _distinct_tensors(tensors: dict[str, torch.Tensor], scalars: dict[str, object]) -> tuple:
    """Return the values with a distinct object for every tensor, so that a tensor passed twice counts as two."""
    return tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in (*tensors.values(), *scalars.values()))


def _allow_module_loads():
    """Return a context that allows Triton to load modules during a CUDA graph capture."""
    try:
        return driver().relaxed() if torch.cuda.is_current_stream_capturing() else nullcontext()
    except (OSError, DriverError):
        return nullcontext()
