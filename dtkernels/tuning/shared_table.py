"""Share a table as one file: rows and measurements, never code. Where it is merged, kernels are built anew.

The file is a zip of ``gpu.yaml``, ``<op>.yaml`` and ``measurements.safetensors``. Rows are DT text, which is parsed and checked.
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

from ..lang.errors import DTError
from ..ops.registry import shipped, shipped_names
from ..runtime.aot_build import BuildError, variant_of
from ..runtime.select.schedule_selection import scheduled, target_for
from ..runtime.signature.spec_hash import spec_hash
from ..runtime.tables.table import Gpu, Row, TableError, read_gpu, read_rows, rows_text, write_gpu, write_whole
from .records.measurement_store import read_matrices, write_joined
from .records.write_table import place_of

LARGEST = 64 << 20  #: bytes of a shared file's contents
MEASURED = "measurements.safetensors"


def write_shared(folder: Path, to: Path) -> Path:
    """Write the rows and the measurements of a table, without kernels and their names, into one file; return its path."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as found:
        for path in sorted(folder.glob("*.yaml")):
            plain = path.stem == "gpu"
            text = path.read_text() if plain else rows_text(replace(r, binaries=()) for r in read_rows(path.read_text(), str(path)))
            found.writestr(path.name, text)
        if (folder / MEASURED).exists():
            found.write(folder / MEASURED, MEASURED)
    return to


def unpacked(path: Path, into: Path) -> Gpu:
    """Unpack a shared file into an empty folder and return its GPU. Raises TableError, one line, for anything that a table does not have."""
    allowed = {"gpu.yaml", MEASURED, *(f"{op}.yaml" for op in shipped_names())}
    if not path.is_file():
        raise TableError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as found:
            infos = found.infolist()
            if strange := [i.filename for i in infos if i.filename not in allowed]:
                raise TableError(f"{path}: {strange[0]!r} is no part of a shared table; allowed: gpu.yaml, OP.yaml of an op of the package, {MEASURED}")
            if sum(i.file_size for i in infos) > LARGEST:
                raise TableError(f"{path}: more than {LARGEST >> 20} MiB of contents")
            for i in infos:
                write_whole(into / i.filename, found.read(i))
        gpu = read_gpu(into)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise TableError(f"{path}: no shared table: {' '.join(str(error).split())}") from None
    except FileNotFoundError:
        raise TableError(f"{path}: it has no gpu.yaml") from None
    if target_for(gpu) is None:
        raise TableError(f"{path}: {gpu.name}: no target is of its compute capability, {gpu.arch}")
    return gpu


def checked_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the usable rows of one op's file, and why others are left out. Raises TableError where the file is no table."""
    rows, why = [], []
    for row in read_rows(path.read_bytes().decode(), path.name):
        if problem := _problem(row, path.stem):
            why.append(f"{path.name}: {row.title()}: {problem}")
        else:
            rows.append(replace(row, binaries=()))
    return rows, why


def _problem(row: Row, op: str) -> str:
    if row.op != op:
        return f"is of {row.op}"
    if not row.measured or not row.microseconds:
        return "nobody measured it"
    operator = shipped(op)
    if row.spec != (now := spec_hash(operator.spec.algorithm)):
        return f"is of another version of the spec: {row.spec}, now {now}"
    try:
        scheduled(variant_of(operator, row)[1].algorithm, row.schedule)
    except (DTError, BuildError) as error:
        return str(error)
    return ""


def merged(shared: Path, gpu: Gpu, folder: Path) -> tuple[dict[str, int], list[str]]:
    """Merge an unpacked table into ``folder``: of two rows for one call, the faster stays. Returns rows taken by op, and what was left out."""
    taken, why = {}, []
    for path in sorted(p for p in shared.glob("*.yaml") if p.stem != "gpu"):
        rows, problems = checked_rows(path)
        why += problems
        own = folder / path.name
        here = {place_of(r): r for r in (read_rows(own.read_text(), str(own)) if own.exists() else ())}
        better = [r for r in rows if place_of(r) not in here or (r.microseconds or 0) < (here[place_of(r)].microseconds or float("inf"))]
        if better:
            write_gpu(folder, gpu)
            write_whole(own, rows_text((here | {place_of(r): r for r in better}).values()).encode())
            taken[path.stem] = len(better)
    if taken and (shared / MEASURED).exists():
        write_joined(folder / MEASURED, *read_matrices(shared / MEASURED))
    return taken, why
