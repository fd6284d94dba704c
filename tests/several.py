"""Runs cases of distributed_cases.py, or of another script like it, in two or more processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
GRACE = 20  #: seconds that a process has to notice that the other one failed, before it waits for it no longer


def run_together(
    kind: str, names: list[str], folder: Path, seconds: int = 300, script: str = "distributed_cases.py", processes: int = 2, interpreted: bool = False
) -> dict[str, str]:
    """Run cases one after another in several processes: name -> "" where it passed, else what the first process that failed said."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), environment.get("PYTHONPATH", "")])
    environment["PROCESSES"] = str(processes)
    command = [sys.executable, str(TESTS / script), kind]
    said, problems = [folder / f"said_{rank}" for rank in range(processes)], [folder / f"problems_{rank}" for rank in range(processes)]
    running = []
    for rank in range(processes):
        with said[rank].open("w") as out, problems[rank].open("w") as err:
            running.append(subprocess.Popen([*command, str(rank), str(folder / "store"), *names], env=environment, stdout=out, stderr=err))
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
