"""How are the times of an op's schedules distributed, and where do its peers and the cost model's choice lie among them?

    python benchmarks/schedule_study.py --seconds 240 --json study.json      the six ops of the language's publication
    python benchmarks/schedule_study.py --ops two_mm:512x512x64r64 --seconds 60
    python benchmarks/schedule_study.py --show study.json                     prints the figures of a run again; needs no GPU

Each op's schedules are those that the scheduling rules propose, for every way to fuse, those of its spec's families, and random ones from the
tuner's space: shuffled by ``--seed``, compiled on ``--jobs`` processes, checked and timed with a cold L2 until the time is over. Marked among them are the one that the
cost model alone picks of all that the rules propose, the default schedule, and the one that a call takes. At the end the best and the marked
are timed beside torch's eager and compiled forms, its libraries, Liger and products written by hand in Triton, in one rotation.
``--dry-run`` takes predicted times for measured ones: it tries everything but the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

import bench  # noqa: E402
import torch  # noqa: E402
from common import workloads  # noqa: E402
from common.cli_types import Parser, at_least, file_to_write, some_of, within  # noqa: E402
from sampling.beside_peers import make_finalists, make_peer_preparer  # noqa: E402
from sampling.measuring import ask, handled  # noqa: E402
from sampling.regret import problem_of  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

import dtkernels  # noqa: E402
from dtkernels.autoschedule.cost.predicted_time import predicted_time  # noqa: E402
from dtkernels.autoschedule.default_schedule import default_schedule, proposals  # noqa: E402
from dtkernels.codegen.target import TARGETS, Target  # noqa: E402
from dtkernels.lang.errors import DTError  # noqa: E402
from dtkernels.tuning.records.journal import Time  # noqa: E402
from dtkernels.tuning.records.problems import TuningProblem, time_model, variants_of  # noqa: E402
from dtkernels.tuning.search.candidates import KernelCandidate, ScheduleCandidate, split_by_kernel, with_aligned_rows  # noqa: E402
from dtkernels.tuning.search.space import Surroundings, drawn  # noqa: E402
from dtkernels.tuning.workers.benchmark_worker import make_gpu_worker  # noqa: E402
from dtkernels.tuning.workers.compile_worker import Artefact, CpuWorker, Refused  # noqa: E402
from dtkernels.tuning.workers.simulated_worker import SimulatedGpu  # noqa: E402
from dtkernels.tuning.workers.worker_pool import WorkerPool  # noqa: E402

#: DyT's and two_mm's sizes are the publication's; for ops whose sizes are not known here, a large one of docs/benchmarks.md
CASES = (
    ("relu", "128x65536", "fp32"), ("dyt", "128x65536", "fp32"), ("softmax", "128x65536", "fp32"), ("two_mm", "512x1024x32r32", "bf16"),
    ("two_mm", "1024x1024x64r64", "bf16"), ("mmsigmoid", "4096x4096x4096", "bf16"), ("attention", "B1H32M4096S4096D128", "bf16"),
)  # fmt: skip
OPS = tuple(dict.fromkeys(op for op, _, _ in CASES))
PEERS = ("eager", "compile", "compile-max", "liger", "sdpa", "cudnn", "fa2", "flex")
STEPS = 14  #: of a random schedule from one that the rules propose, at most
PROPOSED_FIRST = 2  #: proposed schedules for each random one
PEERS_PART, FINAL_PART = 0.2, 0.25  #: of the time: to compile the peers, and to time them beside the best
NEAR = 1.05  #: over the best time: a schedule that is as good
COMPILING, TIMING = 60.0, 30.0  #: seconds for one schedule
LEAST = 20.0  #: seconds that the rotation of a case may take however late it is
TRIES = 3  #: of the rotation at the end, each without the peers that were too slow or died
ILLEGAL = "not legal, or no room"
QUANTILES = (0, 5, 25, 50, 75, 95, 100)
MODEL, DEFAULT, CALL = "cost model", "default", "call"

# -- the schedules of one case ------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """One schedule: where it comes from, and its predicted microseconds."""

    whole: ScheduleCandidate
    origin: str
    predicted: float
    time: Time | None = None
    why: str = ""


@dataclass
class Case:
    """An op at a size, and its schedules. ``marks``: mark -> key of a schedule; ``proposed``: how many the rules propose."""

    op: str
    shape: str
    dtype: str
    work: TuningProblem
    target: Target
    call: str
    entries: dict[str, Entry] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    proposed: int = 0
    finals: dict = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"

    def text(self, whole: ScheduleCandidate) -> str:
        """Return the schedule as DT."""
        return whole.schedule(variants_of(self.work.group)[1].outputs)

    def predicted(self, whole: ScheduleCandidate) -> float:
        """Return the microseconds by the cost model."""
        return predicted_time(self.text(whole), time_model(self.work.group).known, self.work.extents, self.work.group.itemsize, self.target)

    def add(self, whole: ScheduleCandidate, origin: str, mark: str = "") -> str:
        """Add a schedule, once; return its key."""
        key = whole.text()
        if key not in self.entries:
            self.entries[key] = Entry(whole, origin, self.predicted(whole))
        if mark:
            self.marks[mark] = key
        return key

    def timed(self) -> list[Entry]:
        """Return the schedules with times, the fastest first."""
        return sorted((e for e in self.entries.values() if e.time is not None), key=lambda e: e.time.cold)  # type: ignore[union-attr]


def case_at(op: str, shape: str, dtype: str, target: Target) -> Case:
    """Return the case with its marked schedules and no other yet."""
    load = workloads.at(op, shape, bench.DTYPES[dtype])
    with FakeTensorMode():
        made = [(t.shape, t.dtype) for t in load.make()]
    inputs = [torch.empty(size, dtype=kind, device="meta") for size, kind in made]
    said = dtkernels.explain(op, *inputs, **load.about, gpu=target.name).forward
    case = Case(op, shape, dtype, problem_of(op, shape, "forward", dtype, said.sizes), target, said.schedule)
    own = variants_of(case.work.group)[1]
    usual = default_schedule(own.algorithm, own.outputs, case.work.extents, case.work.group.itemsize, target)
    for mark, text in ((DEFAULT, str(usual)), (CALL, said.schedule)):
        case.add(with_aligned_rows(split_by_kernel(own.algorithm, own.outputs, text), case.work), "rules" if mark == DEFAULT else "table", mark)
    return case


def rules_space(case: Case) -> Iterator[ScheduleCandidate]:
    """Yield every schedule that differs from a way to fuse with its usual kernels by one proposal for one kernel."""
    own = variants_of(case.work.group)[1]
    for schedule, root, configs in proposals(own.algorithm, own.outputs, case.work.extents, case.work.group.itemsize, case.target):
        try:
            whole = split_by_kernel(own.algorithm, own.outputs, str(schedule))
        except DTError:
            continue
        for config in configs if root in whole.roots else ():
            plan = KernelCandidate(whole.fused, root, "\n".join(config.texts()))
            yield with_aligned_rows(whole.with_plan(plan), case.work)


def space(case: Case) -> list[tuple[str, ScheduleCandidate]]:
    """Return every schedule that the rules propose and those of the spec's families, each once, and where it comes from."""
    rules = {w.text(): ("rules", w) for w in rules_space(case)}
    case.proposed = len(rules)
    seeds = CpuWorker(case.target).seeds(case.work)
    families = (seeds.cuts[p.fused].with_plan(p) for p, cost in seeds.plans.items() if cost is not None and p.fused in seeds.cuts)
    found = {w.text(): ("families", w) for w in (with_aligned_rows(w, case.work) for w in families)}
    return list({**found, **rules}.values())


