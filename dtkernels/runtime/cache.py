"""Emitted source as real files, which Triton needs to read its kernels from."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from .notes import warn_once


def cache_dir() -> Path:
    """``DTKERNELS_CACHE``, else the user's cache; a temporary folder, with a warning, where neither can be written."""
    folder, problem = find_cache()
    if problem:
        warn_once(f"cannot write the cache folder {problem[0]} ({problem[1]}); using {folder}")
    return folder


def find_cache() -> tuple[Path, tuple[Path, OSError] | None]:
    """The folder that ``cache_dir`` gives; if it is not the one that was asked for, that one and what is wrong with it."""
    wanted = Path(os.environ.get("DTKERNELS_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtkernels")
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted, None
    except OSError as error:
        fallback = Path(tempfile.gettempdir()) / f"dtkernels-{os.getuid()}"
        fallback.mkdir(parents=True, exist_ok=True)
        return fallback, (wanted, error)


def load_module(source: str, name: str) -> ModuleType:
    """The module of ``source``, from a file named after its contents; written whole or not at all."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    module_name = f"dtkernels_emitted_{name}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = cache_dir() / f"{name}_{digest}.py"
    if not path.exists() or path.read_text() != source:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".py", delete=False) as f:
            f.write(source)
        os.replace(f.name, path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        if "dot_precision" in vars(module):
            from .precision import dot_precision

            module.dot_precision = dot_precision  # type: ignore[attr-defined]
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
