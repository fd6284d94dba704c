"""Load tables from disk on first use. A table that cannot be read gives one warning and is ignored."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

from ..bounded_cache import BoundedCache
from ..folders import folder_named
from ..log import forget as forget_warnings
from ..log import warn_once
from ..tables.kernel_store import KernelStore, StoreError, digest
from ..tables.table import Gpu, Row, RowKey, TableError, call_kind, call_kind_text, read_gpu, read_rows
from .evidence import Sizes, TimeModel
from .row_ranking import Candidate, bucket_of, nearest_gpu, rank_rows, rows_of_kind

_DECIDED = 1024  #: cached decisions per table
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class OpTable:
    """The rows of one op for one GPU, with its binary store where there is one."""

    gpu: str | None  #: name of the table's folder
    written: tuple[Row, ...] = ()  #: the rows, where they were read from the YAML
    store: KernelStore | None = None
    packed: Path | None = None  #: path of the YAML, where the store holds a copy of its rows and a call reads only the rows of its kind
    _read: dict[tuple, tuple[Row, ...]] = field(default_factory=dict, compare=False, repr=False)
    _decided: BoundedCache[tuple, Candidate | None] = field(default_factory=lambda: BoundedCache(_DECIDED), compare=False, repr=False)
    _own: dict[tuple, dict[Sizes, None]] = field(default_factory=dict, compare=False, repr=False)
    _agree: dict[tuple, list[tuple[Row, bool]]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return all rows."""
        return self.written if self.packed is None else self._copied(None)

    def rows_like(self, key: RowKey) -> tuple[Row, ...]:
        """Return at least the rows of the kind of ``key`` (``call_kind``)."""
        if self.packed is None:
            return self.written
        kind = call_kind(key)
        if kind not in self._read:  # once per kind: every new shape asks
            self._read[kind] = self._copied(key)
        return self._read[kind]

    def rows_of_kind(self, key: RowKey) -> list[tuple[Row, bool]]:
        """Return the rows of the kind of ``key``, each with whether it matches ``key`` exactly."""
        if key not in self._agree:
            self._agree[key] = rows_of_kind(self.rows_like(key), key)
        return self._agree[key]

    def nearest(self, key: RowKey, sizes: dict[str, int], spec: str, model: Callable[[], TimeModel | None]) -> Candidate | None:
        """Return the first usable row with exactly ``key``, as ranked by ``rank_rows``. Sizes of one bucket are decided once."""
        if key not in self._own:
            self._own[key] = dict.fromkeys(tuple(sorted(row.sizes.items())) for row, exact in self.rows_of_kind(key) if exact)
        asked = tuple(sorted(sizes.items()))
        name = (key, spec, ("own", asked) if asked in self._own[key] else bucket_of(sizes))
        if name not in self._decided:
            ranked = rank_rows([(row, exact) for row, exact in self.rows_of_kind(key) if exact], sizes, spec, model())
            self._decided.put(name, next((c for c in ranked if not c.refused), None))
        return self._decided[name]

    def _copied(self, key: RowKey | None) -> tuple[Row, ...]:
        assert self.store is not None and self.packed is not None
        try:
            if found := self.store.rows(key):
                return found
            if found := tuple(r for r in self._table if key is None or call_kind_text(r.key) == call_kind_text(key)):
                raise StoreError(f"{self.store.path}: its rows are missing")
        except StoreError as error:
            warn_once(f"rows are read from the table: {_named(self.packed, error)}", about=self.store.path)
            found = self._table
        return found

    @cached_property
    def _table(self) -> tuple[Row, ...]:
        """Return the rows of the YAML itself."""
        assert self.packed is not None
        return _read(self.packed)


def tables_folder() -> Path:
    """Return the folder of ``DTKERNELS_TABLES``, else the shipped tables."""
    named = os.environ.get("DTKERNELS_TABLES")
    return folder_named(named) if named else _own_tables()


