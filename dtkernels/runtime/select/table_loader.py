"""Load tables from disk on first use. A table that cannot be read gives one warning and is ignored.

The folders are, in this order: that of ``DTKERNELS_TABLES`` alone where it is set; else the user's, then the package's. In each, the
rows of a GPU lie in a folder of its own, kernels beside them or in the folder of its architecture. Kinds of calls that a GPU's own
table lacks take the rows of the most similar GPU of its architecture.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..bounded_cache import BoundedCache
from ..folders import folder_named, user_folder
from ..log import forget as forget_warnings
from ..log import warn_once
from ..tables.kernel_store import KernelStore, KernelStores, StoreError, digest
from ..tables.table import Gpu, Row, RowKey, TableError, arch_folder, call_kind, call_kind_text, read_gpu, read_rows
from ..tables.trust import trusted
from .addition_order import fixed_order
from .evidence import Sizes, TimeModel
from .row_ranking import Candidate, bucket_of, nearest_gpu, rank_rows, rows_of_kind

if TYPE_CHECKING:
    from ...autoschedule.cost.outline import Known

_DECIDED = 8192  #: cached decisions per table: a thousand rows in four widths have 700 buckets for each kind of call
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class OpTable:
    """The rows of one op for one GPU, with its binary store where there is one."""

    gpu: str | None  #: name of the table's folder
    written: tuple[Row, ...] = ()  #: the rows, where they were read from the YAML
    store: KernelStore | KernelStores | None = None
    packed: Path | None = None  #: path of the YAML, where a store holds a copy of its rows and a call reads only the rows of its kind
    copy: KernelStore | None = None  #: that store
    beyond: OpTable | None = None  #: the table of the next folder
    folder: Path | None = field(default=None, compare=False)
    similar: Callable[[], OpTable] | None = field(default=None, compare=False)  #: reads the table of another GPU, for kinds of calls that this one lacks
    _read: dict[tuple, tuple[Row, ...]] = field(default_factory=dict, compare=False, repr=False)
    _decided: BoundedCache[tuple, Candidate | None] = field(default_factory=lambda: BoundedCache(_DECIDED), compare=False, repr=False)
    _own: dict[tuple, dict[Sizes, None]] = field(default_factory=dict, compare=False, repr=False)
    _agree: dict[tuple, list[tuple[Row, bool]]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def title(self) -> str | None:
        """Return the GPU, with the table's folder where that is the user's."""
        return f"{self.gpu} in {self.folder}" if self.gpu and self.folder == user_folder() / "tables" else self.gpu

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return all rows."""
        own = self.written if self.packed is None else self._copied(None)
        kinds = {r.kind for r in own}
        if self.similar is not None:
            own += tuple(r for r in self.similar().rows if r.kind not in kinds)
            kinds = {r.kind for r in own}
        return own + tuple(r for r in (self.beyond.rows if self.beyond else ()) if self.beyond.gpu == self.gpu or r.kind not in kinds)  # type: ignore[union-attr]

    def rows_like(self, key: RowKey) -> tuple[Row, ...]:
        """Return at least the rows of the kind of ``key`` (``call_kind``)."""
        kind = call_kind(key)
        if kind not in self._read:  # once per kind: every new shape asks
            own = self.written if self.packed is None else self._copied(key)
            if self.beyond is not None and (self.beyond.gpu == self.gpu or not any(r.kind == kind for r in own)):
                places = {(r.key, *sorted(r.sizes.items())) for r in own}
                own += tuple(r for r in self.beyond.rows_like(key) if (r.key, *sorted(r.sizes.items())) not in places)
            if self.similar is not None and not any(r.kind == kind for r in own):
                own = self.similar().rows_like(key)
            self._read[kind] = own
        return self._read[kind]

    def gpu_of(self, key: RowKey) -> str | None:
        """Return the GPU whose rows of the kind of ``key`` are taken."""
        if (self.beyond is None and self.similar is None) or any(r.kind == call_kind(key) for r in (self.written if self.packed is None else self._copied(key))):
            return self.gpu
        if self.beyond is not None and (self.similar is None or any(r.kind == call_kind(key) for r in self.beyond.rows_like(key))):
            return self.beyond.gpu_of(key)
        assert self.similar is not None
        return self.similar().gpu_of(key) or self.gpu

    def rows_of_kind(self, key: RowKey) -> list[tuple[Row, bool]]:
        """Return the rows of the kind of ``key``, each with whether it matches ``key`` exactly."""
        if key not in self._agree:
            self._agree[key] = rows_of_kind(self.rows_like(key), key)
        return self._agree[key]

    def nearest(self, key: RowKey, sizes: dict[str, int], spec: str, known: Known | None, model: Callable[[], TimeModel | None]) -> Candidate | None:
        """Return the first usable row with exactly ``key``, as ranked by ``rank_rows``. Sizes of one bucket, as ``known`` tells it, are decided once."""
        if key not in self._own:
            self._own[key] = dict.fromkeys(tuple(sorted(row.sizes.items())) for row, exact in self.rows_of_kind(key) if exact)
        asked = tuple(sorted(sizes.items()))
        name = (key, spec, ("own", asked) if asked in self._own[key] else bucket_of(sizes, known), fixed_order())
        if name not in self._decided:
            ranked = rank_rows([(row, exact) for row, exact in self.rows_of_kind(key) if exact], sizes, spec, model())
            self._decided.put(name, next((c for c in ranked if not c.refused), None))
        return self._decided[name]

    def _copied(self, key: RowKey | None) -> tuple[Row, ...]:
        assert self.copy is not None and self.packed is not None
        try:
            if found := self.copy.rows(key):
                return found
            if found := tuple(r for r in self._table if key is None or call_kind_text(r.key) == call_kind_text(key)):
                raise StoreError(f"{self.copy.path}: its rows are missing")
        except StoreError as error:
            warn_once(f"rows are read from the table: {_named(self.packed, error)}", about=self.copy.path)
            found = self._table
        return found

    @cached_property
    def _table(self) -> tuple[Row, ...]:
        """Return the rows of the YAML itself."""
        assert self.packed is not None
        return _read(self.packed)


