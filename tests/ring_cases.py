"""Ring attention in several processes, against float64 over the whole sequence in one: on CPUs (gloo) and on GPUs (nccl)."""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from attention_forms_truth import truth

from dtkernels import ops

WORLD = int(sys.argv[4]) if __name__ == "__main__" else 1


def compare(device: str, order: str, causal: bool, dtype=torch.float32, tokens: int = 10, heads=(6, 2), width=(16, 8), tolerance=2e-5, group=None, **options) -> None:
    """The part of this process of results, logsumexps and gradients is that of the whole sequence."""
    generator = torch.Generator().manual_seed(5)
    length, (h, g), (d, n) = WORLD * tokens, heads, width
    shapes = ((2, h, length, d), (2, g, length, d), (2, g, length, n), (2, h, length, n), (2, h, length))
    q, k, v, d_result, d_lse = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    place = torch.arange(length)
    wanted = truth(*exact, (place <= place[:, None]) if causal else torch.ones(length, length, dtype=torch.bool), **options)
    grads = torch.autograd.grad(wanted, exact, (d_result.double(), d_lse.double()))
    own = ops.ring_positions(tokens, group, order=order)
    ours = [t[:, :, own].to(device).requires_grad_() for t in (q, k, v)]
    found = ops.ring_attention(*ours, group, causal=causal, order=order, return_lse=True, **options)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    got = torch.autograd.grad(found, ours, (d_result[:, :, own].to(device), d_lse[:, :, own].to(device)))
    for f, w in (*zip(found, wanted), *zip(got, grads)):
        torch.testing.assert_close(f.cpu().double(), w[:, :, own], atol=tolerance * max(1.0, float(w.detach().abs().max())), rtol=0)


def zigzag_causal(device: str) -> None:
    compare(device, "zigzag", True)


def plain_causal(device: str) -> None:
    """In a group other than the world."""
    compare(device, "plain", True, group=dist.new_group(list(range(WORLD))))


def full_and_softcap(device: str) -> None:
    compare(device, "plain", False, softcap=3.0, scale=0.5)


def half_precision(device: str) -> None:
    compare(device, "zigzag", True, torch.bfloat16 if device != "cpu" else torch.float16, heads=(5, 1), width=(64, 64), tolerance=2e-2 if device != "cpu" else 4e-3)


def only_the_result(device: str) -> None:
    """A gradient of the result alone, of inputs of which one asks for none."""
    torch.manual_seed(7)
    whole = [torch.randn(1, 2, 4 * WORLD, 8) for _ in "qkv"]
    own = ops.ring_positions(4, order="zigzag")
    q, k, v = (t[:, :, own].to(device) for t in whole)
    exact = [t.double().requires_grad_() for t in whole]
    place = torch.arange(4 * WORLD)
    truth(*exact, place <= place[:, None])[0].square().sum().backward()
    ops.ring_attention(q, k.requires_grad_(), v, causal=True).square().sum().backward()
    assert q.grad is None
    torch.testing.assert_close(k.grad.cpu().double(), exact[1].grad[:, :, own], atol=1e-4, rtol=1e-4)


CASES = {f.__name__: f for f in (zigzag_causal, plain_causal, full_and_softcap, half_precision, only_the_result)}


if __name__ == "__main__":
    from several import run_cases

    device = "cpu" if sys.argv[1] == "cpu" else f"cuda:{sys.argv[2]}"
    if device != "cpu":
        torch.cuda.set_device(int(sys.argv[2]))
    elif os.environ.get("TRITON_INTERPRET") == "1":
        from quick_interpreter import install

        install()
    run_cases({name: partial(case, device) for name, case in CASES.items()}, *sys.argv[1:])
