"""How good are default schedules? Programs that nobody tuned, beside eager, torch.compile and torch's own function, if there is one.

    python benchmarks/untuned.py --json out.json                       all of tests/untuned_programs.py, forward and backward
    python benchmarks/untuned.py --only '^att_.*backward' --seconds 60
    python benchmarks/untuned.py --jobs 14                             compiles on all cores first, which is sooner done

Of a backward the training step is timed too: its forward saves what the backward reads, by kernels that no forward case runs.
Cold L2, replays of CUDA graphs in rotated order, every result checked against float64. The first size of each program comes
first, forward and then backward, and further sizes after those: what the seconds allow is measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(p) for p in (ROOT, ROOT / "tools", ROOT / "tests") if str(p) not in sys.path]

import bench  # noqa: E402
from common import timing  # noqa: E402
from common.cli_types import Parser, at_least, file_to_write, pattern, within  # noqa: E402
from sampling.measuring import handled  # noqa: E402
from untuned_calls import DTYPES, Call, Errors, as_tuple, operator, runs  # noqa: E402
from untuned_program import Sizes  # noqa: E402
from untuned_programs import PROGRAMS  # noqa: E402

from dtkernels.lang.errors import error_line  # noqa: E402

Case = tuple[str, Sizes, str, bool]  #: program, sizes, dtype, whether backward


def title(case: Case) -> str:
    name, sizes, dtype, backward = case
    return f"{name}{' backward' if backward else ''} {'x'.join(map(str, sizes.values()))} {dtype}"


def cases(only: re.Pattern) -> list[Case]:
    """Return the cases in whose title ``only`` is found, in the order of measuring."""
    found = []
    for name, program in PROGRAMS.items():
        for i, sizes in enumerate(program.sizes):
            for j, dtype in enumerate(program.dtypes):
                found += [(2 * (i + j > 0) + back, (name, sizes, dtype, bool(back))) for back in range(2 if program.grad else 1)]
    return [case for _, case in sorted(found, key=lambda f: f[0]) if only.search(title(case))]


def checked(call: Call, op) -> dict:
    """Return errors against float64, ours and eager's, and the paths that ran."""
    before = runs(call.name)
    got, truth = call.results(op), call.truth()
    ran = sorted(path for path, count in runs(call.name).items() if count > before.get(path, 0))
    ours, eager = Errors.of(got, truth), Errors.of(call.results(PROGRAMS[call.name].eager), truth)
    found = {"error": ours.norm, "worst": ours.worst, "eager_error": eager.norm, "eager_worst": eager.worst}
    return found | {"wrong": not ours.allowed(eager, call), "path": ran}


