"""How good is ours at the sizes that other projects publish their figures for? The sweeps of Liger, Helion and TritonBench.

    python benchmarks/sweeps.py --jobs 14 --seconds 540 --json sweeps.json     forward and backward beside eager, compile and Liger
    python benchmarks/sweeps.py --resume sweeps.json --json sweeps.json         the cases that the run before did not reach
    python benchmarks/sweeps.py --only 'Helion softmax' --directions forward
    python benchmarks/sweeps.py --list                                          the sizes and their sources; needs no GPU

Sizes are taken in turns from all sweeps: both ends of each, the middle, the quarters, then what lies between. A run that ends early has seen
every sweep over its whole range. The same order holds for compiling, which has a part of the time. Cold L2, replays of CUDA graphs in rotated
order, every result of ours checked against float64. A size runs in a process of its own. The dtype is the source's; where the source leaves it
to an option, bfloat16. Helion's tuned kernels are a peer where helion is installed and HELION_PRETUNED_KERNELS names the folder pretuned_kernels
of its repository. Exit status 1: ours was wrong or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

from common.cli_types import Parser, at_least, file_to_write, pattern, read_text, some_of, within  # noqa: E402
from sampling import ratios  # noqa: E402

DIRECTIONS = ("forward", "backward")
PEERS = ("eager", "compile", "compile-max", "liger", "helion", "sdpa", "cudnn", "fa2", "flex")
USUAL = ("eager", "compile", "liger", "helion", "sdpa", "cudnn")
GRACE = 20.0  #: seconds that a size may take beyond the end
COMPILING = 0.35  #: the most of the time that goes to compiling before the first size is timed: with 15 processes 700 cases took 160 s, and 42 to time 100

# -- the sizes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """One op's sizes in one project, in its order. ``source``: where they stand; ``note``: what differs from what the project times."""

    suite: str
    op: str
    dtype: str
    shapes: tuple[str, ...]
    source: str
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One size in one direction, and the sweeps that have it."""

    op: str
    shape: str
    dtype: str
    direction: str
    suites: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{'+'.join(self.suites)} {self.op} {self.direction} {self.shape} {self.dtype}"


def by(rows: int, columns: list[int]) -> tuple[str, ...]:
    """Return shapes of so many rows."""
    return tuple(f"{rows}x{n}" for n in columns)


def _powers(first: int, last: int) -> list[int]:
    return [2**i for i in range(first, last + 1)]


HELION_ROWS = "2048x48 2048x96 2048x127 2048x768 2048x1023 2048x1536 2048x2047 2048x3072 2048x5120 2048x6144 4096x3584 4096x4096 4096x5120 4096x7168 4096x8192 4096x12288"
HELION_MORE_ROWS = "8192x4096 8192x8192 16384x4096 16384x8192 145956x384 380668x512 589824x256 1179648x256"
HELION_CLASSES = ((32000, (2048, 4096, 8192)), (128000, (8192, 16384, 32768)), (128256, (2048, 4096, 8192, 16384)), (129280, (2048, 4096, 8192)),
                  (151936, (2048, 4096, 8192)), (152064, (2048, 4096, 8192)), (256000, (1024, 2048)))  # fmt: skip
ROPE = tuple(f"B1H32/8S{s}D256" for s in _powers(10, 14)) + ("B1H32/8S2048D16", "B1H32/8S2048D64")
GATED = tuple(f"{4 * s}x11008" for s in _powers(10, 13))
LIGER, HELION, TRITONBENCH = "Liger", "Helion", "TritonBench"
DATA, PRETUNED, OPERATORS = "benchmark/data/all_benchmark_data.csv", "pretuned_kernels/{0}/{0}.py", "tritonbench/operators/{0}/operator.py"
GATE_ONLY = "the project times a layer with its three products; here the gate alone, on what those products give"

SWEEPS = (
    Sweep(LIGER, "softmax", "fp32", by(2048, _powers(7, 12)), DATA),
    Sweep(LIGER, "softmax", "bf16", by(2048, _powers(7, 12)), DATA),
    Sweep(LIGER, "layernorm", "fp32", by(4096, _powers(10, 14)), DATA),
    Sweep(LIGER, "rmsnorm", "bf16", by(2048, _powers(10, 15)), DATA),
    Sweep(LIGER, "dyt", "bf16", tuple(f"{n}x4096" for n in _powers(10, 14)), "benchmark/scripts/benchmark_dyt.py", "its sweep of tokens at the hidden size of Llama 3 8B"),
    Sweep(LIGER, "cross_entropy", "bf16", by(8 * 2048, _powers(12, 17)), DATA, "the project times float32"),
    Sweep(LIGER, "swiglu", "bf16", GATED, DATA, GATE_ONLY),
    Sweep(LIGER, "geglu", "bf16", tuple(f"{8 * s}x11008" for s in _powers(10, 13)), DATA, GATE_ONLY),
    Sweep(LIGER, "rope", "bf16", ROPE, DATA),
    Sweep(HELION, "softmax", "fp16", (*by(4096, [128 * i for i in range(2, 100)]), "4096x16384", "2048x32768"), PRETUNED.format("softmax")),
    Sweep(HELION, "layernorm", "fp16", (*by(4096, [512 * i for i in range(2, 32)]),
          *"2048x3584 8192x4096 8192x5120 8192x7168 2048x8192 4096x16384 1024x36864 1152x36864".split()), PRETUNED.format("layer_norm")),
    Sweep(HELION, "rmsnorm", "bf16", (*by(2048, _powers(10, 15)), *HELION_ROWS.split(), *HELION_MORE_ROWS.split()), PRETUNED.format("rms_norm")),
    Sweep(HELION, "cross_entropy", "bf16", tuple(f"{n}x{v}" for v, rows in HELION_CLASSES for n in rows), PRETUNED.format("cross_entropy"),
          "the project gives each row's loss, here their mean"),
    Sweep(HELION, "rope", "bf16", ROPE, PRETUNED.format("rope")),
    Sweep(TRITONBENCH, "softmax", "bf16", by(4096, [128 * i for i in range(2, 100)]), OPERATORS.format("softmax")),
    Sweep(TRITONBENCH, "layernorm", "bf16", by(4096, [512 * i for i in range(2, 32)]), OPERATORS.format("layer_norm")),
    Sweep(TRITONBENCH, "rmsnorm", "bf16", by(2048, _powers(10, 15)), OPERATORS.format("rms_norm")),
    Sweep(TRITONBENCH, "cross_entropy", "bf16", by(8 * 2048, _powers(12, 17)), OPERATORS.format("cross_entropy")),
    Sweep(TRITONBENCH, "rope", "bf16", ROPE, OPERATORS.format("rope")),
    Sweep(TRITONBENCH, "swiglu", "bf16", GATED, OPERATORS.format("swiglu"), GATE_ONLY),
    Sweep(TRITONBENCH, "attention", "bf16", tuple(f"B4H48M{s}S{s}D64" for s in _powers(7, 14)), OPERATORS.format("flash_attention")),
)  # fmt: skip


def coarse_first(shapes: tuple[str, ...]) -> list[str]:
    """Return both ends, the middle, the quarters and so on: each part of the list shows the whole range."""
    found, step = dict.fromkeys((shapes[0], shapes[-1])), len(shapes) - 1
    while step > 1:
        step = -(-step // 2)
        found |= dict.fromkeys(shapes[::step])
    return [*(found | dict.fromkeys(shapes))]


def cases(only: re.Pattern, directions: tuple[str, ...]) -> list[Case]:
    """Return the cases whose title ``only`` is found in, each once, in the order of measuring."""
    suites: dict[tuple[str, str, str], dict[str, None]] = {}
    for s in SWEEPS:
        for shape in s.shapes:
            suites.setdefault((s.op, shape, s.dtype), {})[s.suite] = None
    turns = [[(s.op, shape, s.dtype) for shape in coarse_first(s.shapes)] for s in SWEEPS]
    order = dict.fromkeys(turn[i] for i in range(max(map(len, turns))) for turn in turns if i < len(turn))
    found = (Case(*key, direction, tuple(suites[key])) for key in order for direction in directions)  # type: ignore[arg-type]
    return [case for case in found if only.search(case.title)]


def case_of(found: dict) -> Case:
    """Return the case that was measured."""
    return Case(found["op"], found["shape"], found["dtype"], found["direction"], tuple(found["suites"]))


def earlier(text: str) -> list[dict]:
    """Accept a file of --json; return what was measured, without the sizes for which there was no time or memory."""
    try:
        found = [one for one in json.loads(read_text(Path(text)))["sizes"] if "skipped" not in one]
        [case_of(one) for one in found]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise argparse.ArgumentTypeError(f"{text}: not written by sweeps.py --json: {type(problem).__name__}: {problem}") from None
    return found


def listed(found: list[Case]) -> str:
    """Format the sweeps with their sources, then the cases."""
    lines = [f"{s.suite} {s.op} {s.dtype}: {len(s.shapes)} sizes, {s.source}{f' ({s.note})' if s.note else ''}" for s in SWEEPS]
    return "\n".join([*lines, "", *(case.title for case in found), f"{len(found)} cases"])


# -- measuring ----------------------------------------------------------------------------------------------------------


class Run:
    """Measure cases until the time is over. ``bench``: measures one (measuring.Bench); ``known``: what an earlier run found."""

    def __init__(self, options: argparse.Namespace, todo: list[Case], about: dict, bench, known: list[dict] | None = None):
        self.options, self.about, self.bench = options, about, bench
        self.begin, self.found = time.monotonic(), list(known or [])
        seen = {case_of(one) for one in self.found}
        self.todo = [case for case in todo if case not in seen]

    def go(self) -> None:
        """Compile what fits a part of the time, then measure in the same order."""
        until = self.begin + self.options.seconds
        if self.options.jobs:
            sizes = [(case.op, case.shape, case.dtype, case.direction) for case in self.todo]
            done = self.bench.prepare(sizes, self.options.jobs, COMPILING * self.options.seconds)
            print(f"compiled {done} of {len(sizes)} cases before timing, {time.monotonic() - self.begin:.0f} s", flush=True)
        for one in self._measured(until):
            self._take(one)

    def _measured(self, until: float) -> Iterator[dict]:
        for i, case in enumerate(self.todo):
            if time.monotonic() >= until:
                print(f"sweeps: out of time before {len(self.todo) - i} of {len(self.todo)} cases; --resume goes on", file=sys.stderr)
                return
            try:
                found = self.bench.measure(case.op, case.shape, case.dtype, case.direction, until + GRACE - time.monotonic())
            except Exception as problem:  # in measuring, not in ours
                found = {"us": {}, "errors": {}, "notes": {}, "skipped": f"{type(problem).__name__}: {problem}"}
            about = {"op": case.op, "direction": case.direction, "shape": case.shape, "stratum": f"{'+'.join(case.suites)} {case.dtype}"}
            yield {**about, "dtype": case.dtype, "suites": case.suites, **ratios.compared(found)}

    def _take(self, found: dict) -> None:
        self.found.append(found)
        print(ratios.line(found), flush=True)
        if self.options.json:
            self.options.json.write_text(json.dumps({**self.about, "sizes": self.found}, separators=(",", ":"), default=str) + "\n")

    def text(self) -> str:
        """Format each suite's mean ratio by op and direction, then the report over all."""
        cells: dict[tuple[str, str, str], list[float]] = {}
        for one in self.found:
            for suite in one["suites"] if "ratio" in one else ():
                cells.setdefault((suite, one["op"], one["direction"]), []).append(one["ratio"])
        lines = [f"{suite:12} {op:14} {direction:9}{ratios.Ratios.of(found)}" for (suite, op, direction), found in sorted(cells.items())]
        return "\n".join([f"{len(self.found)} cases; fastest peer / ours:", *lines, "", ratios.report(self.found) if self.found else ""])


