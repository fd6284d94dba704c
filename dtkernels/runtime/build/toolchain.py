"""Tell a machine on which no kernel can be compiled from a kernel that cannot be."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from functools import cache

from ...codegen.target import Target
from ...lang.errors import message_line

OLDEST = 70  #: the lowest compute capability that Triton compiles for


class NoCompiler(RuntimeError):
    """No kernel at all can be compiled for this GPU on this machine; the message says what is missing."""


@cache
def may_compile() -> bool:
    """Return whether Triton and a C compiler for its launchers are found, without compiling. Asked before an op that has no prebuilt kernels."""
    names = (os.environ.get("CC"), "gcc", "clang", "cc")
    return importlib.util.find_spec("triton") is not None and any(name is not None and shutil.which(name) is not None for name in names)


def missing(error: Exception, gpu: Target) -> str | None:
    """Return what keeps Triton from compiling for ``gpu`` at all, judged by the error of one compilation; None if the kernel may be at fault."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "triton":
        return f"Triton cannot be imported ({error})"
    if isinstance(gpu.arch, int) and gpu.arch < OLDEST:
        return f"Triton has no compiler for compute capability {gpu.arch / 10}"
    if isinstance(error, subprocess.CalledProcessError | FileNotFoundError | PermissionError) or "C compiler" in str(error):
        return f"no C compiler works, and Triton needs one ({message_line(error, 120)})"
    return f"Triton finds no ptxas ({message_line(error, 120)})" if "Cannot find ptxas" in str(error) else None
