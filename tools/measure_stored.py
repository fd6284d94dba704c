"""Measure the stored kernels of an architecture on another GPU of it, and write that GPU's rows. Nothing is compiled.

    python tools/measure_stored.py                        this GPU, the rows of every table of its architecture
    python tools/measure_stored.py --ops softmax,two_mm   some ops
    python tools/measure_stored.py --budget 5m            as many kinds of calls as the time allows; another run goes on with the rest
    python tools/measure_stored.py --dry-run --gpu h100   no GPU: simulated times, rows are marked measured: false
    python tools/measure_stored.py --retime descriptor    this GPU's own rows whose schedules have this word: their times alone, as after a change of their kernels

At every size of a row, the schedules predicted to be the fastest race, each by the kernels that were built for sizes of this alignment;
their results are checked first. The best becomes the GPU's row, without those that a call would be given anyway. Schedules that the
stored ones lack are what tools/tune.py finds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from math import exp, log
from pathlib import Path

sys.path[:0] = [p for p in (str(Path(__file__).resolve().parent),) if p not in sys.path]

if __name__ == "__main__":
    from common.require_packages import needs

    needs("measure_stored", "torch", "triton")

from common.cli_types import DTYPES, Parser, at_least, folder_to_read, pattern, some_of  # noqa: E402

from dtkernels.codegen.target import TARGETS, target  # noqa: E402
from dtkernels.lang.errors import DTError  # noqa: E402
from dtkernels.ops.registry import shipped, shipped_names  # noqa: E402
from dtkernels.runtime.aot_build import BuiltKernels  # noqa: E402
from dtkernels.runtime.select.row_ranking import candidates  # noqa: E402
from dtkernels.runtime.select.table_loader import package_tables, with_kernels  # noqa: E402
from dtkernels.runtime.signature.spec_hash import spec_hash  # noqa: E402
from dtkernels.runtime.tables.kernel_store import KernelStore, KernelStores, StoreError  # noqa: E402
from dtkernels.runtime.tables.table import Row, TableError, arch_folder, read_gpu, read_rows, write_gpu  # noqa: E402
from dtkernels.tuning.build_kernels import key_for, same_arch, stores_of, write_table  # noqa: E402
from dtkernels.tuning.cli_types import seconds  # noqa: E402
from dtkernels.tuning.records.journal import Time  # noqa: E402
from dtkernels.tuning.records.measurement_store import MeasurementMatrix, write_joined  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, TuningProblem, op_names, row_of, time_model, variants_of  # noqa: E402
from dtkernels.tuning.records.write_table import gpu_named, matrix_of_times, pruned  # noqa: E402
from dtkernels.tuning.search.candidates import split_by_kernel  # noqa: E402
from dtkernels.tuning.workers.benchmark_worker import make_gpu_worker  # noqa: E402
from dtkernels.tuning.workers.compile_worker import Artefact  # noqa: E402
from dtkernels.tuning.workers.simulated_worker import make_simulated_gpu  # noqa: E402
from dtkernels.tuning.workers.worker_pool import WorkerPool  # noqa: E402

ROUNDS = 2
Times = dict[TuningProblem, dict[str, Time]]  #: of the schedules that raced at a size


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if not args.dry_run:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("measure_stored: no GPU: torch.cuda.is_available() is False; --dry-run needs none")
    gpus = WorkerPool(1, make_simulated_gpu, target(args.gpu)) if args.dry_run else WorkerPool(1, make_gpu_worker)
    try:
        about = ask(gpus, ("about",))
        gpu = gpu_named(about)
        folder = args.tables / gpu.folder
        by = {"gpu": gpu.name, "multiprocessors": gpu.multiprocessors, "driver": about["driver"], "torch": about["torch"], "triton": about["triton"],
              "date": str(date.today()), "command": "tools/measure_stored.py" + (f" --retime {args.retime.pattern}" if args.retime else "")}  # fmt: skip
        until = time.monotonic() + args.budget
        names = op_names(args.ops, "measure_stored") if args.ops != "all" else shipped_names()
        if args.retime:
            for path in sorted(p for p in folder.glob("*.yaml") if p.stem in names):
                retime(path, gpus, args, by, until)
            return 0
        sources = [p for p in sorted(args.tables.glob("*/gpu.yaml")) if p.parent != folder and same_arch(p.parent, arch_folder(gpu.arch))]
        if not sources:
            raise SystemExit(f"measure_stored: no table of another GPU of {arch_folder(gpu.arch)} under {args.tables}")
        for op in names:
            paths = [p for s in sources if (p := s.parent / f"{op}.yaml").exists()]
            if paths:
                write_gpu(folder, gpu)
                write_joined(folder / "measurements.safetensors", by, measure(op, paths, folder / f"{op}.yaml", gpus, args, by, until))
    except (TableError, StoreError, OSError) as error:
        raise SystemExit(f"measure_stored: {error}") from None
    finally:
        gpus.close()
    return 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("measure_stored", __doc__)
    parser.add_argument("--tables", type=folder_to_read, default=package_tables(), metavar="DIR")
    parser.add_argument("--ops", default="all", help="all, or names separated by commas")
    parser.add_argument("--most", type=at_least(1), default=6, metavar="N", help="schedules that race at a size; default: 6")
    parser.add_argument("--dtypes", type=some_of(DTYPES), default=DTYPES, help=f"which of the rows' dtypes, comma-separated: {', '.join(DTYPES)}")
    parser.add_argument("--budget", type=seconds, default="24h", help="begin no further size after 90s, 30m, 2h; a kind of call that is not finished gets no rows")
    parser.add_argument("--again", action="store_true", help="measure kinds of calls too that the GPU's table has rows of")
    parser.add_argument("--retime", type=pattern, metavar="REGEX", help="time this GPU's own rows again whose schedules match")
    parser.add_argument("--gpu", choices=tuple(TARGETS), default="h100", help="the GPU that --dry-run pretends")
    parser.add_argument("--dry-run", action="store_true", help="predicted times instead of measurements; needs no GPU")
    return parser.parse_args(argv)


def ask(gpus: WorkerPool, message: tuple, seconds: float = 120.0):
    """Return the worker's answer to one message. Exits with one line where there is none."""
    gpus.send(0, message, message, seconds)
    while True:
        for done in gpus.poll(1.0):
            if message[0] == "about" and done.failure:
                raise SystemExit(f"measure_stored: the GPU worker does not start: {done.failure}")
            return [] if done.failure else done.result


