"""Attention holds no row of scores: the memory of forward and backward grows with the sequence, not with its square."""

import gc

import pytest
import torch
from op_cases import normal

import dtkernels
from dtkernels import ops

LENGTHS = (4096, 16384, 65536)
WIDTH, SLOTS = 64, 16


def normals(*shapes, grad=False):
    return [normal(*shape, dtype=torch.bfloat16, device="cuda", seed=i).requires_grad_(grad) for i, shape in enumerate(shapes)]


def heads_first(length, heads, grad):
    return normals((1, heads, length, WIDTH), (1, 1, length, WIDTH), (1, 1, length, WIDTH), grad=grad)


def matrix(**options):
    return lambda length, heads, grad: (heads_first(length, heads, grad), lambda q, k, v: ops.attention(q, k, v, **options))


def packed(length, heads, grad):
    starts = torch.tensor([0, length // 3, length // 2, length], dtype=torch.int32, device="cuda")
    tensors = normals((length, heads, WIDTH), (length, 1, WIDTH), (length, 1, WIDTH), grad=grad)
    return tensors, lambda q, k, v: ops.attention(q, k, v, cu_seqlens_q=starts, causal=True)


def segmented(length, heads, grad):
    numbers = torch.arange(length, device="cuda") // 1000
    return heads_first(length, heads, grad), lambda q, k, v: ops.attention(q, k, v, segments=numbers, causal=True)


def cached(length, heads, grad):
    lengths = torch.tensor([length - 7], device="cuda")
    return heads_first(length, heads, grad), lambda q, k, v: ops.attention(q, k, v, lengths=lengths, causal=True)


def paged(length, heads, grad):
    table = torch.randperm(length // SLOTS, device="cuda").view(1, -1).int()
    tensors = normals((1, heads, length, WIDTH), (length // SLOTS, SLOTS, 1, WIDTH), (length // SLOTS, SLOTS, 1, WIDTH))
    lengths = torch.tensor([length - 7], device="cuda")
    return tensors, lambda q, k, v: ops.attention(q, k, v, block_table=table, lengths=lengths, causal=True)


def appended(length, heads, grad):
    """A step of decoding: its memory does not grow with the cache but for the partial results of its splits."""
    q, k, v, new_k, new_v = normals((1, heads, 1, WIDTH), (1, 1, length, WIDTH), (1, 1, length, WIDTH), (1, 1, 1, WIDTH), (1, 1, 1, WIDTH))
    lengths = torch.tensor([length - 7], device="cuda")
    return [q, k, v], lambda q, k, v: ops.attention(q, k, v, lengths=lengths, new_k=new_k, new_v=new_v)


def written(**text):
    function = dtkernels.attention_spec(**text, name="memory_" + "_".join(text))
    given = {n: torch.full((8,), 0.1, device="cuda") if n == "slope" else None for n in text.get("inputs", "").split()}

    def case(length, heads, grad):
        more = {n: torch.arange(length, device="cuda")[None] // 1000 if t is None else t[:heads] for n, t in given.items()}
        return heads_first(length, heads, grad), lambda q, k, v: function(q, k, v, **more)

    return case


#: how the inputs of a length are made, and what is called
FORMS = {
    "full": lambda: matrix(), "causal": lambda: matrix(causal=True), "window": lambda: matrix(causal=True, window=(1000, None)),
    "logsumexp": lambda: matrix(causal=True, return_lse=True), "dropout": lambda: matrix(causal=True, dropout_p=0.1, seed=7),
    "packed": lambda: packed, "segments": lambda: segmented, "cache": lambda: cached,
    "score": lambda: written(score="s + slope[h] * (l - m)", mask="l <= m", inputs="slope"),
    "mask": lambda: written(mask="doc[b, m] == doc[b, l] and l <= m", inputs="doc"),
    "ring": lambda: lambda length, heads, grad: (heads_first(length, heads, grad), lambda q, k, v: ops.ring_attention(q, k, v, causal=True, window=(1000, None))),
}  # fmt: skip
INFERENCE = {"pages": lambda: paged, "append": lambda: appended}


def peak(form, length: int, backward: bool, heads: int) -> int:
    """Bytes allocated at most during a call, beyond its inputs; ``heads`` of the queries share one of the keys and values."""
    tensors, call = form(length, heads, backward)
    gc.collect()  # what an earlier call left may otherwise go during this one, and its peak seem lower than it is
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*tensors)
    out = out[0] if isinstance(out, tuple) else out
    if backward:
        out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name, backward, heads", [
    *((n, b, 1) for n in FORMS for b in (False, True)), *((n, b, 4) for n in ("full", "causal", "packed") for b in (False, True)), *((n, False, 4) for n in INFERENCE),
])  # fmt: skip
def test_memory_is_linear_in_the_length(name, backward, heads):
    form = (FORMS | INFERENCE)[name]()
    peak(form, LENGTHS[0], backward, heads)  # whatever is allocated once
    each = [peak(form, length, backward, heads) / length for length in LENGTHS]
    found = f"bytes a position: {dict(zip(LENGTHS, each))}"
    # Short sequences are split over the GPU and keep a few partial results: there each position takes more, not less.
    assert all(later <= 1.1 * earlier for earlier, later in zip(each, each[1:])), found
    assert each[-1] < WIDTH * 2 * 20 * heads, found  # a few tensors of the inputs' size
