"""Find schedules for a GPU and write them into its table: ``dtkernels/tuning/tune.py``; --help says how."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [p for p in (str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)) if p not in sys.path]


def _too_early(*_) -> None:
    print("\ntune: interrupted before anything was measured", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":  # the imports below take seconds; main() installs its own handlers later
    signal.signal(signal.SIGINT, _too_early)
    from common.require_packages import needs

    needs("tune", "torch", "triton", "numpy")

from dtkernels.tuning.tune import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
