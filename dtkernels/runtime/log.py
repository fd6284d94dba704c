"""Log the runtime's messages through the logger ``dtkernels``; each warning once, not at every call.

``DTKERNELS_LOG=info`` (or debug, warning, error) prints them to stderr. ``info`` gives one line per compiled kernel.
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger("dtkernels")
_told: set[str] = set()


def warn_once(text: str, about: object = None) -> None:
    """Log a warning the first time only. With ``about``, one warning per subject, for example a damaged file."""
    key = text if about is None else f"about {about}"
    if key not in _told:
        _told.add(key)
        log.warning("dtkernels: %s", text)


def forget() -> None:
    """Allow every warning again."""
    _told.clear()


def _listen(level: str) -> None:
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        warn_once(f"DTKERNELS_LOG is {level!r}; allowed: debug, info, warning, error")
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False


if _wanted := os.environ.get("DTKERNELS_LOG"):
    _listen(_wanted)
