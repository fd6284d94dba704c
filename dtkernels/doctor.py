"""Report what is installed on this machine, and known problems with it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from . import __version__, environment
from .runtime.path_counters import interpreting

OLDEST = {"torch": (2, 10), "triton": (3, 6), "transformers": (4, 53)}
OPTIONAL = ("transformers",)
PLAIN = {"pyyaml": "yaml", "safetensors": "safetensors"}  #: required packages of any version -> import name


def report() -> Iterator[str]:
    """Yield one line per fact, starting with OK or WARN."""
    for fact in facts():
        yield str(fact)


class Fact(NamedTuple):
    """One result. ``fault``: something is unusable. A machine without a GPU gives a warning but no fault."""

    good: bool
    text: str
    fault: bool

    def __str__(self) -> str:
        return f"{'OK  ' if self.good else 'WARN'} {self.text}"


def facts() -> Iterator[Fact]:
    """Yield every result."""
    for good, text in _facts():
        yield Fact(good, text, not good)
    for good, text in (_gpu(), _interpreter()):
        yield Fact(good, text, False)
    for good, text in environment.variable_reports():
        yield Fact(good, text, not good)


def _facts() -> Iterator[tuple[bool, str]]:
    yield True, f"dtkernels {__version__}, in {Path(__file__).parent}"
    recent = sys.version_info >= (3, 10)
    yield recent, f"python {sys.version.split()[0]}" + ("" if recent else ": 3.10 or newer is required")
    for name in OLDEST:
        yield _installed(name)
    for name, module in PLAIN.items():
        if util.find_spec(module) is None:
            yield False, f"{name} is not installed, but required"
    if not os.environ.get("DTKERNELS_TABLES"):  # otherwise checked with the environment
        yield from _tables()
    yield _cache()
    yield _ptxas()
    yield _compiler()
    yield from _traps()


def _tables() -> Iterator[tuple[bool, str]]:
    from .runtime.select.table_loader import tables_folders

    for folder in tables_folders():
        try:
            yield True, f"schedule tables: {folder}: {environment.tables_in(folder)}"
        except environment.Unusable as problem:
            yield False, f"schedule tables: {problem}"


def version(package: str) -> tuple[int, ...] | None:
    """Return an installed package's version as numbers, None if it is not installed."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    numbers = []
    for part in found.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _installed(name: str) -> tuple[bool, str]:
    found, oldest = version(name), ".".join(map(str, OLDEST[name]))
    if found is None:
        return name in OPTIONAL, f"{name} is not installed" + (": optional" if name in OPTIONAL else f": {oldest} or newer is required")
    text = f"{name} {metadata.version(name)}"
    return (True, text) if found >= OLDEST[name] else (False, f"{text}: {oldest} or newer is required")


def _gpu() -> tuple[bool, str]:
    if version("torch") is None:
        return False, "GPU: unknown, torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return False, "GPU: none found; ops run the torch reference"
    p = torch.cuda.get_device_properties(0)
    more = f" and {torch.cuda.device_count() - 1} more" if torch.cuda.device_count() > 1 else ""
    return True, f"GPU: {p.name}{more}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} multiprocessors"


def _cache() -> tuple[bool, str]:
    if version("torch") is None:
        return False, "cache folder: not checked, torch is not installed"
    from .runtime.build import source_cache

    try:
        found, problem = source_cache.find_cache()
    except OSError as error:
        return False, f"cache folder: none is writable, not even a temporary one ({error.strerror}); set DTKERNELS_CACHE"
    if not problem:
        return True, f"cache folder: {found}"
    return False, f"cache folder: {problem[0]} is not writable, using {found}; set DTKERNELS_CACHE"


def _interpreter() -> tuple[bool, str]:
    on = interpreting()
    if on and version("numpy") is None:
        return False, "TRITON_INTERPRET: set; the interpreter needs numpy, which is not installed"
    return not on, f"TRITON_INTERPRET: {'set; kernels run in the interpreter, slowly' if on else 'not set'}"


def _ptxas() -> tuple[bool, str]:
    spec = util.find_spec("triton")
    if spec is None or spec.origin is None:
        return False, "ptxas: not found; it comes with triton, which is not installed"
    tools = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    asked = os.environ.get("TRITON_PTXAS_PATH")
    found = asked if asked and os.access(asked, os.X_OK) else next(map(str, sorted(tools.glob("ptxas*"))), shutil.which("ptxas"))
    if asked and found != asked:
        return False, f"ptxas: {asked}, which TRITON_PTXAS_PATH names, cannot be run; Triton has {found or 'no other'}"
    return bool(found), f"ptxas: {found or f'none in {tools} nor on PATH; no machine code for NVIDIA GPUs'}"


def _compiler() -> tuple[bool, str]:
    found = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return bool(found), f"C compiler: {found or 'none found; Triton needs one to launch kernels that it compiles'}"


def _traps() -> Iterator[tuple[bool, str]]:
    triton, numpy = version("triton"), version("numpy")
    if triton is not None and numpy is not None:
        bad = triton[:2] == (3, 6) and numpy >= (2, 4)
        what = f"triton {_dotted(triton)} with numpy {_dotted(numpy)}"
        yield not bad, what + (": the interpreter crashes on range(tl.cdiv(...)); use numpy < 2.4" if bad else "")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