def stream(case: Case, seed: int, most: int) -> Iterator[str]:
    """Yield the keys of schedules to time: the marked ones, then proposed and random ones, shuffled."""
    draw, worker = random.Random(f"{seed} {case.title}"), CpuWorker(case.target)
    proposed = space(case)
    usual = case.entries[case.marks[DEFAULT]].whole  # what the rules propose, with roles of warps where they add them
    ranked = sorted((usual, *(w for origin, w in proposed if origin == "rules")), key=case.predicted)
    picked = next((w for w in ranked if worker.fits(case.work, w, None)), None)
    if picked is not None:
        case.add(picked, "rules", MODEL)
    yield from dict.fromkeys(case.marks.values())
    parents = [w for _, w in proposed] or [e.whole for e in case.entries.values()]
    draw.shuffle(proposed)
    left = iter(proposed)
    for i in range(4 * most):
        if len(case.entries) >= most:
            return
        if i % (PROPOSED_FIRST + 1) < PROPOSED_FIRST:
            origin, whole = next(left, ("", None))
        else:
            origin, whole = "random", _random(case, draw, parents)
        if whole is not None and whole.text() not in case.entries:
            yield case.add(whole, origin)


def _random(case: Case, draw: random.Random, parents: list[ScheduleCandidate]) -> ScheduleCandidate:
    """Return a schedule some random steps from a proposed one; it may be illegal."""
    base = draw.choice(parents)
    plan = draw.choice(base.plans)
    around = Surroundings.of(variants_of(case.work.group)[1].algorithm, plan, case.work.extents, case.target.has_tma, case.dtype == "fp32")
    return with_aligned_rows(base.with_plan(drawn(plan, around, draw.randint(1, STEPS), draw)), case.work)


