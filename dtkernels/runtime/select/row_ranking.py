"""Rank the rows of a table for a call by predicted time: the cost model, corrected by the measured times of the rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ...autoschedule.cost.kernel_config import halved_labels, read_schedule, tiled_labels
from ...codegen.powers_of_two import UNITS, next_power_of_two, two_tiles_are_shorter
from ..tables.table import Gpu, Row, RowKey, call_kind
from .addition_order import fixed_order
from .evidence import ITEMSIZE, Sizes, TimeModel, predictions
from .size_buckets import bucket_anchor

if TYPE_CHECKING:
    from ...autoschedule.cost.outline import Known

FAR = 0.75  #: from this distance on the default schedule competes with the row
LIGHT = 0.25  #: weight of a label that only sets the number of blocks
UNLIKE = 2.0  #: added to the squared distance where row and call differ in the alignment of a tensor's rows


class Candidate(NamedTuple):
    """A row, its distance from the call, and the reason why it is refused ("" if it is not).

    ``exact``: the row has exactly the call's parameters, so its binaries may run; otherwise a numeric parameter differs.
    ``predicted``: microseconds at the call's sizes, at the row's own sizes its time; infinite where it is refused.
    """

    row: Row
    distance: float
    refused: str = ""
    exact: bool = True
    predicted: float = math.inf

    def distance_text(self) -> str:
        """Describe distance and prediction in a few words."""
        return f"distance {self.distance:.2f}" + ("" if self.refused or not self.distance else f", predicted {self.predicted:.4g} us")


def candidates(rows: Iterable[Row], key: RowKey, sizes: dict[str, int], spec: str, model: TimeModel | None = None) -> list[Candidate]:
    """Return the rows for ``key``: the usable ones, fastest first, then those that are refused, nearest first, with the reason.

    Rows that differ in a numeric parameter come last: a good schedule for one value is a good guess for another.
    """
    return rank_rows(rows_of_kind(rows, key), sizes, spec, model)


def rank_rows(rows: Iterable[tuple[Row, bool]], sizes: dict[str, int], spec: str, model: TimeModel | None = None) -> list[Candidate]:
    """Rank the pairs that ``rows_of_kind`` returns, as ``candidates`` does. Sizes are predicted at their bucket's anchors."""
    model, rows = model or TimeModel.unknown(sizes), list(rows)
    anchors = dict(bucket_of(sizes, model.known))
    found: list[Candidate] = []
    for exact in (True, False):
        if own := [row for row, agrees in rows if agrees is exact]:
            found += _ranked(own, exact, sizes, anchors, spec, model)
    return found


def _ranked(rows: list[Row], exact: bool, sizes: dict[str, int], anchors: dict[str, int], spec: str, model: TimeModel) -> list[Candidate]:
    logs, pitches, asked = _logs(anchors), model.known.pitches, tuple(anchors.items())
    refusals = [_refusal(row, sizes, spec) for row in rows]
    near = sorted([(_distance(row, anchors, logs, pitches), i) for i, row in enumerate(rows) if row.spec == spec])
    usable = {row.schedule for row, refused in zip(rows, refusals) if not refused}
    times = predictions([(d, rows[i]) for d, i in near], model, asked, usable.__contains__, exact)
    exact_logs = logs if anchors == sizes else _logs(sizes)
    found = []
    for i, (row, refused) in enumerate(zip(rows, refusals)):
        d = _distance(row, sizes, exact_logs, pitches)
        own = exact and row.sizes == sizes and not refused
        there = math.inf if refused else row.microseconds if own and row.microseconds else times[row.schedule]
        order = (bool(refused), not own, (row.microseconds or math.inf) if own else there, d, row.microseconds or math.inf, i)
        found.append((order, Candidate(row, d, refused, exact, there)))
    return [c for _, c in sorted(found, key=lambda pair: pair[0])]


