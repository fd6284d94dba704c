"""Compute ring attention: a sequence is split over the processes of a group, k and v are sent round, partial results are merged by logsumexp.

Backward has the result and its logsumexp over all keys. So a step's gradients are those of ``attention_part``, and no partial result is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.path_counters import checking
from ..attention_arguments import AttentionArgs, check_kinds, spec_arguments
from ..merge_attention import merge_attention
from ..op_decorator import only_tensors
from ..option_checks import check_floating
from ..registry import shipped
from . import calls  # noqa: F401 (names the arguments of the ops of a step)
from .checks import check_integers
from .ring_plan import Ring, Step, pieces, place, small_numbers, steps
from .specs import PART


def attend(
    args: AttentionArgs, group: dist.ProcessGroup | None, order: str, segments: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and its logsumexp. Raises TypeError and ValueError, one line."""
    only_tensors("ring_attention", q=args.q, k=args.k, v=args.v)
    check_kinds(args, "ring_attention")
    q, k, v = args.q, args.k, args.v
    check_floating("ring_attention", q=q, k=k, v=v)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"ring_attention: group is {group!r}; allowed: a process group, or None for the world")
    if any(t.dim() != 4 for t in (q, k, v)) or not q.shape[2] == k.shape[2] == v.shape[2]:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"ring_attention: q is (B, H, M, D), k (B, G, M, D), v (B, G, M, N), M tokens of each process; got shapes {found}")
    left, right = args.window if args.window is not None else (None, None)
    if isinstance(args.scale, torch.Tensor):
        raise TypeError("ring_attention: scale is a tensor; allowed: a number")
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"ring_attention: a window reaches 0 or more keys to either side, None for no limit; got {args.window}")
    ring = Ring(group, *place(group), q.shape[2], order, bool(args.causal), (left, 0 if args.causal else right), args.scale, args.softcap)
    pieces(ring.tokens, ring.rank, ring.size, order)
    spec_arguments(args._replace(causal=False, window=None))
    if checking():
        _check_agreement(ring, args, segments)
    held = None if segments is None else _gather_segments(ring, _local(segments, q))
    return _RingAttention.apply(ring, steps(ring, held, q.shape[0], q.device), q, k, v, args.sinks)


def _local(segments: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the segments of this process's tokens as (B or 1, M). Raises TypeError and ValueError."""
    check_integers("segments", segments, q.device, of="ring_attention")
    batch, tokens = q.shape[0], q.shape[2]
    if segments.dim() not in (1, 2) or segments.shape[-1] != tokens or segments.dim() == 2 and segments.shape[0] not in (1, batch):
        raise ValueError(f"ring_attention: segments has shape {tuple(segments.shape)}; allowed: ({tokens},) or ({batch}, {tokens}), of the process's own tokens")
    return segments.long().view(-1, tokens)


def _gather_segments(ring: Ring, own: torch.Tensor) -> torch.Tensor:
    """Return the segments of all processes, as small numbers: (processes, B or 1, tokens)."""
    found = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(ring.size)]
    if ring.size > 1:
        dist.all_gather(found, own.contiguous(), ring.group)
    else:
        found = [own]
    return small_numbers(torch.stack(found))


def _check_agreement(ring: Ring, args: AttentionArgs, segments: torch.Tensor | None) -> None:
    """Raise ValueError where the processes' arguments disagree: each would wait for what the others do not send."""
    if ring.size == 1:
        return
    mine: dict[str, object] = {n: (tuple(t.shape), str(t.dtype)) for n, t in (("q", args.q), ("k", args.k), ("v", args.v))}
    mine |= {"segments": None if segments is None else tuple(segments.shape), **{n: getattr(ring, n) for n in ("order", "causal", "window", "scale", "softcap")}}
    found: list[Any] = [None] * ring.size
    dist.all_gather_object(found, mine, ring.group)
    for rank, other in enumerate(found):
        if wrong := next((n for n in mine if other[n] != found[0][n]), None):
            raise ValueError(f"ring_attention: {wrong} is {other[wrong]} in process {rank} and {found[0][wrong]} in process 0; allowed: the same in all")


