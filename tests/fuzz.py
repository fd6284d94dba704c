"""Random programs without end: compiled, run and compared with float64, in Triton's interpreter or on a GPU.

    python tests/fuzz.py --device interpreter --seed 1 --seconds 600      one seed, all cores
    python tests/fuzz.py --device cuda --case 1000123                     one case again, printed
    python tests/fuzz.py --case 1000123 --shorten                         the same, made shorter while it fails the same way

Case ``i`` of seed ``s`` is number ``s * 1000000 + i``. Each core has a process, which makes, compiles and runs whole cases: kernels of
several cases compile while one of them runs. Prints a line for each failure, then a summary; exit status 1 if any was wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path

CASES_OF_A_SEED = 1_000_000
LONGEST = 180.0  #: seconds of work that a case may take before its process is ended
WAITED = 5  #: times as long by the clock: other processes may have the cores


def prepare(device: str) -> None:
    """Make this process one that runs cases; before torch and Triton are imported."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(Path(__file__).parent)]
    import torch

    torch.set_num_threads(1)
    if device == "interpreter":
        import bounds  # noqa: F401 (an access outside the tensors raises)
        from quick_interpreter import install

        install()


def attempt(number: int, device: str, tape: list[int] | None = None) -> tuple[str, str, str]:
    """(kind, rule or one line of what went wrong, what came of it as an op) of a case."""
    from random_cases import case_from
    from random_draws import Draws
    from random_runs import Wrong, run

    try:
        found = run(case_from(Draws(number, tape)), "cuda" if device == "cuda" else "cpu")
        return found.kind, found.rule, found.as_op
    except Wrong as wrong:
        return "wrong", str(wrong).split("\n")[0], ""
    except Exception as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if "dtkernels" in f.filename or "tests" in f.filename]
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        return "error", f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:200]}", ""


def work(pipe: Connection, device: str) -> None:
    """Run the numbers that come through ``pipe`` until None does."""
    prepare(device)
    while (number := pipe.recv()) is not None:
        found = attempt(number, device)
        pipe.send(found)
        if device == "cuda" and found[0] == "error" and "CUDA error" in found[1]:
            return  # what follows in this process would fail too


class Worker:
    """A process that runs cases; it is replaced when it dies or takes too long."""

    def __init__(self, device: str):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.device, self.number = device, None
        self.since, self.before = time.monotonic(), 0.0

    def give(self, number: int) -> None:
        self.number, self.since, self.before = number, time.monotonic(), self._worked()
        self.pipe.send(number)

    def late(self) -> bool:
        """Whether its case takes too long."""
        waited = time.monotonic() - self.since
        return self.number is not None and waited > LONGEST and (waited > WAITED * LONGEST or self.device == "cuda" or self._worked() - self.before > LONGEST)

    def _worked(self) -> float:
        """Seconds of a core that the process took; where the system does not say, those by the clock."""
        try:
            spent = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        except OSError:
            return time.monotonic()
        return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


class Summary:
    """What came of the cases so far."""

    def __init__(self, device: str):
        self.device, self.kinds, self.refusals, self.ops = device, Counter(), Counter(), Counter()

    def add(self, number: int, found: tuple[str, str, str]) -> None:
        kind, text, as_op = found
        self.kinds[kind] += 1
        if kind == "refused":
            self.refusals[text] += 1
        elif kind in ("wrong", "error", "unexpected refusal"):
            print(f"{kind}: {text}\n    replay: python tests/fuzz.py --device {self.device} --case {number}", flush=True)
        if as_op:
            self.ops[as_op] += 1

    @property
    def failed(self) -> bool:
        return any(self.kinds[kind] for kind in ("wrong", "error", "unexpected refusal"))

    def __str__(self) -> str:
        k, total = self.kinds, sum(self.kinds.values())
        lines = [
            f"{total} programs: {k['right']} compared, {k['nothing to compare']} with nothing to compare, {k['refused']} refused, {k['too long']} too long,"
            f" {k['unexpected refusal']} refused unexpectedly, {k['wrong']} wrong, {k['error']} errors;"
            f" {sum(self.ops.values())} run as ops too, gradients among them"
        ]
        return "\n".join([*lines, *(f"  {count:6} refused: {rule}" for rule, count in self.refusals.most_common())])


def forever(device: str, seed: int, seconds: float, jobs: int) -> Summary:
    """Run cases of ``seed`` for so many seconds on ``jobs`` processes."""
    summary, workers = Summary(device), [Worker(device) for _ in range(jobs)]
    number, end = seed * CASES_OF_A_SEED, time.monotonic() + seconds
    for worker in workers:
        worker.give(number)
        number += 1
    while any(w.number is not None for w in workers):
        for pipe in wait([w.pipe for w in workers if w.number is not None], timeout=1.0):
            at = next(i for i, w in enumerate(workers) if w.pipe is pipe)
            worker = workers[at]
            try:
                summary.add(worker.number, pipe.recv())
            except (EOFError, ConnectionError):
                worker.stop()
                summary.add(worker.number, ("error", f"its process ended with status {worker.process.exitcode}", ""))
            worker.number = None
        for at, worker in enumerate(workers):
            late = worker.late()
            if late:
                summary.add(worker.number, ("error", f"it took more than {LONGEST:g} seconds", ""))
                worker.stop()
                worker.number = None
            if worker.number is None and time.monotonic() < end:
                if late or not worker.process.is_alive():
                    workers[at] = worker = Worker(device)
                try:
                    worker.give(number)
                except (BrokenPipeError, OSError):  # it ended after its answer
                    workers[at] = worker = Worker(device)
                    worker.give(number)
                number += 1
    for worker in workers:
        worker.stop()
    return summary


def once(number: int, device: str, shorten: bool) -> Summary:
    """One case again, printed, perhaps made shorter."""
    prepare(device)
    from random_cases import case_from
    from random_draws import Draws, shortened

    summary, found = Summary(device), attempt(number, device)
    draws = Draws(number)
    print(case_from(draws))
    if shorten and found[0] in ("wrong", "error", "unexpected refusal"):
        alike = found[0], found[1].split(":")[0] if found[0] != "wrong" else ""

        def fails(tape: list[int]) -> bool:
            kind, text, _ = attempt(number, device, tape)
            return (kind, text.split(":")[0] if kind != "wrong" else "") == alike

        tape = shortened(draws.made, fails)
        print(f"\nshorter, {attempt(number, device, tape)[:2]}:\n{case_from(Draws(number, tape))}")
    summary.add(number, found)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("interpreter", "cuda"), default="interpreter")
    parser.add_argument("--seed", type=int, default=0, help="the first case is number seed * 1000000")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; all cores by default")
    parser.add_argument("--case", type=int, help="run this number alone and print it")
    parser.add_argument("--shorten", action="store_true", help="with --case: a shorter case that fails in the same way")
    given = parser.parse_args()
    if given.seconds <= 0 or given.jobs < 1 or given.seed < 0:
        parser.error("--seconds and --jobs are positive, --seed is 0 or more")
    summary = once(given.case, given.device, given.shorten) if given.case is not None else forever(given.device, given.seed, given.seconds, given.jobs)
    print(summary)
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
