"""Attention holds no row of scores: the memory of forward and backward grows with the sequence, not with its square."""

import pytest
import torch
from op_cases import normal

import dtkernels

LENGTHS = (4096, 16384, 65536)


def peak(length: int, backward: bool, causal: bool) -> int:
    """Bytes allocated at most during a call, beyond its inputs."""
    q, k, v = (normal(1, 1, length, 64, dtype=torch.bfloat16, device="cuda", seed=s).requires_grad_(backward) for s in range(3))
    adjoint = torch.ones_like(q) if backward else None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = dtkernels.ops.attention(q, k, v, causal=causal)
    if backward:
        out.backward(adjoint)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_in_the_length(backward, causal):
    peak(LENGTHS[0], backward, causal)  # whatever is allocated once
    each = [peak(length, backward, causal) / length for length in LENGTHS]
    assert max(each) <= 1.1 * min(each), f"bytes a position: {dict(zip(LENGTHS, each))}"
    assert max(each) < 64 * 2 * 16  # a few tensors of the inputs' size
