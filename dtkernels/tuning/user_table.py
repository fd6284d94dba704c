"""Tune for this machine: a table in the user's folder, its kernels, and a file to share. ``python -m dtkernels tune``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from ..runtime.folders import user_folder

SIZES = 10  #: of an op


def tune_user_table(minutes: float, ops: str, more: list[str]) -> int:
    """Tune ``ops`` at ten sizes each for ``minutes``, into the user's folder. Returns the exit status.

    ``more``: further options of tools/tune.py.
    """
    if missing := [p for p in ("numpy", "triton") if find_spec(p) is None]:
        print(f"dtkernels: tune: not installed: {', '.join(missing)}; pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    from ..runtime.tables.table import TableError
    from .shared_table import write_shared
    from .tune import Run, arguments

    rehearsed = "--dry-run" in more
    tables = user_folder() / ("dry_run" if rehearsed else "tables")
    try:
        tables.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"dtkernels: tune: {error.filename}: {error.strerror}; DTKERNELS_USER names another folder", file=sys.stderr)
        return 2
    run = Run(arguments(["--ops", ops, "--budget", f"{minutes * 60:g}", "--sizes", str(SIZES), "--tables", str(tables), *more]))
    status = run.go()
    if rehearsed:
        print(f"estimates, which no call takes: {run.out}")
        return status
    try:
        file = write_shared(run.out, Path(user_folder() / "shared" / f"{run.gpu.folder}.zip"))
    except (OSError, TableError) as error:
        print(f"dtkernels: tune: nothing to share: {error}", file=sys.stderr)
        return status or 1
    print(f"calls take these rows from now on: {run.out}")
    print(f"to share them (rows and measurements, no code): {file}; tools/merge_table.py takes it in")
    return status
