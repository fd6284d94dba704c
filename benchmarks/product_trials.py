"""Which schedule of a product is fast at which size? A grid of schedules at random sizes: what a cost model is judged by.

    python benchmarks/product_trials.py --seed 1 --seconds 400 --json product_trials.json

The sizes are those of ``random_shapes.py`` for mmsigmoid. Each schedule that is not hopeless there is compiled and timed, cold
L2, results checked against float64. ``bare`` is torch's product alone at that size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

from common.cli_types import Parser, at_least, file_to_write, within  # noqa: E402
from sampling import domains  # noqa: E402

#: (block of rows, block of columns, tile of the sum, warps, stages): measured good starting points of the H200's table, and their neighbours
TILES = (
    (16, 32, 256, 4, 4), (16, 64, 128, 4, 5), (16, 128, 128, 4, 4), (32, 64, 128, 4, 5), (32, 128, 128, 4, 4), (64, 16, 128, 4, 5), (64, 32, 128, 4, 5),
    (64, 64, 64, 4, 5), (64, 64, 128, 4, 4), (64, 128, 64, 4, 5), (64, 128, 128, 4, 4), (64, 256, 64, 4, 4), (64, 256, 64, 8, 4), (128, 16, 128, 4, 5),
    (128, 32, 128, 4, 4), (128, 64, 64, 4, 5), (128, 64, 128, 4, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (256, 64, 64, 8, 4),
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 256, 64, 8, 4),
)  # fmt: skip
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
MULTIPROCESSORS = 132
WASTED = 2.0  #: a block is left out where it computes this many times what the size needs, if a smaller one does not


def grid(x: int, y: int, k: int) -> list[str]:
    """Return the schedules to try at one size."""
    found = []
    for (bx, by, bk, warps, stages), form in itertools.product(TILES, ("plain", "descriptors", "tail", "split")):
        if (bx > 16 and bx >= WASTED * x) or (by > 16 and by >= WASTED * y) or (bk > 64 and bk >= 2 * k):
            continue
        blocks = -(-x // bx) * -(-y // by)
        if blocks > 24 * MULTIPROCESSORS and bx * by < 128 * 128:
            continue  # small blocks of a large product
        aligned = y % 8 == k % 8 == 0
        if form in ("descriptors", "tail") and (blocks < MULTIPROCESSORS or not aligned or min(bx, by) < 64):
            continue
        if form == "tail" and (bx * by < 128 * 256 or blocks > 8 * MULTIPROCESSORS):
            continue
        head = f"f.block(x:{bx}, y:{by}); f.tensorize(x:{bx}, y:{by}, k:{bk});"
        group = min(8, -(-x // bx))
        walk = f" f.map(x:x1/{group}, y, x1);" if group > 1 and y > by else ""
        tail = f" f.num_warps({warps}); f.num_stages({stages}); f.compile();"
        if form == "plain":
            found.append(head + walk + tail)
        elif form == "split":
            useful = [p for p in PARTS[1:] if blocks * p <= 2.2 * MULTIPROCESSORS and k >= 2 * p * bk]
            found += [f"{head} f.split(k:{p});{tail}" for p in useful[-4:]]
        else:
            cut = " f.tail(x:64, y:128, k:128);" if form == "tail" else ""
            found.append(f"{head}{walk} f.persistent(); f.descriptor(A, B, f);{cut}{tail}")
    return found


def bare(x: int, y: int, k: int) -> float:
    """Return the microseconds of torch's product."""
    import torch
    from common.timing import captured, gpu_time

    a, b = torch.randn(x, k, device="cuda", dtype=torch.bfloat16), torch.randn(k, y, device="cuda", dtype=torch.bfloat16)
    call, _ = captured(lambda: lambda: a @ b)
    return gpu_time(call, 10.0)


