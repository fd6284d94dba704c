"""Which way calls went: counted, so that a fallback is never silent."""

from __future__ import annotations

import os
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
