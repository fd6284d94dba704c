"""Check schedule tables: every row parses, is legal and matches the current spec, and its kernels are what a build gives now.

    python tools/check_tables.py                 every row, its wrapper, and that no kernel has another text; rebuilds one row for each op and table
    python tools/check_tables.py --rebuild all   rebuilds every row (minutes)

Machine code differs between versions of Triton: kernels built by another version are counted, not compared. It may also differ
between builds, because the order of one of Triton's passes depends on addresses. The IR and the launch must be the same; different
machine code from the same IR is counted.
Prints one line for each problem, and exits with 1 if there is any.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [p for p in (str(Path(__file__).resolve().parent),) if p not in sys.path]

if __name__ == "__main__":
    from common.require_packages import needs

    needs("check_tables", "torch", "triton", "numpy")

from common.cli_types import Parser, at_least, folder_to_read  # noqa: E402

from dtkernels.codegen.emit.module import emit  # noqa: E402
from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.lang.errors import DTError  # noqa: E402
from dtkernels.ops.registry import shipped, shipped_names  # noqa: E402
from dtkernels.runtime.aot_build import BuildError, build_row, rows_with_any_build, variant_of  # noqa: E402
from dtkernels.runtime.launch.wrapper_recorder import host_text  # noqa: E402
from dtkernels.runtime.select.schedule_selection import scheduled, target_for  # noqa: E402
from dtkernels.runtime.signature.spec_hash import spec_hash  # noqa: E402
from dtkernels.runtime.tables.kernel_store import KernelStore, KernelStores, StoredKernel, StoreError, digest  # noqa: E402
from dtkernels.runtime.tables.table import Row, TableError, arch_folder, read_gpu, read_rows, rows_text  # noqa: E402
from dtkernels.tuning.build_kernels import same_arch, stores_of  # noqa: E402
from dtkernels.tuning.deterministic_build import same_addresses  # noqa: E402
from dtkernels.tuning.records.measurement_store import read_matrices  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 40 << 20  #: bytes of all tables and kernels together


def main(argv: list[str] | None = None) -> int:
    parser = Parser("check_tables", __doc__)
    parser.add_argument("--tables", type=folder_to_read, default=ROOT / "schedule_tables", metavar="DIR")
    parser.add_argument("--rebuild", choices=("none", "some", "all"), default="some")
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count() or 1, help="processes that build")
    args = parser.parse_args(argv)
    same_addresses()
    wrong, seen, stored, every = [], Counts(), [], []
    for path in sorted(args.tables.glob("*/*.yaml")):
        if path.stem == "gpu":
            wrong += check_gpu(path.parent)
        else:
            rows = check_table(path, wrong, seen)
            every += rows
            stored += rows if args.rebuild == "all" else rows[:1] if args.rebuild == "some" else []
    if not seen.rows and not wrong:
        wrong.append(f"{args.tables}: no table with a row in it")
    wrong += stray_files(args.tables)
    wrong += rows_with_wrong_kernels(every, args.jobs)
    wrong += compare(stored, args.jobs, seen)
    size = sum(p.stat().st_size for p in args.tables.rglob("*") if p.suffix in (".yaml", ".safetensors"))
    if size > LARGEST:
        wrong.append(f"{args.tables}: {size / 2**20:.1f} MiB; allowed: {LARGEST / 2**20:.0f}")
    for line in wrong:
        print(line)
    compared = f"{seen.compared} built anew and compared ({seen.varied} gave other code from the same IR), {seen.other} built by another Triton and not compared"
    print(f"{seen.rows} rows ({seen.bare} without kernels, compiled when first taken), {seen.kernels} kernels, {compared}, {size / 2**20:.1f} MiB; {len(wrong)} wrong")
    return 1 if wrong else 0


class Counts:
    """Counts of what was checked."""

    rows = kernels = compared = varied = other = bare = 0


@dataclass(frozen=True)
class Stored:
    """A row whose kernels all exist."""

    row: Row
    entries: list[StoredKernel]
    target: str  #: its name
    widest: bool  #: whether it is also built for any layout and 64-bit sizes
    title: str  #: its name in messages


# -- what lies there ----------------------------------------------------------------------------------------------------


def check_gpu(folder: Path) -> list[str]:
    """Return the problems of ``gpu.yaml``."""
    try:
        gpu = read_gpu(folder)
    except (TableError, OSError) as error:
        return [str(error)]
    return [] if gpu.folder == folder.name else [f"{folder / 'gpu.yaml'}: is of {gpu.name}, of which no call looks here; allowed: the folder {gpu.folder}"]


def stray_files(tables: Path) -> Iterator[str]:
    """Return files that belong to no table, and measurements that cannot be read."""
    lying = (p for p in tables.glob("*/*") if p.parent.name != "__pycache__")  # the folder is also a package, for which Python writes bytecode
    for path in sorted(p for p in lying if p.name != "journal.jsonl" and p.suffix not in (".old", ".yaml")):
        if path.name == "measurements.safetensors":
            try:
                read_matrices(path)
            except (OSError, ValueError) as error:
                yield str(error)
        elif path.suffix != ".safetensors":
            yield f"{path}: is no part of a table"
        elif not path.with_suffix(".yaml").exists() and not any(same_arch(p.parent, path.parent.name) for p in tables.glob(f"*/{path.stem}.yaml")):
            yield f"{path}: kernels without a table"


def check_table(path: Path, wrong: list[str], seen: Counts) -> list[Stored]:
    """Return the rows of one op's table whose kernels all exist; add its problems to ``wrong``."""
    try:
        text = path.read_text()
        rows = read_rows(text, str(path))
        to = target_for(read_gpu(path.parent))
    except (TableError, OSError, UnicodeDecodeError) as error:
        wrong.append(str(error))
        return []
    if to is None:
        wrong.append(f"{path.parent}: no target is of its compute capability")
        return []
    if path.stem not in shipped_names():
        wrong.append(f"{path}: no such op; allowed: {', '.join(shipped_names())}")
        return []
    if text != rows_text(rows):
        wrong.append(f"{path}: is not as tools/build.py writes it: order or spelling differ")
    store = stores_for(path, to.arch, text, rows, wrong)
    found, widest = [], rows_with_any_build(rows)
    for i, row in enumerate(rows):
        seen.rows += 1
        seen.bare += not row.binaries  # allowed: its kernels are compiled at the first call
        title = f"{path}: row {i + 1} ({row.title()})"
        problems = list(check_row(row, path.stem))
        if row.binaries and store is not None and not problems:
            entries = list(entries_of(row, store, problems))
            seen.kernels += len(entries)
            if not problems:
                found.append(Stored(row, entries, to.name, i in widest, title))
        wrong += [f"{title}: {what}" for what in problems]
    return found


