"""Hash an algorithm: tables and manifests name the version that they were made for."""

from __future__ import annotations

import hashlib


def spec_hash(algorithm: object) -> str:
    """Return 12 hex digits that depend on the algorithm of a spec."""
    return hashlib.sha256(str(algorithm).encode()).hexdigest()[:12]
