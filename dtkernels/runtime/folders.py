"""Resolve folders that environment variables name."""

from __future__ import annotations

import os
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


def user_folder() -> Path:
    """Return the folder of this user's tables and of the key that seals their kernels; it need not exist."""
    named, data = os.environ.get("DTKERNELS_USER"), os.environ.get("XDG_DATA_HOME")
    return folder_named(named or (f"{data}/dtkernels" if data else "~/.local/share/dtkernels"))