# -- measuring ----------------------------------------------------------------------------------------------------------


class Compiler(CpuWorker):
    """Compile schedules that are legal and fit."""

    def compile_fitting(self, work: TuningProblem, whole: ScheduleCandidate) -> Artefact:
        """Return the compiled kernels. Raises Refused."""
        if not self.fits(work, whole, None):
            raise Refused(ILLEGAL)
        return self.compile(work.group, whole, None, (work,))


def make_compiler(index: int, to: Target, compiling: bool) -> Compiler:
    """Make the handler of a process that compiles."""
    return Compiler(to, compiling)


def make_simulated(index: int, to: Target) -> SimulatedGpu:
    """Make the handler of a GPU that is not there."""
    return SimulatedGpu(to)


class Study:
    """Compile on all cores, time on the GPU."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.begin = options, time.monotonic()
        self.gpus = WorkerPool(1, make_simulated, TARGETS["h100"]) if options.dry_run else WorkerPool(1, make_gpu_worker)
        told = ask(self.gpus, ("about",), 120.0)
        if told.failure:
            raise SystemExit(f"schedule_study: the GPU worker does not start: {told.failure}")
        self.about = told.result
        self.target = next((t for t in TARGETS.values() if self.about["name"].startswith(f"NVIDIA {t.name.upper()}")), TARGETS["h200"])
        self.cases = [case_at(*asked, self.target) for asked in options.ops]
        self.cpus = WorkerPool(options.jobs, make_compiler, self.target, not options.dry_run)

    def left(self, until: float) -> float:
        """Return the seconds until that part of the time."""
        return self.begin + until * self.options.seconds - time.monotonic()

    def go(self) -> None:
        """Prepare peers, time schedules, and end with the rotation of the best and the peers."""
        if not self.options.dry_run:
            names = [n for n in PEERS if n in self.options.peers]
            tasks = [((c.title, n), (c.dtype, c.op, c.shape, (n,))) for n in ("compile", "compile-max", "flex") if n in names for c in self.cases]
            handled(tasks, self.options.jobs, max(1.0, self.left(PEERS_PART)), make_peer_preparer)
        self._time()
        self.cpus.close()
        self.gpus.close()
        rotation = None if self.options.dry_run else Rotation()
        try:
            for number, case in enumerate(self.cases, 1):
                if rotation is not None:
                    case.finals = rotation.at(case, tuple(self.options.peers), max(LEAST, self.left(1.0) / (len(self.cases) + 1 - number)))
                print(text(described(case)), flush=True)
                self._write()
        finally:
            if rotation is not None:
                rotation.close()

    def _time(self) -> None:
        turns = deque((c, stream(c, self.options.seed, self.options.most)) for c in self.cases)
        to_time = deque[tuple]()
        best: dict[str, float] = {}
        while self.left(1 - FINAL_PART) > 0 and (turns or to_time or self.cpus.busy() or self.gpus.busy()):
            for worker in self.cpus.idle():
                if len(to_time) < 200 and (found := _next(turns)) is not None:
                    case, key = found
                    self.cpus.send(worker, found, ("compile_fitting", case.work, case.entries[key].whole), COMPILING)
            for worker in self.gpus.idle():
                if to_time:
                    (case, key), artefact = to_time.popleft()
                    whole, own = case.entries[key].whole, variants_of(case.work.group)[1]
                    funcs = tuple(d.name for d in own.algorithm.definitions if d.name in {*own.outputs, *whole.roots})
                    self.gpus.send(worker, (case, key), ("measure", case.work, funcs, (case.title, key), artefact, best.get(case.title, float("inf")), (whole, None)), TIMING)
            for done in self.gpus.poll(0.002):
                case, key = done.task
                entry, found = case.entries[key], done.result
                entry.why = done.failure or found.failure
                entry.time = None if entry.why else found
                if not entry.why:
                    best[case.title] = min(found.cold, best.get(case.title, float("inf")))
            for done in self.cpus.poll(0.02):
                case, key = done.task
                case.entries[key].why = done.failure
                if not done.failure:
                    to_time.append((done.task, done.result))

    def _write(self) -> None:
        if self.options.json:
            by = {**self.about, "date": str(date.today()), "command": " ".join(["benchmarks/schedule_study.py", *sys.argv[1:]]), "seed": self.options.seed}
            self.options.json.write_text(json.dumps({**by, "simulated": self.options.dry_run, "cases": [described(c) for c in self.cases]}, indent=1) + "\n")


def _next(turns: deque) -> tuple[Case, str] | None:
    """Return the next schedule of the case whose turn it is; cases without any are left out from then on."""
    while turns:
        case, keys = turns.popleft()
        if (key := next(keys, None)) is not None:
            turns.append((case, keys))
            return case, key
    return None


class Rotation:
    """Time the best schedule, the marked ones and the peers of a case in one rotation, in a process that serves all cases."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.stage = Path(self.folder.name) / "stage"
        self.pool = WorkerPool(1, make_finalists, str(self.stage))

    def at(self, case: Case, names: tuple[str, ...], seconds: float) -> dict:
        """Return times and notes. A peer at which the process dies, or that takes longer than ``seconds``, is left out."""
        timed = case.timed()
        schedules = {"best": case.text(timed[0].whole)} if timed else {}
        schedules |= {m: case.text(case.entries[k].whole) for m, k in case.marks.items() if m != CALL and case.entries[k].time is not None}
        left_out: dict[str, str] = {}
        for _ in range(TRIES):
            self.stage.write_text("start")
            asked = tuple(n for n in names if n not in left_out)
            done = ask(self.pool, (case.op, case.shape, case.dtype, case.work, asked, schedules), seconds)
            if not done.failure:
                return {**done.result, "notes": {**left_out, **done.result["notes"]}}
            left_out[self.stage.read_text()] = done.failure
            if not {*left_out} <= {*names}:
                break
        return {"us": {}, "notes": left_out}

    def close(self) -> None:
        """End the process."""
        self.pool.close()
        self.folder.cleanup()