def tables_folders() -> tuple[Path, ...]:
    """Return the folders that tables are looked up in, first to last."""
    named = os.environ.get("DTKERNELS_TABLES")
    if named:
        return (folder_named(named),)
    return _with_user_tables(user_folder())


@lru_cache(maxsize=8)
def _with_user_tables(folder: Path) -> tuple[Path, ...]:
    own = folder / "tables"
    return (own, package_tables()) if any(own.glob("*/gpu.yaml")) else (package_tables(),)


def table_names() -> tuple[str, ...]:
    """Return the names of the tables in ``tables_folders()``. Never raises."""
    found: dict[str, None] = {}
    for folder in tables_folders():
        try:
            found |= dict.fromkeys(sorted(p.name for p in folder.iterdir() if (p / "gpu.yaml").exists()))
        except OSError:
            continue
    return tuple(found)


@lru_cache(maxsize=1)
def package_tables() -> Path:
    inside = _PACKAGE / "schedule_tables"
    return inside if inside.is_dir() else _PACKAGE.parent / "schedule_tables"


def op_table(op: str, gpu: Gpu) -> OpTable:
    """Return the table of ``op`` for ``gpu``, with those of further folders behind it. Never raises."""
    return _op_table(op, gpu, tables_folders())


def forget() -> None:
    """Drop all cached tables, so that they are read again."""
    for cached in (_op_table, _similar_table, _similar_folder, _with_user_tables, _store):
        cached.cache_clear()
    forget_warnings()


@lru_cache(maxsize=256)
def _op_table(op: str, gpu: Gpu, folders: tuple[Path, ...]) -> OpTable:
    found: OpTable | None = None
    for root in reversed(folders):
        own = _table_in(op, gpu, root, folders)
        rows = own.written or own.packed is not None
        found = own if found is None else replace(own, beyond=found, store=_joined(own.store, found.store)) if rows else found
    if found is not None and found.similar is not None and not (found.written or found.packed or found.beyond):
        other = found.similar()
        return other if other.written or other.packed else found
    return found or OpTable(None)


def _table_in(op: str, gpu: Gpu, root: Path, folders: tuple[Path, ...]) -> OpTable:
    """Return the table of one folder: that of the GPU, which knows of another one's, or that of the most similar GPU."""
    if (root / gpu.folder).is_dir():
        return replace(_table_of(op, gpu, root, gpu.folder, folders), similar=partial(_similar_table, op, gpu, root, folders))
    return _similar_table(op, gpu, root, folders)


@lru_cache(maxsize=256)
def _similar_table(op: str, gpu: Gpu, root: Path, folders: tuple[Path, ...]) -> OpTable:
    name = _similar_folder(gpu, root)
    return OpTable(None) if name is None else _table_of(op, gpu, root, name, folders)


