"""How good is ours at sizes that nobody chose? Random sizes from the whole domain of each op, beside every peer.

    python benchmarks/random_shapes.py --seed 1 --seconds 540 --json out.json
    python benchmarks/random_shapes.py --seed 1 --ops mmsigmoid --directions forward --regret 60 --seconds 540
    python benchmarks/random_shapes.py --seed 1 --list 20                          the sizes alone; needs no GPU

Never use it to choose rows of a table: what is tuned at its sizes is no longer measured by them. Seeds under 1000 are for
development. Reports take seeds from 1000 on, and each of those once.

A seed gives the same sizes whatever the seconds, peers and GPU. Cold L2, replays of CUDA graphs in rotated order, medians.
Results of ours are checked against float64, those of peers loosely. A size runs in a process of its own: one that hangs or
dies ends neither the run nor the others. Attention is not compared with eager and compile, which write all scores. Exit
status 1: ours was wrong or failed somewhere. Sizes are drawn log-uniformly, every stratum in each ten:

{domains}
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

from common.cli_types import Parser, at_least, file_to_write, some_of, within  # noqa: E402
from sampling import domains, ratios  # noqa: E402

from dtkernels.lang.errors import error_line  # noqa: E402

DIRECTIONS = ("forward", "backward")
PEERS = ("eager", "compile", "compile-max", "liger", "sdpa", "cudnn", "fa2", "flex")
USUAL = PEERS[:-1]
GRACE = 20.0  #: seconds that a size may take beyond the end


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with one line for a wrong one."""
    parser = Parser("random_shapes", (__doc__ or "").format(domains=domains.text()))
    parser.add_argument("--seed", type=at_least(0), required=True, help="under 1000 for development, from 1000 on for reports")
    parser.add_argument("--ops", type=some_of(domains.OPS), default=domains.OPS, help=f"comma-separated: {', '.join(domains.OPS)}")
    parser.add_argument("--directions", type=some_of(DIRECTIONS), default=DIRECTIONS, help="comma-separated: forward, backward")
    parser.add_argument("--seconds", type=within(0), default=540.0, help="for everything, divided evenly over ops and directions")
    parser.add_argument("--peers", type=some_of(PEERS), default=USUAL, help=f"comma-separated: {', '.join(PEERS)}; default: all but flex")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--regret", type=within(0), metavar="S", help="search S seconds at each size with the tuner, and compare with the best found")
    parser.add_argument("--sizes", type=at_least(1), metavar="N", help="at most N sizes for each op and direction")
    parser.add_argument("--skip", type=at_least(0), default=0, metavar="N", help="leave out the first N sizes of each stream: goes on with an earlier run")
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help="compile all sizes on N processes before the first is timed, in at most half of the time; needs --sizes")
    parser.add_argument("--list", type=at_least(1), metavar="K", help="print the first K sizes of each op and end; needs no GPU")
    parser.add_argument("--json", type=file_to_write, help="write everything here, after each size")
    options = parser.parse_args(argv)
    if options.jobs and not options.sizes:
        parser.error("--jobs needs --sizes: what is compiled before must be known")
    return options


def listed(options: argparse.Namespace) -> str:
    """Format the first sizes of each op."""
    lines = []
    for op in options.ops:
        lines += [f"{op} {s.shape} ({s.stratum})" for s in domains.first_sizes(options.seed, op, options.skip + options.list)[options.skip :]]
    return "\n".join(lines)


