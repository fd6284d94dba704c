"""Ring attention in several processes, against float64 over the whole sequence in one: on CPUs (gloo) and on GPUs (nccl)."""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from attention_forms_truth import truth, visible

from dtkernels import ops

WORLD = int(sys.argv[4]) if __name__ == "__main__" else 1


def compare(
    device: str, order: str, causal: bool, dtype=torch.float32, tokens: int = 10, heads=(6, 2), width=(16, 8), tolerance=2e-5, group=None,
    window=None, segments=None, sinks=False, **options,
) -> None:  # fmt: skip
    """The part of this process of results, logsumexps and gradients is that of the whole sequence. ``segments``: of the whole, (B, length)."""
    generator = torch.Generator().manual_seed(5)
    length, (h, g), (d, n) = WORLD * tokens, heads, width
    shapes = ((2, h, length, d), (2, g, length, d), (2, g, length, n), (2, h, length, n), (2, h, length), (h,))
    q, k, v, d_result, d_lse, sink = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    exact = [t.double().requires_grad_() for t in ((q, k, v, sink) if sinks else (q, k, v))]
    place = torch.arange(length)
    seen = visible(place, place, causal, window)
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    wanted = truth(*exact[:3], seen, **({"sinks": exact[3]} if sinks else {}), **options)
    grads = torch.autograd.grad(wanted, exact, (d_result.double(), d_lse.double()))
    own = ops.ring_positions(tokens, group, order=order)
    ours = [t[:, :, own].to(device).requires_grad_() for t in (q, k, v)] + ([sink.to(device).requires_grad_()] if sinks else [])
    more = {"segments": None if segments is None else segments[:, own].to(device), "sinks": ours[3] if sinks else None}
    found = ops.ring_attention(*ours[:3], group, causal=causal, window=window, order=order, return_lse=True, **more, **options)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    got = list(torch.autograd.grad(found, ours, (d_result[:, :, own].to(device), d_lse[:, :, own].to(device))))
    if sinks:  # each process has the part of its own queries
        dist.all_reduce(got[3])
        torch.testing.assert_close(got.pop().cpu().double(), grads[3], atol=1e-4, rtol=1e-4)
    for f, w in (*zip(found, wanted), *zip(got, grads)):
        torch.testing.assert_close(f.cpu().double(), w[:, :, own], atol=tolerance * max(1.0, float(w.detach().abs().max())), rtol=0)


def documents(lengths: list[int], *others: list[int]) -> torch.Tensor:
    """Ascending numbers of documents in a row, for each entry of a batch."""
    return torch.stack([torch.repeat_interleave(torch.tensor([-2, 3, 5, 7, 11, 40][: len(one)]), torch.tensor(one)) for one in (lengths, *others)])


def zigzag_causal(device: str) -> None:
    compare(device, "zigzag", True)


def plain_causal(device: str) -> None:
    """In a group other than the world."""
    compare(device, "plain", True, group=dist.new_group(list(range(WORLD))))


def full_and_softcap(device: str) -> None:
    compare(device, "plain", False, softcap=3.0, scale=0.5)


def half_precision(device: str) -> None:
    compare(device, "zigzag", True, torch.bfloat16 if device != "cpu" else torch.float16, heads=(5, 1), width=(64, 64), tolerance=2e-2 if device != "cpu" else 4e-3)


def windows(device: str) -> None:
    """To both sides over two pieces; to one side in another order; and with sinks."""
    compare(device, "plain", False, window=(12, 3), heads=(3, 1))
    compare(device, "zigzag", True, window=(7, None), softcap=3.0, sinks=True, heads=(2, 2))


def segments(device: str) -> None:
    """Documents that end inside of pieces, other ones in each entry, and numbers in any order."""
    length = 10 * WORLD
    mixed = torch.randint(0, 3, (1, length), generator=torch.Generator().manual_seed(3))
    compare(device, "zigzag", True, segments=documents([3, 9, length - 12], [length - 1, 1]), heads=(2, 1))
    compare(device, "plain", False, segments=mixed.expand(2, -1), window=(None, 6), heads=(2, 2))


def what_no_pair_needs_stays(device: str) -> None:
    """Documents of a process's own, and windows of the process before, take no more transfers than that; gradients go home from there."""
    from dtkernels.ops.attention_forms import ring

    moved, transfer = [], ring._Transfer.__init__

    def counting(self, one, tensors, places):
        moved.append(places % WORLD)
        transfer(self, one, tensors, places)

    ring._Transfer.__init__ = counting
    try:
        compare(device, "plain", True, segments=documents([10] * WORLD, [5, 5] + [10] * (WORLD - 1)), heads=(2, 1))
        none, moved[:] = list(moved), []
        compare(device, "plain", True, window=(10, None), segments=documents([10] * WORLD, [4] + [10] * (WORLD - 1) + [6]), heads=(2, 1))
    finally:
        ring._Transfer.__init__ = transfer
    assert not any(none), none
    # keys one place on; backward, keys and what there is of their gradients one place on, and the gradients home
    assert [places for places in moved if places] == [1, 1, 1, WORLD - 1], moved


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


def processes_that_disagree(device: str) -> None:
    """Under DTKERNELS_CHECK=1 each process says so, instead of waiting for what the others do not send."""
    q = torch.zeros(1, 2, 4 if dist.get_rank() else 6, 8, device=device)
    os.environ["DTKERNELS_CHECK"] = "1"
    try:
        ops.ring_attention(q, q, q)
    except ValueError as error:
        assert str(error).startswith("ring_attention: q is ((1, 2, 4, 8), 'torch.float32') in process 1 and ((1, 2, 6, 8), 'torch.float32') in process 0; allowed"), error
    else:
        raise AssertionError("nothing was said")
    finally:
        del os.environ["DTKERNELS_CHECK"]


CASES = {
    f.__name__: f
    for f in (zigzag_causal, plain_causal, full_and_softcap, half_precision, only_the_result, windows, segments, what_no_pair_needs_stays, processes_that_disagree)
}


if __name__ == "__main__":
    from several import run_cases

    device = "cpu" if sys.argv[1] == "cpu" else f"cuda:{sys.argv[2]}"
    if device != "cpu":
        torch.cuda.set_device(int(sys.argv[2]))
    elif os.environ.get("TRITON_INTERPRET") == "1":
        from quick_interpreter import install

        install()
    run_cases({name: partial(case, device) for name, case in CASES.items()}, *sys.argv[1:])