class _Transfer:
    """Tensors on their way to the process so many places behind this one, and those of the one as many before that come in."""

    def __init__(self, ring: Ring, tensors: Sequence[torch.Tensor], places: int):
        self.received = list(tensors)
        self.waiting: list[Any] = []
        if places % ring.size:
            self.sent = [t.contiguous() for t in tensors]
            self.received = [torch.empty_like(t) for t in self.sent]
            ranks = [r if ring.group is None else dist.get_global_rank(ring.group, r) for r in ((ring.rank + places) % ring.size, (ring.rank - places) % ring.size)]
            moves = [dist.P2POp(dist.isend, t, ranks[0], ring.group) for t in self.sent] + [dist.P2POp(dist.irecv, t, ranks[1], ring.group) for t in self.received]
            self.waiting = dist.batch_isend_irecv(moves)

    def wait(self) -> list[torch.Tensor]:
        """Return what came in."""
        for one in self.waiting:
            one.wait()
        return self.received


def _distances(ring: Ring, planned: Sequence[Step]) -> list[int]:
    """Return how many places keys go on after each step; after the last step their gradients go home."""
    after = [*(s.distance for s in planned[1:]), ring.size]
    return [later - s.distance for s, later in zip(planned, after)]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring: Ring, planned: tuple[Step, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None):
        result, lse, held, wide = None, None, [k, v], torch.promote_types(q.dtype, torch.float32)
        for step, places in zip(planned, _distances(ring, planned)):
            transfer = _Transfer(ring, held, places) if step is not planned[-1] else None
            if not step.idle:
                rows, columns = step.rows, step.columns
                given = (q[:, :, rows], held[0][:, :, columns], held[1][:, :, columns])
                part, part_lse = _part(ring, step, given, sinks if not step.distance else None)
                if result is None or lse is None:  # its own keys come first, and every query has a part there
                    result, lse = part.to(wide) if len(planned) > 1 else part, part_lse
                else:
                    result[:, :, rows], lse[:, :, rows] = merge_attention(result[:, :, rows], lse[:, :, rows], part, part_lse)
            held = transfer.wait() if transfer else held
        if result is None or lse is None:  # no process has a token
            result, lse = q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros(q.shape[:3], dtype=wide)
        result = result.to(q.dtype)
        ctx.ring, ctx.planned = ring, planned
        ctx.save_for_backward(q, k, v, result, lse, *([] if sinks is None else [sinks]))
        return result, lse

    @staticmethod
    def backward(ctx, d_result: torch.Tensor, d_lse: torch.Tensor):
        ring, planned, (q, k, v, result, lse, *sinks) = ctx.ring, ctx.planned, ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        shift = d_lse.to(wide) - (d_result.to(wide) * result.to(wide)).sum(-1)  # the gradient of each score is its weight times (d_result v + shift)
        d_q, held = torch.zeros_like(q, dtype=wide), [k, v]
        coming = _Transfer(ring, [torch.zeros_like(t, dtype=wide) for t in (k, v)], 0)
        for step, places in zip(planned, _distances(ring, planned)):
            transfer = _Transfer(ring, held, places) if step is not planned[-1] else None
            sums = coming.wait()
            if not step.idle:
                rows, columns = step.rows, step.columns
                given = (q[:, :, rows], held[0][:, :, columns], held[1][:, :, columns])
                grads = _part_gradients(ring, step, given, d_result[:, :, rows], lse[:, :, rows], shift[:, :, rows])
                for total, at, grad in ((d_q, rows, grads[0]), (sums[0], columns, grads[1]), (sums[1], columns, grads[2])):
                    total[:, :, at] += grad
            coming = _Transfer(ring, sums, places)  # they go where the keys go, and home after the last step
            held = transfer.wait() if transfer else held
        d_k, d_v = coming.wait()
        d_sinks = (torch.exp(sinks[0][:, None] - lse) * shift).sum((0, 2)).to(sinks[0].dtype) if sinks else None
        return None, None, d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks


def _part(ring: Ring, step: Step, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sinks: torch.Tensor | None):
    """Return the attention of queries to the keys of one step, and its logsumexp."""
    q, k, v = given
    args = AttentionArgs(q, k, v, scale=ring.scale, softcap=ring.softcap, sinks=sinks)
    return shipped("attention_lse")(**spec_arguments(args), **step.seen)


def _part_gradients(ring: Ring, step: Step, given: tuple[torch.Tensor, ...], d_result: torch.Tensor, lse: torch.Tensor, shift: torch.Tensor):
    """Return the gradients of queries, keys and values through the keys of one step."""
    q, k, v = given
    args = spec_arguments(AttentionArgs(q, k, v, scale=ring.scale, softcap=ring.softcap))
    return shipped(PART).gradients(("Q", "K", "V"), {PART: d_result, "weight": shift}, **args, lse=lse, **step.seen, **step.keyed)
