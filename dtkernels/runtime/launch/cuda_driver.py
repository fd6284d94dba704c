"""Load and launch machine code by the CUDA driver through ctypes, without Triton or a C compiler."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import contextmanager

_SHARED_LIMIT, _PREFER_SHARED = 8, 1  #: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_CACHE_PREFER_SHARED
_RELAXED = 2  #: CU_STREAM_CAPTURE_MODE_RELAXED
_CLUSTER, _OVERLAPS = 4, 6  #: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_GRAPHS_OVERLAP = 12030  #: the first driver version that captures overlapping launches (PDL) in CUDA graphs
NO_CONTEXT = 201  #: CUDA_ERROR_INVALID_CONTEXT


class DriverError(RuntimeError):
    """A failed call of the CUDA driver, with the driver's message."""


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((n, ctypes.c_uint) for n in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the kind, and a union of 64 bytes, of which at most three integers are set."""

    _fields_ = [("kind", ctypes.c_int), ("padding", ctypes.c_int), ("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)] + [
        ("rest", ctypes.c_char * 52)
    ]


def launch_config(grid: Sequence[int], threads: int, shared: int, blocks: int = 1, overlaps: bool = False) -> tuple[LaunchConfig, object]:
    """Return (launch configuration of ``grid`` programs of ``blocks`` blocks each, which form a cluster; memory that it refers to).

    ``overlaps``: programmatic dependent launch. The kernel may start before the previous one has ended, and waits for it by itself.
    """
    found = [LaunchAttribute(_CLUSTER, 0, blocks, 1, 1)] * (blocks > 1) + [LaunchAttribute(_OVERLAPS, 0, 1)] * overlaps
    attributes = (LaunchAttribute * len(found))(*found)
    x, y, z = (*grid, 1, 1)[:3]
    config = LaunchConfig(x * blocks, y, z, threads, 1, 1, shared, None, ctypes.addressof(attributes) if found else None, len(found))
    return config, attributes


class Driver:
    """The driver of this process. Modules are loaded once per device and never unloaded."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.launch = self.library.cuLaunchKernelEx  # CUDA 11.8 and newer; no argtypes: callers pass ctypes objects
        self._lock = threading.Lock()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[tuple, ctypes.c_void_p] = {}
        self.check(self.library.cuInit(0), "cuInit")
        version = ctypes.c_int()
        self.check(self.library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        self.overlaps = version.value >= _GRAPHS_OVERLAP  #: whether launches may overlap (PDL), also in CUDA graphs

    def check(self, code: int, what: str) -> None:
        """Raise DriverError unless ``code`` is success."""
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(f"{what}: {(text.value or b'unknown error').decode()} ({code})")

    def context(self, device: int) -> ctypes.c_void_p:
        """Return the primary context of a device, which torch uses too."""
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self.check(self.library.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
            self.check(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
            self._contexts[device] = context
        return self._contexts[device]

    def make_current(self, device: int) -> None:
        """Set the device's context in a thread that has none."""
        self.check(self.library.cuCtxSetCurrent(self.context(device)), "cuCtxSetCurrent")

    def function(self, device: int, name: str, code, kernel: str, shared: int) -> ctypes.c_void_p:
        """Return the function ``kernel`` of the machine code called ``name``. ``code()`` supplies the bytes where it is not loaded yet."""
        key = (device, name, kernel)
        with self._lock:
            if key not in self._functions:
                self._functions[key] = self._load(device, code(), kernel, shared)
            return self._functions[key]

    def _load(self, device: int, code: bytes, kernel: str, shared: int) -> ctypes.c_void_p:
        lib, module, function = self.library, ctypes.c_void_p(), ctypes.c_void_p()
        self.check(lib.cuCtxPushCurrent_v2(self.context(device)), "cuCtxPushCurrent")
        try:
            with self.relaxed():
                self.check(lib.cuModuleLoadData(ctypes.byref(module), code), f"loading {kernel}")
                self.check(lib.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()), f"finding {kernel}")
                if shared > 49152:
                    self.check(lib.cuFuncSetCacheConfig(function, _PREFER_SHARED), f"shared memory of {kernel}")
                    self.check(lib.cuFuncSetAttribute(function, _SHARED_LIMIT, shared), f"{shared} bytes of shared memory for {kernel}")
        finally:
            lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return function

    @contextmanager
    def relaxed(self):
        """Allow operations that a CUDA graph capture forbids this thread, such as loading a module."""
        mode = ctypes.c_int(_RELAXED)
        self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_driver: Driver | None = None
_making = threading.Lock()


def driver() -> Driver:
    """Return the driver, opened on first use. Raises OSError where there is none, DriverError where it does not start."""
    global _driver
    if _driver is None:
        with _making:
            _driver = _driver or Driver()
    return _driver


def _forget() -> None:
    global _driver, _making
    _driver, _making = None, threading.Lock()  # the parent's handles are invalid in a child


os.register_at_fork(after_in_child=_forget)
