"""Read and write schedule tables: YAML rows that say which schedule runs which call.

A table is a folder, ``schedule_tables/<gpu>/``: ``gpu.yaml`` describes its GPU and ``<op>.yaml`` holds the rows of one op. A row
contains everything it depends on; file names carry no meaning. Running ops never writes rows.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ...lang.errors import error_line, message_line

DIRECTIONS = ("forward", "backward")
DTYPES = ("fp32", "fp16", "bf16")
#: keys of ``by``: the machine and the command that measured or made a row
PROVENANCE = ("gpu", "multiprocessors", "driver", "torch", "triton", "date", "command")


class TableError(ValueError):
    """A table is refused. The message is one line that names the file, the row and the fault."""


class RowKey(NamedTuple):
    """What must agree exactly between a row and a call."""

    op: str
    direction: str
    params: tuple[tuple[str, int | bool], ...]
    wanted: tuple[str, ...]
    kept: tuple[str, ...] | bool  #: ``Row.kept``; where that is empty, ``Row.saved``
    batched: tuple[str, ...]
    dtype: str
    labels: frozenset[str]


@dataclass(frozen=True)
class Row:
    """One schedule and the call it is for.

    ``saved``: the forward also returns tensors that the backward for ``wanted`` reads. ``kept``: the products among them, saved where
    the sizes make that worthwhile. ``batched``: inputs with more leading dimensions than the op declares. ``sizes`` has every label of
    the lowered algorithm.
    """

    op: str
    direction: str
    dtype: str
    sizes: dict[str, int]
    schedule: str
    spec: str  #: ``spec_hash`` of the algorithm
    params: dict[str, int | bool] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    saved: bool = False
    kept: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()
    microseconds: float | None = None
    measured: bool = True
    by: dict[str, object] = field(default_factory=dict)
    binaries: tuple[str, ...] = ()  #: names of kernels in the binary store beside the table

    @cached_property
    def key(self) -> RowKey:
        """Return the key that a call must match exactly. Among matching rows the nearest in ``sizes`` is taken."""
        params = tuple(sorted(self.params.items()))
        return RowKey(self.op, self.direction, params, self.wanted, self.kept or self.saved, self.batched, self.dtype, frozenset(self.sizes))

    @cached_property
    def kind(self) -> RowKey:
        """Return ``call_kind`` of the key."""
        return call_kind(self.key)

    @cached_property
    def logs(self) -> dict[str, float]:
        """Return log2 of each size."""
        return {label: math.log2(max(n, 1)) for label, n in self.sizes.items()}

    def title(self) -> str:
        """Describe the row in a few words."""
        words = [self.op, self.direction + saved_words(self.saved, self.kept), self.dtype, " ".join(f"{k}={v}" for k, v in self.sizes.items())]
        words += [" ".join(f"{k}={str(v).lower()}" for k, v in self.params.items())] if self.params else []
        return ", ".join(words)


def saved_words(saved: bool, kept: tuple[str, ...]) -> str:
    """Name the tensors that a forward saves for its backward, for messages."""
    words = [*(["saving"] if saved else []), *kept]
    return f" ({' '.join(words)})" if words else ""


def call_kind(key: RowKey) -> RowKey:
    """Return a key without its numeric parameters. A parameter at its default, often 1, is absent from keys anyway."""
    return key._replace(params=tuple((n, v) for n, v in key.params if isinstance(v, bool)))


def call_kind_text(key: RowKey) -> str:
    """Return ``call_kind`` as text that is equal in every process."""
    *rest, labels = call_kind(key)
    return json.dumps([*rest, sorted(labels)])


_MEMORY = re.compile(r"\d+gb?|hbm\d\w*|sxm\d*")


@dataclass(frozen=True)
class Gpu:
    """The GPU of a table."""

    name: str  #: as reported by the driver
    arch: int | str  #: 90, or "gfx942"
    multiprocessors: int
    bandwidth: float = 0.0  #: bytes per second

    @property
    def folder(self) -> str:
        """Return the folder name: ``NVIDIA H200`` -> ``nvidia_h200``. Memory and socket are left out: ``NVIDIA H100 80GB HBM3`` -> ``nvidia_h100``."""
        words = "".join(c if "a" <= c <= "z" or "0" <= c <= "9" else " " for c in self.name.lower()).split()
        return "_".join(w for w in words if not _MEMORY.fullmatch(w))


def arch_folder(arch: int | str) -> str:
    """Return the folder of the kernels that the GPUs of an architecture share: 90 -> ``sm_90``, "gfx942" -> ``gfx942``."""
    return f"sm_{arch}" if str(arch).isdigit() else str(arch)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_rows(text: str, source: str) -> tuple[Row, ...]:
    """Parse the rows in ``text``. Raises TableError."""
    import yaml

    try:
        data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TableError(f"{source}: not YAML: {message_line(error)}") from None
    return rows_from(data if data is not None else [], source)


def rows_from(data: object, source: str) -> tuple[Row, ...]:
    """Build rows from plain lists and mappings and check each. Raises TableError."""
    if not isinstance(data, list):
        raise TableError(f"{source}: a table is a list of rows; found {type(data).__name__}")
    return tuple(_row(item, f"{source}: row {i + 1}") for i, item in enumerate(data))


_FIELDS = {f.name: f for f in fields(Row)}
_REQUIRED = ("op", "direction", "dtype", "sizes", "schedule", "spec")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _row(data: object, where: str) -> Row:
    if not isinstance(data, dict):
        raise TableError(f"{where}: a row is a mapping; found {type(data).__name__}")
    unknown = [k for k in data if k not in _FIELDS]
    missing = [k for k in _REQUIRED if k not in data]
    if unknown or missing:
        raise TableError(f"{where}: {'unknown key ' + repr(unknown[0]) if unknown else 'no ' + missing[0]}; allowed: {', '.join(_FIELDS)}")
    for key, good, what in _RULES:
        if key in data and not good(data[key]):
            raise TableError(f"{where}: {key} is {what}; found {str(data[key])[:80]!r}")
    from ...lang.parser import parse_schedule

    try:
        parse_schedule(data["schedule"], where)
    except ValueError as error:
        raise TableError(str(error) if where in str(error) else f"{where}: {error}") from None
    values = {k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in data.items()}
    return Row(**{**values, "schedule": data["schedule"].strip()})


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(v, str) and re.fullmatch(r"\w+", v) for v in value)


_RULES = (
    ("op", lambda v: isinstance(v, str) and _NAME.match(v), "a name"),
    ("direction", lambda v: v in DIRECTIONS, f"one of {', '.join(DIRECTIONS)}"),
    ("dtype", lambda v: v in DTYPES, f"one of {', '.join(DTYPES)}"),
    ("sizes", lambda v: isinstance(v, dict) and v and all(isinstance(k, str) and _count(n) for k, n in v.items()), "label: extent, at least one"),
    ("schedule", lambda v: isinstance(v, str), "DT text"),
    ("spec", lambda v: isinstance(v, str) and re.fullmatch(r"[0-9a-f]{12}", v), "12 hex digits"),
    ("params", lambda v: isinstance(v, dict) and all(isinstance(k, str) and isinstance(n, (bool, int)) for k, n in v.items()), "name: value"),
    ("wanted", _names, "a list of inputs"),
    ("saved", lambda v: isinstance(v, bool), "true or false"),
    ("kept", _names, "a list of Funcs"),
    ("batched", _names, "a list of inputs"),
    ("microseconds", lambda v: v is None or isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0, "a time above 0"),
    ("measured", lambda v: isinstance(v, bool), "true or false"),
    ("by", lambda v: isinstance(v, dict) and all(k in PROVENANCE for k in v), f"a mapping of {', '.join(PROVENANCE)}"),
    ("binaries", _names, "a list of names"),
)


def read_gpu(folder: Path) -> Gpu:
    """Read ``gpu.yaml`` of a table. Raises TableError, and OSError."""
    import yaml

    path = folder / "gpu.yaml"
    try:
        data = yaml.safe_load(path.read_text())
        return Gpu(str(data["name"]), data["arch"], int(data["multiprocessors"]), float(data.get("bandwidth") or 0))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableError(f"{path}: a mapping of name, arch, multiprocessors, bandwidth; {error_line(error)}") from None


# -- writing ----------------------------------------------------------------------------------------------------------


def rows_text(rows: Iterable[Row]) -> str:
    """Return the YAML of ``rows``, sorted, defaults left out. ``read_rows`` is the inverse."""
    ordered = sorted(rows, key=lambda r: (r.op, r.direction, r.saved, r.wanted, r.kept, json.dumps(r.params), r.batched, r.dtype, tuple(r.sizes.items())))
    return "\n".join(_row_text(r) for r in ordered) if ordered else "[]\n"


def _row_text(row: Row) -> str:
    lines = []
    for name in ("op", "direction", "saved", "wanted", "kept", "params", "batched", "dtype", "sizes", "schedule", "microseconds", "measured", "spec", "by", "binaries"):
        value = getattr(row, name)
        if name == "schedule":
            lines += ["schedule: |", *(f"  {line}" for line in value.strip().splitlines())] if value.strip() else ['schedule: ""']
        elif name in _REQUIRED or name == "measured" or value not in ({}, (), None, False):
            lines.append(f"{name}: {_flow(value)}")
    return "\n".join(("- " if i == 0 else "  ") + line for i, line in enumerate(lines)) + "\n"


def _flow(value: object) -> str:
    """Format a value as one line of YAML. Strings are quoted wherever a reader could take them for another type."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    words = value if isinstance(value, str) and re.fullmatch(r"[a-zA-Z_]\w*( \w+)*", value) else ""
    if words and words.lower() not in ("yes", "no", "on", "off", "true", "false", "null"):
        return words
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(c if " " <= c <= "~" else f"\\U{ord(c):08X}" for c in quoted)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a table atomically."""
    write_whole(path, rows_text(rows).encode())


def write_gpu(folder: Path, gpu: Gpu) -> None:
    """Write ``gpu.yaml``."""
    text = "".join(f"{f.name}: {_flow(getattr(gpu, f.name))}\n" for f in fields(gpu))
    write_whole(folder / "gpu.yaml", text.encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old contents or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def with_binaries(row: Row, names: Iterable[str]) -> Row:
    """Return the row with the names of the kernels built for it."""
    return replace(row, binaries=tuple(names))


__all__ = ["Gpu", "Row", "RowKey", "TableError", "arch_folder", "call_kind", "call_kind_text", "read_gpu", "read_rows", "rows_from", "rows_text", "with_binaries", "write_gpu", "write_rows",
           "write_whole"]  # fmt: skip
