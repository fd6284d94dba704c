"""Which way calls went: counted, so that a fallback is never silent."""

from __future__ import annotations

import os
import threading
from collections import defaultdict

KINDS = ("gpu", "interpreter", "reference")
_counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))


def count(op: str, kind: str) -> None:
    """Record one call of ``op`` by ``kind``."""
    _counts[op][kind] += 1


def counter(op: str) -> dict[str, int]:
    """The counts of ``op``, to add to."""
    return _counts[op]


def paths() -> dict[str, dict[str, int]]:
    """Calls so far by op: {"softmax": {"gpu": 3, "interpreter": 0, "reference": 1}}.

    ``gpu`` and ``interpreter`` ran a generated kernel, ``reference`` eager torch on the same algorithm.
    """
    return {op: dict(kinds) for op, kinds in _counts.items()}


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter: what it takes ``TRITON_INTERPRET`` to say."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def checking() -> bool:
    """Whether ``DTKERNELS_CHECK`` asks for checked indices. Set it before the first call: kernels repeat a known call without a further look."""
    return os.environ.get("DTKERNELS_CHECK", "").lower() in ("1", "true", "yes", "on", "y")


#: held while a kernel is imported, and while the interpreter runs one, which changes triton.language for that long, for every thread
one_at_a_time = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child has the thread that forked alone: none of its own holds the lock
    os.register_at_fork(after_in_child=one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]
