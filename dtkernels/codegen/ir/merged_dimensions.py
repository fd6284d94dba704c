"""Find dimensions of a buffer that one number counts together: ``A[p // len(x), p % len(x)]``, as ``f.merge(p, y, x)`` makes them."""

from __future__ import annotations

from dataclasses import dataclass

from .nest import Joined, Op, Size, Tile


@dataclass(frozen=True)
class Run:
    """Dimensions ``first`` to ``last`` of a buffer that are indexed by the parts of one number, ``whole``."""

    first: int
    last: int
    whole: Tile
    extents: tuple[str, ...]  #: labels of the dimensions after the first

    @property
    def joined(self) -> Joined:
        return Joined(self.first, self.last, self.extents)


def merged_runs(index: tuple[Tile, ...]) -> dict[int, Run]:
    """Return the run that each dimension belongs to: ``p // len(x)`` and ``p % len(x)`` after it are ``p``."""
    found: dict[int, Run] = {}
    for n in range(len(index) - 1, 0, -1):
        whole = found[n].whole if n in found else index[n]
        joined = _joined(index[n - 1], whole)
        if joined is not None:
            last, extents = (found[n].last, found[n].extents) if n in found else (n, ())
            run = Run(n - 1, last, joined[0], (joined[1], *extents))
            found |= dict.fromkeys(range(n - 1, run.last + 1), run)
    return found


def _joined(slow: Tile, fast: Tile) -> tuple[Tile, str] | None:
    """Return the number of which ``slow`` and ``fast`` are quotient and remainder, and the label whose extent the first dimension of ``fast`` has."""
    match slow, fast:
        case Op("//", (a, Size(label))), Op("%", (b, Size(other))) if a == b and label == other:
            return a, label
        case Op("%", (Op("//", (a, Size(label) as size)), Size() as more)), Op("%", (b, Size(other))) if a == b and label == other:
            return Op("%", (a, Op("*", (more, size)))), label
        case Op("//", (Op("//", (a, inner)), Size(label) as size)), Op("%", (b, Op("*", (first, rest)))) if (a, size, inner) == (b, first, rest):
            return a, label
    return None
