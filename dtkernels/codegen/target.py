"""Describe GPUs to schedules. Figures are from the vendors' datasheets; shared memory is the most that one block may use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

from ..lang.errors import DTError


@dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    name: str
    backend: str  #: "cuda" or "hip"
    arch: int | str  #: 90, or "gfx942"
    multiprocessors: int
    shared_bytes: int  #: largest shared memory of one block
    bandwidth: float  #: bytes a second
    l2_bytes: int  #: the cache that all multiprocessors share
    warp_size: int = 32
    registers: int = 65536  #: 32-bit registers of one multiprocessor

    @property
    def has_tma(self) -> bool:
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 90

    @property
    def has_float8(self) -> bool:
        """Whether it converts to and from e4m3 and e5m2, and multiplies them (compute capability 8.9 on)."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 89

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may be launched before the one that it waits for has ended (compute capability 9.0 on)."""
        return self.has_tma


MEGABYTE = 1 << 20
TARGETS = {
    t.name: t
    for t in (
        Target("a100", "cuda", 80, 108, 166912, 2.0e12, 40 * MEGABYTE),
        Target("l40s", "cuda", 89, 142, 101376, 0.86e12, 96 * MEGABYTE),
        Target("h100", "cuda", 90, 132, 232448, 3.35e12, 50 * MEGABYTE),
        Target("h200", "cuda", 90, 132, 232448, 4.8e12, 50 * MEGABYTE),
        Target("b200", "cuda", 100, 148, 232448, 8.0e12, 126 * MEGABYTE),
        Target("mi300x", "hip", "gfx942", 304, 65536, 5.3e12, 256 * MEGABYTE, warp_size=64),
    )
}


def target(name: str) -> Target:
    """Return the target called ``name``. Raises DTError where there is none."""
    if name not in TARGETS:
        raise DTError("unknown GPU", found=repr(name), allowed=", ".join(TARGETS))
    return TARGETS[name]


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, int] | None:
    """Return (major, minor) of the Triton that is installed, None where there is none; Triton is not imported."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None
