"""Run GPU workers: check a candidate's results, then time it with a cold and with a warm L2."""

from __future__ import annotations

import ctypes
import math
import re
import statistics
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.build.specialization import fits, narrowest
from ...runtime.build.triton_compile import plain_constant
from ...runtime.launch.cuda_driver import DriverError, driver, launch_config
from ...runtime.launch.tensor_map import WORDS, TensorMap, words_of_map
from ...runtime.launch.wrapper_recorder import RecordedLaunch, record
from ...runtime.tables.kernel_store import StoredKernel
from ..records import inputs_and_reference
from ..records.journal import Time
from ..records.problems import TuningProblem
from .compile_worker import Artefact, Refused
from .worker_pool import FORGOTTEN, Fatal

KEPT = 24 << 30  #: bytes of earlier problems' tensors that stay
SHORT = 60.0  #: microseconds below which a kernel is also timed by graph replay
SLOW = 2.0  #: a candidate this many times slower than the best is timed a few times only
AHEAD = 350_000  #: cycles, 200 microseconds, in which the host launches what is timed
AGAIN = 3  #: runs after a slow first one: a kernel of a few microseconds often takes tens at first
_BUFFER = re.compile(r"(_ptr|_desc(_\d+)?)$")  #: what follows a buffer's name in that of a parameter
_RAW = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def build_for(launch: RecordedLaunch, entries: list[StoredKernel]) -> StoredKernel | None:
    """Return the build that a call of these sizes gets, the most specific one. A build for another problem that merely fits may be
    several times slower, because it assumes less about the sizes.
    """
    narrow = narrowest(launch.names, launch.args, launch.constants, {})
    told = {n: v for n, v in narrow.constants.items() if n.startswith("EVEN_") or n == "INDEX"}
    for e in entries:
        if e.kernel == launch.kernel and e.multiples == narrow.multiples and fits(e, launch.names, launch.args, launch.constants):
            if all(e.constants.get(n) in (v, plain_constant(v)) for n, v in told.items()):
                return e
    return None


class Kernels:
    """Repeatable launches of a wrapper, on its own tensors."""

    def __init__(self, launches: list[RecordedLaunch], entries: list[StoredKernel], codes: dict[str, bytes], device: int):
        self.device = device
        self.kept: list[object] = []  #: what must live as long as the launches
        self.calls: list[tuple] = []
        self.launch = driver().launch
        for launch in launches:
            entry = build_for(launch, entries)
            if entry is None:
                raise Refused(f"no build of {launch.kernel} for this call")
            if entry.shared > torch.cuda.get_device_properties(device).shared_memory_per_block_optin:  # type: ignore[attr-defined]  # not in torch's stubs
                raise Refused(f"{launch.kernel} takes {entry.shared} bytes of shared memory")
            function = driver().function(device, entry.code, lambda e=entry: codes[e.code], entry.kernel, entry.shared)
            self.calls.append(self._call(launch, entry, function))

    def _call(self, launch: RecordedLaunch, entry: StoredKernel, function) -> tuple:
        given: dict[str, Any] = dict(zip(launch.names, launch.args))
        slots: list[Any] = []
        for name, kind in entry.types.items():
            if kind != "constexpr":
                value = given[name]
                if isinstance(value, torch.Tensor):
                    self.kept.append(value)
                    slots.append(ctypes.c_uint64(value.data_ptr()))
                elif isinstance(value, TensorMap):
                    self.kept.append(value)
                    slots.append((ctypes.c_uint64 * WORDS)(*words_of_map(value, entry.encodings[name])))
                    slots += [*map(ctypes.c_int32, value.shape), *map(ctypes.c_int64, value.strides)]
                else:
                    slots.append(_RAW[kind](value))
        size = entry.scratch[0] * math.prod(launch.grid) * entry.blocks
        scratch = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.device}") if size else None
        slots += [ctypes.c_uint64(scratch.data_ptr() if scratch is not None else 0), ctypes.c_uint64(0)]
        overlaps = bool(self.calls) and driver().overlaps and "launch_pdl" in launch.options
        config, attributes = launch_config(launch.grid, entry.threads, entry.shared, entry.blocks, overlaps)
        params = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(s) for s in slots))
        self.kept += [slots, scratch, attributes, config]
        return config, ctypes.byref(config), function, params

    def __call__(self) -> None:
        """Launch on the current stream."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for config, reference, function, params in self.calls:
            config.stream = stream
            code = self.launch(reference, function, params, None)
            if code:
                driver().check(code, "launching a kernel")


@dataclass
class Timer:
    """Time with CUDA events and with graph replay."""

    flush: torch.Tensor  #: larger than the L2; written between runs

    def once(self, run: Callable[[], None]) -> float:
        """Return the microseconds of one run with a cold cache."""
        return self.cold(run, 1)

    def cold(self, run: Callable[[], object], count: int) -> float:
        """Return the median of ``count`` runs, each with a cold cache."""
        pairs = []
        for _ in range(count):
            self.flush.zero_()
            torch.cuda._sleep(AHEAD)  # else a host busy with compiling would be waited for, and its time counted
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(b.elapsed_time(e) for b, e in pairs) * 1e3

    def warm(self, run: Callable[[], None], each: int = 10, count: int = 3) -> float:
        """Return the time of one run among ``each`` in a captured graph; the median of ``count`` replays."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(each):
                run()
        graph.replay()
        return min(self.cold(graph.replay, count), self.cold(graph.replay, 1)) / each


