"""Plan ring attention: the steps that some process needs, and the keys of a step that a query sees.

In step s a process attends to the keys of the process s places before it. Causal attention of whole tokens needs no positions: all see all, each those
up to its own place, or one half sees the other's. A window and segments become ranges of keys for each query, as in packed sequences. Which steps
are left out follows from the positions, which all processes know, and from the smallest and the largest segment of each piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from .visible_keys import Ranges, Window, around, ranks

ORDERS = ("zigzag", "plain")


class Ring(NamedTuple):
    """What the processes agree on."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    tokens: int  #: of each process
    order: str
    causal: bool
    window: Window  #: keys that a query sees to the left and to the right; None for no limit
    scale: float | None
    softcap: float | None

    @property
    def everywhere(self) -> bool:
        """Whether no window cuts anything off but what causal attention does."""
        return self.window[0] is None and (self.causal or self.window[1] is None)


class Step(NamedTuple):
    """The keys of one process as the queries of another see them."""

    distance: int  #: the keys are those of the process so many places before
    rows: slice = slice(0, 0)  #: of the queries that take part; none where no query sees a key
    columns: slice = slice(0, 0)  #: of the keys
    seen: dict[str, object] = {}  #: the arguments of a form that say which
    keyed: dict[str, object] = {}  #: those that backward needs beside them

    @property
    def idle(self) -> bool:
        """Whether no query of this process sees a key of the other."""
        return self.rows.stop == self.rows.start


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank in a group and its size: 0 of 1 where no processes were started."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def pieces(tokens: int, rank: int, size: int, order: str) -> list[range]:
    """Return the places of the tokens of one process, piece by piece. Raises ValueError."""
    if order not in ORDERS:
        raise ValueError(f"ring_attention: order is {order!r}; allowed: {', '.join(map(repr, ORDERS))}")
    if order == "zigzag" and tokens % 2:
        raise ValueError(f"ring_attention: {tokens} tokens in a process; allowed: an even number of them in the order 'zigzag'")
    half = tokens // 2
    each, held = (half, (rank, 2 * size - 1 - rank)) if order == "zigzag" else (tokens, (rank,))
    return [range(piece * each, (piece + 1) * each) for piece in held]


def positions(tokens: int, rank: int, size: int, order: str, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the places of the tokens of one process."""
    return torch.cat([torch.arange(p.start, p.stop, device=device) for p in pieces(tokens, rank, size, order)])


def steps(ring: Ring, segments: torch.Tensor | None, batch: int, device: torch.device) -> tuple[Step, ...]:
    """Return the steps that some process needs, the first with a process's own keys. ``segments``: (processes, B or 1, tokens), or None."""
    spans = None if segments is None or not ring.tokens else _spans(ring, segments)
    needed = [s for s in range(ring.size) if any(_meet(ring, spans, r, (r - s) % ring.size) for r in range(ring.size))]
    return tuple(_step(ring, spans, segments, s, batch, device) for s in needed)


def _step(ring: Ring, spans: list | None, segments: torch.Tensor | None, distance: int, batch: int, device: torch.device) -> Step:
    source = (ring.rank - distance) % ring.size
    if not _meet(ring, spans, ring.rank, source):
        return Step(distance)
    every, half = slice(0, ring.tokens), ring.tokens // 2
    if segments is None and ring.everywhere:
        if not ring.causal or not distance:
            return Step(distance, every, every, {"causal": True} if ring.causal else {})
        if ring.order == "plain":
            return Step(distance, every, every)
        return Step(distance, every, slice(0, half)) if source < ring.rank else Step(distance, slice(half, ring.tokens), every)
    ranges = _ranges(ring, segments, source, device)
    seen: dict[str, object] = {"ranged": True, "lo": ranges.lo.expand(batch, -1), "hi": ranges.hi.expand(batch, -1)}
    if segments is not None:
        numbers = {n: segments[of].to(torch.int32).expand(batch, -1) for n, of in (("of_q", ring.rank), ("of_k", source))}
        seen |= {"segmented": True, **numbers}
    return Step(distance, every, every, seen, {"keyed": True, "begins": ranges.begins.expand(batch, -1), "stops": ranges.stops.expand(batch, -1)})


def _ranges(ring: Ring, segments: torch.Tensor | None, source: int, device: torch.device) -> Ranges:
    """Return the keys of ``source`` that each query may see, and the queries that may see each key."""
    of_q, of_k = (positions(ring.tokens, rank, ring.size, ring.order, device) for rank in (ring.rank, source))
    left, right = ring.window
    lo, hi = _within(of_q, of_k, left, right)
    begins, stops = _within(of_k, of_q, right, left)
    if segments is not None:
        lo, hi = _both((lo, hi), around(segments[ring.rank], segments[source]))
        begins, stops = _both((begins, stops), around(segments[source], segments[ring.rank]))
    return Ranges(*(t.to(torch.int32) for t in (lo, hi, begins, stops)))


def _both(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])


def _within(mine: torch.Tensor, others: torch.Tensor, before: int | None, behind: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each position in ``mine`` the range of ``others`` from ``before`` places before it to ``behind`` places behind it."""
    none = torch.zeros_like(mine)
    first = none if before is None else torch.searchsorted(others, mine - before)
    return first, none + len(others) if behind is None else torch.searchsorted(others, mine + behind, right=True)


def _spans(ring: Ring, segments: torch.Tensor) -> list:
    """Return the smallest and the largest segment of each piece of each process, for each entry of the batch. Waits for the device."""
    by_piece = segments.view(ring.size, segments.shape[1], 2 if ring.order == "zigzag" else 1, -1)
    return torch.stack([by_piece.amin(-1), by_piece.amax(-1)], -1).transpose(1, 2).tolist()


def _meet(ring: Ring, spans: list | None, mine: int, source: int) -> bool:
    """Return whether a query of ``mine`` may see a key of ``source``."""
    if mine == source:
        return True
    (left, right), held = ring.window, [pieces(ring.tokens, rank, ring.size, ring.order) for rank in (mine, source)]
    for i, queries in enumerate(held[0]):
        for j, keys in enumerate(held[1]):
            near = (right is None or keys.start <= queries.stop - 1 + right) and (left is None or keys.stop - 1 >= queries.start - left)
            if near and (spans is None or any(a[0] <= b[1] and b[0] <= a[1] for a, b in zip(spans[mine][i], spans[source][j]))):
                return True
    return False


def small_numbers(segments: torch.Tensor) -> torch.Tensor:
    """Replace segments by small numbers in the same order."""
    return ranks(segments, segments[:0])[0]