def times(call: Call, peers: dict, direction: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return (microseconds by implementation, notes on those that failed or could not be captured). ``direction``: as in ``bench.preparation``."""

    def prepared(fn):
        return bench.preparation(lambda *t: fn(*t, *call.scalars), call.inputs, call.wanted, direction, call.grads)

    return timing.times_by_turns({who: partial(prepared, fn) for who, fn in peers.items()})


def bytes_moved(call: Call) -> int:
    """Count the bytes that must move: each input, output and gradient once, and the rows that are read of a table."""
    program, names = PROGRAMS[call.name], list(PROGRAMS[call.name].inputs)
    with torch.no_grad():
        outputs = call.grads or as_tuple(program.eager(*call.inputs, *call.scalars))
    whole = [t for name, t in zip(names, call.inputs) if program.kinds.get(name) != "table"]
    picked = outputs if len(whole) < len(names) else ()
    return sum(t.numel() * t.element_size() for t in (*whole, *picked, *outputs, *(call.inputs[i] for i in call.wanted)))


def implementations(name: str) -> dict:
    """Return our form of a program and its peers."""
    program = PROGRAMS[name]
    peers = {"dtkernels": operator(name), "eager": program.eager, "compile": torch.compile(program.eager, dynamic=False)}
    return peers | ({"library": program.library} if program.library else {})


def make_preparer(index: int):
    """Make the handler of a process that compiles a case, for a later process of this machine. It times and checks nothing."""
    torch._functorch.config.donated_buffer = False

    def prepare(name: str, sizes: Sizes, dtype: str, backward: bool) -> None:
        call = Call.of(name, sizes, DTYPES[dtype], backward, "cuda")
        for who, fn in implementations(name).items():
            if who in ("dtkernels", "compile"):
                with contextlib.suppress(Exception):
                    call.results(fn)
                torch.cuda.synchronize()
        torch._dynamo.reset()
        torch.cuda.empty_cache()

    return lambda case: prepare(*case)


def measure(case: Case) -> dict:
    """Measure one case: errors, times, and how near to the time of a copy or of torch's largest products ours comes."""
    name, sizes, dtype, backward = case
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    program, peers = PROGRAMS[name], implementations(name)
    call = Call.of(name, sizes, DTYPES[dtype], backward, "cuda")
    found = checked(call, peers["dtkernels"])
    torch.cuda.empty_cache()
    us, notes = times(call, peers, "backward" if backward else "forward")
    step = times(call, peers, "training")[0] if backward else {}
    flops, size = program.products(sizes) * (program.backward if backward else 1), bytes_moved(call)
    copy = timing.copy_time(size)
    limit = max(copy, flops / timing.product_rate(DTYPES[dtype]) * 1e6) if flops else copy
    found |= notes | {"us": us, "bytes": size, "flops": flops, "copy_us": copy}
    if "dtkernels" not in us:
        return found | {"failed": notes["dtkernels_note"]}
    ours = us["dtkernels"]
    found |= {"fraction": limit / ours, "tflops": flops / ours / 1e6, "tbs": size / ours / 1e6} | _ratio("ratio", us)
    return found | ({"step_us": step} | _ratio("step_ratio", step) if step else {})


def _ratio(name: str, us: dict[str, float]) -> dict[str, float]:
    """Return the time of the fastest other implementation over ours, if both were timed."""
    rest = [t for who, t in us.items() if who != "dtkernels"]
    return {name: min(rest) / us["dtkernels"]} if rest and "dtkernels" in us else {}


def line(case: Case, found: dict) -> str:
    if "failed" in found:
        return f"{title(case):52} FAILED {found['failed']}"
    us = found["us"]
    peers = " ".join(f"{who} {t:.1f}" for who, t in us.items() if who != "dtkernels")
    rate = f"{found['tflops']:.0f} TF/s" if found["flops"] else f"{found['tbs']:.2f} TB/s"
    said = ["WRONG"] if found["wrong"] else []
    said += [f"step ours {found['step_us']['dtkernels']:.1f} ratio {found['step_ratio']:.2f}"] if "step_ratio" in found else []
    said += [] if found["path"] == ["gpu"] else [f"path {found['path']}"]
    said += [f"{k}: {v}" for k, v in found.items() if k.endswith("_note")]
    return (f"{title(case):52} ours {us['dtkernels']:8.1f} {peers:42} ratio {found.get('ratio', math.nan):5.2f} of limit {found['fraction']:.2f} {rate:>9}"
            f"  error {found['error']:.1e} (eager {found['eager_error']:.1e}) worst {found['worst']:.1e} ({found['eager_worst']:.1e}) {' '.join(said)}").rstrip()  # fmt: skip


def summary(found: dict[str, dict], asked: int) -> str:
    """Sum up: how many were measured, failed and were wrong; the geometric mean of the best peer's time over ours, and the slowest."""
    failed, wrong = (sum(bool(r.get(k)) for r in found.values()) for k in ("failed", "wrong"))
    said = f"{len(found)} of {asked} cases; failed {failed}, wrong {wrong}"
    for what, ratio in (("geometric mean of best peer / ours", "ratio"), ("the same of training steps", "step_ratio")):
        if ratios := {name: r[ratio] for name, r in found.items() if ratio in r}:
            slowest = ", ".join(f"{name} {r:.2f}" for name, r in sorted(ratios.items(), key=lambda r: r[1])[:12])
            said += f"\n{what}: {math.exp(statistics.fmean(map(math.log, ratios.values()))):.2f}; slowest: {slowest}"
    return said


def measure_all(todo: list[Case], seconds: float, json_file: Path | None) -> dict[str, dict]:
    """Measure what the seconds allow, printed and written after each case. One that fails stops no other, unless no more can run on the GPU."""
    found: dict[str, dict] = {}
    start = time.monotonic()
    for case in todo:
        if time.monotonic() - start > seconds:
            print(f"untuned: out of time before {title(case)}", file=sys.stderr)
            break
        broken = False
        try:
            found[title(case)] = measure(case)
        except Exception as problem:
            found[title(case)] = {"failed": error_line(problem, 300)}
            broken = isinstance(problem, torch.AcceleratorError)
        print(line(case, found[title(case)]), flush=True)
        if json_file:
            json_file.write_text(json.dumps({**bench.versions(), "cases": found}, separators=(",", ":")) + "\n")
        if broken:
            print(f"untuned: the GPU takes no more work from this process after {title(case)}", file=sys.stderr)
            break
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser("untuned", __doc__)
    parser.add_argument("--json", type=file_to_write, help="write every figure here, after each case")
    parser.add_argument("--only", type=pattern, default=re.compile(""), metavar="REGEX", help="is looked for in titles as they are printed")
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help="compile all cases on so many processes before timing")
    parser.add_argument("--seconds", type=within(0), default=math.inf, help="start no further case after so long")
    options = parser.parse_args(argv)
    if not (todo := cases(options.only)):
        parser.error(f"--only: no case has {options.only.pattern!r} in its title; allowed: {', '.join(PROGRAMS)}")
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is False")
    torch._functorch.config.donated_buffer = False  # its graphs are run backward more than once
    if options.jobs:
        handled([(title(case), case) for case in todo], options.jobs, options.seconds / 2, make_preparer)
    found = measure_all(todo, options.seconds, options.json)
    print(summary(found, len(todo)))
    return 1 if any(r.get("failed") or r.get("wrong") for r in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