def bucket_of(sizes: dict[str, int], known: Known | None = None) -> Sizes:
    """Return the anchors of sizes: calls with equal ones are decided once. ``known``: the outline, which tells which extents are row pitches."""
    return tuple([(label, bucket_anchor(n, known is None or label in known.strides)) for label, n in sizes.items()])


def _logs(sizes: dict[str, int]) -> dict[str, float]:
    return {label: math.log2(size) if size > 1 else 0.0 for label, size in sizes.items()}


def rows_of_kind(rows: Iterable[Row], key: RowKey) -> list[tuple[Row, bool]]:
    """Return the rows of the kind of ``key``, each with whether it matches ``key`` exactly."""
    kind = call_kind(key)
    return [(row, row.key == key) for row in rows if row.key == key or row.kind == kind]


def _refusal(row: Row, sizes: dict[str, int], spec: str) -> str:
    if row.spec != spec:
        return f"written for another version of the spec ({row.spec}, now {spec})"
    for label in tiled_labels(row.schedule)[1]:
        if label in sizes and next_power_of_two(sizes[label]) != next_power_of_two(row.sizes.get(label, 0)):
            return f"its tile covers all of {label}: {next_power_of_two(row.sizes.get(label, 0))} elements, {next_power_of_two(sizes[label])} needed"
    for label in halved_labels(row.schedule):
        if label in sizes and not two_tiles_are_shorter(sizes[label], UNITS):
            return f"two tiles hold all of {label}, and one of {next_power_of_two(sizes[label])} elements has no more"
    if fixed_order() and (sums := read_schedule(row.schedule).unordered_sums):
        return f"{', '.join(sorted(sums))} would be added up in no fixed order, and torch.use_deterministic_algorithms(True) is set"
    if 0 in sizes.values() and (inside := read_schedule(row.schedule).stored_inside):
        return f"an extent is 0, and {', '.join(sorted(inside))} would be written from inside a loop or a kernel that may be empty"
    return ""


def distance(row: Row, sizes: dict[str, int], pitches: Mapping[str, int] = MappingProxyType({})) -> float:
    """Return the Euclidean distance in log2 of sizes. Labels with one element per program count a quarter.

    ``pitches``: labels whose extent is the row pitch of a tensor, with the bytes that fast rows start at multiples of. A schedule that is fast
    for such rows may be slow for others, whose loads are narrower or take more sectors.
    """
    return _distance(row, sizes, _logs(sizes), pitches)


def _distance(row: Row, sizes: dict[str, int], logs: dict[str, float], pitches: Mapping[str, int]) -> float:
    """Return ``distance``, given log2 of the sizes."""
    own, there_logs, total = row.sizes, row.logs, 0.0
    tiled, itemsize = tiled_labels(row.schedule)[0], ITEMSIZE[row.dtype]
    for label, size in sizes.items():
        there = own.get(label, 1)
        if there != size:
            step = logs[label] - there_logs.get(label, 0.0)
            total += (1.0 if label in tiled else LIGHT) * step * step
            widest = pitches.get(label, itemsize) // itemsize
            if math.gcd(size, widest) != math.gcd(there, widest):
                total += UNLIKE
    return math.sqrt(total)


def whole_labels(schedule: str) -> tuple[str, ...]:
    """Return the labels that a schedule holds whole, ``tensorize(y:0)``. It fits only sizes with the same next power of two."""
    return tiled_labels(schedule)[1]


def nearest_gpu(gpus: dict[str, Gpu], wanted: Gpu) -> str | None:
    """Return the table to use: the GPU's own, else the most similar one of the same compute capability; None if there is none."""
    if wanted.folder in gpus:
        return wanted.folder
    alike = [(_dissimilarity(g, wanted), name) for name, g in gpus.items() if str(g.arch) == str(wanted.arch)]
    return min(alike)[1] if alike else None


def _dissimilarity(a: Gpu, b: Gpu) -> float:
    ratios = [(a.multiprocessors, b.multiprocessors)] + ([(a.bandwidth, b.bandwidth)] if a.bandwidth > 0 and b.bandwidth > 0 else [])
    return sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in ratios)
