"""Runs cases of distributed_cases.py, or of another file, in two processes or more."""

import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
GRACE = 20  #: seconds that a process has to notice that the other one failed, before it waits for it no longer


def run_together(
    kind: str,
    names: list[str],
    folder: Path,
    seconds: int = 300,
    file: str = "distributed_cases.py",
    world: int = 2,
    interpret: bool = False,
    reference: bool = False,
) -> dict[str, str]:
    """Run cases one after another in so many processes: name -> "" where it passed, else what the first process that failed said.

    ``interpret``: kernels run in Triton's interpreter. ``reference``: patched models compute by the reference.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= ({"TRITON_INTERPRET": "1"} if interpret else {}) | ({"DTKERNELS_FALLBACK": "reference"} if reference else {})
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(TESTS / file), kind]
    said, problems = [folder / f"said_{rank}" for rank in range(world)], [folder / f"problems_{rank}" for rank in range(world)]
    running = []
    for rank in range(world):
        with said[rank].open("w") as out, problems[rank].open("w") as err:
            running.append(subprocess.Popen([*command, str(rank), str(folder / f"store_{world}"), str(world), *names], env=environment, stdout=out, stderr=err))
    failed = _first_failure(running, seconds)
    passed = said[0].read_text().split()
    problem = "" if failed is None else problems[failed].read_text()[-3000:]
    return {name: "" if name in passed else problem or "did not run to its end" for name in names}


def _first_failure(running: list[subprocess.Popen], seconds: float) -> int | None:
    """Waits for all processes, and for one whose partner failed not for long; which failed first by itself, if any."""
    end, failed = time.monotonic() + seconds, None
    while any(process.poll() is None for process in running) and time.monotonic() < end:
        if failed is None and any(process.poll() for process in running):
            failed = next(i for i, process in enumerate(running) if process.poll())
            end = min(end, time.monotonic() + GRACE)
        time.sleep(0.1)
    for process in running:
        process.kill()
        process.wait()
    return failed if failed is not None else next((i for i, process in enumerate(running) if process.returncode), None)


def run_cases(cases: dict, kind: str, rank: str, store: str, world: str, *names: str) -> None:
    """One of the processes: runs cases by name, and says which passed."""
    import torch
    import torch.distributed as dist

    if os.environ.get("TRITON_INTERPRET") == "1":
        from quick_interpreter import install

        install()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    for name in names:
        cases[name]()
        dist.barrier()
        if rank == "0":
            print("passed", name, flush=True)
    dist.destroy_process_group()
