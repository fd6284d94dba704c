"""Explain what a call runs: its row or the default schedule, and the candidates. Needs neither a GPU nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..autoschedule.cost.outline import Known, Outline
from ..autoschedule.cost.predicted_time import predicted_time
from ..codegen.analysis.product_types import typed
from ..codegen.target import Target
from ..lang.algorithm import with_operands
from .select.row_ranking import Candidate
from .select.schedule_selection import Call, Choice, choose
from .select.shape_buckets import PlannedKernel, ScheduleCache
from .select.table_loader import table_names, tables_folders
from .tables.table import Row, saved_words

if TYPE_CHECKING:
    from ..codegen.analysis.product_types import InputTypes
    from ..lang.algorithm import Algorithm

SHOWN = 5  #: alternatives
KINDS = 8  #: kinds of rows listed
LOOKED_UP = "prebuilt kernel if one fits"  #: the path of a row with kernels, where no GPU can tell more
TO_COMPILE = "compiled on first call"


@dataclass(frozen=True)
class Decision:
    """What one direction of a call runs. ``row`` is None for the default schedule."""

    direction: str
    path: str  #: "prebuilt", "compiled", "interpreter" or "reference"; LOOKED_UP or TO_COMPILE where no call was made
    sizes: dict[str, int]
    row: Row | None
    distance: float | None
    why: str
    schedule: str
    alternatives: tuple[Candidate, ...]

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items())
        lines = [f"{self.direction}: {'; '.join(filter(None, (sizes, self.path)))}", f"  {self.why}"]
        lines += [f"    {line}" for line in self.schedule.splitlines()]
        return "\n".join([*lines, *self.candidate_lines()])

    def candidate_lines(self) -> list[str]:
        """Return one line per candidate row: its sizes, distance and times, and the reason where it is refused."""
        return [f"  row {describe_candidate(c, self.sizes)}" for c in self.alternatives]


def describe_candidate(candidate: Candidate, sizes: dict[str, int]) -> str:
    """Describe a candidate: its sizes, parameters where they differ from the call's, distance and times."""
    row = candidate.row
    words = " ".join(f"{k}={v}" for k, v in row.sizes.items())
    if not candidate.exact:
        words += f", of {' '.join(f'{k}={str(v).lower()}' for k, v in row.params.items()) or 'the default parameters'}"
    return f"{words}: {candidate.distance_text()}, {times(candidate, sizes)}" + (f"; refused: {candidate.refused}" if candidate.refused else "")


def times(candidate: Candidate, sizes: dict[str, int]) -> str:
    """Format a row's time at its own sizes."""
    row = candidate.row
    if row.microseconds is None:
        return "not measured"
    text = f"{'measured' if row.measured else 'estimated'} {row.microseconds:g} us"
    return text if sizes == row.sizes else f"{text} at its sizes"


def direction_of(subject: Call) -> str:
    """Return ``forward`` or ``backward``, with a note where the forward saves tensors, and the names of the products among them."""
    products = f": {', '.join(subject.kept)}" if subject.kept else ""
    return subject.direction + (f" (saving for backward{products})" if subject.saved else "")


def make_decision(
    subject: Call, types: int | InputTypes, path: str, choice: Choice, planned: PlannedKernel, candidate: Candidate | None, outputs: tuple[str, ...], target: Target
) -> Decision:
    """Build the decision for ``choice``, which runs ``planned`` on ``target``: by ``candidate``, or by the default schedule if it is None."""
    if candidate is not None:
        why = f"row {candidate.row.title()}, {candidate.distance_text()}, {times(candidate, choice.sizes)}: {_reason(candidate, choice)}"
        schedule = candidate.row.schedule
    else:
        algorithm, itemsize = typed(planned.program.algorithm, choice.sizes, types)
        known = Known.of(with_operands(algorithm, planned.program.schedule.subjects()), outputs)
        took = predicted_time(str(planned.program.schedule), known, choice.sizes, itemsize, target)
        why = f"default schedule, predicted {took:.4g} us{_anchor_note(planned.asked, choice.sizes)}: {choice.why_no_row()}{_alternatives_note(subject, choice)}"
        schedule = str(planned.program.schedule)
    others = tuple(c for c in choice.considered if c is not candidate and (candidate is None or c.row is not candidate.row))[:SHOWN]
    row, distance = (candidate.row, candidate.distance) if candidate else (None, None)
    return Decision(direction_of(subject), path, choice.sizes, row, distance, why, schedule, others)


