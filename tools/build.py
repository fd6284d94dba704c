"""Compile the kernels of every row of schedule tables into the store beside each table. Needs no GPU.

    python tools/build.py                                    every table of the repository
    python tools/build.py --gpu nvidia_h200 --ops softmax    one op of one table
    python tools/build.py --ops my_op.yaml                   an op of your own, as given to tools/tune.py
    python tools/build.py --default-schedules a100 l40s      first write tables for GPUs that nobody measured: default
                                                             schedules at some sizes of the specs, marked measured: false

With the same Triton, the same tables give the same bytes. A kernel that the store has already, from the same IR by the same
Triton, is kept; --anew compiles all. (In a container that keeps addresses random, ptxas compiles a few kernels differently.) A row
that cannot be built is named and keeps no binaries, and the exit status is 1. If nothing can be built, without Triton or on a
full disk, tables stay as they are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    from common.require_packages import needs

    needs("build", "torch", "triton", "numpy")  # without Triton every row would fail and lose its kernels

from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import TARGETS, Target, target
from dtkernels.lang.errors import DTError
from dtkernels.ops.registry import shipped_names
from dtkernels.runtime.aot_build import BuiltKernels, PreviousBuild, build_row, rows_with_any_build
from dtkernels.runtime.select.schedule_selection import gpu_of, target_for
from dtkernels.runtime.tables.kernel_store import KernelStore, StoreError, digest, write_store
from dtkernels.runtime.tables.table import (
    Row,
    TableError,
    read_gpu,
    read_rows,
    rows_text,
    with_binaries,
    write_gpu,
    write_rows,
    write_whole,
)

sys.path[:0] = [p for p in (str(Path(__file__).resolve().parent),) if p not in sys.path]

from common.cli_types import DTYPES, Parser, at_least, said, some_of  # noqa: E402
from common.deterministic_build import same_addresses  # noqa: E402
from tuning.records.problems import CallKind, TuningProblem, op_names, operator_of, problems_of, row_of, variants_of  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    same_addresses()
    specs = specs_of(args.ops)
    folders = [args.tables / name for name in args.gpu or []]
    for folder in folders:
        if not (folder / "gpu.yaml").is_file():
            raise SystemExit(f"build: no table: {folder}; allowed: {', '.join(sorted(p.parent.name for p in args.tables.glob('*/gpu.yaml'))) or 'none is here'}")
    try:
        for name in args.default_schedules:
            folders.append(args.tables / gpu_of(target(name)).folder)
            write_default_tables(folders[-1], target(name), list(specs.values()), args.dtypes, args.few)
        folders = folders or sorted(p.parent for p in args.tables.glob("*/gpu.yaml"))
        if not folders:
            raise SystemExit(f"build: no table under {args.tables}; tools/tune.py writes one")
        failures = build_tables(folders, specs, args.jobs, args.anew)
    except (TableError, OSError) as error:  # tables are written completely or not at all
        raise SystemExit(f"build: {said(error)}") from None
    except (BrokenProcessPool, MemoryError) as error:
        raise SystemExit(f"build: a process that compiles ended, for want of memory perhaps: {error}; tables stay as they are, --jobs 1 takes least") from None
    for line in failures:
        print(f"not built: {line}", file=sys.stderr)
    return 1 if failures else 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("build", __doc__)
    parser.add_argument("--tables", type=Path, default=ROOT / "schedule_tables", metavar="DIR")
    parser.add_argument("--gpu", nargs="+", metavar="FOLDER", help="tables to build; default: all")
    parser.add_argument("--ops", nargs="+", metavar="NAME", help="names and spec files; default: all of the package's that a table has")
    parser.add_argument("--default-schedules", nargs="+", default=[], metavar="GPU", choices=sorted(TARGETS), help=f"GPUs to write tables of default schedules for: {', '.join(TARGETS)}")
    parser.add_argument("--few", type=at_least(1), default=2, metavar="N", help="rows that --default-schedules writes for each kind of call")
    parser.add_argument("--dtypes", type=some_of(DTYPES), default=("bf16", "fp32"), help="of the rows that --default-schedules writes; default: bf16,fp32")
    parser.add_argument("--anew", action="store_true", help="compile every kernel, even those that the store has")
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count() or 1, help="processes that compile; default: one per core")
    return parser.parse_args(argv)


def specs_of(asked: list[str] | None) -> dict[str, str]:
    """Return op -> its name or spec file for what was asked; None means all of the package's. Exits with one line on an error."""
    try:
        return {operator_of(op).spec.op: op for op in op_names(",".join(asked or []), "build", least=0)}
    except DTError as error:
        raise SystemExit(f"build: {error}") from None


# -- tables of default schedules -----------------------------------------------------------------------------------------


def write_default_tables(folder: Path, to: Target, ops: list[str], dtypes: tuple[str, ...], few: int) -> None:
    """Write rows with default schedules for ``to``, at ``few`` of the sizes that each kind of call is tuned at.

    ``ops``: names or spec files; empty: all of the package's.
    """
    write_gpu(folder, gpu_of(to))
    by = {"gpu": gpu_of(to).name, "multiprocessors": to.multiprocessors, "date": str(date.today()), "command": "tools/build.py --default-schedules"}
    for op in ops or op_names("all"):
        kinds: dict[CallKind, list[TuningProblem]] = {}
        spec = operator_of(op).spec
        for work in problems_of(op, spec.shapes, dtypes):
            kinds.setdefault(work.group, []).extend([] if work.held_out else [work])
        rows = []
        for group, works in kinds.items():
            _, variant = variants_of(group)
            for work in works[:: max(1, -(-len(works) // few))][:few]:
                schedule = default_schedule(variant.algorithm, variant.outputs, work.extents, group.itemsize, to)
                rows.append(row_of(work, str(schedule), measured=False, by=by))
        write_rows(folder / f"{spec.op}.yaml", rows)


# -- building -----------------------------------------------------------------------------------------------------------


def build_tables(folders: list[Path], specs: dict[str, str], jobs: int, anew: bool = False) -> list[str]:
    """Build the ops of ``specs`` (empty: all) of some tables; return one line for each failure."""
    failures, tables = [], {}
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
            store = None if anew else path.with_suffix(".safetensors")
            op = specs.get(path.stem, path.stem)
            tables[path] = [(row, op, to.name, i in widest, store) for i, row in enumerate(rows)]
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
                whole += result
                done.append(with_binaries(row, [e.name for e in result.entries]))
        save(path, done, whole)
    return failures


def save(path: Path, rows: list[Row], built: BuiltKernels) -> None:
    """Write the table with the names of its binaries, and the store with a copy of the rows."""
    text = rows_text(rows).encode()
    ordered = read_rows(text.decode(), str(path))
    write_store(path.with_suffix(".safetensors"), built.entries, built.hosts, built.codes, ordered, digest(text))
    write_whole(path, text)


def build_rows(pairs: list[tuple[Row, str, str, bool, Path | None]], jobs: int) -> list[BuiltKernels | str]:
    """Build the kernels of each (row, op or its spec, target, for any layout too, store to reuse kernels from), or say why not.

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
            found.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return found


@cache
def earlier_of(store: str) -> PreviousBuild:
    """Return the kernels of a store; none if there is no complete one."""
    try:
        return PreviousBuild(KernelStore(Path(store)) if store else None)
    except (OSError, StoreError):
        return PreviousBuild()


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


if __name__ == "__main__":
    sys.exit(main())
