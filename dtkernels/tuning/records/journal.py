"""Record measurements line by line. A line is whole or absent, so an interruption at any time loses only unfinished measurements.

Each line is JSON: ``["w", number, first, rest]`` and ``["p", number, first, rest]`` name problems and plans, where ``["x",
number, text]`` is the first half of several, and ``["g", number, text]`` a device. ``["t", work, plan, cold, warm, device]``
is a time in microseconds, ``["f", work, plan, why, device]`` a failure, both without a device if none took part.
``["s", seconds]`` is time spent, ``["h", {...}]`` a header. Only one process writes; workers send it their results.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

FORMAT = "dtkernels tuning 1"
HALF = "\x1f"  #: separates the halves of a name


class OtherRun(ValueError):
    """Raised if the file is a complete journal of another run."""


@dataclass(frozen=True)
class Time:
    """Microseconds with a cold and with a warm cache, or why there are none."""

    cold: float = 0.0
    warm: float = 0.0
    failure: str = ""

    @property
    def score(self) -> float:
        """Return the number by which schedules are compared."""
        return (self.cold + self.warm) / 2 if not self.failure else float("inf")


class Journal:
    """The journal at ``path``: read if it exists, then appended to. Raises ValueError if it belongs to something else."""

    def __init__(self, path: Path, header: dict, about: dict | None = None):
        """``header`` must equal that of the file; ``about`` is stored with it."""
        self.about = about or {}
        self.times: dict[tuple[str, str], Time] = {}  #: (work, plan) -> time
        self.seconds = 0.0
        self._numbers: dict[tuple[str, str], int] = {}
        self._count = {"w": -1, "p": -1, "x": -1, "g": -1}
        self.places: dict[tuple[str, str], str] = {}  #: (work, plan) -> the device that measured it
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._read(path, header) if path.exists() else 0
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(whole)  # drop a last line that was cut short
        self._whole = self._file.seek(whole)
        self._full = False
        self._synced = time.monotonic()
        if not whole:
            self._write(["h", {"format": FORMAT, **header, "about": self.about}])

    def _read(self, path: Path, header: dict) -> int:
        """Read every whole line; return their length in bytes."""
        names: dict[tuple[str, int], str] = {}
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        for i, line in enumerate(data[:end].splitlines()):
            try:
                self._take(json.loads(line), names, header, path)
            except (OtherRun, json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, RecursionError) as error:
                if isinstance(error, OtherRun):
                    raise
                raise ValueError(f"{path}:{i + 1}: damaged: {type(error).__name__}; move it away to start anew") from None
        return end

    def _take(self, entry: list, names: dict, header: dict, path: Path) -> None:
        kind = entry[0]
        if kind == "h":
            for key, value in {"format": FORMAT, **header}.items():
                if entry[1].get(key) != value:
                    raise OtherRun(f"{path}: measured with {key} {entry[1].get(key)!r}, this is {value!r}; choose another --out or move it away")
            self.about = entry[1].get("about", {})
        elif kind in ("w", "p", "x", "g"):
            text = entry[2] if kind in "xg" else names["x", entry[2]] + HALF + entry[3]
            names[kind, entry[1]] = text
            self._numbers[kind, text] = self._count[kind] = entry[1]
        elif kind in ("t", "f"):
            key = names["w", entry[1]], names["p", entry[2]]
            self.times[key] = Time(entry[3], entry[4]) if kind == "t" else Time(failure=entry[3])
            if len(entry) > (5 if kind == "t" else 4):
                self.places[key] = names["g", entry[-1]]
        elif kind == "s":
            self.seconds += entry[1]

    def put(self, work: str, plan: str, found: Time, where: str = "") -> None:
        """Record one measurement and its device."""
        self.times[work, plan] = found
        names = [self._number("w", work), self._number("p", plan)]
        device = [self._number("g", where)] if where else []
        if where:
            self.places[work, plan] = where
        self._write(["f", *names, found.failure, *device] if found.failure else ["t", *names, round(found.cold, 3), round(found.warm, 3), *device])

    def spent(self, seconds: float) -> None:
        """Record elapsed time."""
        self.seconds += seconds
        self._write(["s", round(seconds, 1)])

    def _number(self, kind: str, text: str) -> int:
        if (kind, text) not in self._numbers:
            first, _, rest = text.partition(HALF)
            said = [text] if kind in "xg" else [self._number("x", first), rest]
            self._count[kind] += 1
            self._numbers[kind, text] = self._count[kind]
            self._write([kind, self._count[kind], *said])
        return self._numbers[kind, text]

    def _write(self, entry: list) -> None:
        if self._full:
            return  # was reported when it happened
        left = line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._full = True
            self._file.truncate(self._whole)  # a line is whole or absent
            raise
        self._whole += len(line)
        if time.monotonic() - self._synced > 5:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Flush everything to disk."""
        os.fsync(self._file.fileno())
        self._file.close()
