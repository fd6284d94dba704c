"""Check schedule tables: every row parses, is legal, is of the current spec, and its kernels are what builds now.

    python tools/check_tables.py                 every row; of each op of each table one row is built anew and compared
    python tools/check_tables.py --rebuild all   every row is built anew (minutes)

Machine code differs between versions of Triton: kernels that another version built are counted and not compared. It may also
differ from build to build, where the order of one of Triton's passes follows addresses: what a kernel is compiled from and how
it is launched must be the same, other code from the same IR is counted.
Prints what is wrong, a line each, and exits with 1 if anything is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # as tools/build.py does

from dtkernels.codegen.target import Target
from dtkernels.lang.errors import DTError
from dtkernels.ops.registry import shipped, shipped_names
from dtkernels.runtime.decide import scheduled, target_for
from dtkernels.runtime.prebuild import BuildError, build_row, variant_of, widest_of
from dtkernels.runtime.store import Store, StoreError
from dtkernels.runtime.table import Row, TableError, read_gpu, read_rows, rows_text, spec_hash

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 30 << 20  #: bytes of all tables and kernels together


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=ROOT / "schedule_tables", metavar="DIR")
    parser.add_argument("--rebuild", choices=("none", "some", "all"), default="some")
    args = parser.parse_args(argv)
    wrong, seen = [], Counts()
    for path in sorted(args.tables.glob("*/*.yaml")):
        wrong += check_gpu(path.parent) if path.stem == "gpu" else check_table(path, args.rebuild, seen)
    size = sum(p.stat().st_size for p in args.tables.rglob("*") if p.suffix in (".yaml", ".safetensors"))
    if size > LARGEST:
        wrong.append(f"{args.tables}: {size / 2**20:.1f} MiB; allowed: {LARGEST / 2**20:.0f}")
    for line in wrong:
        print(line)
    compared = f"{seen.compared} built anew and compared ({seen.varied} gave other code from the same IR), {seen.other} built by another Triton and not compared"
    print(f"{seen.rows} rows ({seen.bare} without kernels, compiled when first taken), {seen.kernels} kernels, {compared}, {size / 2**20:.1f} MiB; {len(wrong)} wrong")
    return 1 if wrong else 0


class Counts:
    """What was looked at."""

    rows = kernels = compared = varied = other = bare = 0


def check_gpu(folder: Path) -> list[str]:
    """What is wrong with ``gpu.yaml``."""
    try:
        read_gpu(folder)
    except (TableError, OSError) as error:
        return [str(error)]
    return []


def check_table(path: Path, rebuild: str, seen: Counts) -> list[str]:
    """What is wrong with the table of one op."""
    try:
        text = path.read_text()
        rows = read_rows(text, str(path))
        to = target_for(read_gpu(path.parent))
    except (TableError, OSError, UnicodeDecodeError) as error:
        return [str(error)]
    if to is None:
        return [f"{path.parent}: no target is of its compute capability"]
    if path.stem not in shipped_names():
        return [f"{path}: no such op; allowed: {', '.join(shipped_names())}"]
    wrong = [] if text == rows_text(rows) else [f"{path}: is not as tools/build.py writes it: order or spelling differ"]
    store = None
    try:
        store = Store(path.with_suffix(".safetensors"))
    except FileNotFoundError:
        if any(r.binaries for r in rows):
            wrong.append(f"{path}: its kernels are missing; run tools/build.py --gpu {path.parent.name} --ops {path.stem}")
    except (OSError, StoreError) as error:
        wrong.append(str(error))
    built = next((i for i, r in enumerate(rows) if r.binaries), None)
    widest = widest_of(rows)
    for i, row in enumerate(rows):
        seen.rows += 1
        anew = rebuild == "all" or rebuild == "some" and i == built
        wrong += [f"{path}: row {i + 1} ({row.title()}): {what}" for what in check_row(row, path.stem, store, to, "" if not anew else "widest" if i in widest else "usual", seen)]
    return wrong


def check_row(row: Row, op: str, store: Store | None, to: Target, rebuild: str, seen: Counts) -> Iterator[str]:
    """What is wrong with one row; ``rebuild``: "" for not at all, "usual", or "widest" with the builds for any layout."""
    if row.op != op:
        yield f"is of {row.op}"
        return
    operator = shipped(op)
    now = spec_hash(operator.spec.algorithm)
    if row.spec != now:
        yield f"is of another version of the spec: {row.spec}, now {now}"
    try:
        _, variant = variant_of(operator, row)
        scheduled(variant.algorithm, row.schedule)
    except (DTError, BuildError) as error:
        yield str(error)
        return
    if not row.binaries:
        seen.bare += 1  # allowed: its kernels are compiled when it is first taken
    elif store is not None:
        yield from check_kernels(row, store, to, rebuild, seen)


def check_kernels(row: Row, store: Store, to: Target, rebuild: str, seen: Counts) -> Iterator[str]:
    """Whether the row's kernels are all there, whole, and what builds now."""
    entries = []
    for name in row.binaries:
        try:
            entry = store.entry(name)
            if entry is None or store.host(entry.host) is None:
                yield f"kernel {name} is missing from {store.path.name}"
                continue
            store.code(entry.code)
            entries.append(entry)
        except StoreError as error:
            yield str(error)
    seen.kernels += len(entries)
    if not rebuild or len(entries) < len(row.binaries):
        return
    import triton

    if any(e.built != triton.__version__ for e in entries):
        seen.other += len(entries)
        return
    seen.compared += len(entries)
    fresh = build_row(shipped(row.op), row, to, rebuild == "widest").entries
    if [replace(e, code="") for e in fresh] != [replace(e, code="") for e in entries]:
        yield "its kernels are not what builds now; run tools/build.py"
    else:
        seen.varied += sum(new.code != old.code for new, old in zip(fresh, entries))


if __name__ == "__main__":
    sys.exit(main())
