"""The other implementations that the benchmark runs beside ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Work


def _compiled(work: Work, **options) -> Callable:
    return torch.compile(work.eager, dynamic=False, **options)


def _sdpa(work: Work, backend: SDPBackend | None) -> Callable | None:
    if work.op != "attention":
        return None
    causal = work.shape.endswith("causal")

    def run(q, k, v):
        call = dict(is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, **call)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **call)

    return run


#: peer -> its form of a workload, None where it has none
PEERS: dict[str, Callable[[Work], Callable | None]] = {
    "eager": lambda work: work.eager,
    "compile": _compiled,
    "compile-max": lambda work: _compiled(work, mode="max-autotune-no-cudagraphs"),
    "sdpa": lambda work: _sdpa(work, None),
    "cudnn": lambda work: _sdpa(work, SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda work: _sdpa(work, SDPBackend.FLASH_ATTENTION),
}


def implementations(work: Work, names: list[str]) -> dict[str, Callable]:
    """Ours and the named peers that have a form of this workload."""
    found = {"dtkernels": work.ours}
    for name in names:
        if name not in PEERS:
            raise SystemExit(f"bench: unknown peer {name!r}; allowed: {', '.join(PEERS)}")
        made = PEERS[name](work)
        if made is not None:
            found[name] = made
    return found
