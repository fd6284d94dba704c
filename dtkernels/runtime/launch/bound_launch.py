"""Replay a recorded call: allocate as the wrapper does, fill in pointers, launch the loaded kernels."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence

import torch

from ..tables.kernel_store import Encoding, StoredKernel
from ..torch_support.determinism import fixed_order
from .cuda_driver import NO_CONTEXT, driver, launch_config
from .tensor_map import WORDS, TensorMap, encoded
from .wrapper_recorder import Record

_RAW = frozenset(("i32", "i64", "fp32"))


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# Used by torch's own generated code: five to ten times faster than the public functions, which are the fallback.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_empty_strided = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


def allocator(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """Return a function (shape, strides, dtype) -> an uninitialized tensor on ``device``, which must be current."""
    if device.type == "cuda" and _empty_strided is not None:
        return _empty_strided
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("<f", number), "little")


class NotBound(Exception):
    """A record cannot be replayed; the message says why."""


class _Frame:
    """The argument storage of one call in flight."""

    __slots__ = ("slots", "floats", "launches", "stream")

    def __init__(self, slots: ctypes.Array, floats: list[tuple[int, ctypes.c_float]], launches: list[tuple]):
        self.slots, self.floats, self.launches, self.stream = slots, floats, launches, 0  #: the stream set in the launches

    def move(self, stream: int) -> None:
        """Set the stream of all launches."""
        self.stream = stream
        for config, *_ in self.launches:
            config.stream = stream


class BoundLaunch:
    """Replay the record of one kind of call, on tensors of the same shapes, strides, dtypes and alignment.

    Thread-safe: each call takes its own argument storage from a pool.
    """

    def __init__(
        self, record: Record, values: tuple, scalars: dict[str, int], kernels: list[tuple[StoredKernel, ctypes.c_void_p]], device: torch.device
    ):
        self.device, self.index = device, device.index
        self.unordered = record.unordered  #: programs add sums up in any order, which torch may come to forbid
        used = {id(t) for t in record.results} | {id(a.base if isinstance(a, TensorMap) else a) for launch in record.launches for a in launch.args}
        used |= {id(tensor) for tensor, _, _ in record.views.values()}
        record.allocated = [t for t in record.allocated if id(t) in used]
        self.allocations = [(tuple(t.shape), t.dtype) for t in record.allocated]
        self._made = {id(t): j for j, t in enumerate(record.allocated)}
        self._given = {id(v): i for i, v in enumerate(values) if isinstance(v, torch.Tensor)}
        if any(id(r) not in self._made and id(r) not in self._given for r in record.results):
            raise NotBound("a result is neither a tensor that the wrapper allocates nor one that it is given")
        #: places among the allocations; ~i for value i, which the kernels change
        self.results = tuple(self._made[id(r)] if id(r) in self._made else ~self._given[id(r)] for r in record.results)
        self._scalars, self._record_views = scalars, record.views
        self._slots: dict[tuple, int] = {}  #: content of a slot -> its place
        self._maps: list[tuple[int, tuple, tuple, Encoding]] = []  #: (first slot, shape, strides, encoding) of tensor maps
        self._plans = [self._plan(launch, *kernel) for launch, kernel in zip(record.launches, kernels)]
        # a map begins with the pointer to its tensor
        pointers = [(key, slot) for key, slot in self._slots.items()] + [(key[1], slot) for key, slot in self._slots.items() if key[0] == "map"]
        self.pointers = [(key[1], slot) for key, slot in pointers if key[0] == "given"]
        self.made = [(key[1], slot) for key, slot in pointers if key[0] == "made"]
        #: (slot, slot of the tensor that it is a view of, offset in bytes)
        self.views = [(slot, key[1], key[2]) for key, slot in pointers if key[0] == "view"]
        #: bits that were 0 in all pointers at binding time: kernels may assume 16-byte alignment
        self.grain = 0 if any(values[i].data_ptr() & 15 for i, _ in self.pointers) else 15
        self._strides = [row_major(shape) for shape, _ in self.allocations]
        self._numbers: Sequence[int] | None = None  #: contents of the slots, where they differ from the record
        self._free: list[_Frame] = []
        self._taken: list[tuple] = []  #: the same pool for ``alone``
        self._empty = allocator(device)
        self._several = torch.cuda.device_count() > 1
        self._launch = driver().launch
        self._overlaps = [driver().overlaps and "launch_pdl" in launch.options for launch in record.launches]
        del self._made, self._given, self._record_views

    def _plan(self, launch, entry: StoredKernel, function: ctypes.c_void_p) -> tuple:
        """Return (places of the arguments, grid, entry, function) of one launch."""
        args, slots, places = launch.args, self._slots, []
        for i, name, kind in entry.given:
            value = args[i]
            if isinstance(value, TensorMap):
                places += self._map_places(name, kind, value, entry.encodings[name])
            elif type(value) is int and kind in _RAW and name not in self._scalars:  # the common case: strides and sizes
                places.append(slots.setdefault(("raw", kind, value), len(slots)))
            else:
                places.append(self._slot(name, kind, value))
        scratch, _ = entry.scratch
        if scratch:
            self.allocations.append(((scratch * entry.blocks * math.prod(launch.grid),), torch.uint8))
            places += [self._place(("made", len(self.allocations) - 1)), self._place(("raw", "i64", 0))]
        else:
            places += [self._place(("raw", "i64", 0))] * 2
        return places, launch.grid, entry, function

    def _map_places(self, name: str, kind: str, value: TensorMap, how: Encoding) -> list[int]:
        """Return the places of a tensor map, and of its extents and strides, which Triton passes behind it."""
        tensor, first = self._pointer(name, kind, value.base), len(self._slots)
        key = ("map", tensor, value.shape, value.strides, how)
        if key not in self._slots:
            self._slots |= {key: first} | {("word", first, j): first + j for j in range(1, WORDS)}
            self._maps.append((first, value.shape, value.strides, how))
        numbers = [("raw", "i32", n) for n in value.shape] + [("raw", "i64", n) for n in value.strides]
        return [self._slots[key], *map(self._place, numbers)]

    def _pointer(self, name: str, kind: str, value: torch.Tensor) -> tuple:
        """Return the key of a slot that holds where a tensor begins."""
        if id(value) in self._given:
            return "given", self._given[id(value)]
        if id(value) in self._made:
            return "made", self._made[id(value)]
        if id(value) in self._record_views:
            tensor, offset, _ = self._record_views[id(value)]
            return "view", self._slot(name, kind, tensor), offset
        raise NotBound(f"{name} is a tensor that the wrapper converts")

    def _slot(self, name: str, kind: str, value: object) -> int:
        if isinstance(value, torch.Tensor):
            return self._place(self._pointer(name, kind, value))
        if name in self._scalars:
            if kind != "fp32":
                raise NotBound(f"{name} is a number that the wrapper makes whole")
            return self._place(("float", self._scalars[name]))
        if kind not in _RAW or not isinstance(value, (int, float)):
            raise NotBound(f"{name} is a {type(value).__name__}")
        return self._place(("raw", kind, value))

    def _place(self, key: tuple) -> int:
        return self._slots.setdefault(key, len(self._slots))

    def _frame(self) -> _Frame:
        slots = (ctypes.c_uint64 * max(1, len(self._slots)))(*self._raw())
        for first, shape, strides, how in self._maps:
            slots[first : first + WORDS] = list(encoded(shape, strides, how))
        base = ctypes.addressof(slots)
        floats = [(key[1], ctypes.c_float.from_address(base + 8 * slot)) for key, slot in self._slots.items() if key[0] == "float"]
        launches = []
        for (places, grid, entry, function), overlaps in zip(self._plans, self._overlaps):
            config, attributes = launch_config(grid, entry.threads, entry.shared, entry.blocks, overlaps)
            params = (ctypes.c_uint64 * len(places))(*[base + 8 * p for p in places])
            launches.append((config, ctypes.byref(config), function, params, attributes))
        return _Frame(slots, floats, launches)

    def _raw(self) -> Sequence[int]:
        """Return the initial bits of the slots. Kernels read the lower half for 32-bit parameters."""
        if self._numbers is not None:
            return self._numbers
        return [(_bits(key[2]) if key[1] == "fp32" else key[2]) if key[0] == "raw" else 0 for key in self._slots]

    def __call__(self, values: tuple) -> list[torch.Tensor]:
        """Run on ``values``, the inputs then the scalars in order of declaration, and return the results."""
        if self._several and current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.run(values, self._allocate())
        return self.run(values, self._allocate())

    def shape_of(self, result: int) -> tuple[int, ...]:
        """Return the shape of a result."""
        return self.allocations[self.results[result]][0]

    def shaped(self, shapes: Sequence[tuple[int, ...]], order: Sequence[int] | None = None) -> BoundLaunch:
        """Return the same kernels with results in other shapes of as many elements. Value i is found at ``order[i]``."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.allocations = list(self.allocations)
        for j, shape in ((j, shape) for j, shape in zip(self.results, shapes) if j >= 0):
            other.allocations[j] = (tuple(shape), self.allocations[j][1])
        other._strides = [row_major(shape) for shape, _ in other.allocations]
        if order is not None:  # else the argument storage is shared
            other.results = tuple(j if j >= 0 else ~order[~j] for j in self.results)
            other._free, other._taken = [], []
            other.pointers = [(order[i], slot) for i, slot in self.pointers]
            other._slots = {("float", order[key[1]]) if key[0] == "float" else key: slot for key, slot in self._slots.items()}
        return other

    def numbered(self, raw: Sequence[int], grids: Sequence[tuple], shapes: Sequence[tuple], strides: Sequence[tuple], maps: Sequence[tuple]) -> BoundLaunch:
        """Return the same kernels with other slot contents, grids, shapes of allocations, and (shape, strides) of tensor maps."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._numbers, other._strides, other._free, other._taken = raw, list(strides), [], []
        other.allocations = [(shape, dtype) for shape, (_, dtype) in zip(shapes, self.allocations)]
        other._plans = [(places, grid, *kernel) for grid, (places, _, *kernel) in zip(grids, self._plans)]
        other._maps = [(first, *own, how) for own, (first, _, _, how) in zip(maps, self._maps)]
        return other

    def _allocate(self) -> list[torch.Tensor]:
        empty = self._empty
        return [empty(shape, strides, dtype) for (shape, dtype), strides in zip(self.allocations, self._strides)]

    def alone(self) -> Callable[[tuple], torch.Tensor | None] | None:
        """Return a fast path for one kernel with one result, which is returned without a list; None for other kinds.

        Most calls are of this kind. The code is written out, since each saved step is a twentieth of the call. It returns None and launches
        nothing where all tensors were aligned to 16 bytes at binding time and one is not now.
        """
        if self.unordered or self.results[0] < 0 or len(self._plans) != 1 or len(self.allocations) != 1 or not self.made or self.views:
            return None
        (shape, dtype), ((_, slot), *others), pointers, grain = self.allocations[0], self.made, self.pointers, self.grain
        strides, several, index = row_major(shape), self._several, self.index
        empty, launch, stream_of, free = self._empty, self._launch, raw_stream, self._taken

        def run(values: tuple) -> torch.Tensor | None:
            try:
                taken = free.pop()  # another thread may take the last one between a check and this pop
            except IndexError:
                taken = self._take()
            slots, floats, reference, function, params, frame = taken
            bits = 0
            for i, place in pointers:
                slots[place] = pointer = values[i].data_ptr()
                bits |= pointer
            if bits & grain:
                free.append(taken)
                return None
            if several and current_device() != index:
                free.append(taken)
                return self(values)[0]
            made = empty(shape, strides, dtype)
            slots[slot] = made.data_ptr()
            for _, place in others:
                slots[place] = slots[slot]
            if floats:
                for i, number in floats:
                    number.value = values[i]
            if (stream := stream_of(index)) != frame.stream:
                frame.move(stream)
            if code := launch(reference, function, params, None):
                self._retry_with_context(code, reference, function, params)
            free.append(taken)
            return made

        return run

    def together(self) -> Callable[[tuple], torch.Tensor | tuple[torch.Tensor, ...] | None]:
        """Return a fast path for several kernels or results. Intermediates share one allocation. Several results are a tuple.

        It returns None where ``alone`` does, and where sums would be added up in any order although torch now asks for a fixed one.
        """
        outs = [(*self.allocations[j], self._strides[j], [slot for i, slot in self.made if i == j]) for j in self.results if j >= 0]
        given = [(k, ~j) for k, j in enumerate(self.results) if j < 0]  #: results that are arguments
        offsets, size = dict[int, int](), 0
        for j in dict.fromkeys(j for j, _ in self.made if j not in self.results):
            shape, dtype = self.allocations[j]
            offsets[j] = size
            size += -(-math.prod(shape) * dtype.itemsize // 256) * 256  # the alignment of the caching allocator
        inner = [(slot, offsets[j]) for j, slot in self.made if j in offsets]
        pointers, grain, several, index, single = self.pointers, self.grain, self._several, self.index, len(self.results) == 1
        empty, launch, stream_of, free, views, unordered = self._empty, self._launch, raw_stream, self._free, self.views, self.unordered

        def run(values: tuple):
            if unordered and fixed_order():
                return None
            try:
                frame = free.pop()
            except IndexError:
                frame = self._frame()
            slots, bits = frame.slots, 0
            for i, slot in pointers:
                slots[slot] = pointer = values[i].data_ptr()
                bits |= pointer
            if bits & grain:
                free.append(frame)
                return None
            if several and current_device() != index:
                free.append(frame)
                results = self(values)
                return results[0] if single else tuple(results)
            made = []
            for shape, dtype, strides, places in outs:
                made.append(result := empty(shape, strides, dtype))
                for slot in places:
                    slots[slot] = result.data_ptr()
            if size:
                memory = empty((size,), (1,), torch.uint8)
                base = memory.data_ptr()
                for slot, offset in inner:
                    slots[slot] = base + offset
            if views:
                for slot, whole, offset in views:
                    slots[slot] = slots[whole] + offset
            for i, number in frame.floats:
                number.value = values[i]
            if (stream := stream_of(index)) != frame.stream:
                frame.move(stream)
            for _, reference, function, params, _ in frame.launches:
                if code := launch(reference, function, params, None):
                    self._retry_with_context(code, reference, function, params)
            free.append(frame)
            for k, i in given:
                made.insert(k, values[i])
            return made[0] if single else tuple(made)

        return run

    def _take(self) -> tuple:
        """Take a frame from the pool, with the data of its one launch."""
        try:
            frame = self._free.pop()
        except IndexError:
            frame = self._frame()
        _, reference, function, params, _ = frame.launches[0]
        return frame.slots, frame.floats, reference, function, params, frame

    def run(self, values: tuple, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Launch on ``values`` into ``made``."""
        try:
            frame = self._free.pop()
        except IndexError:
            frame = self._frame()
        slots = frame.slots
        for i, slot in self.pointers:
            slots[slot] = values[i].data_ptr()
        for j, slot in self.made:
            slots[slot] = made[j].data_ptr()
        for slot, whole, offset in self.views:
            slots[slot] = slots[whole] + offset
        for i, number in frame.floats:
            number.value = values[i]
        if (stream := raw_stream(self.index)) != frame.stream:
            frame.move(stream)
        for _, reference, function, params, _ in frame.launches:
            if code := self._launch(reference, function, params, None):
                self._retry_with_context(code, reference, function, params)
        self._free.append(frame)
        return [made[j] if j >= 0 else values[~j] for j in self.results]

    def first(self, values: tuple, record: Record) -> list[torch.Tensor]:
        """Launch into the tensors that ``record`` allocated."""
        scratch = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.allocations[len(record.allocated) :]]
        with torch.cuda.device_of(record.results[0]):
            return self.run(values, record.allocated + scratch)

    def _retry_with_context(self, code: int, reference, function, params) -> None:
        """Launch again after setting the context, in a thread that has none; raise for any other error."""
        if code == NO_CONTEXT:
            driver().make_current(self.index)
            code = self._launch(reference, function, params, None)
        driver().check(code, "launching a kernel")
