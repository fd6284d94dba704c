"""Which of the schedules that the rules propose is fast at which size? What the cost model is fitted to and judged by.

    python benchmarks/candidate_trials.py --seed 1 --ops mmsigmoid,two_mm --seconds 400 --out trials.safetensors
    python benchmarks/candidate_trials.py --programs 'norm|_sum' --out trials.safetensors      programs that nobody tuned, at their timed sizes

The sizes are those of ``random_shapes.py``. At each, every kernel of the first ways to fuse is timed by several of its proposals: the usual
one, those predicted to be the fastest, and others evenly from the rest. Cold L2, results checked. ``fit_cost_rates.py --more`` reads the file.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

from common.cli_types import Parser, at_least, file_to_write, pattern, some_of, within  # noqa: E402
from sampling import domains, programs  # noqa: E402
from sampling.measuring import ask  # noqa: E402

from dtkernels.autoschedule.cost.kernel_config import KernelConfig  # noqa: E402
from dtkernels.autoschedule.default_schedule import proposals  # noqa: E402
from dtkernels.codegen.target import TARGETS, Target  # noqa: E402
from dtkernels.lang.errors import DTError  # noqa: E402
from dtkernels.tuning.records.journal import Time  # noqa: E402
from dtkernels.tuning.records.measurement_store import write_matrices  # noqa: E402
from dtkernels.tuning.records.problems import TuningProblem, variants_of  # noqa: E402
from dtkernels.tuning.records.write_table import matrix_of_times  # noqa: E402
from dtkernels.tuning.search.candidates import KernelCandidate, ScheduleCandidate, split_by_kernel, with_aligned_rows  # noqa: E402
from dtkernels.tuning.workers.benchmark_worker import make_gpu_worker  # noqa: E402
from dtkernels.tuning.workers.compile_worker import make_cpu_worker  # noqa: E402
from dtkernels.tuning.workers.worker_pool import WorkerPool  # noqa: E402

DIRECTIONS = ("forward", "backward")
WAYS = 2  #: to fuse, that are tried
ALIKE = 2  #: of the fastest that may have the same tiles
MOST_FLOPS = 1.5e12  #: of a forward: larger ones tell less for their time
Trial = tuple[TuningProblem, ScheduleCandidate, KernelCandidate]


def trials_of(work: TuningProblem, target: Target, count: int) -> list[Trial]:
    """Return the kernels to time at one size."""
    variant, found, ways = variants_of(work.group)[1], list[Trial](), list[str]()
    for schedule, root, configs in proposals(variant.algorithm, variant.outputs, work.extents, work.group.itemsize, target):
        try:
            whole = split_by_kernel(variant.algorithm, variant.outputs, str(schedule))
        except DTError:
            continue
        ways += [whole.fused] if whole.fused not in ways else []
        if len(ways) > WAYS:
            break
        for config in sample(configs, count):
            plan = KernelCandidate(whole.fused, root, "\n".join(config.texts()))
            if root in whole.roots:  # not one that another kernel computes in parts
                found.append((work, with_aligned_rows(whole.with_plan(plan), work), plan))
    return found


def sample(configs: list[KernelConfig], count: int) -> list[KernelConfig]:
    """Return the usual proposal, the fastest predicted of different tiles, and as many others evenly from the rest."""
    usual, *rest = configs
    seen: dict[object, int] = {}
    best = []
    for config in rest:
        seen[config.tiles] = seen.get(config.tiles, 0) + 1
        if seen[config.tiles] <= ALIKE and len(best) < count // 2:
            best.append(config)
    others = [c for c in rest if c not in best]
    few = max(0, count - 1 - len(best))
    return [usual, *best, *(others[i * len(others) // few] for i in range(min(few, len(others))))]


class Trials:
    """Compile on all cores, time on the GPU, keep what was found."""

    def __init__(self, options: argparse.Namespace, make=make_gpu_worker):
        self.options, self.times = options, dict[TuningProblem, dict[str, Time]]()
        self.programs = programs.names(options.programs) if options.programs else ()
        self.gpus = WorkerPool(1, programs.make_knowing, make, self.programs)
        told = ask(self.gpus, ("about",), 120.0)
        if told.failure:
            raise SystemExit(f"candidate_trials: the GPU worker does not start: {told.failure}")
        self.about = told.result
        self.target = next((t for t in TARGETS.values() if self.about["name"].startswith(f"NVIDIA {t.name.upper()}")), TARGETS["h200"])
        self.cpus = WorkerPool(options.jobs, programs.make_knowing, make_cpu_worker, self.programs, self.target)
        self.to_compile, self.to_time = deque[Trial](), deque[tuple[Trial, object]]()
        self.failed, self.end = 0, time.monotonic() + options.seconds

    def go(self) -> None:
        """Take one size after another until the time is over, or all sizes of programs are done."""
        problems = self._problems()
        left: TuningProblem | None = next(problems)
        while time.monotonic() < self.end and (left or self.to_compile or self.to_time or self.cpus.busy() or self.gpus.busy()):
            while left and len(self.to_compile) < 2 * self.options.jobs:
                self.to_compile.extend(trials_of(left, self.target, self.options.count))
                left = next(problems, None)
            self._feed()
            for done in self.gpus.poll(0.002):
                work, _, plan = done.task
                found: Time = done.result
                self.failed += bool(done.failure or found.failure)
                if not (done.failure or found.failure):
                    self.times.setdefault(work, {})[plan.text()] = found
            for done in self.cpus.poll(0.02):
                self.failed += bool(done.failure)
                if not done.failure:
                    self.to_time.append((done.task, done.result))
        self._write()

    def _problems(self) -> Iterator[TuningProblem]:
        from sampling.regret import problem_of

        if self.programs:
            yield from programs.problems(self.programs, self.options.directions)
            return
        found = self.options.strata.search
        streams = {op: (size for size in domains.sizes(self.options.seed, op) if found(size.stratum)) for op in self.options.ops}
        drawn = ((op, next(sizes).shape) for _ in itertools.count() for op, sizes in streams.items())
        for op, shape in itertools.chain(self.options.first, drawn):
            labels = labels_of(op, shape)
            if labels:
                for direction in self.options.directions:
                    yield problem_of(op, shape, direction, self.options.dtype, labels)

    def _feed(self) -> None:
        for worker in self.cpus.idle():
            if not self.to_compile or len(self.to_time) > 200:
                break
            trial = self.to_compile.popleft()
            work, whole, plan = trial
            self.cpus.send(worker, trial, ("compile", work.group, whole, plan.root, (work,)), 60.0)
        for worker in self.gpus.idle():
            if self.to_time:
                trial, artefact = self.to_time.popleft()
                work, whole, plan = trial
                variant = variants_of(work.group)[1]
                funcs = tuple(d.name for d in variant.algorithm.definitions if d.name in {*variant.outputs, *whole.roots})
                self.gpus.send(worker, trial, ("measure", work, funcs, (work, whole.text(), plan.root), artefact, float("inf"), ()), 30.0)

    def _write(self) -> None:
        only = f" --strata '{self.options.strata.pattern}'" if self.options.strata.pattern else ""
        asked = f"--programs '{self.options.programs.pattern}'" if self.programs else f"--seed {self.options.seed}{only}"
        by = {**self.about, "date": str(date.today()), "command": f"benchmarks/candidate_trials.py {asked}"}
        kinds = dict.fromkeys(w.group for w in self.times)
        write_matrices(self.options.out, by, [matrix_of_times(kind, {w: t for w, t in self.times.items() if w.group == kind}, by) for kind in kinds])
        print(f"{len(self.times)} problems, {sum(map(len, self.times.values()))} times, {self.failed} failures")


def labels_of(op: str, shape: str) -> dict[str, int]:
    """Return the extents of a shape's forward, none where it is too large."""
    import torch
    from common import workloads

    import dtkernels

    work = workloads.at(op, shape, torch.bfloat16)
    if work.flops[0] > MOST_FLOPS:
        return {}
    inputs = [t.to("meta") for t in work.make()]
    return dtkernels.explain(op, *inputs, **work.about, gpu="h200").forward.sizes


