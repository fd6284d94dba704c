"""Find schedules for a GPU and write them into its table.

    python tools/tune.py --ops all --budget 30m                     the local GPU, every op of the package
    python tools/tune.py --ops softmax,my_op.yaml --shapes my.yaml  some ops, at sizes of your own
    python tools/tune.py --resume                                   continue the last run, however it ended
    python tools/tune.py --ray auto                                 every GPU of a Ray cluster

Candidates come from the rules of the default schedule, from the schedule families of the spec, and from draws of the whole space and
mutations. Those that cannot fit are dropped. The cost model, refitted during the run to what was measured, ranks the others; the best
are compiled on all cores, checked for correct results and timed on the GPU. A size is done when the model expects no
gain above the noise. Rows of the existing table compete too, so none is replaced by a slower one; rows at other sizes stay. A few schedules are kept, chosen by
regret, and judged at held-out sizes; rows that a call would be given anyway, by another row of the same schedule, are left out. At
the end the kernels of the table are built.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path

from ..codegen.target import TARGETS, Target, target
from ..lang.errors import DTError
from ..lang.tuning_space import Shapes, read_shapes
from ..lang.yaml_text import read_text, read_yaml
from ..runtime.select.schedule_selection import target_for
from ..runtime.select.table_loader import package_tables
from ..runtime.tables.table import Gpu, TableError
from .build_kernels import build_tables
from .cli_types import DTYPES, Parser, at_least, seconds, some_of, within
from .deterministic_build import same_addresses
from .records.comparison import PEERS, against_roofline, timed_against
from .records.journal import Journal, Time
from .records.problems import TuningProblem, op_names, operator_of, problems_of, shipped_names
from .records.write_table import (
    conclude,
    corrected_by_races,
    entrants,
    gpu_named,
    measured_op,
    remaining_rows,
    rows_of,
    run_at,
    set_aside,
    write_measurements,
    write_tables,
)
from .search.playoffs import Playoffs
from .search.portfolio import choose_group
from .search.progress import Progress
from .search.search import ScheduleSearch
from .search.search_state import SearchState
from .search.warm_start import WarmStart, rows_in
from .workers.benchmark_worker import make_gpu_worker
from .workers.compile_worker import make_cpu_worker
from .workers.ray_worker_pool import RayWorkerPool
from .workers.simulated_worker import make_faulty_simulated_gpu, make_simulated_gpu
from .workers.worker_pool import WorkerPool

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)  #: errors of a disk that cannot be written
KEPT = 5.0  #: seconds between records of the time spent
FILL, RACE = 0.1, 0.97  #: the part of the budget for filling gaps, and the part after which races end
RACED = 0.5  #: seconds of one GPU for a size: 80 sizes with 250 schedules took 30 on an H200, and a table's row runs too


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("tune", __doc__)
    parser.add_argument("--ops", default="all", help="all, or names and spec files separated by commas")
    parser.add_argument("--gpu", default="auto", choices=("auto", *TARGETS), help="auto, or the GPU to simulate with --dry-run")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="YAML: op -> list of shapes as in a spec; default: those of the specs")
    parser.add_argument("--dtypes", type=some_of(DTYPES), default=DTYPES, help=f"which of the shapes' dtypes, comma-separated: {', '.join(DTYPES)}")
    parser.add_argument("--budget", type=seconds, default="30m", help="time for everything, all runs that --resume joins together: 90s, 30m, 2h")
    parser.add_argument("--stop-after", type=seconds, metavar="TIME", help="end this run after this time; --resume continues it")
    parser.add_argument("--resume", action="store_true", help="continue with the journal in --out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the table's folder; default: schedule_tables/<gpu>")
    parser.add_argument("--tables", type=Path, default=package_tables(), metavar="DIR", help="the folder of tables that --out lies in by default")
    parser.add_argument("--sizes", type=at_least(1), metavar="N", help="tune each op at this many of its sizes; default: all")
    parser.add_argument("--from", dest="earlier", metavar="DIR", help="the table whose rows compete too, or none; default: schedule_tables/<gpu>")
    parser.add_argument("--ray", metavar="ADDRESS", help="use the GPUs of a Ray cluster: auto, an address, or local")
    parser.add_argument("--workers", type=at_least(1), help="GPU workers; default: one per GPU")
    parser.add_argument("--jobs", type=at_least(0), default=0, help="compiling processes; default and 0: one per remaining core")
    parser.add_argument("--regret", type=within(0.999), default=1.02, help="slowdown that a size may have so that fewer schedules are kept: 1.02 is 2%%")
    parser.add_argument("--dry-run", action="store_true", help="estimates instead of measurements, into a folder without measured rows; needs no GPU")
    parser.add_argument("--against", type=some_of(PEERS), default=(), metavar="PEERS", help=f"time these too, in the same workers: {', '.join(PEERS)}, the op's reference in torch")
    parser.add_argument("--no-build", action="store_true", help="leave the kernels of the table to tools/build.py; so does --dry-run")
    parser.add_argument("--write-only", action="store_true", help="measure nothing; write the table from the journal")
    parser.add_argument("--troubled", metavar="DIR", help=argparse.SUPPRESS)  # tests: a simulated worker that hangs, dies and fails, once each
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)  # tests: seconds that the simulated worker takes
    parser.add_argument("--rounds", type=at_least(1), help=argparse.SUPPRESS)  # tests: end every kernel after so many proposals
    parser.add_argument("--limit", type=within(0), default=30.0, help="seconds before a measurement is abandoned")
    args = parser.parse_args(argv)
    if args.gpu != "auto" and not (args.dry_run or args.write_only):
        parser.error(f"argument --gpu: {args.gpu} is what --dry-run pretends; without it the GPU that is here is tuned")
    return args


def all_problems(args: argparse.Namespace) -> list[TuningProblem]:
    """Return what to tune. Exits with one line if the shapes are refused."""
    names, found, left_out = op_names(args.ops), [], list[str]()
    try:
        given = given_shapes(args.shapes, names) if args.shapes else None
        for name in names:
            spec = operator_of(name).spec
            shapes = read_shapes(given.get(spec.op), f"{args.shapes}: {spec.op}", spec.dtypes) if given is not None else spec.shapes
            of_op = _problems(name, shapes, args, left_out)
            if args.sizes:
                of_op = [w for w in of_op if not w.held_out]
                of_op = [of_op[i * len(of_op) // args.sizes] for i in range(min(args.sizes, len(of_op)))] if len(of_op) > args.sizes else of_op
            found += [((i + 0.5) / len(of_op), work) for i, work in enumerate(of_op)]
    except DTError as error:
        raise SystemExit(f"tune: {error}") from None
    if left_out:
        print(f"tune: {', '.join(left_out)}: their specs give no length of what they index; they keep their default schedules", file=sys.stderr)
    if not found:
        raise SystemExit(f"tune: no shapes for {', '.join(names)}; give --shapes, or shapes in the spec")
    return [work for _, work in sorted(found, key=lambda f: f[0])]  # interleave ops: a short budget serves all of them


def _problems(name: str, shapes: Iterable[Shapes], args: argparse.Namespace, left_out: list[str]) -> list[TuningProblem]:
    """Return what to tune of one op: nothing, and its name in ``left_out``, where its shapes are refused and it was not asked for by name."""
    try:
        return problems_of(name, shapes, args.dtypes)
    except SystemExit:
        if args.ops != "all" or args.shapes:
            raise
        left_out.append(name)
        return []


def given_shapes(path: Path, names: tuple[str, ...]) -> dict:
    """Return op -> shapes of the file. Raises DTError; exits with one line if it cannot be read."""
    try:
        given = read_yaml(read_text(path, "what to tune at"), str(path))
    except OSError as error:
        raise SystemExit(f"tune: {path}: {error.strerror}") from None
    if not isinstance(given, dict):
        raise DTError(f"{path}: maps ops to lists of shapes", found=type(given).__name__)
    known = dict.fromkeys((*shipped_names(), *(operator_of(n).spec.op for n in names)))
    for op in given:
        if op not in known:
            raise DTError(f"{path}: no such op", found=repr(op), allowed=", ".join(known))
    return given


class Run:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.begin, self.stopping = args, time.monotonic(), 0  #: the signal that asked to stop
        self.works = all_problems(args)
        self._check_gpus()
        pretended = target(args.gpu) if args.gpu != "auto" else target("h200")
        self.gpus = self._gpu_workers(pretended)
        self.about = self._about(pretended)
        self.gpu = gpu_named(self.about)
        self.target = self._target(self.gpu)
        self.out = args.out or args.tables / self.gpu.folder
        path = self.out / "journal.jsonl"
        self.lock = only_one(self.out)
        self.earlier = self._earlier()  # refuse wrong input before the journal of an earlier run is set aside
        if path.exists() and not (args.resume or args.write_only):
            print(f"tune: the journal of an earlier run is now {set_aside(path)}; --resume would go on with it", file=sys.stderr, flush=True)
        try:
            header = {"gpu": self.gpu.name, "measured": not args.dry_run}
            command = f"tools/tune.py --ops {args.ops} --budget {args.budget:g}s{' --dry-run' if args.dry_run else ''}"
            self.journal = Journal(path, header, {**self.about, "date": str(date.today()), "command": command})
        except ValueError as error:
            raise SystemExit(f"tune: {error}") from None
        self.kept_until = self.begin  #: the journal has the time spent until then
        self.known = SearchState(self.works, self.journal)
        timing = 1 if args.ray else len(self.gpus.members)  # local GPU workers launch on this machine; the search takes another core
        self.cpus = WorkerPool(args.jobs or max(1, (os.cpu_count() or 2) - 1 - timing), make_cpu_worker, self.target, not args.dry_run)
        self.peers: dict[TuningProblem, dict[str, Time]] = {}
        self.progress = Progress(args.budget, self.journal.seconds, args.stop_after)

    def _check_gpus(self) -> None:
        """Exit with one line where this machine has not the GPUs to tune."""
        args = self.args
        if args.dry_run or args.write_only or args.troubled or args.ray:
            return
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("tune: no GPU: torch.cuda.is_available() is False; --dry-run needs none")
        here = torch.cuda.device_count()
        if (args.workers or here) > here:
            raise SystemExit(f"tune: --workers {args.workers}: {here} GPUs are here, and two workers on one would disturb each other")

    def _gpu_workers(self, pretended: Target):
        args = self.args
        make: Callable = make_gpu_worker
        rest: tuple = ()
        if args.dry_run or args.write_only:
            make, rest = make_simulated_gpu, (pretended, args.pause)
        if args.troubled:
            make, rest = make_faulty_simulated_gpu, (pretended, args.pause, args.troubled)
        if args.ray:
            return RayWorkerPool(args.ray, args.workers, 0 if args.dry_run else 1, 1, make, *rest)
        if make is make_gpu_worker:
            import torch

            return WorkerPool(args.workers or torch.cuda.device_count(), make)
        return WorkerPool(args.workers or 1, make, *rest)

    def _about(self, pretended: Target) -> dict:
        """Return the machine of all workers. They must be alike: times of one kind of GPU do not apply to another."""
        abouts: dict[int, dict] = {}
        for worker in self.gpus.idle():
            self.gpus.send(worker, "about", ("about",), 120.0)
        while self.gpus.busy():
            for done in self.gpus.poll(1.0):
                if done.failure:
                    raise SystemExit(f"tune: GPU worker {done.worker} does not start: {done.failure}")
                abouts[done.worker] = done.result
        names = dict.fromkeys(f"{a['name']} ({a['multiprocessors']} multiprocessors, torch {a['torch']})" for _, a in sorted(abouts.items()))
        if len(names) > 1:
            raise SystemExit(f"tune: workers differ: {', '.join(names)}; tune one kind at a time, with CUDA_VISIBLE_DEVICES or --workers")
        return abouts[0]

    def _earlier(self) -> WarmStart:
        folder = package_tables() / self.gpu.folder if self.args.earlier is None else Path(self.args.earlier)
        try:
            if self.args.earlier not in (None, "none") and not folder.is_dir():
                raise TableError(f"--from {folder}: no such folder")
            for op in dict.fromkeys(operator_of(w.group.op).spec.op for w in self.works):
                rows_in(self.out / f"{op}.yaml")  # rows that stay are read after measuring: that must not fail then
            if self.args.dry_run and (measured := measured_op(self.out)):
                raise TableError(f"--dry-run writes estimates, and {self.out} has measured rows of {measured}; name another folder by --out")
            return WarmStart(None if self.args.earlier == "none" else folder, self.works)
        except TableError as error:
            raise SystemExit(f"tune: {error}") from None

    def _target(self, gpu: Gpu) -> Target:
        found = target_for(gpu)
        if found is None:
            raise SystemExit(f"tune: {gpu.name} has compute capability {gpu.arch}; allowed: {', '.join(str(t.arch) for t in TARGETS.values())}")
        return found

    # -- the phases ---------------------------------------------------------------------------------------------------

    def spent(self) -> float:
        """Return the spent seconds of the budget."""
        return self.journal.seconds + time.monotonic() - self.kept_until

    def past(self, part: float):
        """Return whether a part of the budget, or this run's time, is over."""
        own = self.args.stop_after

        def over() -> bool:
            return bool(self.stopping) or self.spent() > part * self.args.budget or own is not None and time.monotonic() - self.begin > own - 12

        return over

    def go(self) -> int:
        """Search, race, write. Returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and what batch systems and `timeout` send
            signal.signal(number, self._interrupt)
        limits = {"measure": self.args.limit, "compile": 60.0}
        search = ScheduleSearch(self.known, self.journal, self.cpus, self.gpus, limits, self.earlier)
        search.rounds = self.args.rounds
        racing = RACE - racing_part(len(self.works), len(self.gpus.members), self.args.budget)
        try:
            for _ in search.explore((lambda: True) if self.args.write_only else self.past(racing - FILL), lambda: bool(self.stopping)):
                self._show("search", search.measured, search.failed)
            if not self.args.write_only:
                print(f"tune: the search stopped: {search.reason()}", flush=True)
            if told := self.earlier.text():
                print(f"tune: {told}", flush=True)
            if not self.args.write_only:
                for _ in range(2):
                    for _ in search.fill(self.past(racing)):
                        self._show("fill", search.measured, search.failed)
            self._race(search, Playoffs(self.known, self.journal, self.cpus, self.gpus, search.artefacts, limits), racing)
            self.peers = {} if self.args.write_only or self.stopping else timed_against(self.gpus, self.works, self.args.against, self.past(1.0))
        finally:
            self.cpus.close()
            self.gpus.close()
            self.progress.close()
            self._keep_time()
        if not self.journal.times:
            why = f"--resume continues in {self.out}" if self.stopping else "nothing could be, or more time is needed, by --budget or --stop-after"
            print(f"tune: nothing was measured, tables stay as they are: {why}", file=sys.stderr)
            return 128 + self.stopping if self.stopping else 1
        self.write()
        self.journal.close()
        if not (self.stopping or self.args.no_build or self.args.dry_run or self.args.write_only):
            return self.build()
        return 128 + self.stopping if self.stopping else 0

    def build(self) -> int:
        """Build the kernels of the table. Returns the exit status."""
        same_addresses()
        names = dict.fromkeys(w.group.op for w in self.works)
        failures = build_tables([self.out], {operator_of(n).spec.op: n for n in names}, self.args.jobs or os.cpu_count() or 1)
        for line in failures:
            print(f"tune: not built: {line}", file=sys.stderr)
        return 1 if failures else 0

    def _show(self, phase: str, done: int, failed: int) -> None:
        self.progress.show(phase, done, failed)
        if time.monotonic() - self.kept_until > KEPT:
            self._keep_time()

    def _keep_time(self) -> None:
        """Record the time spent in the journal now and then: a killed run has spent its time too."""
        if not self.args.write_only:
            now = time.monotonic()
            self.journal.spent(now - self.kept_until)
            self.kept_until = now

    def _interrupt(self, number: int, _) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = number
        print("\ntune: stopping after what is in hand; --resume goes on", file=sys.stderr, flush=True)

    def _race(self, search: ScheduleSearch, finals: Playoffs, begin: float) -> None:
        """Race at the sizes used for the choice, choose, then race at held-out sizes what calls would run."""
        known, times = self.known, self.journal.times
        chosen = {g: choose_group(known, g, self.args.regret) for g in known.of_group}
        first = sum(not w.held_out for w in self.works) / len(self.works)
        self._finals(finals, entrants(known, {w: chosen[w.group].get(w) for w in self.works if not w.held_out}), begin + first * (RACE - begin))
        self.choice = corrected_by_races(known, times, chosen, self.args.regret)
        rows = {g: rows_of(known, times, choice, self.by(), True) for g, choice in self.choice.items()}
        self.kept = remaining_rows(self.out, known, [r for found in rows.values() for r in found], not self.stopping and not search.unseeded())
        kept = {g: self.kept[operator_of(g.op).spec.op] for g in rows}
        self.runs = {w: made for g, choice in self.choice.items() for w, made in run_at(known, g, choice, rows[g] + kept[g]).items()}
        self._finals(finals, entrants(known, self.runs), RACE)

    def _finals(self, finals: Playoffs, races: dict, end: float) -> None:
        self.known.raced |= races
        if not self.args.write_only:
            for _ in finals.run(races, self.past(end)):
                self._show("finals", finals.raced, len(finals.failed))

    def by(self) -> dict[str, object]:
        """Return the GPU, software, date and command for the rows of this run."""
        about = self.journal.about
        return {"gpu": self.gpu.name, "multiprocessors": self.gpu.multiprocessors, "driver": about["driver"], "torch": about["torch"],
                "triton": about["triton"], "date": about["date"], "command": about["command"]}  # fmt: skip

    def write(self) -> None:
        """Write tables, measurements and regrets."""
        by = self.by()
        outcome = conclude(self.known, self.journal.times, self.choice, self.runs, by, not self.args.dry_run)
        paths = write_tables(self.out, self.gpu, outcome.rows, self.kept)
        write_measurements(self.out / "measurements.safetensors", self.known, self.journal.times, by)
        for line in against_roofline(self.known, self.target, self.peers):
            print(line)
        print(outcome.text())
        failures = sum(bool(t.failure) for t in self.journal.times.values())
        for place, count in sorted(Counter(self.journal.places.values()).items()):
            print(f"{place}: {count} measurements")
        print(f"{len(self.journal.times)} measurements, {failures} of them failures; {self.journal.seconds:.0f} s in all; wrote {', '.join(p.name for p in paths)} in {self.out}")


def racing_part(works: int, gpus: int, budget: float) -> float:
    """Return the part of the budget for racing: as much as it needs, at most half."""
    return min(0.5, max(0.15, works * RACED / max(gpus, 1) / budget))


def only_one(folder: Path) -> int:
    """Keep other runs out of ``folder`` until this process ends. Exits with one line if one is active, or the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SystemExit(f"tune: --out {folder}: {error.strerror}") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SystemExit(f"tune: another run writes into {folder}; choose another --out") from None
    return held


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    try:
        return Run(arguments(argv)).go()
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        print(f"tune: cannot write: {error.strerror}; what the journal has stays, --resume goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntune: interrupted; what was measured is in the journal, --resume goes on", file=sys.stderr)
        return 130
