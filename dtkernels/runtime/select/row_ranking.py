"""Rank the rows of a table for a call: by distance in log2 of sizes, increased by what the schedule wastes at the call's sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ...codegen.powers_of_two import next_power_of_two
from ..tables.table import Gpu, Row, RowKey, call_kind
from .quantization_cost import cuts, quantization_cost

LIMIT = 2.0  #: beyond this distance a row is no better than the default schedule
LIGHT = 0.25  #: weight of a label that only sets the number of blocks
UNLIKE = 2.0  #: added to the squared distance where row and call differ in the alignment of a tensor's rows
WASTE = 2.0  #: weight of the squared log2 of the quantization cost
WASTED = 2.0  #: a row with a higher quantization cost is worse than the default schedule


class Candidate(NamedTuple):
    """A row, its distance from the call, and the reason why it is refused ("" if it is not).

    ``exact``: the row has exactly the call's parameters, so its binaries may run; otherwise a numeric parameter differs. ``wasted``: the
    quantization cost of its schedule at the call's sizes.
    """

    row: Row
    distance: float
    refused: str = ""
    exact: bool = True
    wasted: float = 1.0

    @property
    def reach(self) -> float:
        """Return the key that rows are ordered by: the distance, increased by the quantization cost."""
        return _reach(self.distance, self.wasted)

    def distance_text(self) -> str:
        """Describe the distance in a few words."""
        return f"distance {self.distance:.2f}" + (f", quantization cost {self.wasted:.2f}x" if self.wasted >= 1.005 else "")


def candidates(
    rows: Iterable[Row], key: RowKey, sizes: dict[str, int], spec: str, limit: float = LIMIT, pitches: frozenset[str] = frozenset()
) -> list[Candidate]:
    """Return the rows for ``key``, nearest first, the faster first at equal distance. Refused rows carry the reason.

    Rows that differ in a numeric parameter come last: a good schedule for one value is a good guess for another.
    """
    return rank_rows(rows_of_kind(rows, key), sizes, spec, limit, pitches)


def rank_rows(rows: Iterable[tuple[Row, bool]], sizes: dict[str, int], spec: str, limit: float = LIMIT, pitches: frozenset[str] = frozenset()) -> list[Candidate]:
    """Rank the pairs that ``rows_of_kind`` returns, as ``candidates`` does."""
    logs, found = _logs(sizes), []
    for row, exact in rows:
        d = _distance(row, sizes, logs, pitches)
        wasted = quantization_cost(row, sizes) if d <= limit else 1.0
        found.append(Candidate(row, d, _refusal(row, sizes, spec, d, wasted, limit), exact, wasted))
    return sorted(found, key=lambda c: (not c.exact, c.reach, c.row.microseconds or math.inf))


class NearbyRows:
    """Find the first exact and usable row of ``rank_rows`` for calls of similar sizes, without ranking all rows.

    ``sizes`` are those of the first call. Moving to other sizes changes each distance by at most the length of the step, where the
    pitches' alignment stays the same. Rows further than the nearest by twice the step are therefore skipped.
    """

    REACH = 0.1  #: the longest step in log2 of sizes

    def __init__(self, rows: Iterable[tuple[Row, bool]], sizes: dict[str, int], spec: str, pitches: frozenset[str]):
        self.spec, self.pitches, self.logs = spec, pitches, _logs(sizes)
        own = [(_distance(row, sizes, self.logs, pitches), i, row) for i, (row, exact) in enumerate(rows) if exact]
        self.rows = sorted(own, key=lambda found: found[:2])

    @staticmethod
    def name(sizes: dict[str, int], pitches: frozenset[str]) -> tuple:
        """Return the cache key of calls that one ``NearbyRows`` may serve."""
        return tuple([(n.bit_length(), math.gcd(n, 8) if label in pitches else 0) for label, n in sizes.items()])

    def first(self, sizes: dict[str, int]) -> tuple[bool, Candidate | None]:
        """Return (whether ``sizes`` are near enough, the row to take)."""
        logs = _logs(sizes)
        step = math.sqrt(sum((logs[label] - log) ** 2 for label, log in self.logs.items()))
        if step > self.REACH:
            return False, None
        best, key = None, (math.inf, math.inf, 0)
        for there, place, row in self.rows:
            if there - step - 1e-9 > key[0]:
                break
            d = _distance(row, sizes, logs, self.pitches)
            if d > min(key[0], LIMIT):  # the quantization cost only increases it
                continue
            wasted = quantization_cost(row, sizes)
            found = (_reach(d, wasted), row.microseconds or math.inf, place)
            if found < key and not _refusal(row, sizes, self.spec, d, wasted, LIMIT):
                best, key = Candidate(row, d, wasted=wasted), found
        return True, best


def _logs(sizes: dict[str, int]) -> dict[str, float]:
    return {label: math.log2(size) if size > 1 else 0.0 for label, size in sizes.items()}


def rows_of_kind(rows: Iterable[Row], key: RowKey) -> list[tuple[Row, bool]]:
    """Return the rows of the kind of ``key``, each with whether it matches ``key`` exactly."""
    kind = call_kind(key)
    return [(row, row.key == key) for row in rows if row.key == key or row.kind == kind]


def _reach(d: float, wasted: float) -> float:
    return math.sqrt(d * d + WASTE * math.log2(wasted) ** 2) if wasted > 1 else d


def _refusal(row: Row, sizes: dict[str, int], spec: str, d: float, wasted: float, limit: float) -> str:
    if row.spec != spec:
        return f"written for another version of the spec ({row.spec}, now {spec})"
    if d > limit:
        return f"distance {d:.2f} is more than {limit:g}"
    if wasted > WASTED:
        return f"quantization cost {wasted:.1f}x is more than {WASTED:g}x: its blocks extend past the data or leave multiprocessors idle"
    for label in _labels(row.schedule)[1]:
        if label in sizes and next_power_of_two(sizes[label]) != next_power_of_two(row.sizes.get(label, 0)):
            return f"its tile covers all of {label}: {next_power_of_two(row.sizes.get(label, 0))} elements, {next_power_of_two(sizes[label])} needed"
    return ""


def distance(row: Row, sizes: dict[str, int], pitches: frozenset[str] = frozenset()) -> float:
    """Return the Euclidean distance in log2 of sizes. Labels with one element per program count a quarter.

    ``pitches``: labels whose extent is the row pitch of a tensor. A schedule that is fast for rows aligned to 16 bytes may be slow for
    others, where loads are narrower.
    """
    return _distance(row, sizes, {label: math.log2(max(size, 1)) for label, size in sizes.items()}, pitches)


def _distance(row: Row, sizes: dict[str, int], logs: dict[str, float], pitches: frozenset[str]) -> float:
    """Return ``distance``, given log2 of the sizes."""
    own, there_logs, total = row.sizes, row.logs, 0.0
    tiled, widest = _labels(row.schedule)[0], 4 if row.dtype == "fp32" else 8
    for label, size in sizes.items():
        there = own.get(label, 1)
        if there != size:
            step = logs[label] - there_logs.get(label, 0.0)
            total += (1.0 if label in tiled else LIGHT) * step * step
            if label in pitches and math.gcd(size, widest) != math.gcd(there, widest):
                total += UNLIKE
    return math.sqrt(total)


@lru_cache(maxsize=4096)
def _labels(schedule: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return (labels with tiles of more than one element or held whole, labels held whole)."""
    sized = [found for _, name, inside in cuts(schedule) if name != "split" for found in inside]
    return frozenset(label for label, size in sized if size != 1), tuple(dict.fromkeys(label for label, size in sized if size == 0))


def whole_labels(schedule: str) -> tuple[str, ...]:
    """Return the labels that a schedule holds whole, ``tensorize(y:0)``. It fits only sizes with the same next power of two."""
    return _labels(schedule)[1]


def nearest_gpu(gpus: dict[str, Gpu], wanted: Gpu) -> str | None:
    """Return the table to use: the GPU's own, else the most similar one of the same compute capability; None if there is none."""
    if wanted.folder in gpus:
        return wanted.folder
    alike = [(_dissimilarity(g, wanted), name) for name, g in gpus.items() if str(g.arch) == str(wanted.arch)]
    return min(alike)[1] if alike else None


def _dissimilarity(a: Gpu, b: Gpu) -> float:
    ratios = [(a.multiprocessors, b.multiprocessors)] + ([(a.bandwidth, b.bandwidth)] if a.bandwidth > 0 and b.bandwidth > 0 else [])
    return sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in ratios)