class GpuWorker:
    """Handle tasks in a worker process that has one GPU."""

    def __init__(self, index: int):
        self.device = index
        torch.cuda.set_device(index)
        torch.backends.cuda.matmul.allow_tf32 = False
        properties = torch.cuda.get_device_properties(index)
        self.where, cache = f"cuda:{index} GPU-{properties.uuid}", properties.L2_cache_size  # under Ray the number is 0 everywhere
        self.timer = Timer(torch.empty(max(2 * cache, 64 << 20), dtype=torch.uint8, device=f"cuda:{index}"))
        self.known: OrderedDict[tuple, inputs_and_reference.InputsAndReference] = OrderedDict()
        self.artefacts: OrderedDict[object, Artefact] = OrderedDict()

    def __call__(self, task: tuple) -> object:
        kind, *rest = task
        try:
            return getattr(self, kind)(*rest)
        except torch.OutOfMemoryError:
            self.known.clear()
            torch.cuda.empty_cache()
            raise
        except DriverError as error:
            if "out of resources" in str(error) or "invalid argument" in str(error):
                raise
            raise Fatal(str(error)) from None
        except (torch.AcceleratorError, RuntimeError) as error:
            if "CUDA error" in str(error):
                raise Fatal(str(error)) from None
            raise

    def measure(self, work: TuningProblem, funcs: tuple[str, ...], key: object, artefact: Artefact | None, best: float, _candidate: tuple = ()) -> Time:
        """Time a candidate; a failure if its results are wrong."""
        kernels, why = self._ready(work, funcs, self._artefact(key, artefact))
        if why:
            return Time(failure=why)
        first = self.timer.once(kernels)
        if first > SLOW * best + 10:
            first = min(first, self.timer.cold(kernels, AGAIN))
        if first > SLOW * best + 10:
            return Time(first, first)
        cold = self.timer.cold(kernels, max(3, min(11, int(3000 / max(first, 1)))))
        return Time(cold, self.timer.warm(kernels) if cold < SHORT else cold)

    def race(self, work: TuningProblem, funcs: tuple[str, ...], entrants: tuple[tuple[object, Artefact | None, tuple], ...], rounds: int) -> list[Time]:
        """Time whole schedules in turn, so that none meets a higher clock or an emptier machine than the others."""
        running: list[Kernels | None] = []
        times: list[Time] = []
        for key, artefact, _ in entrants:
            try:
                kernels, why = self._ready(work, funcs, self._artefact(key, artefact))
            except Refused as error:
                kernels, why = None, str(error)
            running.append(None if why else kernels)
            times.append(Time(failure=why))
        places = [i for i, k in enumerate(running) if k is not None]
        samples: dict[int, list[tuple[float, float]]] = {i: [] for i in places}
        for turn in range(rounds):
            for i in places[turn % max(len(places), 1) :] + places[: turn % max(len(places), 1)]:
                run = running[i]
                assert run is not None
                cold = self.timer.cold(run, 5)
                samples[i].append((cold, self.timer.warm(run, count=1) if cold < SHORT else cold))
        for i in places:
            times[i] = Time(statistics.median(c for c, _ in samples[i]), statistics.median(w for _, w in samples[i]))
        return times

    def peer(self, work: TuningProblem, name: str) -> Time:
        """Time the op's reference in the dtype of the call: in eager torch, or compiled by torch.compile."""
        run = inputs_and_reference.peer(work, f"cuda:{self.device}", compiled=name == "compile")
        for _ in range(AGAIN):
            run()
        torch.cuda.synchronize()
        cold = self.timer.cold(run, 11)
        return Time(cold, cold)

    def about(self) -> dict:
        """Describe this machine."""
        import triton

        p = torch.cuda.get_device_properties(self.device)
        return {
            "name": p.name, "arch": p.major * 10 + p.minor, "multiprocessors": p.multi_processor_count, "torch": torch.__version__,
            "triton": triton.__version__, "driver": _driver_version(), "memory": p.total_memory,
        }  # fmt: skip

    # -- one work -------------------------------------------------------------------------------------------------

    def _artefact(self, key: object, artefact: Artefact | None) -> Artefact:
        if artefact is not None:
            self.artefacts[key] = artefact
            while len(self.artefacts) > 3000:
                self.artefacts.popitem(last=False)
        if key not in self.artefacts:
            raise Refused(FORGOTTEN)
        self.artefacts.move_to_end(key)
        return self.artefacts[key]

    def _data(self, work: TuningProblem, funcs: tuple[str, ...]) -> inputs_and_reference.InputsAndReference:
        key = (work, funcs)
        if key not in self.known:
            while self.known and sum(d.bytes for d in self.known.values()) > KEPT:
                self.known.popitem(last=False)
            self.known[key] = inputs_and_reference.make(work, funcs, f"cuda:{self.device}")
            torch.cuda.empty_cache()
        self.known.move_to_end(key)
        return self.known[key]

    def _ready(self, work: TuningProblem, funcs: tuple[str, ...], artefact: Artefact) -> tuple[Kernels, str]:
        """Bind the kernels to this problem's tensors and run them once; return them and what is wrong with their results."""
        known = self._data(work, funcs)
        notes = record(artefact.host, known.values)
        mine = [launch for launch in notes.launches if launch.kernel in artefact.kernels]
        kernels = Kernels(mine, artefact.entries, artefact.codes, self.device)
        named = [(name, t.base if isinstance(t, TensorMap) else t) for launch in notes.launches for name, t in zip(launch.names, launch.args)]
        made = {id(t): _BUFFER.sub("", name) for name, t in named if isinstance(t, torch.Tensor)}
        buffers = {made[id(t)]: t for t in notes.allocated if id(t) in made}
        for name, tensor in buffers.items():
            if name in artefact.writes:
                tensor.fill_(float("nan"))
            if name in known.right:  # aligned rows are longer than their contents
                buffers[name] = tensor = tensor[tuple(slice(n) for n in known.right[name].shape)]
            if name in known.right and name not in artefact.writes:
                tensor.copy_(known.right[name])
        kernels()
        torch.cuda.synchronize()
        for name in artefact.writes:
            if why := inputs_and_reference.wrong(buffers[name], known.right[name], work.group.torch_dtype):
                return kernels, f"{name}: {why}"
        return kernels, ""


def _driver_version() -> str:
    """Return the driver version from nvidia-smi, else the driver's CUDA version."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        version = ctypes.c_int()
        driver().library.cuDriverGetVersion(ctypes.byref(version))
        return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def make_gpu_worker(index: int) -> GpuWorker:
    """Make the handler of a worker process for the GPU of this number among those in CUDA_VISIBLE_DEVICES; Ray shows each worker one."""
    return GpuWorker(index if torch.cuda.device_count() > 1 else 0)