def _table_of(op: str, gpu: Gpu, root: Path, name: str, folders: tuple[Path, ...]) -> OpTable:
    """Return the table ``name``. Kernels lie beside it or with its architecture, there or in a later folder."""
    path, shared = root / name / f"{op}.yaml", f"{arch_folder(gpu.arch)}/{op}.safetensors"
    places = (path.with_suffix(".safetensors"), *(folder / shared for folder in folders[folders.index(root) :]))
    stores = [s for s in map(_store, places) if s is not None]
    try:
        text = path.read_bytes() if stores else b""
        copy = next((s for s in stores if s.table and s.table == digest(text)), None)
        every = stores[0] if len(stores) == 1 else KernelStores(stores) if stores else None
        if copy:
            return OpTable(name, (), every, path, copy, folder=root)
        rows = _read(path)
        if any(r.binaries for r in rows) and not any(p.exists() for p in places):
            warn_once(f"{path}: its kernels are neither beside it nor in {arch_folder(gpu.arch)}, and are compiled when first called; tools/build.py builds them")
        return OpTable(name, _without_stale_binaries(rows, stores, path), every, folder=root)
    except FileNotFoundError:
        return OpTable(name)
    except (OSError, TableError, UnicodeDecodeError) as error:
        warn_once(f"table not used, {op} gets a similar GPU's rows or default schedules: {_named(path, error)}")
        return OpTable(name)


def _joined(first: KernelStore | KernelStores | None, then: KernelStore | KernelStores | None) -> KernelStore | KernelStores | None:
    every = dict.fromkeys(s for stores in (first, then) if stores is not None for s in (stores.stores if isinstance(stores, KernelStores) else (stores,)))
    return KernelStores(tuple(every)) if len(every) > 1 else first or then


def _read(path: Path) -> tuple[Row, ...]:
    return read_rows(path.read_bytes().decode(), str(path))


def _without_stale_binaries(rows: tuple[Row, ...], stores: list[KernelStore], path: Path) -> tuple[Row, ...]:
    """Look kernels up by what they compute: rows get those that were built for the same call and schedule, others lose theirs.

    The names of kernels do not say what they compute: a changed row may differ from the old one in a parameter.
    """
    if not stores:
        return rows
    built: dict[tuple, list[Row]] = {}
    for store in stores:
        try:
            for r in store.rows():
                if r.binaries:
                    built.setdefault((r.key, r.spec, r.schedule), []).append(r)
        except StoreError as error:
            warn_once(f"prebuilt kernels not used, they are compiled when first called: {_named(path, error)}", about=store.path)
    found = tuple(with_kernels(r, built.get((r.key, r.spec, r.schedule), [])) for r in rows)
    if changed := sum(bool(a.binaries) and not b.binaries for a, b in zip(rows, found)):
        warn_once(f"{path}: {changed} rows name kernels that were built for others, and are compiled when first called; tools/build.py builds theirs", about=stores[0].path)
    return found


def with_kernels(row: Row, alike: list[Row]) -> Row:
    """Return the row with the kernels of rows of the same call and schedule, those of equally aligned sizes first."""
    if row.binaries and any(row.binaries == r.binaries for r in alike):
        return row
    ordered = sorted(alike, key=lambda r: -sum(math.gcd(n, 16) == math.gcd(r.sizes.get(x, 0), 16) for x, n in row.sizes.items()))
    return replace(row, binaries=tuple(dict.fromkeys(name for r in ordered for name in r.binaries)))


def _named(path: Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if str(path) in text else f"{path}: {text}"


@lru_cache(maxsize=256)
def _store(path: Path) -> KernelStore | None:
    try:
        found = KernelStore(path)
    except FileNotFoundError:
        return None
    except (OSError, StoreError) as error:
        warn_once(f"prebuilt kernels not used, they are compiled when first called: {_named(path, error)}")
        return None
    if usable(found):
        return found
    warn_once(f"prebuilt kernels not used: {path}: neither the package nor this user built it; tools/build.py builds it anew, DTKERNELS_TRUST_TABLES=1 trusts it")
    return None


def usable(store: KernelStore) -> bool:
    """Return whether a store's kernels may be run: it is the package's, or the user's own, or all are trusted."""
    return package_tables() in store.path.resolve().parents or trusted(store)


@lru_cache(maxsize=32)
def _similar_folder(gpu: Gpu, root: Path) -> str | None:
    """Return the folder of the most similar other GPU of the same architecture; None if there is none."""
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
    return nearest_gpu({name: g for name, g in found.items() if name != gpu.folder}, gpu)
