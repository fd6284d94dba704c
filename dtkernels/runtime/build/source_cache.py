"""Write emitted source to files, from which Triton reads its kernels, and import them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from ..folders import folder_named
from ..log import warn_once
from ..path_counters import interpreting, one_at_a_time


def cache_dir() -> Path:
    """Return the folder of ``DTKERNELS_CACHE``, else the user's cache; a temporary folder, with a warning, where that is not writable."""
    folder, problem = find_cache()
    if problem:
        _warn(*problem, folder)
    return folder


def find_cache() -> tuple[Path, tuple[str, OSError] | None]:
    """Return the folder of ``cache_dir``; where it is not the requested one, also the requested one and its error."""
    wanted = None
    try:
        wanted = _wanted()
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted, None
    except OSError as error:
        return _temporary(), (str(wanted or "~/.cache/dtkernels"), error)


def _wanted() -> Path:
    """Return the requested folder. Raises OSError where there is no home directory."""
    if named := os.environ.get("DTKERNELS_CACHE"):
        return folder_named(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtkernels"
    except RuntimeError:  # a user without an entry in passwd, as in many containers
        raise FileNotFoundError("this user has no home") from None


@lru_cache(maxsize=1)
def _temporary() -> Path:
    """Return a private folder of this user: its files are executed. All processes share it, unless someone else created it."""
    folder = Path(tempfile.gettempdir()) / f"dtkernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="dtkernels-"))


def _warn(wanted: str, error: OSError, folder: Path) -> None:
    warn_once(f"cannot write the cache folder {wanted} ({error}); using {folder}")


def load_module(source: str, name: str) -> ModuleType:
    """Import ``source`` from a file named after its contents. The file is written atomically."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    with one_at_a_time:  # another thread must not see a half-imported module
        return _loaded(source, name, digest)


def _loaded(source: str, name: str, digest: str) -> ModuleType:
    mode = "interpreted" if interpreting() else "compiled"  # Triton decides it when a kernel is defined, not when it is launched
    module_name = f"dtkernels_emitted_{name}_{digest}_{mode}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = _written(source, f"{name}_{digest}.py")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        if interpreting() and "triton" in vars(module):
            from ..reference.interpreter import fix_bf16_products

            fix_bf16_products()
        elif "triton" in vars(module):
            from .aligned_launch import launch_aligned

            launch_aligned(module)
        if "dot_precision" in vars(module):
            from ..torch_support.tf32 import dot_precision, heeding_ieee

            module.dot_precision = dot_precision  # type: ignore[attr-defined]
            if "exact_products" in vars(module):
                module.exact_products = heeding_ieee(module.exact_products)  # type: ignore[attr-defined]
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, ModuleNotFoundError):
            what = "Triton's interpreter runs it" if interpreting() else "Triton compiles it"
            raise ModuleNotFoundError(f"{name}: a kernel cannot run: {what}, and needs {error.name}: pip install {error.name}", name=error.name) from error
        raise
    return module


def _written(source: str, name: str) -> Path:
    """Write a file with these contents to the cache, or to the temporary folder where the cache is full or not writable."""
    folder = cache_dir()
    try:
        return _in(folder, source, name)
    except OSError as error:
        _warn(str(folder), error, _temporary())
        return _in(_temporary(), source, name)


def _in(folder: Path, source: str, name: str) -> Path:
    path, wanted = folder / name, source.encode()
    if path.is_file() and path.read_bytes() == wanted:
        return path
    handle, part = tempfile.mkstemp(dir=folder, suffix=".py")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(wanted)
        os.replace(part, path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise
    return path