def measure(op: str, paths: list[Path], to: Path, gpus: WorkerPool, args: argparse.Namespace, by: dict, until: float) -> list[MeasurementMatrix]:
    """Race the stored schedules of one op and write its rows; return the times. Rows of kinds that were not measured stay."""
    found = [r for p in paths for r in read_rows(p.read_text(), str(p)) if r.binaries and not r.batched and r.spec == spec_hash(shipped(op).spec.algorithm)]
    earlier = read_rows(to.read_text(), str(to)) if to.exists() else ()
    known = set() if args.again else {kind_of(r) for r in earlier}
    kinds: dict[CallKind, dict[TuningProblem, None]] = {}
    for r in found:
        if r.dtype in args.dtypes and (kind := kind_of(r)) not in known:
            kinds.setdefault(kind, {})[TuningProblem(kind, tuple(r.sizes.items()))] = None
    places = dict.fromkeys(s for p in paths for s in stores_of(p, read_gpu(p.parent).arch) if s.exists())
    stores, rows, matrices, measured = KernelStores([KernelStore(s) for s in places]), list[Row](), list[MeasurementMatrix](), set[CallKind]()
    for kind, works in kinds.items():
        times: Times = {w: raced(w, found, stores, gpus, args.most) for w in works if time.monotonic() < until}
        if len(times) < len(works):
            print(f"{op}: {kind.direction} {kind.dtype} not finished, no rows", flush=True)
            continue
        best = {w: min(t, key=lambda s: t[s].score) for w, t in times.items() if t}
        chosen = {w: row_of(w, s, measured=not args.dry_run, by=by, microseconds=None if args.dry_run else round(times[w][s].cold, 2)) for w, s in best.items()}
        rows += [with_kernels(r, [o for o in found if (o.key, o.schedule) == (r.key, r.schedule)]) for r in pruned(chosen)]
        matrices.append(matrix(kind, times, by))
        measured.add(kind)
    if rows:
        write_table(to, rows + [r for r in earlier if kind_of(r) not in measured], BuiltKernels(), key_for(to))
    print(f"{op}: {sum(map(len, kinds.values()))} sizes, {len(rows)} rows in {to}", flush=True)
    return matrices


