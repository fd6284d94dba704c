"""Find the range of keys that each query sees, and of queries that see each key, as small tensors of integers.

All of it is done on the device of the tensors, without waiting for it, in memory that is linear in the number of queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Window = tuple[int | None, int | None]


class Ranges(NamedTuple):
    """Query m sees keys lo[m] <= l < hi[m]; key l is seen by queries begins[l] <= m < stops[l]."""

    lo: torch.Tensor
    hi: torch.Tensor
    begins: torch.Tensor
    stops: torch.Tensor


def of_sequences(cu_q: torch.Tensor, cu_k: torch.Tensor, queries: int, keys: int, window: Window) -> Ranges:
    """Return the ranges of packed sequences; sequence i has queries cu_q[i] to cu_q[i + 1]. Its last query is at its last key."""
    cu_q, cu_k = cu_q.long(), cu_k.long()

    def ends(cumulative: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, ...]:
        last = torch.searchsorted(cumulative[1:-1].contiguous(), place, right=True)
        return cu_q[last], cu_q[last + 1], cu_k[last], cu_k[last + 1]

    m, l = (torch.arange(n, device=cu_q.device) for n in (queries, keys))  # noqa: E741 (labels)
    _, q_end, k_start, k_end = ends(cu_q, m)
    lo, hi = _within(k_start, k_end, m - q_end + k_end, *window)
    q_start, q_end, _, k_end = ends(cu_k, l)
    begins, stops = _within(q_start, q_end, l - k_end + q_end, window[1], window[0])
    return _whole(lo, hi, begins, stops)


def of_segments(of_q: torch.Tensor, of_k: torch.Tensor, offset: int | torch.Tensor, window: Window) -> Ranges:
    """Return ranges that hold every pair of one segment; of segments in ascending order, the range of each exactly."""
    lo, hi = around(of_q, of_k)
    begins, stops = around(of_k, of_q)
    m, l = (torch.arange(t.shape[-1], device=t.device) for t in (of_q, of_k))  # noqa: E741 (labels)
    lo, hi = _within(lo, hi, m + offset, *window)
    begins, stops = _within(begins, stops, l - offset, window[1], window[0])
    return _whole(lo, hi, begins, stops)


def stops(lengths: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Return for each key of a cache the number of queries that may see it: none where it lies behind the length of its entry."""
    valid = torch.arange(keys, device=lengths.device) < lengths[:, None]
    return valid.to(torch.int32) * queries


def ranks(of_q: torch.Tensor, of_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace segment numbers by small ones in the same order, which float32 holds exactly."""
    both = torch.cat([t.reshape(-1) for t in (of_q, of_k)])
    values, order = both.sort()
    new = torch.zeros_like(values)
    new[1:] = (values[1:] != values[:-1]).cumsum(0)
    numbers = torch.empty_like(new).scatter_(0, order, new)
    return numbers[: of_q.numel()].view(of_q.shape), numbers[of_q.numel() :].view(of_k.shape)


def segments_and_ranges(batch: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]], window: Window) -> tuple[torch.Tensor, ...]:
    """Return the segments of queries and keys that agree in every pair of numbers, and their ranges, for as many sequences as ``batch`` has.

    pairs: integers (B or 1, queries) and (B or 1, keys). Returns six tensors of int32: two of segments, and those of Ranges.
    """
    of_q = of_k = torch.zeros((1, 1), dtype=torch.long, device=batch.device)
    for one, other in pairs:
        q, k = ranks(one.long(), other.long())
        count = q.numel() + k.numel()
        of_q, of_k = of_q * count + q, of_k * count + k
        of_q, of_k = ranks(of_q, of_k)
    of_q, of_k = (t.expand(batch.shape[0], -1) for t in (of_q, of_k))
    return (of_q.to(torch.int32), of_k.to(torch.int32), *of_segments(of_q, of_k, 0, window))


def around(mine: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a range of ``others`` outside which none equals an element of ``mine``, for each element.

    Before the range all are smaller, as the largest so far is; behind it all are larger, as the smallest from there on is.
    """
    if others.shape[-1] == 0:
        return torch.zeros_like(mine), torch.zeros_like(mine)
    mine = mine.contiguous()
    largest = others.cummax(-1).values
    smallest = others.flip(-1).cummin(-1).values.flip(-1)
    return torch.searchsorted(largest, mine), torch.searchsorted(smallest, mine, right=True)


def _within(lo: torch.Tensor, hi: torch.Tensor, place: torch.Tensor, left: int | None, right: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Limit a range to the window around ``place``."""
    if left is not None:
        lo = torch.maximum(lo, place - left)
    if right is not None:
        hi = torch.minimum(hi, place + right + 1)
    return torch.broadcast_tensors(lo, hi, place)[0], torch.broadcast_tensors(lo, hi, place)[1]


def _whole(lo: torch.Tensor, hi: torch.Tensor, begins: torch.Tensor, stops: torch.Tensor) -> Ranges:
    return Ranges(*(t.to(torch.int32) for t in (lo, hi, begins, stops)))
