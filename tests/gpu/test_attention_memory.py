"""Attention holds no row of scores: the memory of forward and backward grows with the sequence, not with its square."""

import gc

import pytest
import torch
from op_cases import normal

import dtkernels

LENGTHS = (4096, 16384, 65536)


def peak(length: int, backward: bool, causal: bool, heads: int = 1) -> int:
    """Bytes allocated at most during a call, beyond its inputs; ``heads`` of the queries share one of the keys and values."""
    shapes = [(1, h, length, 64) for h in (heads, 1, 1)]
    q, k, v = (normal(*shape, dtype=torch.bfloat16, device="cuda", seed=i).requires_grad_(backward) for i, shape in enumerate(shapes))
    adjoint = torch.ones_like(q) if backward else None
    gc.collect()  # what an earlier call left may otherwise go during this one, and its peak seem lower than it is
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = dtkernels.ops.attention(q, k, v, causal=causal)
    if backward:
        out.backward(adjoint)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_in_the_length(backward, causal, heads):
    peak(LENGTHS[0], backward, causal, heads)  # whatever is allocated once
    each = [peak(length, backward, causal, heads) / length for length in LENGTHS]
    found = f"bytes a position: {dict(zip(LENGTHS, each))}"
    # Short sequences are split over the GPU and keep a few partial results: there each position takes more, not less.
    assert all(later <= 1.1 * earlier for earlier, later in zip(each, each[1:])), found
    assert each[-1] < 64 * 2 * 16 * heads, found  # a few tensors of the inputs' size