def shapes(text: str) -> tuple[tuple[str, str], ...]:
    """Parse ``op:shape`` pairs."""
    found = tuple(tuple(pair.split(":")) for pair in text.split(","))
    if any(len(pair) != 2 or pair[0] not in domains.OPS for pair in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of op:shape; ops: {', '.join(domains.OPS)}")
    return found  # type: ignore[return-value]


def strata_named(text: str) -> re.Pattern:
    """Parse a regular expression that is found in the words of a stratum."""
    found = pattern(text)
    if not any(found.search(s.words) for _, strata, _ in domains.DOMAINS.values() for s in strata):
        raise argparse.ArgumentTypeError(f"no stratum has {text!r} in its words; see random_shapes.py --help")
    return found


def programs_named(text: str) -> re.Pattern:
    """Parse a regular expression that is found in the name of a program."""
    found = pattern(text)
    if not programs.names(found):
        raise argparse.ArgumentTypeError(f"no program has {text!r} in its name; allowed: {', '.join(programs.PROGRAMS)}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the trials."""
    parser = Parser("candidate_trials", __doc__)
    parser.add_argument("--seed", type=at_least(0), default=1, help="under 1000: sizes of reports are not to be fitted to")
    parser.add_argument("--ops", type=some_of(domains.OPS), default=domains.OPS, help=f"comma-separated: {', '.join(domains.OPS)}")
    parser.add_argument("--strata", type=strata_named, default=re.compile(""), metavar="REGEX", help="only sizes of these strata, such as 'one row|few rows'")
    parser.add_argument("--programs", type=programs_named, metavar="REGEX", help="instead of ops: those of tests/untuned_programs.py, by name")
    parser.add_argument("--directions", type=some_of(DIRECTIONS), default=DIRECTIONS, help="comma-separated: forward, backward")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--count", type=at_least(1), default=18, metavar="N", help="proposals of each kernel")
    parser.add_argument("--first", type=shapes, default=(), metavar="OP:SHAPE,...", help="sizes to take before the random ones: mmsigmoid:8192x1x5120")
    parser.add_argument("--seconds", type=within(0), default=400.0)
    parser.add_argument("--jobs", type=at_least(1), default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=file_to_write, required=True)
    trials = Trials(parser.parse_args(argv))
    try:
        trials.go()
    finally:
        trials.cpus.close()
        trials.gpus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
