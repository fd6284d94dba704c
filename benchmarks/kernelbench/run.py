"""Run KernelBench's problems, each from its mathematics in DT alone: no schedule is written by hand.

    python benchmarks/kernelbench/run.py --level 1 --dtype fp32,bf16 --json out.json       on a GPU: checked, timed, fast_p
    python benchmarks/kernelbench/run.py --only softmax --peers eager,compile,compile-max
    python benchmarks/kernelbench/run.py --jobs 14                                         compiles on all cores first, which is sooner done
    python benchmarks/kernelbench/run.py --check                                           without a GPU
    python benchmarks/kernelbench/run.py --check kernels --only 'conv' --backward --gpu h200

On a GPU results are compared with torch's own on five random inputs, within 1e-4 (float32) or 1e-2 (bfloat16), absolute and relative,
as the suite does, and with float64, which decides where the two differ. Convolutions take no TF32, as products do not. Times are medians of CUDA-graph replays with a cold L2.

--check runs small sizes in Triton's interpreter against float64 (values), and compiles every kernel of the default schedules at the
published sizes (kernels); it says which are refused, fail to compile, spill, or take more shared memory than there is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(p) for p in (ROOT, ROOT / "tools", ROOT / "benchmarks", Path(__file__).resolve().parent) if str(p) not in sys.path]

import check  # noqa: E402
import measure  # noqa: E402
from common.cli_types import Parser, at_least, file_to_write, pattern, some_of, within  # noqa: E402
from problem import DTYPES, levels, not_said, problems  # noqa: E402
from sampling.measuring import handled  # noqa: E402

from dtkernels.codegen.target import TARGETS  # noqa: E402
from dtkernels.lang.errors import error_line  # noqa: E402


def names(options: argparse.Namespace) -> list[tuple[int, str]]:
    """Return the problems asked for, as (level, name)."""
    asked = [(int(level), name) for level in options.level for name in problems(int(level))]
    return [(level, name) for level, name in asked if options.only.search(f"{level}/{name}")]


def check_values(todo: list[tuple[int, str]]) -> int:
    """Print what small sizes give; return how many are wrong."""
    failed = 0
    for level, name in todo:
        try:
            wrong = check.check_values(level, name)
        except Exception as error:
            wrong = error_line(error, 300)
        failed += bool(wrong)
        print(f"{level}/{name:46} {wrong or 'right'}", flush=True)
    print(f"{len(todo)} problems at small sizes: {failed} wrong")
    return failed


def check_kernels(todo: list[measure.Case], gpu: str) -> int:
    """Print what the default schedules at the published sizes are; return how many cannot run."""
    failed = long = 0
    for case in todo:
        found = check.check_schedule(case.level, case.name, case.dtype, TARGETS[gpu], backward=case.backward)
        failed, long = failed + bool(found.wrong), long + found.long
        print(f"{str(case):58} {found}", flush=True)
    print(f"{len(todo)} cases for {gpu}: {failed} cannot run or spill; {long} are predicted to take more than {100 / check.LONG:.1f} times their limit")
    return failed


def check_all(options: argparse.Namespace) -> int:
    """Check values in a process with Triton's interpreter, and kernels in one without. Returns the exit status."""
    todo = names(options)
    failed = 0
    if options.check == "all":
        command = [sys.executable, __file__, "--check", "values", "--level", ",".join(options.level), "--only", options.only.pattern]
        failed = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    if options.check == "values":
        failed = check_values(todo)
    if options.check in ("all", "kernels"):
        failed += check_kernels(cases(options), options.gpu)
    return min(failed, 1)


def measure_all(todo: list[measure.Case], options: argparse.Namespace) -> dict[str, dict]:
    """Measure what the seconds allow; print and write after each case. A case that fails stops no other, unless the GPU takes no more work."""
    found: dict[str, dict] = {}
    start = time.monotonic()
    for case in todo:
        if time.monotonic() - start > options.seconds:
            print(f"kernelbench: out of time before {case}", file=sys.stderr)
            break
        broken = False
        try:
            found[str(case)] = measure.measure(case, options.peers)
        except Exception as error:
            found[str(case)] = {"failed": error_line(error, 300)}
            broken = isinstance(error, torch.AcceleratorError)
        print(measure.line(case, found[str(case)]), flush=True)
        if options.json:
            options.json.write_text(json.dumps({**measure.bench.versions(), "cases": found}, separators=(",", ":")) + "\n")
        if broken:
            print(f"kernelbench: the GPU takes no more work from this process after {case}", file=sys.stderr)
            break
    return found


def cases(options: argparse.Namespace) -> list[measure.Case]:
    """Return the cases asked for, in the order of measuring."""
    every = [measure.Case(level, name, dtype, back) for dtype in options.dtype for level, name in names(options) for back in (False, True)[: 1 + options.backward]]
    return [c for c in every if not c.backward or c.problem.differentiated()]


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line. Exits with one line where it is wrong."""
    parser = Parser("kernelbench", __doc__)
    there = tuple(map(str, levels()))
    parser.add_argument("--level", type=some_of(there), default=there, help=f"of {', '.join(there)}, separated by commas")
    parser.add_argument("--only", type=pattern, default=re.compile(""), metavar="REGEX", help="is looked for in names such as 1/019_relu")
    parser.add_argument("--dtype", type=some_of(DTYPES), default=("fp32",), help="fp32, bf16, separated by commas")
    parser.add_argument("--backward", action="store_true", help="also forward and backward together")
    parser.add_argument("--peers", type=some_of(measure.PEERS), default=("eager", "compile"), help=f"of {', '.join(measure.PEERS)}")
    parser.add_argument("--seconds", type=within(0), default=math.inf, help="start no further case after so long")
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help="compile all cases on so many processes before timing, in at most half of the seconds")
    parser.add_argument("--json", type=file_to_write, help="write every figure here, after each case")
    parser.add_argument("--check", nargs="?", const="all", choices=("all", "values", "kernels"), help="check without a GPU")
    parser.add_argument("--gpu", choices=tuple(TARGETS), default="h200", help="the GPU that --check compiles for")
    options = parser.parse_args(argv)
    if not names(options):
        parser.error(f"--only: no problem has {options.only.pattern!r} in its name")
    if options.check == "values" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--check values runs Triton's interpreter: set TRITON_INTERPRET=1")
    if options.check in ("all", "kernels") and os.environ.get("TRITON_INTERPRET") == "1":
        parser.error(f"--check {options.check} compiles kernels: unset TRITON_INTERPRET")
    if not options.check and not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is False; --check needs none")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns 1 where anything failed or is wrong."""
    options = parsed(argv)
    for level in options.level:
        for name, why in not_said(int(level)).items():
            print(f"{level}/{name:46} not said: {why}")
    if options.check:
        return check_all(options)
    torch._functorch.config.donated_buffer = False  # its graphs are run backward more than once
    todo = cases(options)
    start = time.monotonic()
    if options.jobs:
        handled([(str(case), case) for case in todo], options.jobs, options.seconds / 2, measure.make_preparer, options.peers)
    options.seconds -= time.monotonic() - start
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # float32 is float32, in convolutions as in products
        found = measure_all(todo, options)
    print(measure.summary(found, options.peers, len(todo)))
    return 1 if any(r.get("failed") or r.get("wrong") for r in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