# -- output -------------------------------------------------------------------------------------------------------------


def described(case: Case) -> dict:
    """Return a case as JSON has it."""
    timed = case.timed()
    failures = Counter(e.why[:100] for e in case.entries.values() if e.why and ILLEGAL not in e.why)
    illegal = sum(ILLEGAL in e.why for e in case.entries.values())
    keys = {k: i for i, e in enumerate(timed) for k in (e.whole.text(),)}
    schedules = [{"us": round(e.time.cold, 3), "warm_us": round(e.time.warm, 3), "predicted_us": round(e.predicted, 3), "origin": e.origin, "schedule": case.text(e.whole)}
                 for e in timed if e.time is not None]  # fmt: skip
    marks = {m: {"place": keys.get(k), "predicted_us": round(case.entries[k].predicted, 3), "why": case.entries[k].why, "schedule": case.text(case.entries[k].whole)}
             for m, k in case.marks.items()}  # fmt: skip
    untried = sum(e.time is None and not e.why for e in case.entries.values())
    return {"op": case.op, "shape": case.shape, "dtype": case.dtype, "proposed": case.proposed, "illegal": illegal, "untried": untried, "failures": dict(failures),
            "schedules": schedules, "marks": marks, "finals": case.finals}  # fmt: skip


def text(case: dict) -> str:
    """Format a case: counts, the distribution, the marks, and the peers."""
    title = f"{case['op']} {case['shape']} {case['dtype']}"
    times = [s["us"] for s in case["schedules"]]
    failed = sum(case["failures"].values())
    origins = Counter(s["origin"] for s in case["schedules"])
    lines = [f"\n{title}: {len(times)} schedules timed ({', '.join(f'{n} {o}' for o, n in origins.items())}); the rules propose {case['proposed']}; "
             f"{case['illegal']} not legal, {failed} failed, {case['untried']} not reached"]  # fmt: skip
    lines += [f"  failed: {n} x {why}" for why, n in sorted(case["failures"].items(), key=lambda f: -f[1])[:3]]
    if not times:
        return "\n".join([*lines, "  nothing was timed"])
    best = times[0]
    spread = "  ".join(f"{q}%: {quantile(times, q) / best:.2f}" for q in QUANTILES)
    near = sum(t <= NEAR * best for t in times)
    lines += [f"  best {best:.1f} us; time over the best: {spread}", f"  within 5% of the best: {near} of {len(times)} ({near / len(times):.1%})", *histogram(times)]
    for mark, found in case["marks"].items():
        place = found["place"]
        where = f"place {place + 1} of {len(times)}, {times[place] / best:.2f} of the best's time" if place is not None else f"not timed ({found['why'] or 'not reached'})"
        lines.append(f"  * {mark}: {where}; predicted {found['predicted_us']:.1f} us")
    return "\n".join([*lines, *beside(case["finals"])])


