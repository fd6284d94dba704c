"""Compile kernels in this process where none is prebuilt: one build serves all sizes that fit it."""

from __future__ import annotations

from types import ModuleType

from ...codegen.target import Target
from ..bounded_cache import BoundedCache
from ..launch.wrapper_recorder import RecordedLaunch as Note
from ..tables.kernel_store import StoredKernel
from .specialization import fits, shared_build
from .triton_compile import KernelLaunch, compile_kernel, kernel_named, plain_constant, plain_types, stored_kernel_of

REMEMBERED = 1024  #: kernels cached per algorithm


class NeedsTritonLaunch(Exception):
    """A launch that only Triton itself can make; the message says why."""


class CompiledKernels:
    """Cache the compiled kernels of one algorithm, with their machine code."""

    def __init__(self):
        self._known: BoundedCache[tuple, tuple[StoredKernel, bytes]] = BoundedCache(REMEMBERED)

    def kernel(self, source: str, module: ModuleType, note: Note, target: Target) -> tuple[StoredKernel, bytes]:
        """Return the kernel for the launch ``note`` of the imported ``source``, compiled in the build that suits it. Raises NeedsTritonLaunch."""
        language = module.tl  # type: ignore[attr-defined]
        constants = {k: getattr(language, v[3:]) if isinstance(v, str) and v.startswith("tl.") else v for k, v in note.constants.items()}
        launch = KernelLaunch(kernel_named(module, note.kernel), note.grid, note.args, constants, note.options)
        build = shared_build(tuple(launch.kernel.arg_names), note.args, constants, plain_types(launch))
        plainly = tuple((k, plain_constant(v)) for k, v in build.constants.items())
        key = (source, note.kernel, tuple(build.types.items()), plainly, tuple(build.multiples.items()), tuple(note.options.items()), target)
        if (found := self._known.get(key)) is None:
            compiled = compile_kernel(launch.kernel, build.types, build.constants, build.multiples, note.options, target)
            if compiled.metadata.shared > target.shared_bytes:  # Triton's own launch then retries with fewer stages
                raise NeedsTritonLaunch(f"{note.kernel} takes {compiled.metadata.shared} bytes of shared memory")
            found = self._known.put(key, (stored_kernel_of(compiled, "", target.arch), compiled.asm["cubin"]))
        entry, code = found
        if not fits(entry, note.names, note.args, note.constants):
            raise NeedsTritonLaunch(f"{note.kernel} is not what was asked for")
        return entry, code
