"""Check a tool's required packages first; exit with one line that names those missing."""

from __future__ import annotations

from importlib.util import find_spec


def needs(tool: str, *packages: str) -> None:
    """Exit with one line if a package is not installed."""
    if missing := [p for p in packages if find_spec(p) is None]:
        raise SystemExit(f"{tool}: not installed: {', '.join(missing)}; pip install {' '.join(missing)}")