def _reason(candidate: Candidate, choice: Choice) -> str:
    """Say why a row is taken, and what the next other schedule is predicted to take."""
    if candidate.row.sizes == choice.sizes and candidate.exact:
        return "tuned at these sizes" if candidate.row.measured else "a schedule stored for these sizes"
    other = next((c for c in choice.usable if c.row.schedule != candidate.row.schedule), None)
    return "the fastest predicted" + (f", before {other.predicted:.4g} us" if other is not None else "")


def expected_path(candidate: Candidate | None) -> str:
    """Return the path that a row, or the default schedule, would take on its GPU."""
    return LOOKED_UP if candidate is not None and candidate.row.binaries and candidate.exact else TO_COMPILE


def look_up(
    subject: Call, algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], dtype: str, types: int | InputTypes, target: Target
) -> tuple[Decision, PlannedKernel, Choice]:
    """Decide what a call on contiguous tensors would run on ``target``, which need not be present.

    ``algorithm`` is prepared. ``sizes`` has the extent of each of its labels. Raises DTError where no schedule fits.
    """
    fixed = frozenset(label for label in algorithm.labels if algorithm.constant_extent(label) is not None)
    known = {label: sizes[label] for label in algorithm.labels if label in fixed or algorithm.extent_source(label) is not None or algorithm.formulas_of(label)}
    outline, cache = Known(Outline.of(algorithm), outputs), ScheduleCache(lambda: algorithm, outputs, fixed)
    choice = cache.compete(choose(subject, dtype, known, target, outline), dtype, types, outline, target)
    planned = cache.plan(choice, types, target)
    return make_decision(subject, types, expected_path(planned.candidate), choice, planned, planned.candidate, outputs, target), planned, choice


def _alternatives_note(subject: Call, choice: Choice) -> str:
    """List the tables, or the kinds of rows, that exist instead."""
    if choice.table.gpu is None:
        return f" (tables in {', '.join(map(str, tables_folders()))}: {', '.join(table_names()) or 'none'})"
    if choice.considered:
        return ""
    kinds = list(dict.fromkeys(call_kind_words(r) for r in choice.table.rows))
    more = f" and {len(kinds) - KINDS} more kinds" if len(kinds) > KINDS else ""
    return f" (rows of {subject.op}: {'; '.join(kinds[:KINDS]) or 'none'}{more})"


def call_kind_words(row: Row) -> str:
    """Describe the kind of call that a row is for, without its sizes."""
    words = [row.direction + saved_words(row.saved, row.kept), row.dtype, *(f"{k}={str(v).lower()}" for k, v in row.params.items())]
    words += [f"gradients of {', '.join(row.wanted)}"] if row.wanted else []
    return " ".join(words + ([f"batched {', '.join(row.batched)}"] if row.batched else []))


def _anchor_note(asked: dict[str, int], sizes: dict[str, int]) -> str:
    """Name the sizes that the default schedule was made for, where they differ from the call's."""
    return f", made for sizes {' '.join(f'{k}={v}' for k, v in asked.items())}" if asked != sizes else ""


__all__ = ["LOOKED_UP", "SHOWN", "TO_COMPILE", "Decision", "make_decision", "describe_candidate", "direction_of", "expected_path", "call_kind_words", "look_up", "times"]
