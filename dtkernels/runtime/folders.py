"""Resolve folders that environment variables name."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=32)
def folder_named(name: str) -> Path:
    """Return the absolute folder for ``name``. ``~`` is expanded. A relative path is resolved once, at the first use."""
    path = Path(name)
    try:
        path = path.expanduser()
    except RuntimeError:  # no home directory: a folder called ~
        pass
    return path.absolute()
