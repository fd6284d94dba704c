"""Write a table's stored measurements as one self-contained HTML page, and its pictures as PNGs. Needs no GPU.

The page begins with a table to search and sort: each measured call with its best peer. Pictures of all schedules follow.

python tools/report.py                                              every table under schedule_tables/
python tools/report.py schedule_tables/nvidia_h200 --bench benchmarks/h200.json --out report/
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(p) for p in (ROOT / "tools", ROOT) if str(p) not in sys.path]

from common.cli_types import DTYPES, Parser, said, some_of  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = Parser("report", __doc__)
    parser.add_argument("tables", nargs="*", type=Path, help="folders with measurements.safetensors; default: all under schedule_tables/")
    parser.add_argument(
        "--bench", action="append", type=Path, metavar="JSON", help="peers, from tools/bench.py; may be repeated; default: those of benchmarks/ of that GPU"
    )
    parser.add_argument("--dtypes", type=some_of(DTYPES), default=DTYPES, help=f"which to show, comma-separated: {', '.join(DTYPES)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: docs/report/<table>")
    options = parser.parse_args(argv)
    tables = options.tables or sorted(p.parent for p in (ROOT / "schedule_tables").glob("*/measurements.safetensors"))
    if not tables:
        print("report: no measurements.safetensors under schedule_tables/; python tools/tune.py makes one", file=sys.stderr)
        return 2
    try:
        from reporting import drawing  # noqa: F401 (whether matplotlib is there)
    except ImportError as error:
        print(f"report: {error}; pip install 'dtkernels[report]'", file=sys.stderr)
        return 2
    from reporting.benchmark_runs import measured_on
    from reporting.study import read

    from dtkernels.runtime.tables.table import read_gpu

    for table in tables:
        try:
            benches = measured_on(read_gpu(table).name, ROOT / "benchmarks") if options.bench is None else options.bench
            study = read(table, benches)
        except (OSError, ValueError) as error:
            print(f"report: {said(error)}", file=sys.stderr)
            return 2
        except (LookupError, TypeError, AttributeError) as error:  # measurements in another format
            print(f"report: {table}: {type(error).__name__}: {said(error)}", file=sys.stderr)
            return 2
        study.show(options.dtypes)
        out = options.out or ROOT / "docs" / "report" / table.name
        if not study.kinds:
            print(f"report: {table}: nothing was measured for {', '.join(options.dtypes)}", file=sys.stderr)
            return 2
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"report: --out {out}: {error.strerror}", file=sys.stderr)
            return 2
        _write(study, table, benches, out)
    return 0


def _write(study, table: Path, benches: list[Path], out: Path) -> None:
    """Draw the pictures and the page of one table into ``out``."""
    from reporting import drawing
    from reporting.page import page

    general = [drawing.roofline(study), drawing.regret(study)]
    of_kind = {
        i: drawing.distribution(k, k.title().replace(" ", "-").replace("(", "").replace(")", "").replace("=", "-"))
        for i, k in enumerate(study.kinds)
    }
    by_op = {op: [k for k in study.kinds if k.group.op == op] for op in dict.fromkeys(k.group.op for k in study.kinds)}
    maps = {op: drawn for op, kinds in by_op.items() if (drawn := drawing.coverage(kinds, op)) is not None}
    for drawn in (*general, *of_kind.values(), *maps.values()):
        drawn.write(out)
    command = "python tools/report.py " + " ".join(
        map(str, (_short(table), *(x for b in benches for x in ("--bench", _short(b)))))
    )
    (out / "index.html").write_text(page(study, general, of_kind, maps, command))
    print(f"{out / 'index.html'}: {len(study.kinds)} kinds of calls, {sum(len(k.sizes) for k in study.kinds)} sizes")
    for op, regret in study.regrets(True).items():
        print(f"  regret of what a call of {op} runs, sizes held out: {regret}")


def _short(path: Path) -> Path:
    full = path.resolve()
    return full.relative_to(ROOT) if full.is_relative_to(ROOT) else Path(path.name)


if __name__ == "__main__":
    sys.exit(main())
