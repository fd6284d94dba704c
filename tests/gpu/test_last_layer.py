"""The loss of a last layer on a GPU: gradients are those of float32 logits, in the memory that is said, whether forward forms the logits' adjoint or backward."""

import pytest
import torch
import torch.nn.functional as F

import dtkernels
from dtkernels import ops

SIZES = [(1000, 1024, 50257), (333, 2048, 32001), (4096, 1536, 32000)]


def tensors(rows, hidden, classes):
    torch.manual_seed(rows)
    h = torch.randn(rows, hidden, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(classes, hidden, device="cuda") / hidden**0.5).bfloat16().requires_grad_()
    t = torch.randint(classes, (rows,), device="cuda")
    t[::7] = -100
    return h, w, t


@pytest.mark.parametrize("by_rows", [False, True], ids=["by forward", "by backward"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("size", SIZES)
def test_gradients(size, softcap, by_rows):
    """Logits in bfloat16 are off by 2^-9 of the largest, about 6; float32 products of the reference do not count."""
    h, w, t = tensors(*size)
    if by_rows:
        loss = ops.linear_cross_entropy(h, w, t, softcap=softcap, reduction="none").sum() / (t != -100).sum()
    else:
        loss = ops.linear_cross_entropy(h, w, t, softcap=softcap)
    got = torch.autograd.grad(3 * loss, (h, w))
    wide = [v.detach().float().requires_grad_() for v in (h, w)]
    z = wide[0] @ wide[1].T
    want = F.cross_entropy(z if softcap is None else softcap * torch.tanh(z / softcap), t)
    assert torch.allclose(loss, want, rtol=1e-4)
    for own, other in zip(got, torch.autograd.grad(3 * want, wide)):
        assert (own - other).abs().max() <= 2**-9 * 8 * other.abs().max()


def test_memory_of_an_adjoint_formed_in_forward():
    """Beside the gradients: the logits once, rounded, in whose place their adjoint lies until backward."""
    h, w, t = tensors(2048, 2048, 64000)
    for _ in range(2):
        h.grad = w.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ops.linear_cross_entropy(h, w, t).backward()
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before - 2 * (h.numel() + w.numel())
    assert dtkernels.paths()["linear_cross_entropy_sum backward"]["gpu"]
    assert held <= 2 * 2048 * 64000 + (64 << 20)
