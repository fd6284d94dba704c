"""Runs a case of distributed_cases.py in as many processes as it wants."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_together(kind: str, names: list[str], folder: Path, seconds: int = 300) -> dict[str, str]:
    """Run cases one after another in two processes: name -> "" where it passed, else what the first process that failed said."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(TESTS / "distributed_cases.py"), kind]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), *names], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = []
    for process in running:
        try:
            said.append(process.communicate(timeout=seconds))
        except subprocess.TimeoutExpired:
            for other in running:
                other.kill()
            said.append(process.communicate())
    passed = said[0][0].split()
    problem = next((err for p, (_, err) in zip(running, said) if p.returncode), "")[-3000:]
    return {name: "" if name in passed else problem or "did not run" for name in names}