def quantile(times: list[float], percent: int) -> float:
    """Return a quantile of sorted times."""
    return times[min(len(times) - 1, round(percent / 100 * (len(times) - 1)))]


def histogram(times: list[float]) -> list[str]:
    """Return a line for each range of times over the best."""
    edges = (1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, float("inf"))
    counts = [sum(low <= t / times[0] < high for t in times) for low, high in zip(edges, edges[1:])]
    return [f"    {low:5.2f} to {high:5.2f} {count:5} {'#' * round(50 * count / max(counts))}" for low, high, count in zip(edges, edges[1:], counts) if count]


def beside(finals: dict) -> list[str]:
    """Return the rotation at the end: each by its time, with the ratio to the best schedule's."""
    us = finals.get("us", {})
    best = us.get("best")
    words = {"dtkernels": "what a call takes", "bare-product": "cuBLAS, the product alone", "copy": "a copy of as many bytes"}
    timed = sorted({**us, **({"copy": finals["copy_us"]} if us else {})}.items(), key=lambda f: f[1])
    lines = [f"    {words.get(who, who):28}{t:10.1f} us{f'  {t / best:6.2f} of the best' if best else ''}" for who, t in timed]
    return [*(["  in one rotation:"] if lines else []), *lines, *(f"    {who}: {why}" for who, why in finals.get("notes", {}).items())]


def summary(cases: list[dict]) -> str:
    """Return one line for each case."""
    lines = [f"\n{'op':38}{'timed':>6}{'median':>8}{'within 5%':>11}{'model':>7}{'default':>9}{'best peer / best':>30}"]
    for c in cases:
        times = [s["us"] for s in c["schedules"]]
        us = c["finals"].get("us", {})
        peers = {w: t for w, t in us.items() if w not in ("best", "dtkernels", "bare-product", *c["marks"])}
        peer = min(peers, key=peers.__getitem__, default="")
        ratio = {m: f"{times[f['place']] / times[0]:.2f}" if f["place"] is not None else "-" for m, f in c["marks"].items()}
        found = f"{peer} {peers[peer] / us['best']:.2f}" if peer and "best" in us else "-"
        if times:
            lines.append(f"{c['op'] + ' ' + c['shape'] + ' ' + c['dtype']:38}{len(times):6}{statistics.median(times) / times[0]:8.2f}{sum(t <= NEAR * times[0] for t in times) / len(times):11.1%}"
                         f"{ratio.get(MODEL, '-'):>7}{ratio.get(DEFAULT, '-'):>9}{found:>30}")  # fmt: skip
    return "\n".join(lines)


def cases_of(words: str) -> tuple[tuple[str, str, str], ...]:
    """Parse ops, or op:shape or op:shape:dtype, separated by commas."""
    found: list[tuple[str, str, str]] = []
    for word in words.split(","):
        op, *rest = word.split(":")
        if op not in OPS or len(rest) > 2 or len(rest) == 2 and rest[1] not in ("bf16", "fp16", "fp32"):
            raise argparse.ArgumentTypeError(f"{word!r} is no op, op:shape or op:shape:dtype; ops: {', '.join(OPS)}; dtypes: bf16, fp16, fp32")
        found += [(op, *rest, *(["bf16"] if len(rest) == 1 else []))] if rest else [c for c in CASES if c[0] == op]  # type: ignore[list-item]
    return tuple(found)


def shown(path: Path) -> int:
    """Print a run again."""
    try:
        cases = json.loads(path.read_text())["cases"]
        print("\n".join([*map(text, cases), summary(cases)]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        print(f"schedule_study: {path}: not written by --json: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the study."""
    parser = Parser("schedule_study", __doc__)
    parser.add_argument("--ops", type=cases_of, default=CASES, help=f"comma-separated, with a shape or without: {', '.join(OPS)}; two_mm:512x512x64r64; relu:128x65536:fp32")
    parser.add_argument("--peers", type=some_of(PEERS), default=PEERS, help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--seconds", type=within(0), default=240.0, help="for all ops together")
    parser.add_argument("--jobs", type=at_least(1), default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--most", type=at_least(4), default=400, metavar="N", help="schedules of each op")
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--json", type=file_to_write, help="write every time here")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print the figures of an earlier run, and do nothing else")
    parser.add_argument("--dry-run", action="store_true", help="take predicted times for measured ones; needs no GPU")
    options = parser.parse_args(argv)
    if options.show:
        return shown(options.show)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is False; --dry-run and --show need none")
    study = Study(options)
    try:
        study.go()
    finally:
        study.cpus.close()
        study.gpus.close()
    print(summary([described(c) for c in study.cases]))
    return 0 if any(c.timed() for c in study.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
