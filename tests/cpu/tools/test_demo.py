"""``make demo`` runs to its end here, and what it compares agrees."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_demo_ends_well():
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "DTKERNELS_FALLBACK")}
    made = subprocess.run([sys.executable, "tools/demo.py"], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    assert "RESULTS DIFFER" not in made.stdout
