"""Define PatchReport: what `apply_to` patched, what it skipped and why, which calls ran since, and how to undo it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from .call_stats import CallRecord

PATCHED, WOULD_PATCH, ALREADY, SKIPPED = "patched", "would patch", "already", "skipped"


@dataclass
class Row:
    """One module and one op. `state` is "patched", "would patch" (dry run), "already" or "skipped"; `reason` says why."""

    module: str
    op: str
    state: str
    reason: str = ""
    record: CallRecord | None = None


@dataclass
class PatchReport:
    """The result of `apply_to`. `print(report)` shows a table; `report.undo()` restores the model."""

    rows: list[Row] = field(default_factory=list)
    dry_run: bool = False
    as_measured: frozenset[str] = frozenset()  #: the ops that only "auto" asked for: calls measured to be slower keep the original path
    by_name: frozenset[str] = frozenset()  #: the ops that were asked for by their own names, not by "auto" or "all" alone
    undone: bool = False
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore exactly what this `apply_to` changed, newest change first; a second call does nothing.

        Modules patched by another `apply_to`, or changed by hand since, are left as they are.
        """
        while self._undo:
            self._undo.pop()()
        self.undone = True

    def add(self, module: str, op: str, state: str, reason: str = "", record: CallRecord | None = None) -> None:
        """Append a row; see Row."""
        self.rows.append(Row(module, op, state, reason, record))

    def on_undo(self, restore: Callable[[], None]) -> None:
        """Have `undo` call `restore`. Patchers register one before each change."""
        self._undo.append(restore)

    def _in_state(self, *states: str) -> list[Row]:
        return [row for row in self.rows if row.state in states]

    @property
    def patched(self) -> list[Row]:
        """Return rows patched by this call (in a dry run: those that would be)."""
        return self._in_state(PATCHED, WOULD_PATCH)

    @property
    def already(self) -> list[Row]:
        """Return rows that an earlier `apply_to` had patched."""
        return self._in_state(ALREADY)

    @property
    def skipped(self) -> list[Row]:
        """Return rows that hold one of the ops and were left alone; `row.reason` says why."""
        return self._in_state(SKIPPED)

    @property
    def calls(self) -> Counter:
        """Return op -> calls of patched modules so far, fallbacks included."""
        return _sum((op, record.calls) for op, record in self._records())

    @property
    def paths(self) -> dict[str, Counter]:
        """Return op -> calls by path: "kernel", "own path" (the module's original one) or "reference"."""
        found: dict[str, Counter] = {}
        for op, record in self._records():
            found.setdefault(op, Counter()).update(record.paths)
        return found

    @property
    def fallbacks(self) -> Counter:
        """Return reason -> calls that took the original path for it so far."""
        return _sum(item for _, record in self._records() for item in record.fallbacks.items())

    @property
    def matrices(self) -> Counter:
        """Return reason -> calls of attention that took a mask of Tq x Tk for it, in place of numbers."""
        return _sum(item for _, record in self._records() for item in record.matrices.items())

    def _records(self) -> list[tuple[str, CallRecord]]:
        """Return (op, record) of the rows that have one."""
        return [(row.op, row.record) for row in self.rows if row.record is not None]

    def __str__(self) -> str:
        head = [f"{len(self._in_state(state))} {state}" for state in (PATCHED, WOULD_PATCH, ALREADY, SKIPPED)]
        head = [part for part in head if not part.startswith("0 ")] or ["nothing to patch"]
        title = "dtkernels: " + ", ".join(head) + (" (undone)" if self.undone else "")
        if not self.rows:
            return title
        table = [("module", "op", "state", "calls", "path", "why")] + [_line(rows) for rows in _groups(self.rows)]
        return "\n".join([title, *_align(table)])


def _sum(items: Iterable[tuple[str, int]]) -> Counter:
    total: Counter = Counter()
    for key, n in items:
        total[key] += n
    return total


def _groups(rows: list[Row]) -> list[list[Row]]:
    """Group rows that differ in layer numbers only: a deep model takes one line for each op instead of one for each layer."""

    def alike(row):
        return _pattern(row.module), row.op, row.state, row.reason

    order: dict[tuple, int] = {}
    for row in rows:
        order.setdefault(alike(row), len(order))
    ordered = sorted(rows, key=lambda row: order[alike(row)])
    return [list(group) for _, group in groupby(ordered, alike)]


def _pattern(name: str) -> tuple[str, ...]:
    return tuple("#" if part.isdigit() else part for part in name.split("."))


def _shared_name(names: list[str]) -> str:
    """Merge names: ["a.0.b", "a.1.b", "a.2.b"] -> "a.0-2.b (x3)"."""
    if len(names) == 1:
        return names[0] or "(the model)"
    parts = []
    for column in zip(*(name.split(".") for name in names), strict=True):
        distinct = sorted(set(column), key=lambda part: (len(part), part))
        parts.append(distinct[0] if len(distinct) == 1 else f"{distinct[0]}-{distinct[-1]}")
    return f"{'.'.join(parts)} (x{len(names)})"


def _line(rows: list[Row]) -> tuple[str, ...]:
    first = rows[0]
    records = [row.record for row in rows if row.record is not None]
    calls = str(sum(record.calls for record in records)) if records else "-"
    fallbacks = _sum(item for record in records for item in record.fallbacks.items())
    why = [first.reason] if first.reason else []
    why += [f"{reason}: {n}" for reason, n in fallbacks.most_common()]
    matrices = _sum(item for record in records for item in record.matrices.items())
    why += [f"{reason}, as a matrix: {n}" for reason, n in matrices.most_common()]
    return _shared_name([row.module for row in rows]), first.op, first.state, calls, _path(records), "; ".join(why)


def _path(records: list[CallRecord]) -> str:
    """Format paths: ["kernel"] -> "kernel"; if calls took several paths, each with its count."""
    counted = _sum(item for record in records for item in record.paths.items())
    taken = [(path, n) for path, n in counted.items() if n]
    if len(taken) < 2:
        return taken[0][0] if taken else "-"
    return ", ".join(f"{path} {n}" for path, n in taken)


def _align(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
