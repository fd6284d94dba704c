"""Print the lines of a kernel that overlaps with others of its call."""

from __future__ import annotations

from ...ir.nest import Link

WAIT, RELEASE = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


def head(link: Link | None) -> list[str]:
    """Return the lines that a kernel begins with."""
    return _lines([WAIT] * link.needs + [RELEASE] * (link.releases == "first")) if link else []


def before_stores(link: Link) -> list[str]:
    """Return the lines before the stores that end a kernel."""
    return _lines([RELEASE] * (link.releases == "stores"))


def tail(link: Link | None) -> list[str]:
    """Return the lines that a kernel ends with."""
    return _lines([WAIT] * (not link.needs)) if link else []


def _lines(calls: list[str]) -> list[str]:
    return ["    if DEPENDENT:", *(f"        {call}" for call in calls)] if calls else []
