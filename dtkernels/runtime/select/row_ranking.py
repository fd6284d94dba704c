"""Which row of a table a call gets: the nearest in log2 of sizes whose schedule fits the sizes it is asked for and wastes little there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ..tables.table import Gpu, Row, RowKey, call_kind
from .quantization_cost import cuts, quantization_cost

LIMIT = 2.0  #: a row further away than this is no better than the formula
LIGHT = 0.25  #: weight of a label that only says how many blocks there are
UNLIKE = 2.0  #: added to the squared distance for a row of a tensor that is aligned to other elements than the call's
WASTE = 2.0  #: weight of the squared log2 of what a row wastes at the call's sizes
WASTED = 2.0  #: a row that takes more than so many times as long for the same work is worse than the formula


class Candidate(NamedTuple):
    """A row, how far its sizes are, and why it may not be taken ("" if it may).

    ``exact``: it is for these very parameters, so that its binaries may run; else they differ in a number. ``wasted``: how many
    times as long for the same work its schedule takes as at its own sizes (quantization_cost.py).
    """

    row: Row
    distance: float
    refused: str = ""
    exact: bool = True
    wasted: float = 1.0

    @property
    def reach(self) -> float:
        """What rows are ordered by: the distance, further where something is wasted."""
        return _reach(self.distance, self.wasted)

    def told(self) -> str:
        """How near it is, in a few words."""
        return f"{self.distance:.2f} away" + (f", {self.wasted:.2f} times the time for the same work" if self.wasted >= 1.005 else "")


def candidates(
    rows: Iterable[Row], key: RowKey, sizes: dict[str, int], spec: str, limit: float = LIMIT, pitches: frozenset[str] = frozenset()
) -> list[Candidate]:
    """The rows for ``key``, nearest first; at the same distance the faster. Rows that may not be taken say why.

    Behind them come rows for other numbers among the parameters: what is good for one is a good guess for another.
    """
    return rank_rows(agreeing(rows, key), sizes, spec, limit, pitches)


def rank_rows(rows: Iterable[tuple[Row, bool]], sizes: dict[str, int], spec: str, limit: float = LIMIT, pitches: frozenset[str] = frozenset()) -> list[Candidate]:
    """``candidates`` of the rows that ``agreeing`` gives."""
    logs, found = _logs(sizes), []
    for row, exact in rows:
        d = _distance(row, sizes, logs, pitches)
        wasted = quantization_cost(row, sizes) if d <= limit else 1.0
        found.append(Candidate(row, d, _refusal(row, sizes, spec, d, wasted, limit), exact, wasted))
    return sorted(found, key=lambda c: (not c.exact, c.reach, c.row.microseconds or math.inf))


class Near:
    """The first of ``rank_rows`` that is exact and may be taken, for calls whose sizes lie near each other; ``sizes`` are those of the first.

    A distance changes by no more than the step from these sizes to others, where pitches have the same common divisor with a load:
    rows that are further away than the nearest by twice that are not looked at.
    """

    REACH = 0.1  #: the longest step

    def __init__(self, rows: Iterable[tuple[Row, bool]], sizes: dict[str, int], spec: str, pitches: frozenset[str]):
        self.spec, self.pitches, self.logs = spec, pitches, _logs(sizes)
        own = [(_distance(row, sizes, self.logs, pitches), i, row) for i, (row, exact) in enumerate(rows) if exact]
        self.rows = sorted(own, key=lambda found: found[:2])

    @staticmethod
    def name(sizes: dict[str, int], pitches: frozenset[str]) -> tuple:
        """What calls have in common of which one ``Near`` may serve all."""
        return tuple([(n.bit_length(), math.gcd(n, 8) if label in pitches else 0) for label, n in sizes.items()])

    def first(self, sizes: dict[str, int]) -> tuple[bool, Candidate | None]:
        """(whether ``sizes`` are near enough, the row that is taken)."""
        logs = _logs(sizes)
        step = math.sqrt(sum((logs[label] - log) ** 2 for label, log in self.logs.items()))
        if step > self.REACH:
            return False, None
        best, key = None, (math.inf, math.inf, 0)
        for there, place, row in self.rows:
            if there - step - 1e-9 > key[0]:
                break
            d = _distance(row, sizes, logs, self.pitches)
            if d > min(key[0], LIMIT):  # nothing brings it nearer
                continue
            wasted = quantization_cost(row, sizes)
            found = (_reach(d, wasted), row.microseconds or math.inf, place)
            if found < key and not _refusal(row, sizes, self.spec, d, wasted, LIMIT):
                best, key = Candidate(row, d, wasted=wasted), found
        return True, best


def _logs(sizes: dict[str, int]) -> dict[str, float]:
    return {label: math.log2(size) if size > 1 else 0.0 for label, size in sizes.items()}


def agreeing(rows: Iterable[Row], key: RowKey) -> list[tuple[Row, bool]]:
    """Rows for ``key`` or for other numbers among its parameters, with whether it is the former."""
    kind = call_kind(key)
    return [(row, row.key == key) for row in rows if row.key == key or row.kind == kind]


def _reach(d: float, wasted: float) -> float:
    return math.sqrt(d * d + WASTE * math.log2(wasted) ** 2) if wasted > 1 else d


def _refusal(row: Row, sizes: dict[str, int], spec: str, d: float, wasted: float, limit: float) -> str:
    if row.spec != spec:
        return f"it is of another version of the spec ({row.spec}, now {spec})"
    if d > limit:
        return f"it is {d:.2f} away, more than {limit:g}"
    if wasted > WASTED:
        return f"it takes {wasted:.1f} times as long for the same work, more than {WASTED:g}: its blocks reach past the end or leave multiprocessors without work"
    for label in _labels(row.schedule)[1]:
        if label in sizes and _power(sizes[label]) != _power(row.sizes.get(label, 0)):
            return f"it holds {label} whole: {_power(row.sizes.get(label, 0))} elements, {_power(sizes[label])} needed"
    return ""


def distance(row: Row, sizes: dict[str, int], pitches: frozenset[str] = frozenset()) -> float:
    """Euclidean distance in log2 of sizes; labels of which a program takes one element count a quarter.

    ``pitches``: labels whose extent is the distance of one row of a tensor from the next. What is fast for rows that start at
    multiples of 16 bytes may be slow for others, where loads are narrower.
    """
    return _distance(row, sizes, {label: math.log2(max(size, 1)) for label, size in sizes.items()}, pitches)


def _distance(row: Row, sizes: dict[str, int], logs: dict[str, float], pitches: frozenset[str]) -> float:
    """``distance``, given the logarithms of the sizes."""
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
    """(labels cut in tiles of more than one element, or held whole; those held whole)"""
    sized = [found for _, name, inside in cuts(schedule) if name != "split" for found in inside]
    return frozenset(label for label, size in sized if size != 1), tuple(dict.fromkeys(label for label, size in sized if size == 0))


def whole_labels(schedule: str) -> tuple[str, ...]:
    """Labels that a schedule holds whole, ``tensorize(y:0)``: it fits sizes of the same power of two only."""
    return _labels(schedule)[1]


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def nearest_gpu(gpus: dict[str, Gpu], wanted: Gpu) -> str | None:
    """The table to use: of the GPU itself, else of the most alike with the same compute capability; None if none is."""
    if wanted.folder in gpus:
        return wanted.folder
    alike = [(_unlike(g, wanted), name) for name, g in gpus.items() if str(g.arch) == str(wanted.arch)]
    return min(alike)[1] if alike else None


def _unlike(a: Gpu, b: Gpu) -> float:
    ratios = [(a.multiprocessors, b.multiprocessors)] + ([(a.bandwidth, b.bandwidth)] if a.bandwidth > 0 and b.bandwidth > 0 else [])
    return sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in ratios)
