"""Describe and encode the tensor maps that kernels get as arguments: a tensor, and the boxes of it that the GPU's copy engine moves."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from ..tables.kernel_store import TENSOR_MAP, Encoding
from ..torch_support.dtypes import TRITON_NAMES
from .cuda_driver import driver

MAKERS = ("tensor_map", "swizzled_map")  #: helpers of emitted files that make them
WORDS = 16  #: of 8 bytes of an encoded map; the first is the tensor's address
_HOST_TYPES = {8: 10, 9: 8, 10: 9}  #: element types that the driver numbers in another way than the hardware
_ALIGNMENT = 64  #: bytes
_L2_128_BYTES = 2  #: what the copy engine brings to the L2 at least, as Triton asks for


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A map that a wrapper asks for, under the names of Triton's own class."""

    maker: str  #: the helper that was called
    base: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]

    def made_by(self, module: ModuleType) -> Any:
        """Return the descriptor that Triton's launcher takes."""
        return getattr(module, self.maker)(self.base, self.shape, self.strides, self.block_shape)


def map_type(value: object) -> str | None:
    """Return the parameter's type for a map or for Triton's own descriptor, without the layout of Gluon's; None for any other value."""
    box = getattr(value, "block_shape", None)
    return None if box is None else f"{TENSOR_MAP}{TRITON_NAMES[value.base.dtype]}[{', '.join(map(str, box))}]>"  # type: ignore[attr-defined]


def plain_map_type(kind: str) -> str:
    """Return a map's type without the layout that Gluon's has."""
    return re.sub(r"^(tensordesc<\w+\[[^\]]*\]).*>$", r"\1>", kind)


@lru_cache(maxsize=4096)
def encoded(shape: tuple[int, ...], strides: tuple[int, ...], how: Encoding) -> tuple[int, ...]:
    """Return the words of a map of a tensor at address 0. Raises DriverError where the driver refuses it."""
    rank, memory = len(shape), ctypes.create_string_buffer(8 * WORDS + _ALIGNMENT)
    place = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    code = driver().library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), _HOST_TYPES.get(how.kind, how.kind), rank, ctypes.c_void_p(_ALIGNMENT),
        (ctypes.c_uint64 * rank)(*reversed(shape)), (ctypes.c_uint64 * rank)(*(how.itemsize * s for s in reversed(strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(how.box)), (ctypes.c_uint32 * rank)(*[1] * rank), 0, how.swizzle, _L2_128_BYTES, 0,
    )  # fmt: skip
    driver().check(code, f"a tensor map of shape {shape}, strides {strides}, boxes of {how.box}")
    return (0, *(ctypes.c_uint64 * WORDS).from_address(place)[1:])


def words_of_map(value: TensorMap, how: Encoding) -> tuple[int, ...]:
    """Return the words of a map, with the address of its tensor."""
    return (value.base.data_ptr(), *encoded(tuple(value.shape), tuple(value.strides), how)[1:])