def stop(*_: object) -> None:
    """End the run as by Ctrl-C, once: ``timeout`` sends its signal to the process and to its group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run the sweeps."""
    parser = Parser("sweeps", __doc__)
    parser.add_argument("--only", type=pattern, default=re.compile(""), metavar="REGEX", help="is looked for in titles as --list prints them")
    parser.add_argument("--directions", type=some_of(DIRECTIONS), default=DIRECTIONS, help="comma-separated: forward, backward")
    parser.add_argument("--peers", type=some_of(PEERS), default=USUAL, help=f"comma-separated: {', '.join(PEERS)}; default: {', '.join(USUAL)}")
    parser.add_argument("--seconds", type=within(0), default=540.0)
    parser.add_argument("--jobs", type=at_least(1), default=max(1, (os.cpu_count() or 2) - 2), metavar="N", help="processes that compile before the first case is timed")
    parser.add_argument("--list", action="store_true", help="print sizes and sources, and end; needs no GPU")
    parser.add_argument("--json", type=file_to_write, help="write everything here, after each case")
    parser.add_argument("--resume", type=earlier, default=[], metavar="JSON", help="what --json wrote: leave these cases out, and sum them up too")
    options = parser.parse_args(argv)
    if not (todo := cases(options.only, options.directions)):
        parser.error(f"--only: no case has {options.only.pattern!r} in its title; --list prints them")
    if options.list:
        print(listed(todo))
        return 0
    import bench
    import torch
    from sampling.measuring import Bench

    if not torch.cuda.is_available():
        print("sweeps: no GPU: torch.cuda.is_available() is False; --list needs none", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, stop)
    measuring = Bench(options.peers)
    run, broken = Run(options, todo, {**bench.versions(), "seconds": options.seconds}, measuring, options.resume), False
    try:
        run.go()
    except (KeyboardInterrupt, SystemExit) as problem:  # asked to stop, or the measuring process does not start again
        broken = True
        print(f"\nsweeps: stopped early: {type(problem).__name__} {problem}", file=sys.stderr)
    finally:
        measuring.close()
    print(run.text(), flush=True)
    return 1 if broken or any(map(ratios.is_fault, run.found)) else 0


if __name__ == "__main__":
    sys.exit(main())
