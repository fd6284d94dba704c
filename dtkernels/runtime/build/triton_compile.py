"""Compile kernels by Triton for a GPU that need not be present.

The emitted wrapper runs on tensors without storage, with recorders in place of its kernels. The kernels are compiled for exactly the
arguments that a launch of those shapes, strides and dtypes would pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

import torch

from ...codegen.target import Target
from ..launch.tensor_map import map_type, plain_map_type
from ..tables.kernel_store import TENSOR_MAP, StoredKernel, digest
from ..torch_support.dtypes import TRITON_NAMES

POINTERS = {dtype: f"*{name}" for dtype, name in TRITON_NAMES.items()}


class JitFunction(Protocol):
    """What is asked of a kernel as ``triton.jit`` or ``gluon.jit`` gives it."""

    __name__: str
    arg_names: list[str]
    src: str

    def is_gluon(self) -> bool: ...


@dataclass
class KernelLaunch:
    """One kernel launch that a wrapper requested."""

    kernel: JitFunction
    grid: tuple[int, ...]
    args: tuple
    constants: dict[str, object]
    options: dict[str, object] = field(default_factory=dict)


def record_launches(module: ModuleType, wrapper: str, args: tuple) -> list[KernelLaunch]:
    """Return the launches that ``wrapper`` of an emitted ``module`` makes for ``args``, which may be on the meta device."""
    found: list[KernelLaunch] = []
    kernels = kernels_of(module)
    before = {name: getattr(module, name) for name in kernels}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Recorder(kernel, found))
        getattr(module, wrapper)(*args)
    finally:
        for name, kernel in before.items():
            setattr(module, name, kernel)
    return found


def kernels_of(module: ModuleType) -> dict[str, JitFunction]:
    """Return the kernels of an imported file by name, as Triton made them."""
    import triton

    found = {n: kernel_named(module, n) for n in vars(module) if n.endswith("_kernel")}
    return {n: f for n, f in found.items() if isinstance(f, triton.runtime.KernelInterface)}


def kernel_named(module: ModuleType, name: str) -> JitFunction:
    """Return a kernel of an imported file as Triton made it."""
    kernel = getattr(module, name)
    return getattr(kernel, "jit", kernel)


class _Recorder:
    def __init__(self, kernel, found: list[KernelLaunch]):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]):
        def record(*args, **kwargs):
            names = set(self.kernel.arg_names)
            constants = {k: v for k, v in kwargs.items() if k in names}
            self.found.append(KernelLaunch(self.kernel, grid, args, constants, {k: v for k, v in kwargs.items() if k not in names}))

        return record


def build(launch: KernelLaunch, target: Target):
    """Compile the kernel of ``launch`` for ``target``. The result has ``asm`` by stage and ``metadata`` with shared memory and warps."""
    constants, multiples = dict(launch.constants), {}
    types = plain_types(launch)
    for name, value in zip(launch.kernel.arg_names, launch.args):
        if isinstance(value, torch.Tensor) or isinstance(value, int) and value != 1 and value % 16 == 0:
            multiples[name] = 16
        elif isinstance(value, int) and value == 1:
            types[name], constants[name] = "constexpr", 1
    return compile_kernel(launch.kernel, types, constants, multiples, launch.options, target)


def plain_types(launch: KernelLaunch) -> dict[str, str]:
    """Return the type of each parameter of a launch. Only declared constexprs are constants."""
    types = {}
    for name, value in zip(launch.kernel.arg_names, launch.args):
        if isinstance(value, torch.Tensor):
            types[name] = POINTERS[value.dtype]
        elif kind := map_type(value):
            types[name] = kind
        elif isinstance(value, int):
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            types[name] = "fp32"
    return types | dict.fromkeys(launch.constants, "constexpr")


def compile_kernel(kernel: JitFunction, types: dict[str, str], constants: dict[str, object], multiples: dict[str, int], options: dict[str, object], target: Target):
    """Compile one kernel to machine code. ``multiples`` holds the known divisors of parameters, powers of two up to 16."""
    import triton
    from triton.backends.compiler import GPUTarget

    if target.backend == "hip" and "EXACT" in constants:
        constants = {**constants, "EXACT": "ieee"}  # recorded without a GPU it is NVIDIA's
    if target.backend == "hip" and "PAIRS" in constants:
        constants = {**constants, "PAIRS": False}
    source = _source(kernel, types, constants, multiples)
    return triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options={**options, "enable_fp_fusion": True})


def compile_here(kernel: JitFunction, types: dict[str, str], constants: dict[str, object], multiples: dict[str, int], options: dict[str, object]):
    """Do the same for the current GPU; the result launches: ``compiled[grid](*args)`` with all parameters in order."""
    import triton

    return triton.compile(_source(kernel, types, constants, multiples), options={**options, "enable_fp_fusion": True})


def ir_of(kernel: JitFunction, types: dict[str, str], constants: dict[str, object], multiples: dict[str, int], options: dict[str, object], target: Target) -> str:
    """Return ``StoredKernel.ir`` of what ``compile_kernel`` would give, without lowering, which can take minutes."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    source, gpu = _source(kernel, types, constants, multiples), GPUTarget(target.backend, target.arch, target.warp_size)
    backend = make_backend(gpu)
    parsed = backend.parse_options({**options, "enable_fp_fusion": True, **source.parse_options()})
    stages: dict = {}
    backend.add_stages(stages, parsed, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(gpu, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    return _ir({"ttir": stages["ttir"](module, dict(vars(parsed))) if "ttir" in stages else module})


def _source(kernel: JitFunction, types: dict[str, str], constants: dict[str, object], multiples: dict[str, int]):
    """Build the source object that Triton compiles."""
    names = kernel.arg_names
    attributes = {(names.index(n),): [["tt.divisibility", step]] for n, step in multiples.items()}
    signature = {n: _with_layout(types[n]) if kernel.is_gluon() else types[n] for n in names}
    return _source_class(kernel)(fn=kernel, signature=signature, constexprs={(names.index(k),): v for k, v in constants.items()}, attrs=attributes)


def _with_layout(kind: str) -> str:
    """Return the type of a parameter of a Gluon kernel: maps have the layout of their boxes in it."""
    if not kind.startswith(TENSOR_MAP):
        return kind
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.language import str_to_ty

    name, box = re.fullmatch(r"tensordesc<(\w+)\[(.*)\]>", kind).groups()  # type: ignore[union-attr]
    layout = NVMMASharedLayout.get_default_for([int(n) for n in box.split(",")], str_to_ty(name, None))
    return f"{kind[:-1]},{layout!r}>"


def _source_class(kernel: JitFunction):
    """Return Triton's source class for a kernel in Triton or in Gluon."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def stored_kernel_of(compiled, host: str, arch: int | str) -> StoredKernel:
    """Describe a kernel that Triton compiled. Raises AttributeError or KeyError where this version of Triton differs."""
    import triton

    meta, source = compiled.metadata, compiled.src
    names = list(source.signature)
    constants = {}
    for place, value in source.constants.items():
        if len(place) == 1:
            constants[names[place[0]]] = plain_constant(value)
    divisible, steps = split_multiples({names[place[0]]: step for place, what in source.attrs.items() if len(place) == 1 for kind, step in what if kind == "tt.divisibility"})
    if getattr(meta, "launch_cooperative_grid", False):
        raise KeyError("a cooperative launch")
    types = {n: plain_map_type(str(t)) for n, t in source.signature.items()}
    described = [n for n, t in types.items() if t.startswith(TENSOR_MAP)]
    maps = dict(zip(described, meta.tensordesc_meta, strict=True)) if described else {}
    scratch = (int(getattr(meta, "global_scratch_size", 0) or 0), int(getattr(meta, "global_scratch_align", 1) or 1))
    code = digest(compiled.asm["cubin"])
    threads, blocks = 32 * meta.num_warps, getattr(meta, "num_ctas", 1)
    return StoredKernel(meta.name, host, code, arch, types, constants, divisible, threads, meta.shared, scratch, blocks, triton.__version__, _ir(compiled.asm), steps, maps)


def split_multiples(multiples: dict[str, int]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Split divisors as entries hold them: (parameters divisible by 16, divisors below 16)."""
    return tuple(n for n, step in multiples.items() if step == 16), {n: step for n, step in multiples.items() if step < 16}


def _ir(asm) -> str:
    """Return a digest of the kernel's IR before lowering, without source locations."""
    text = next(asm[stage] for stage in ("ttir", "source", "ttgir") if stage in asm)  # Gluon kernels have no Triton IR
    return digest(re.sub(r" loc\(.*\)$|^#loc.*\n", "", str(text), flags=re.MULTILINE).encode())


def plain_constant(value: object) -> object:
    """Convert a constant for JSON: a Triton type becomes its name."""
    return value if isinstance(value, (bool, int, float, str, type(None))) else f"tl.{value}"
