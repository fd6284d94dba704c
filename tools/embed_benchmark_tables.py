"""Write tables of measured figures into a page, from the raw output of tools/bench.py.

    python tools/embed_benchmark_tables.py docs/benchmarks.md            rewrite every marked table of the page
    python tools/embed_benchmark_tables.py docs/benchmarks.md --check    exit with 1 if a table differs from its files

A table stands between ``<!-- figures: [extremes] FILE.json ... [only REGEX] -->`` and ``<!-- /figures -->``. File names are relative
to the root of the project; REGEX is matched against "op shape direction". Figures of a later file replace those of an earlier one.
``extremes`` keeps the best, the median and the worst speedup of each family of ops.
"""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

from common.cli_types import Parser, read_figures, read_text, said

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"(<!-- figures: ([^>]+?) -->\n).*?(<!-- /figures -->)", re.DOTALL)
OURS = "dtkernels"
REFERENCES = ("bare-product",)  #: do less work than the op: not peers
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


#: family -> its ops
FAMILIES = {"rows": ("relu", "softmax", "dyt"), "products": ("mmsigmoid", "two_mm"), "attention": ("attention",)}


def table(paths: list[Path], only: str = "", folder: Path = ROOT) -> str:
    """Return a Markdown table: op, shape, our time, the best peer's, the ratio and all others; then the sources.

    Links are relative to ``folder``.

    If several files time the same call, the last one counts: it was measured again, or with more peers.
    """
    lines = ["| op | shape | dtkernels, us | best peer, us | speedup | others, us |", "|---|---|---|---|---|---|"]
    lines += [_line(*key, times) for key, times in _groups(paths, only).items() if OURS in times]
    return "\n".join([*lines, "", *(_source(path, read_figures(path, ("gpu", "command")), folder) for path in paths)]) + "\n"


def extremes(paths: list[Path], only: str = "", folder: Path = ROOT) -> str:
    """Return a Markdown table of each family's sizes with the largest, median and smallest speedup over the best peer."""
    lines = ["| family | of | | op | shape | dtkernels, us | best peer, us | speedup |", "|---|---|---|---|---|---|---|---|"]
    groups = _groups(paths, only)
    for family, ops in FAMILIES.items():
        found = []
        for (name, shape, dtype), times in groups.items():
            peers = [t for who, t in times.items() if who not in (OURS, *REFERENCES)]
            if OURS in times and peers and name.split(",")[0] in ops:
                found.append((min(peers) / times[OURS], name, shape, dtype, times))
        found.sort(key=lambda one: one[:4], reverse=True)
        picked = (("best", found[0]), ("median", found[len(found) // 2]), ("worst", found[-1])) if found else ()
        lines += [f"| {family} | {len(found)} | {place} {_line(*one[1:]).rpartition(' | ')[0]} |" for place, one in picked]
    return "\n".join(lines) + "\n"


def _groups(paths: list[Path], only: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return (op and direction, shape, dtype) -> implementation -> microseconds."""
    groups: dict[tuple[str, str, str], dict[str, float]] = {}
    for path in paths:
        for f in read_figures(path, ("gpu", "command"))["figures"]:
            time, way = f["microseconds"], f.get("direction", "forward")
            if time is not None and math.isfinite(time) and re.search(only, f"{f['op']} {f['shape']} {way}"):
                name = f["op"] if way == "forward" else f"{f['op']}, {'forward and backward' if way == 'both' else way}"
                groups.setdefault((name, f["shape"], f["dtype"]), {})[f["who"]] = time
    return groups


def _line(op: str, shape: str, dtype: str, times: dict[str, float]) -> str:
    ours = times[OURS]
    peers = sorted((t, who) for who, t in times.items() if who not in (OURS, *REFERENCES))
    name = f"{shape} {DTYPES.get(dtype, dtype)}"
    if not peers:
        return f"| {op} | {name} | {_us(ours)} | | | |"
    others = ", ".join(f"{who} {_us(t)}" for t, who in peers[1:])
    return f"| {op} | {name} | {_us(ours)} | {peers[0][1]} {_us(peers[0][0])} | {peers[0][0] / ours:.2f} | {others} |"


def _us(time: float) -> str:
    return f"{time:.0f}" if time >= 1000 else f"{time:.1f}"


def _source(path: Path, data: dict, folder: Path) -> str:
    versions = ", ".join(f"{name} {data[name]}" for name in ("torch", "triton", "dtkernels") if name in data)
    command = re.sub(r"/\S+/(\S+\.json)", r"\1", data["command"])
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return f"- One {data['gpu']}, {versions}: `python {command}`; raw output in [{where}]({os.path.relpath(path, folder)})."


def filled(text: str, folder: Path = ROOT) -> str:
    """Return the page with every marked table rewritten. Raises FileNotFoundError, ValueError."""

    def one(m: re.Match) -> str:
        listed, _, only = m[2].partition(" only ")
        names = listed.split()
        make = extremes if names[0] == "extremes" else table
        return m[1] + make([ROOT / name for name in names if name != "extremes"], only, folder) + m[3]

    found, count = MARK.subn(one, text)
    if not count:
        raise ValueError("the page has no <!-- figures: FILE.json --> ... <!-- /figures --> in it")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser("embed_benchmark_tables", __doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a table is not what its files say")
    options = parser.parse_args(argv)
    try:
        before = read_text(options.page)
        after = filled(before, options.page.resolve().parent)
    except re.error as error:
        print(f"embed_benchmark_tables: {options.page}: after `only` stands no regular expression: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"embed_benchmark_tables: {said(error)}", file=sys.stderr)
        return 2
    if options.check:
        if after != before:
            print(f"embed_benchmark_tables: {options.page} is not what its files say; python tools/embed_benchmark_tables.py {options.page}", file=sys.stderr)
        return int(after != before)
    try:
        options.page.write_text(after)
    except OSError as error:
        print(f"embed_benchmark_tables: {said(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
