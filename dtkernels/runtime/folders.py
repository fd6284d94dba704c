"""Folders that variables of the environment name."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=32)
def folder_named(name: str) -> Path:
    """The absolute folder that ``name`` stands for: ``~`` is the home, and a relative path starts where this process first asked."""
    path = Path(name)
    try:
        path = path.expanduser()
    except RuntimeError:  # nobody's home: a folder called ~
        pass
    return path.absolute()
