"""Time from text to Triton source of every shipped op and of the published programs, in CPU milliseconds, and whether two processes agree.

    python benchmarks/compile_time.py

No GPU, no torch. Ops get the default schedule for an H200 at their usual sizes; the limit for each is 100 ms.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dtkernels import show  # noqa: E402
from dtkernels.codegen import pipeline  # noqa: E402

REPEATS = 3


def subjects() -> dict[str, list]:
    """Return, by name, functions that emit a text again."""
    programs = sorted((ROOT / "tests" / "golden" / "programs").glob("*.dt"))
    found = {op: (op, {}) for op in show.shipped()}
    found |= {f"{op} causal": (op, {"causal": True}) for op in show.shipped() if "causal" in dict(show.read(op).program.algorithm.params)}
    return found | {p.stem: (str(p), {}) for p in programs}


def emitted(what: str, params: dict) -> str:
    """Emit the file of an op or a program, as the first call in a process does."""
    pipeline._lower.cache_clear()
    return show.Subject(show.read(what), given=params).text("triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--digests", action="store_true", help="print a digest of every text, nothing else")
    args = parser.parse_args()
    if args.digests:
        print(json.dumps({name: hashlib.sha256(emitted(*of).encode()).hexdigest() for name, of in subjects().items()}))
        return
    for name, of in subjects().items():
        times = []
        for _ in range(REPEATS):
            start = time.process_time()
            text = emitted(*of)
            times.append((time.process_time() - start) * 1e3)
        print(f"{name:24s} {min(times):7.1f} ms of CPU, {len(text.splitlines()):4d} lines{'' if min(times) < 100 else '   OVER 100'}")
    command = [sys.executable, __file__, "--digests"]
    texts = set()
    for seed in ("0", "1", "77"):
        done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        texts.add(done.stdout)
    print("texts of three processes with other hash seeds:", "the same" if len(texts) == 1 else "DIFFERENT")


if __name__ == "__main__":
    main()
