"""Machine code for a GPU that need not be there.

The emitted wrapper is run on tensors without storage with its kernels replaced by recorders, so that what is compiled
is exactly what a launch of those shapes, strides and dtypes would pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch

from ..codegen.target import Target

_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64", torch.bool: "*i1",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass
class Launch:
    """One kernel launch that a wrapper asked for."""

    kernel: object
    grid: tuple[int, ...]
    args: tuple
    constants: dict[str, object]
    options: dict[str, object] = field(default_factory=dict)


def record_launches(module: ModuleType, wrapper: str, args: tuple) -> list[Launch]:
    """What ``wrapper`` of an emitted ``module`` would launch for ``args`` (tensors on the meta device will do)."""
    import triton

    found: list[Launch] = []
    kernels = {n: f for n, f in vars(module).items() if isinstance(f, triton.runtime.KernelInterface) and n.endswith("_kernel")}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Recorder(kernel, found))
        getattr(module, wrapper)(*args)
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return found


class _Recorder:
    def __init__(self, kernel, found: list[Launch]):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]):
        def record(*args, **kwargs):
            names = set(self.kernel.arg_names)
            constants = {k: v for k, v in kwargs.items() if k in names}
            self.found.append(Launch(self.kernel, grid, args, constants, {k: v for k, v in kwargs.items() if k not in names}))

        return record


def build(launch: Launch, target: Target):
    """The compiled kernel of ``launch`` for ``target``: ``asm`` by stage, ``metadata`` with shared memory and warps."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, dict(launch.constants), {}
    names = launch.kernel.arg_names
    for i, (name, value) in enumerate(zip(names, launch.args)):
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1:
            signature[name], constants[name] = "constexpr", 1
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs={(names.index(k),): v for k, v in constants.items()}, attrs=attributes)
    options = {**launch.options, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)
