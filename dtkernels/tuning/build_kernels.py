"""Compile the kernels of every row of tables.

They go into the folder of the architecture where the tables have one, which every GPU of it shares, else beside the table. The store
beside a table always has the copy of its rows. Stores outside the package are sealed with the user's key.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from ..codegen.target import TARGETS, target
from ..lang.errors import error_line
from ..ops.registry import shipped_names
from ..runtime.aot_build import BuiltKernels, PreviousBuild, build_row, rows_with_any_build
from ..runtime.select.schedule_selection import target_for
from ..runtime.select.table_loader import package_tables
from ..runtime.tables.kernel_store import KernelStore, KernelStores, StoreError, digest, write_store
from ..runtime.tables.table import Row, arch_folder, read_gpu, read_rows, rows_text, with_binaries, write_whole
from ..runtime.tables.trust import user_key
from . import deterministic_build  # noqa: F401  before anything is compiled
from .records.problems import operator_of


def build_tables(folders: list[Path], specs: dict[str, str], jobs: int, anew: bool = False) -> list[str]:
    """Build the ops of ``specs`` (empty: all) of some tables; return one line for each failure."""
    failures, tables, archs = [], {}, {}
    for folder in folders:
        to = target_for(read_gpu(folder))
        if to is None:
            failures.append(f"{folder}: no target is of its compute capability; allowed: {', '.join(TARGETS)}")
            continue
        for path in sorted(folder.glob("*.yaml")):
            if path.stem == "gpu" or specs and path.stem not in specs:
                continue
            if path.stem not in specs and path.stem not in shipped_names():
                failures.append(f"{path}: no op of the package; name its spec, --ops FILE.yaml")
                continue
            rows = read_rows(path.read_text(), str(path))
            widest = rows_with_any_build(rows)
            store = None if anew else os.pathsep.join(map(str, stores_of(path, to.arch)))
            op = specs.get(path.stem, path.stem)
            tables[path] = [(row, op, to.name, i in widest, store) for i, row in enumerate(rows)]
            archs[path] = to.arch
    failures += [f"{op}: no table here has rows of it; tools/tune.py writes them" for op in specs if op not in {p.stem for p in tables}]
    results = iter(build_rows([pair for pairs in tables.values() for pair in pairs], jobs))
    for path, pairs in tables.items():
        whole, done = BuiltKernels(), []
        for row, *_ in pairs:
            result = next(results)
            if isinstance(result, str):
                failures.append(f"{path}: {row.title()}: {result}")
                done.append(with_binaries(row, ()))
            else:
                names = [e.name for e in result.entries]
                kept = kept_kernels(row, names, stores_of(path, archs[path])) if not anew else None
                whole += kept or result
                done.append(row if kept else with_binaries(row, names))
        save(path, done, whole, archs[path])
    return failures


def kept_kernels(row: Row, names: list[str], stores: tuple[Path, Path]) -> BuiltKernels | None:
    """Return the kernels that a row names, if it names more than it needs: rows that were measured and left out had them built. None if one is not there."""
    if not set(names) < set(row.binaries):
        return None
    known, found = KernelStores([KernelStore(p) for p in stores if p.exists()]), BuiltKernels()
    try:
        for name in row.binaries:
            found += _stored(known, name)
    except StoreError:
        return None
    return found


def _stored(store: KernelStore | KernelStores, name: str) -> BuiltKernels:
    """Return one kernel of a store. Raises StoreError where it is not there."""
    entry = store.entry(name)
    return BuiltKernels([entry], {entry.host: store.host(entry.host)}, {entry.code: store.code(entry.code)})


def stores_of(path: Path, arch: int | str) -> tuple[Path, Path]:
    """Return where the kernels of a table may lie: beside it, and with its architecture."""
    return path.with_suffix(".safetensors"), path.parent.parent / arch_folder(arch) / f"{path.stem}.safetensors"


def save(path: Path, rows: list[Row], built: BuiltKernels, arch: int | str) -> None:
    """Write the kernels, the table with their names, and the copy of its rows."""
    key = key_for(path)
    beside, shared = stores_of(path, arch)
    if shared.parent.is_dir():
        share(shared, path, rows, built, key)
        built = BuiltKernels()
    write_table(path, rows, built, key)


def write_table(path: Path, rows: list[Row], built: BuiltKernels, key: bytes | None) -> None:
    """Write a table, and beside it the copy of its rows with the kernels that are not shared."""
    text = rows_text(rows).encode()
    ordered = read_rows(text.decode(), str(path))
    write_store(path.with_suffix(".safetensors"), built.entries, built.hosts, built.codes, ordered, digest(text), key)
    write_whole(path, text)


def share(shared: Path, path: Path, own: list[Row], built: BuiltKernels, key: bytes | None) -> None:
    """Put kernels into the store of an architecture, without those that no row of its GPUs names any more.

    The rows of all its GPUs lie there too: by them a row finds the kernels of its call and schedule (``with_kernels``).

    The store stays as it is, byte for byte, if it has just these. The tables of other GPUs whose rows were copied into it get the copy
    beside them.
    """
    others = [p for p in shared.parent.parent.glob(f"*/{path.name}") if p != path and same_arch(p.parent, shared.parent.name)]
    rows = {p: read_rows(p.read_text(), str(p)) for p in others}
    earlier = KernelStore(shared) if shared.exists() else None
    kept = BuiltKernels()
    for name in dict.fromkeys(n for found in rows.values() for r in found for n in r.binaries) if earlier else ():
        try:
            kept += _stored(earlier, name)  # type: ignore[arg-type]
        except StoreError:
            continue  # it lies beside its table
    kept += built
    if earlier is None or {*earlier.names()} != {e.name for e in kept.entries}:
        for p, theirs in rows.items():
            if not p.with_suffix(".safetensors").exists():
                write_table(p, list(theirs), BuiltKernels(), key)
        index = [r for found in (own, *rows.values()) for r in found if r.binaries]
        write_store(shared, kept.entries, kept.hosts, kept.codes, index, key=key)


def same_arch(folder: Path, name: str) -> bool:
    """Return whether a folder is the table of a GPU whose kernels lie in the folder called ``name``."""
    return (folder / "gpu.yaml").exists() and arch_folder(read_gpu(folder).arch) == name


def key_for(path: Path) -> bytes | None:
    """Return the key that seals the stores of a table; None for those of the package, and where no key can be made."""
    if package_tables() in path.absolute().parents:
        return None
    try:
        return user_key(make=True)
    except OSError as error:
        print(f"the kernels are not sealed, DTKERNELS_TRUST_TABLES=1 is needed to use them: {error.filename}: {error.strerror}", file=sys.stderr)
        return None


def build_rows(pairs: list[tuple[Row, str, str, bool, str | None]], jobs: int) -> list[BuiltKernels | str]:
    """Build the kernels of each (row, op or its spec, target, for any layout too, stores to reuse kernels from), or say why not.

    Rows of one schedule are built in one process, which compiles once.
    """
    groups: dict[tuple, list[int]] = {}
    for i, (row, op, to, _, store) in enumerate(pairs):
        groups.setdefault((to, row.key, row.schedule, op, str(store or "")), []).append(i)
    results: list[BuiltKernels | str] = [""] * len(pairs)
    if not groups:
        return results
    largest_first = sorted(groups.items(), key=lambda item: (-len(item[0][2]), item[1]))
    with ProcessPoolExecutor(min(jobs, len(groups)), mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(build_some, [(pairs[i][0], pairs[i][3]) for i in places], to, *where): places for (to, _, _, *where), places in largest_first}
        for done in progress(as_completed(waiting), len(waiting), "build"):
            for i, result in zip(waiting[done], done.result()):
                results[i] = result
    return results


def build_some(rows: list[tuple[Row, bool]], to: str, op: str, store: str) -> list[BuiltKernels | str]:
    """Build the kernels of ``rows`` of one op in a worker, reusing those of ``store``."""
    found: list[BuiltKernels | str] = []
    earlier = earlier_of(store)
    for row, widest in rows:
        try:
            found.append(build_row(operator_of(op), row, target(to), widest, earlier))
        except (OSError, MemoryError):  # a full disk is no row's fault: no row loses its kernels for it
            raise
        except Exception as error:  # any compiler error is this row's failure, not the others'
            found.append(error_line(error, 300))
    return found


@cache
def earlier_of(store: str) -> PreviousBuild:
    """Return the kernels of some stores, their paths in one text; none of those that are not complete."""
    found = []
    for path in store.split(os.pathsep) if store else ():
        try:
            found.append(KernelStore(Path(path)))
        except (OSError, StoreError):
            continue
    return PreviousBuild(KernelStores(found) if found else None)


def progress(items, total: int, title: str):
    """Iterate over ``items`` with a progress bar: tqdm's if it is installed, else a line now and then."""
    try:
        from tqdm import tqdm
    except ImportError:
        begin = shown = time.monotonic()
        for i, item in enumerate(items):
            yield item
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(f"{title}: {i + 1}/{total}, {(shown - begin) / (i + 1) * (total - i - 1):.0f} s left", file=sys.stderr, flush=True)
        return
    yield from tqdm(items, total=total, desc=title, smoothing=0.1)