def stores_for(path: Path, arch: int | str, text: str, rows: tuple[Row, ...], wrong: list[str]) -> KernelStores | None:
    """Return the stores of a table, its own and that of its architecture; add what is wrong with them to ``wrong``."""
    again, found = f"run tools/build.py --gpu {path.parent.name} --ops {path.stem}", []
    for place in stores_of(path, arch):
        try:
            found.append(KernelStore(place))
        except FileNotFoundError:
            continue
        except (OSError, StoreError) as error:
            wrong.append(str(error))
    if not found:
        if any(r.binaries for r in rows):
            wrong.append(f"{path}: its kernels are missing; {again}")
        return None
    copies = [s for s in found if s.table == digest(text.encode())]
    try:
        if not copies or copies[0].rows() != rows:
            wrong.append(f"{path}: the copy of its rows beside its kernels is not of it; {again}")
    except StoreError as error:
        wrong.append(str(error))
    named = {n for r in rows for n in r.binaries}
    for other in path.parent.parent.glob(f"*/{path.name}"):
        if found[-1].path.parent != path.parent and other != path and same_arch(other.parent, arch_folder(arch)):
            named |= {n for r in read_rows(other.read_text(), str(other)) for n in r.binaries}
    for s in found:
        if spare := {*s.names()} - named:
            wrong.append(f"{s.path}: {len(spare)} kernels that no row names; {again}")
    if len(found) == 2 and (twice := {*found[0].names()} & {*found[1].names()}):
        wrong.append(f"{found[0].path}: {len(twice)} kernels that {found[1].path} has too; {again}")
    return KernelStores(found)


def check_row(row: Row, op: str) -> Iterator[str]:
    """Return the problems of one row's text."""
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


def entries_of(row: Row, store: KernelStores, problems: list[str]) -> Iterator[StoredKernel]:
    """Return the row's kernels that exist and are whole; add the problems of others to ``problems``."""
    for name in row.binaries:
        try:
            entry = store.entry(name)
            store.host(entry.host)
            store.code(entry.code)
            yield entry
        except StoreError as error:
            problems.append(str(error))


# -- kernels that rows share ---------------------------------------------------------------------------------------------