class Trials:
    """Compile on all cores, time on the GPU, keep what was found."""

    def __init__(self, options: argparse.Namespace):
        from sampling.regret import problem_of

        from dtkernels.codegen.target import target
        from dtkernels.tuning.records.problems import variants_of
        from dtkernels.tuning.search.candidates import cut
        from dtkernels.tuning.workers.benchmark_worker import make_gpu_worker
        from dtkernels.tuning.workers.compile_worker import make_cpu_worker
        from dtkernels.tuning.workers.worker_pool import WorkerPool

        self.options, self.problem_of, self.variants_of, self.cut = options, problem_of, variants_of, cut
        self.gpus = WorkerPool(1, make_gpu_worker, *())
        self.cpus = WorkerPool(options.jobs, make_cpu_worker, target("h200"))
        self.sizes: list[dict] = []
        self.to_compile: deque = deque()
        self.to_time: deque = deque()
        self.end = time.monotonic() + options.seconds

    def go(self) -> None:
        """Take one size after another until the time is over."""
        stream = domains.sizes(self.options.seed, "mmsigmoid")
        while time.monotonic() < self.end:
            while len(self.to_compile) < 2 * self.options.jobs and time.monotonic() < self.end:
                self._begin(next(stream).shape)
            self._feed()
            for done in self.gpus.poll(0.002):
                at, text, _ = done.task
                time_of = done.result
                failure = done.failure or time_of.failure
                self.sizes[at]["trials"].append([text, None, None, failure[:160]] if failure else [text, round(time_of.cold, 2), round(time_of.warm, 2), ""])
            for done in self.cpus.poll(0.02):
                at, text, *rest = done.task
                if done.failure:
                    self.sizes[at]["trials"].append([text, None, None, done.failure[:160]])
                else:
                    self.to_time.append((at, text, *rest, done.result))
        self._write()

    def _begin(self, shape: str) -> None:
        x, y, k = map(int, shape.split("x"))
        if x * y * k > 4e11:
            return
        work = self.problem_of("mmsigmoid", shape, "forward", "bf16", {"x": x, "y": y, "k": k})
        variant = self.variants_of(work.group)[1]
        self.sizes.append({"x": x, "y": y, "k": k, "bare": round(bare(x, y, k), 2), "trials": []})
        out = variant.outputs[0]
        for text in grid(x, y, k):
            text = text.replace("f.", f"{out}.").replace(", f)", f", {out})")
            self.to_compile.append((len(self.sizes) - 1, text, work, variant))
        if len(self.sizes) % 5 == 0:
            self._write()

    def _feed(self) -> None:
        for worker in self.cpus.idle():
            if not self.to_compile or len(self.to_time) > 200:
                break
            at, text, work, variant = self.to_compile.popleft()
            try:
                whole = self.cut(variant.algorithm, variant.outputs, text)
            except Exception as refused:
                self.sizes[at]["trials"].append([text, None, None, str(refused)[:160]])
                continue
            self.cpus.send(worker, (at, text, work, whole), ("compile", work.group, whole, None, (work,)), 60.0)
        for worker in self.gpus.idle():
            if not self.to_time:
                break
            at, text, work, _, artefact = self.to_time.popleft()
            funcs = tuple(self.variants_of(work.group)[1].outputs)
            self.gpus.send(worker, (at, text, work), ("measure", work, funcs, (at, text), artefact, float("inf"), ()), 30.0)

    def _write(self) -> None:
        about = {"what": "each trial: schedule, cold L2 us, warm us, failure; bare: torch's product, cold L2 us", "seed": self.options.seed}
        self.options.json.write_text(json.dumps({**about, "sizes": self.sizes}, separators=(",", ":")) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the trials and print the best of each size beside torch's product."""
    parser = Parser("product_trials", __doc__)
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--seconds", type=within(0), default=400.0)
    parser.add_argument("--jobs", type=at_least(1), default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--json", type=file_to_write, required=True)
    trials = Trials(parser.parse_args(argv))
    try:
        trials.go()
    finally:
        trials.cpus.close()
        trials.gpus.close()
    for s in trials.sizes:
        times = sorted((t[1], t[0]) for t in s["trials"] if t[1] is not None)
        if times:
            print(f"{s['x']}x{s['y']}x{s['k']}: {times[0][0]:.1f} us, bare {s['bare']:.1f}, of {len(times)}: {times[0][1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
