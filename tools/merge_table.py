"""Merge a table that somebody shared: its rows and measurements are checked, its kernels are built here.

    python tools/merge_table.py nvidia_h100.zip                  into the package's tables
    python tools/merge_table.py nvidia_h100.zip --tables mine    into a folder of tables; --no-build leaves the kernels to tools/build.py

A shared file carries rows and measurements, never code; `python -m dtkernels tune` writes one. Rows of another version of a spec, rows
that are not legal and rows that nobody measured are left out and named. Of two rows for one call the faster stays.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [p for p in (str(Path(__file__).resolve().parent),) if p not in sys.path]

if __name__ == "__main__":
    from common.require_packages import needs

    needs("merge_table", "torch", "triton", "numpy")

from common.cli_types import Parser, at_least, said  # noqa: E402

from dtkernels.runtime.select.table_loader import package_tables  # noqa: E402
from dtkernels.tuning.build_kernels import build_tables  # noqa: E402
from dtkernels.tuning.deterministic_build import same_addresses  # noqa: E402
from dtkernels.tuning.shared_table import merged, unpacked  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = Parser("merge_table", __doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tables", type=Path, default=package_tables(), metavar="DIR")
    parser.add_argument("--no-build", action="store_true", help="build no kernels")
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count() or 1, help="processes that compile; default: one per core")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as there:
            gpu = unpacked(args.file, Path(there))
            folder = args.tables / gpu.folder
            taken, left_out = merged(Path(there), gpu, folder)
    except (OSError, ValueError) as error:
        raise SystemExit(f"merge_table: {said(error)}") from None
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    print(f"{sum(taken.values())} rows taken into {folder}: {', '.join(f'{n} of {op}' for op, n in taken.items()) or 'none'}; {len(left_out)} left out")
    if not taken or args.no_build:
        return 0
    same_addresses()
    failures = build_tables([folder], {op: op for op in taken}, args.jobs)
    for line in failures:
        print(f"not built: {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