def rows_with_wrong_kernels(rows: list[Stored], jobs: int) -> list[str]:
    """Find rows whose stored kernel was emitted for another row. Every row is emitted, none is compiled."""
    wrong: list[str] = []
    texts: dict[tuple[str, str], tuple[str | None, str]] = {}  #: (GPU, kernel) -> (its text, the row it was seen in)
    for s, (host, kernels) in zip(rows, emitted(rows, jobs)):
        if strange := list(foreign_kernels(s, host, kernels)):
            wrong += strange
            continue
        for e in s.entries:
            text, title = texts.setdefault((s.target, e.name), (kernels.get(e.kernel), s.title))
            if text != kernels.get(e.kernel):
                wrong.append(f"{s.title}: its {e.kernel} is that of {title}, of which another text is emitted; run tools/build.py --anew")
    return list(dict.fromkeys(wrong))


def foreign_kernels(stored: Stored, host: str, kernels: dict[str, str]) -> Iterator[str]:
    """Return kernels that belong to another wrapper, GPU or dtype, whatever their machine code."""
    floats = {e.name: {t.removeprefix("*") for t in e.types.values()} & {"fp32", "fp16", "bf16"} for e in stored.entries}
    lacking = stored.row.dtype not in set().union(*floats.values())
    for e in stored.entries:
        if e.host != host or e.kernel not in kernels or e.arch != target(stored.target).arch or floats[e.name] - {"fp32", stored.row.dtype} or lacking:
            yield f"{stored.title}: its {e.kernel} is not of this row; run tools/build.py"


def emitted(rows: list[Stored], jobs: int) -> list[tuple[str, dict[str, str]]]:
    """Run ``texts_of`` for each row, once for rows of one schedule, in several processes if that pays."""
    kinds = [(s.target, s.row.key, s.row.schedule) for s in rows]
    apart = dict(zip(kinds, rows))
    if len(apart) < 32:
        known = dict(zip(apart, map(texts_of, apart.values())))
    else:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            known = dict(zip(apart, pool.map(texts_of, apart.values(), chunksize=8)))
    return [known[kind] for kind in kinds]


def texts_of(stored: Stored) -> tuple[str, dict[str, str]]:
    """Return the digest of the wrapper, and kernel -> digest of its text and of all functions that it calls."""
    _, variant = variant_of(shipped(stored.row.op), stored.row)
    source = emit(scheduled(variant.algorithm, stored.row.schedule), "call", target(stored.target))
    functions = {m[1]: m[0] for m in re.finditer(r"^@(?:triton|gluon)\.jit\ndef (\w+)\((?:.*\n)*?(?=\n\n|\Z)", source, re.MULTILINE)}
    found = {}
    for name in functions:
        called = [name]
        for c in called:
            called += [w for w in dict.fromkeys(re.findall(r"(\w+)(?=[(,)])", functions[c])) if w in functions and w not in called]
        found[name] = digest("".join(functions[c] for c in called).encode())
    return digest(host_text(source).encode()), found


# -- what builds now ----------------------------------------------------------------------------------------------------


def compare(stored: list[Stored], jobs: int, seen: Counts) -> list[str]:
    """Rebuild rows that this version of Triton built; report differences.

    Rows of tools/measure_stored.py are left out: their kernels were built for rows of another table, where they are compared.
    """
    import triton

    built_for = [s for s in stored if (s.row.by or {}).get("command") != "tools/measure_stored.py"]
    ours = [s for s in built_for if all(e.built == triton.__version__ for e in s.entries)]
    seen.compared += sum(len(s.entries) for s in ours)
    seen.other += sum(len(s.entries) for s in built_for) - seen.compared
    wrong = []
    for s, fresh in zip(ours, built_anew(ours, jobs)):
        if [replace(e, code="") for e in fresh] != [replace(e, code="") for e in s.entries]:
            wrong.append(f"{s.title}: its kernels are not what builds now; run tools/build.py")
        else:
            seen.varied += sum(new.code != old.code for new, old in zip(fresh, s.entries))
    return wrong


def built_anew(rows: list[Stored], jobs: int) -> list[list[StoredKernel]]:
    """Rebuild the kernels of each row in several processes."""
    if not rows:
        return []
    with ProcessPoolExecutor(min(jobs, len(rows)), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(build_stored, rows))


def build_stored(stored: Stored) -> list[StoredKernel]:
    """Rebuild the kernels of one row."""
    return build_row(shipped(stored.row.op), stored.row, target(stored.target), stored.widest).entries


if __name__ == "__main__":
    sys.exit(main())
