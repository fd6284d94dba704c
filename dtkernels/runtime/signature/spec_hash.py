"""The checksum by which tables and manifests know the algorithm they were made for."""

from __future__ import annotations

import hashlib


def spec_hash(algorithm: object) -> str:
    """12 hex digits that change with the algorithm of a spec."""
    return hashlib.sha256(str(algorithm).encode()).hexdigest()[:12]