class Run:
    """One run: what is measured, until when, and what was found."""

    def __init__(self, options: argparse.Namespace, bench, searcher, about: dict):
        self.options, self.bench, self.searcher, self.about = options, bench, searcher, about
        self.end = time.monotonic() + options.seconds
        self.found: list[dict] = []
        self.reached: dict[str, int] = {}

    def go(self) -> None:
        """Measure each op and direction for its share of the time left; what one does not use, the others get."""
        cells = [(op, direction) for op in self.options.ops for direction in self.options.directions]
        if self.options.jobs:
            sizes = [(op, size.shape, self.options.dtype, direction) for op, direction in cells for size in self._sizes(op)]
            done = self.bench.prepare(sizes, self.options.jobs, self.options.seconds / 2)
            print(f"compiled {done} of {len(sizes)} sizes before timing", flush=True)
        for i, (op, direction) in enumerate(cells):
            now = time.monotonic()
            until = now + (self.end - now) / (len(cells) - i)
            for size in self._sizes(op):
                if time.monotonic() >= until:
                    break
                self._take(self._measured(op, direction, size))

    def _sizes(self, op: str) -> Iterator[domains.Size]:
        for i, size in enumerate(domains.sizes(self.options.seed, op)):
            if self.options.sizes is not None and i >= self.options.skip + self.options.sizes:
                return
            if i >= self.options.skip:
                yield size

    def _measured(self, op: str, direction: str, size: domains.Size) -> dict:
        try:
            found = self.bench.measure(op, size.shape, self.options.dtype, direction, max(self.end + GRACE - time.monotonic(), 1.0))
        except Exception as problem:  # in measuring, not in ours
            found = {"us": {}, "errors": {}, "notes": {}, "skipped": error_line(problem)}
        found = {"op": op, "direction": direction, "shape": size.shape, "stratum": size.stratum, **ratios.compared(found)}
        if self.searcher is not None and "how" in found and not ratios.is_fault(found) and self.options.regret <= self.end - time.monotonic():
            found["regret"] = self._regret(op, direction, size, found["how"])
        return found

    def _regret(self, op: str, direction: str, size: domains.Size, how: dict) -> dict:
        try:
            return self.searcher.at(op, size.shape, direction, how, self.options.regret)
        except Exception as problem:
            return {"note": error_line(problem)}
        except SystemExit as problem:  # its workers do not start
            self.searcher = None
            return {"note": error_line(problem)}

    def _take(self, found: dict) -> None:
        """Keep, print and write one size."""
        self.found.append(found)
        key = f"{found['op']} {found['direction']}"
        self.reached[key] = self.reached.get(key, 0) + 1
        print(ratios.line(found), flush=True)
        if self.options.json:
            try:
                self.options.json.write_text(json.dumps({**self.about, "reached": self.reached, "sizes": self.found}, separators=(",", ":"), default=str) + "\n")
            except (OSError, ValueError) as problem:
                print(f"random_shapes: {self.options.json} was not written: {problem}", file=sys.stderr)

    def text(self) -> str:
        """Format the summary."""
        reached = f"seed {self.options.seed}, sizes reached: {', '.join(f'{k} {n}' for k, n in self.reached.items()) or 'none'}"
        return "\n".join(t for t in (reached, ratios.report(self.found) if self.found else "", ratios.regret_report(self.found)) if t)


def versions(options: argparse.Namespace) -> dict:
    """Return the software, command and seed of a run."""
    import bench

    return {**bench.versions(), "seed": options.seed, "skip": options.skip, "dtype": options.dtype, "seconds": options.seconds}


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = arguments(argv)
    if options.list:
        print(listed(options))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("random_shapes: no GPU: torch.cuda.is_available() is False; --list needs none", file=sys.stderr)
        return 2
    from sampling.measuring import Bench
    from sampling.regret import RegretSearch

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C
    bench, searcher, broken = Bench(options.peers), None, False
    try:
        searcher = RegretSearch(options.dtype) if options.regret else None
        run = Run(options, bench, searcher, versions(options))
        try:
            run.go()
        except (KeyboardInterrupt, SystemExit) as problem:  # asked to stop, or the measuring process does not start again
            broken = True
            print(f"\nrandom_shapes: stopped early: {error_line(problem)}", file=sys.stderr)
        print(run.text(), flush=True)
    except RuntimeError as problem:
        print(f"random_shapes: {problem}", file=sys.stderr)
        return 1
    finally:
        bench.close()
        if searcher is not None:
            searcher.close()
    return 1 if broken or any(map(ratios.is_fault, run.found)) else 0


if __name__ == "__main__":
    sys.exit(main())
