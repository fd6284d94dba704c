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
import os
import sys
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from pathlib import Path

if __name__ == "__main__":
    from common.require_packages import needs

    needs("build", "torch", "triton", "numpy")  # without Triton every row would fail and lose its kernels

sys.path[:0] = [p for p in (str(Path(__file__).resolve().parent),) if p not in sys.path]

from common.cli_types import DTYPES, Parser, at_least, said, some_of  # noqa: E402

from dtkernels.autoschedule.default_schedule import default_schedule  # noqa: E402
from dtkernels.codegen.target import TARGETS, Target, target  # noqa: E402
from dtkernels.lang.errors import DTError  # noqa: E402
from dtkernels.runtime.select.schedule_selection import gpu_of  # noqa: E402
from dtkernels.runtime.tables.table import TableError, write_gpu, write_rows  # noqa: E402
from dtkernels.tuning.build_kernels import build_tables  # noqa: E402
from dtkernels.tuning.deterministic_build import same_addresses  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, TuningProblem, op_names, operator_of, problems_of, row_of, variants_of  # noqa: E402

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


if __name__ == "__main__":
    sys.exit(main())
