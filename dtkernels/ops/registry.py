"""Register ops by name. Each is made once from its spec."""

from __future__ import annotations

import copyreg
import errno
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..lang.errors import DTError
from ..runtime.bind import library_ops
from ..runtime.bind.operator import Operator
from ..runtime.signature.arguments import Interface

SPECS = Path(__file__).resolve().parent.parent / "specs"

if TYPE_CHECKING:
    from ..lang.spec import Spec

_registered: dict[str, Operator] = {}
built: dict[str, Callable[[], Spec]] = {}  #: shipped ops whose specs are built by a function, by name
interfaces: dict[str, Interface] = {}  #: the argument names and shapes of the shipped op functions


@lru_cache(maxsize=64)
def shipped(name: str) -> Operator:
    """Return a shipped op."""
    return Operator(built[name]() if name in built else SPECS / f"{name}.yaml", interfaces.get(name), shipped=True)


def is_shipped(name: str) -> bool:
    """Return whether the package has an op of this name."""
    return name in built or (SPECS / f"{name}.yaml").is_file()


library_ops.is_shipped, library_ops.make_shipped = is_shipped, shipped


def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped ops."""
    return tuple(sorted(p.stem for p in SPECS.glob("*.yaml")))


def register(path: str | Path) -> Operator:
    """Make ``dtkernels.ops.<op>`` from the spec at ``path`` and return it.

    The op is differentiable and runs on any device. Registering a name again replaces the op for later lookups. Raises DTError, one line,
    where the spec is invalid or has the name of a shipped op, and FileNotFoundError where there is no such file.
    """
    from .. import ops
    from ..lang.spec import load_spec

    check_path(path)
    spec = load_spec(path)
    if is_shipped(spec.op):
        raise DTError(f"{path}: an op of the package is not replaced", found=repr(spec.op), allowed="another name")
    if hasattr(type(ops), spec.op) or spec.op in vars(ops):
        raise DTError(f"{path}: dtkernels.ops has something else of this name", found=repr(spec.op), allowed="another name")
    _registered[spec.op] = Operator(spec)
    return _registered[spec.op]


def check_path(path: str | Path) -> None:
    """Raise, in one line, for a value that is not the path of a spec: TypeError, DTError for the text of a spec, FileNotFoundError."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"register takes the path of a YAML spec; found {type(path).__name__}")
    text = os.fspath(path)
    if os.path.isdir(text):
        raise DTError("register takes the path of a YAML spec", found=f"the folder {text}", allowed="the path of a file")
    if os.path.exists(text):
        return
    if "\n" in text or ": " in text or not text.strip():
        begins = text.strip().split("\n")[0][:40]
        raise DTError("register takes the path of a YAML spec", found=f"a text that begins {begins!r}", allowed="the path of a file that holds it")
    raise FileNotFoundError(errno.ENOENT, "register takes the path of a YAML spec, and no such file is there", text)


def registered(name: str) -> Operator | None:
    """Return the registered op called ``name``; None if there is none."""
    return _registered.get(name)


def _unpickled(name: str) -> Operator:
    """Return the op that a pickle names. Raises DTError where this process has none."""
    if is_shipped(name):
        return shipped(name)
    if (found := registered(name)) is None:
        raise DTError(f"a pickle names the op {name!r}, which is not registered here", allowed="dtkernels.register(its spec) before it is read")
    return found


copyreg.pickle(Operator, lambda op: (_unpickled, (op.name,)))


def registered_names() -> tuple[str, ...]:
    """Return the names of the registered ops."""
    return tuple(sorted(_registered))
