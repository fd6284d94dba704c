from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: ProcessGroup | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segments: torch.Tensor | None = None,
    order: str = "zigzag",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of a sequence that is cut over the processes of a group: k and v go round, results are merged by logsumexp (Liu et al., 2023).

    Each process of ``group`` (None: of the world) calls it with its own tokens: q (B, H, M, D), k (B, G, M, D), v (B, G, M, N), of one shape in
    all of them, and gets its own part of the result, (B, H, M, N) in q's dtype, with ``return_lse`` also the logsumexp (B, H, M) in float32.
    G divides H. ``causal``, ``window``, ``scale``, ``softcap`` and ``sinks`` are as in ``attention``, where positions are those in the whole sequence.

    - order: which tokens a process holds, see ``ring_positions``. "plain": the r-th of as many pieces as there are processes. "zigzag": of twice
      as many pieces the r-th of the first and the r-th of the last, so that under ``causal`` all processes have as much to do; M is even.
    - segments: integers (M) or (B, M), of the process's own tokens. A query sees keys of its own number: documents in a row, or padding with
      a number of its own. They are gathered, and the host waits for the smallest and the largest of each piece.

    Steps in which no process has a pair of a query and a key, by the window, causality and segments, are left out with their transfers.

    Differentiable in q, k, v and sinks; the gradient of sinks is that through the process's own queries. Backward sends k and v round again, with
    their gradients in float32, and takes the merged logsumexp: no partial result is computed again. A process holds k and v of two
    processes at a time. Raises ValueError where shapes do not fit, and TypeError for an argument of another type. DTKERNELS_CHECK=1 compares the arguments
    of all processes.

    >>> ring_attention(*(torch.ones(1, 2, 4, 8) for _ in "qkv"), causal=True).shape  # without a group: one process
    torch.Size([1, 2, 4, 8])
    """
    from .attention_arguments import AttentionArgs
    from .attention_forms import ring

    args = AttentionArgs(q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks)
    results = ring.attend(args, group, order, segments)
    return results if return_lse else results[0]


def ring_positions(tokens: int, group: ProcessGroup | None = None, *, order: str = "zigzag", device: torch.device | str | None = None) -> torch.Tensor:
    """Return the places in the whole sequence of the ``tokens`` that this process holds for ``ring_attention``: int64, (tokens,).

    ``x.index_select(1, ring_positions(length // processes))`` is the part of a whole tensor that this process takes; rotary embeddings take them
    as position ids. Raises ValueError for an order that is not "zigzag" or "plain", and for an odd number of tokens in zigzag.

    >>> ring_positions(4)
    tensor([0, 1, 2, 3])
    """
    from .attention_forms import ring_plan
    from .option_checks import check_integer

    check_integer("ring_positions", "tokens", tokens, 0)
    return ring_plan.positions(tokens, *ring_plan.place(group), order, device)
