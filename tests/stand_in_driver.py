"""A driver that is not there: in a process that calls ``use()`` tensors in main memory are taken for those of an H200, its table and binaries
are read as there, and a launch does nothing.

For what a process does in its first calls: which modules it imports, what it reads, how long that takes.
"""

import contextlib
import ctypes
from types import SimpleNamespace

import torch

from dtkernels.runtime.dispatch import dispatcher
from dtkernels.runtime.launch import bound_launch


def use() -> None:
    """From here on, for good."""

    loaded: dict[tuple, ctypes.c_void_p] = {}

    def function(device: int, name: str, code, kernel: str, shared: int) -> ctypes.c_void_p:
        if (device, name, kernel) not in loaded:  # as the driver does
            assert code()
            loaded[device, name, kernel] = ctypes.c_void_p(1)
        return loaded[device, name, kernel]

    driver = SimpleNamespace(launch=lambda *args: 0, function=function, overlaps=True)
    torch.Tensor.is_cuda = True
    torch.cuda.device_of, torch.cuda.device_count = lambda tensor: contextlib.nullcontext(), lambda: 1
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    dispatcher.driver = bound_launch.driver = lambda: driver
    bound_launch.raw_stream = lambda index: 0
    bound_launch.encoded = lambda shape, strides, how: (0,) * bound_launch.WORDS
    bound_launch.allocator = lambda device: torch._C._dynamo.guards._empty_strided_cpu  # as quick as that for a GPU
    recorded = dispatcher.record
    dispatcher.record = lambda host, *rest: recorded(host.replace('.device.type != "cpu"', ".is_cuda"), *rest)