def table_names() -> tuple[str, ...]:
    """Return the folders in ``tables_folder()`` that have a ``gpu.yaml``. Never raises."""
    try:
        return tuple(sorted(p.name for p in tables_folder().iterdir() if (p / "gpu.yaml").exists()))
    except OSError:
        return ()


@lru_cache(maxsize=1)
def _own_tables() -> Path:
    inside = _PACKAGE / "schedule_tables"
    return inside if inside.is_dir() else _PACKAGE.parent / "schedule_tables"


def op_table(op: str, gpu: Gpu) -> OpTable:
    """Return the table of ``op`` for ``gpu``. Never raises."""
    return _op_table(op, gpu, tables_folder())


def forget() -> None:
    """Drop all cached tables, so that they are read again."""
    _op_table.cache_clear()
    _folder_for.cache_clear()
    forget_warnings()


@lru_cache(maxsize=256)
def _op_table(op: str, gpu: Gpu, root: Path) -> OpTable:
    name = _folder_for(gpu, root)
    if name is None:
        return OpTable(None)
    path, store = root / name / f"{op}.yaml", _store(root / name / f"{op}.safetensors")
    try:
        copied = store is not None and store.table == digest(path.read_bytes())
        return OpTable(name, (), store, path) if copied else OpTable(name, _without_stale_binaries(_read(path), store, path), store)
    except FileNotFoundError:
        return OpTable(name)
    except (OSError, TableError, UnicodeDecodeError) as error:
        warn_once(f"table not used, {op} gets default schedules: {_named(path, error)}")
        return OpTable(name)


def _read(path: Path) -> tuple[Row, ...]:
    return read_rows(path.read_bytes().decode(), str(path))


def _without_stale_binaries(rows: tuple[Row, ...], store: KernelStore | None, path: Path) -> tuple[Row, ...]:
    """Reconcile rows with a store built for an older version of the table: unchanged rows keep their kernels, changed rows lose them.

    The names of kernels do not say what they compute: a changed row may differ from the old one in a parameter.
    """
    if store is None or not any(r.binaries for r in rows):
        return rows
    try:
        built = {(r.key, r.spec, r.schedule, r.binaries) for r in store.rows()}
    except StoreError as error:
        warn_once(f"prebuilt kernels not used, they are compiled when first called: {_named(path, error)}", about=store.path)
        built = set()
    found = tuple(r if (r.key, r.spec, r.schedule, r.binaries) in built else replace(r, binaries=()) for r in rows)
    if changed := sum(a.binaries != b.binaries for a, b in zip(rows, found)):
        warn_once(f"{path}: {changed} rows name kernels that were built for others, and are compiled when first called; tools/build.py builds theirs", about=store.path)
    return found


def _named(path: Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if str(path) in text else f"{path}: {text}"


def _store(path: Path) -> KernelStore | None:
    try:
        return KernelStore(path)
    except FileNotFoundError:
        return None
    except (OSError, StoreError) as error:
        warn_once(f"prebuilt kernels not used, they are compiled when first called: {_named(path, error)}")
        return None


@lru_cache(maxsize=32)
def _folder_for(gpu: Gpu, root: Path) -> str | None:
    """Return the folder of the GPU itself, else of the most similar one; None if there is none."""
    if (root / gpu.folder).is_dir():
        return gpu.folder
    found = {}
    try:
        folders = sorted(p for p in root.iterdir() if (p / "gpu.yaml").exists())
    except OSError as error:
        warn_once(f"no tables: {_named(root, error)}")
        return None
    if not folders:
        inside = ": it is one table; name the folder that it lies in" if (root / "gpu.yaml").exists() else ""
        warn_once(f"no tables: {root}: no folder in it has a gpu.yaml{inside}")
    for folder in folders:
        try:
            found[folder.name] = read_gpu(folder)
        except (OSError, TableError) as error:
            warn_once(f"table not used: {_named(folder, error)}")
    return nearest_gpu(found, gpu)
