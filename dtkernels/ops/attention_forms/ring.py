"""Attention of a sequence that is cut over a group of processes: k and v go round, partial results are merged by logsumexp.

A process with the rank r attends in step s to the keys of rank r - s. Which of its queries see which of these keys follows from the order of tokens:
all see all, each those up to its own place, or one half sees the other's. It never needs a mask of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..attention import attention
from ..merge_attention import merge_attention
from ..op_decorator import only_tensors

ORDERS = ("zigzag", "plain")


class _Ring(NamedTuple):
    """What the processes agree on."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    causal: bool
    order: str
    scale: float | None
    softcap: float | None


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank in a group and its size: 0 of 1 where no processes were started."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def positions(tokens: int, rank: int, size: int, order: str, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the places of the tokens of one process."""
    _check_order(tokens, order)
    if order == "plain":
        return torch.arange(rank * tokens, (rank + 1) * tokens, device=device)
    half = tokens // 2
    return torch.cat([torch.arange(piece * half, (piece + 1) * half, device=device) for piece in (rank, 2 * size - 1 - rank)])


def _check_order(tokens: int, order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"ring_attention: order is {order!r}; allowed: {', '.join(map(repr, ORDERS))}")
    if order == "zigzag" and tokens % 2:
        raise ValueError(f"ring_attention: {tokens} tokens in a process; allowed: an even number of them in the order 'zigzag'")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None, causal: bool, order: str, scale: float | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and its logsumexp. Raises ValueError, one line."""
    only_tensors("ring_attention", q=q, k=k, v=v)
    if any(t.dim() != 4 for t in (q, k, v)) or not q.shape[2] == k.shape[2] == v.shape[2]:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"ring_attention: q is (B, H, M, D), k (B, G, M, D), v (B, G, M, N), M tokens of each process; got shapes {found}")
    _check_order(q.shape[2], order)
    ring = _Ring(group, *place(group), bool(causal), order, scale, softcap)
    return _RingAttention.apply(ring, q, k, v)


def _parts(ring: _Ring, source: int, tokens: int) -> tuple[slice, slice, bool] | None:
    """Return which queries see which keys of ``source``, and whether each sees them up to its own place only; None where none does."""
    every, half = slice(0, tokens), tokens // 2
    if not ring.causal or source == ring.rank:
        return every, every, ring.causal
    if ring.order == "plain":
        return (every, every, False) if source < ring.rank else None
    return (every, slice(0, half), False) if source < ring.rank else (slice(half, tokens), every, False)


def _block(ring: _Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(q, k, v, causal=causal, scale=ring.scale, softcap=ring.softcap, return_lse=True)  # type: ignore[return-value]


class _Transfer:
    """Tensors on their way to the next process, and those of the one before that come in."""

    def __init__(self, ring: _Ring, tensors: Sequence[torch.Tensor]):
        self.sent = [t.contiguous() for t in tensors]
        self.received = [torch.empty_like(t) for t in self.sent]
        ranks = [r if ring.group is None else dist.get_global_rank(ring.group, r) for r in ((ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size)]
        moves = [dist.P2POp(dist.isend, t, ranks[0], ring.group) for t in self.sent] + [dist.P2POp(dist.irecv, t, ranks[1], ring.group) for t in self.received]
        self.waiting = dist.batch_isend_irecv(moves)

    def wait(self) -> list[torch.Tensor]:
        """Return what came in."""
        for one in self.waiting:
            one.wait()
        return self.received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring: _Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        ctx.ring, result, lse, held, wide = ring, None, None, [k, v], torch.promote_types(q.dtype, torch.float32)
        for step in range(ring.size):
            transfer = _Transfer(ring, held) if step + 1 < ring.size else None
            source = (ring.rank - step) % ring.size
            if (parts := _parts(ring, source, q.shape[2])) is not None:
                rows, columns, causal = parts
                part, part_lse = _block(ring, q[:, :, rows], held[0][:, :, columns], held[1][:, :, columns], causal)
                if result is None or lse is None:  # its own keys come first, and every query has a part there
                    result, lse = part.to(wide) if ring.size > 1 else part, part_lse
                else:
                    result[:, :, rows], lse[:, :, rows] = merge_attention(result[:, :, rows], lse[:, :, rows], part, part_lse)
            held = transfer.wait() if transfer else held
        assert result is not None and lse is not None
        result = result.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        return result, lse

    @staticmethod
    def backward(ctx, d_result: torch.Tensor, d_lse: torch.Tensor):
        ring, (q, k, v, result, lse) = ctx.ring, ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        shift = d_lse.to(wide) - (d_result.to(wide) * result.to(wide)).sum(-1)
        d_q, held = torch.zeros_like(q, dtype=wide), [k, v]
        coming: _Transfer | None = None
        sums: list[torch.Tensor] = []
        for step in range(ring.size):
            transfer = _Transfer(ring, held) if step + 1 < ring.size else None
            source = (ring.rank - step) % ring.size
            sums = coming.wait() if coming else [torch.zeros_like(t, dtype=wide) for t in (k, v)]
            if (parts := _parts(ring, source, q.shape[2])) is not None:
                rows, columns, causal = parts
                given = [t.detach().requires_grad_() for t in (q[:, :, rows], held[0][:, :, columns], held[1][:, :, columns])]
                grads = _block_gradients(ring, given, causal, d_result[:, :, rows], lse[:, :, rows], shift[:, :, rows])
                for total, at, grad in ((d_q, rows, grads[0]), (sums[0], columns, grads[1]), (sums[1], columns, grads[2])):
                    total[:, :, at] += grad
            coming = _Transfer(ring, sums) if ring.size > 1 else None  # they go where the keys go, and home in the last step
            held = transfer.wait() if transfer else held
        d_k, d_v = coming.wait() if coming else sums
        return None, d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _block_gradients(ring: _Ring, given: Sequence[torch.Tensor], causal: bool, d_result: torch.Tensor, lse: torch.Tensor, shift: torch.Tensor):
    """Return the gradients through one partial result, which is computed again: its weight in the whole is exp(its logsumexp - lse).

    ``shift`` is the gradient of the logsumexp less the sum of d_result * result.
    """
    with torch.enable_grad():
        part, part_lse = _block(ring, given[0], given[1], given[2], causal)
    weight = torch.where(part_lse == -torch.inf, 0.0, torch.exp(part_lse.detach() - lse))
    d_part = weight[..., None] * d_result.to(weight.dtype)
    d_part_lse = weight * shift + (d_part * part.detach().to(weight.dtype)).sum(-1)
    return torch.autograd.grad((part, part_lse), given, (d_part.to(part.dtype), d_part_lse))
