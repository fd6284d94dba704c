"""Decide which kernel stores are used: those of the package, and those that this user built, which the user's key seals.

A store holds Python text and machine code, and both are run. The key is 32 random bytes in the user's folder, readable by the user
alone. ``DTKERNELS_TRUST_TABLES=1`` trusts every store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ..folders import user_folder
from .kernel_store import KernelStore

LENGTH = 32


def trusted(store: KernelStore) -> bool:
    """Return whether a store outside the package may be used."""
    return os.environ.get("DTKERNELS_TRUST_TABLES") == "1" or store.sealed_with(user_key())


def user_key(make: bool = False) -> bytes | None:
    """Return the user's key; None where there is none. ``make``: make one then, which raises OSError where that is impossible."""
    path = user_folder() / "key"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process was first
            _write(path, secrets.token_bytes(LENGTH))
    try:
        found = path.read_bytes()
    except OSError:
        if make:
            raise
        return None
    if make and len(found) != LENGTH:
        raise OSError(None, f"no key of {LENGTH} bytes; remove it, and build the tables of this user anew", str(path))
    return found if len(found) == LENGTH else None


def _write(path: Path, data: bytes) -> None:
    """Write a file that only the user can read, whole or not at all."""
    part = path.with_name(f"key.{os.getpid()}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.link(part, path)
    finally:
        part.unlink()
