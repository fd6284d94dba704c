"""What the runtime says: through the logger ``dtkernels``, a warning once and not at every call.

``DTKERNELS_LOG=info`` (or debug, warning, error) prints its messages to stderr, ``info`` being one line for each kernel
that had to be compiled.
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger("dtkernels")
_told: set[str] = set()


def warn_once(text: str, about: object = None) -> None:
    """A warning, the first time it is given; the first of those ``about`` one thing, a damaged file say."""
    key = text if about is None else f"about {about}"
    if key not in _told:
        _told.add(key)
        log.warning("dtkernels: %s", text)


def forget() -> None:
    """Give every warning anew."""
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
