"""Use an existing table's rows as candidates, so that tuning never loses an earlier or handwritten schedule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ...runtime.select.row_ranking import candidates
from ...runtime.signature.spec_hash import spec_hash
from ...runtime.tables.table import Row, RowKey, TableError, read_rows
from ..records.problems import TuningProblem, operator_of, row_of, time_model

NEAREST = 3  #: different schedules of the rows nearest to a size, its own row included
TWIN = {"bf16": "fp16", "fp16": "bf16"}


class WarmStart:
    """The rows of the table in ``folder`` for the ops of ``works``; none without a table. Raises TableError if one is damaged."""

    def __init__(self, folder: Path | None, works: list[TuningProblem]):
        self.folder, self.stale = folder, 0
        self.by_key: dict[RowKey, list[Row]] = {}
        self.illegal: Counter[str] = Counter()  #: schedules that cannot be made any more, and at how many sizes
        for op in dict.fromkeys(w.group.op for w in works) if folder is not None else ():
            spec = operator_of(op).spec
            for row in rows_in(folder / f"{spec.op}.yaml"):  # type: ignore[operator]
                if row.spec == spec_hash(spec.algorithm):
                    self.by_key.setdefault(row.key, []).append(row)
                else:
                    self.stale += 1

    def schedules(self, work: TuningProblem) -> tuple[str, ...]:
        """Return schedules to try at ``work``: the current row's, the nearest others, then those of the 16-bit twin."""
        key = row_of(work, "").key
        found = list(dict.fromkeys(r.schedule for r in self._usable(key, work)))[:NEAREST]
        if key.dtype in TWIN:
            twin = key._replace(dtype=TWIN[key.dtype])
            found += [r.schedule for r in self._usable(twin, work)][:1]
        return tuple(dict.fromkeys(found))

    def _usable(self, key: RowKey, work: TuningProblem) -> list[Row]:
        spec = spec_hash(operator_of(work.group.op).spec.algorithm)
        return [c.row for c in candidates(self.by_key.get(key, ()), key, work.extents, spec, time_model(work.group)) if not c.refused]

    def text(self) -> str:
        """Report in one line how many rows there are, and what was left out."""
        count = sum(map(len, self.by_key.values()))
        left = [f"{self.stale} of another version of their spec left out"] if self.stale else []
        left += [f"{len(self.illegal)} schedules not legal at {sum(self.illegal.values())} sizes left out"] if self.illegal else []
        return "; ".join((f"{count} rows of {self.folder} raced again", *left)) if count or self.stale else ""


def rows_in(path: Path) -> tuple[Row, ...]:
    """Return the rows of a file; none if it does not exist. Raises TableError if it is damaged."""
    try:
        return read_rows(path.read_text(), str(path))
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: {error}") from None