def retime(path: Path, gpus: WorkerPool, args: argparse.Namespace, by: dict, until: float) -> None:
    """Time the rows of a table again whose schedules match, each by its own kernels. A row that is wrong or not reached keeps its time."""
    stores = KernelStores([KernelStore(s) for s in stores_of(path, read_gpu(path.parent).arch) if s.exists()])
    rows, changed, ratios = list(read_rows(path.read_text(), str(path))), 0, list[float]()
    for i, row in enumerate(rows):
        if not row.binaries or row.batched or row.dtype not in args.dtypes or not args.retime.search(row.schedule) or time.monotonic() > until:
            continue
        work = TuningProblem(kind_of(row), tuple(row.sizes.items()))
        variant = variants_of(work.group)[1]
        entrants = tuple((s, a, (split_by_kernel(variant.algorithm, variant.outputs, s), None)) for s, a in artefacts(work, [row], stores, 1))
        for taken in ask(gpus, ("race", work, variant.outputs, entrants, ROUNDS)) if entrants else ():
            if taken.failure:
                print(f"{row.title()}: {taken.failure}", flush=True)
                continue
            ratios += [taken.cold / row.microseconds] if row.microseconds else []
            rows[i], changed = replace(row, microseconds=round(taken.cold, 2), measured=not args.dry_run, by=by), changed + 1
    if changed:
        write_table(path, rows, BuiltKernels(), key_for(path))
    print(f"{path}: {changed} rows timed again, {exp(sum(map(log, ratios)) / max(1, len(ratios))):.3f} of their times", flush=True)


def kind_of(row: Row) -> CallKind:
    """Return the kind of call that a row is for."""
    return CallKind(row.op, row.direction, row.dtype, tuple(sorted(row.params.items())), row.wanted, row.saved, row.kept)


def raced(work: TuningProblem, rows: list[Row], stores: KernelStores, gpus: WorkerPool, most: int) -> dict[str, Time]:
    """Return the times of the schedules predicted to be the fastest at ``work``, without those that failed."""
    _, variant = variants_of(work.group)
    wanted, entrants = row_of(work, ""), []
    for schedule, artefact in artefacts(work, [c.row for c in candidates(rows, wanted.key, work.extents, wanted.spec, time_model(work.group)) if c.exact and not c.refused], stores, most):
        try:
            entrants.append((schedule, artefact, (split_by_kernel(variant.algorithm, variant.outputs, schedule), None)))
        except DTError:
            continue
    found = ask(gpus, ("race", work, variant.outputs, tuple(entrants), ROUNDS)) if entrants else []
    return {schedule: t for (schedule, *_), t in zip(entrants, found) if not t.failure}


def artefacts(work: TuningProblem, ranked: list[Row], stores: KernelStores, most: int) -> Iterator[tuple[str, Artefact]]:
    """Yield the different schedules of some rows, best first, with their stored kernels."""
    _, variant = variants_of(work.group)
    by_schedule: dict[str, list[Row]] = {}
    for r in ranked:
        by_schedule.setdefault(r.schedule, []).append(r)
    for schedule, alike in list(by_schedule.items())[:most]:
        names = dict.fromkeys(n for r in alike for n in r.binaries)
        try:
            entries = [stores.entry(n) for n in names]
            yield schedule, Artefact(stores.host(entries[0].host), tuple(dict.fromkeys(e.kernel for e in entries)), variant.outputs, entries, {e.code: stores.code(e.code) for e in entries})
        except StoreError as error:
            print(f"measure_stored: {work.title()}: left out: {error}", file=sys.stderr)


def matrix(kind: CallKind, times: Times, by: dict) -> MeasurementMatrix:
    """Return the times of one kind of call as tools/tune.py stores them."""
    variant = variants_of(kind)[1]
    return matrix_of_times(kind, {w: {split_by_kernel(variant.algorithm, variant.outputs, s).text(): t for s, t in found.items()} for w, found in times.items()}, by)


if __name__ == "__main__":
    sys.exit(main())
