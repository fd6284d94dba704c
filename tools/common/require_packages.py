"""What a tool cannot do without, said in one line before anything is begun: some of it comes with no installation of dtkernels alone."""

from __future__ import annotations

from importlib.util import find_spec


def needs(tool: str, *packages: str) -> None:
    """Exit in one line where a package is not installed."""
    if missing := [p for p in packages if find_spec(p) is None]:
        raise SystemExit(f"{tool}: not installed: {', '.join(missing)}; pip install {' '.join(missing)}")
