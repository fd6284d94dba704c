"""A last layer whose vocabulary is sharded, over the processes of a group: each against the whole in float64. Each case runs in every process."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from against_torch import normal

from dtkernels import ops

X, V, K, R = 7, 37, 12, 3
HIDDEN, WEIGHT, BIAS, INNER, OUTER = normal(X, K), normal(V, K, seed=1), normal(V, seed=2), normal(X, R, seed=3), normal(V, R, seed=4)
TARGET = torch.tensor([0, -100, 4, 5, 36, 20, 19])  # the first and the last class, and both sides of a cut
CUTS = {2: (20, 17), 3: (5, 0, 32)}  # one rank of three has no class

OPTIONS = [
    ({}, {}),
    ({"reduction": "sum", "label_smoothing": 0.2}, {"reduction": "sum", "smoothing": 0.2}),
    ({"softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.1, "reduction": "none"}, {"cap": 2.0, "z": 0.1, "smoothing": 0.1, "reduction": "none"}),
]


def whole_loss(h, w, b=None, p=None, q=None, t=TARGET, smoothing=0.0, cap=None, z=0.0, reduction="mean"):
    logits = F.linear(h, w, b) + (0 if p is None else p @ q.T)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    rows = F.cross_entropy(logits, t, label_smoothing=smoothing, reduction="none") + z * torch.logsumexp(logits, -1) ** 2 * (t != -100)
    return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.sum() / (t != -100).sum()


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.split(CUTS[dist.get_world_size()])[dist.get_rank()]


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 3e-5) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def both(ours, theirs, tensors: list[torch.Tensor], cut: list[bool], dtype: torch.dtype = torch.float64, tolerance: float = 3e-5) -> None:
    """Hold results and gradients against those of the whole: of a tensor that is cut the rank's own part, else the sum over all ranks."""
    exact = [t.clone().requires_grad_() for t in tensors]
    given = [(mine(t) if c else t).to(dtype).clone().requires_grad_() for t, c in zip(tensors, cut)]
    found, wanted = ours(*given), theirs(*exact)
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
    for a, b in zip(found, wanted, strict=True):
        close(a, b, tolerance)
    for results in (found, wanted):
        sum((r.double() * normal(*r.shape, seed=i)).sum() for i, r in enumerate(results)).backward()
    for got, right, c in zip(given, exact, cut):
        close(got.grad, mine(right.grad) if c else right.grad, tolerance)


def group_losses() -> None:
    """All options, with bias and LoRA and without, by the reference."""
    for ours, theirs in OPTIONS:
        call = lambda h, w, b=None, p=None, q=None: ops.linear_cross_entropy(h, w, TARGET, b, lora=None if p is None else (p, q), group=dist.group.WORLD, **ours)  # noqa: B023, E731
        truth = lambda *t: whole_loss(*t, **theirs)  # noqa: B023, E731
        both(call, truth, [HIDDEN, WEIGHT], [False, True])
        both(call, truth, [HIDDEN, WEIGHT, BIAS, INNER, OUTER], [False, True, True, False, True])


def group_kernels() -> None:
    """The kernels, in Triton's interpreter."""
    import dtkernels

    ours, theirs = OPTIONS[-1]
    call = lambda h, w, b, p, q: ops.linear_cross_entropy(h, w, TARGET, b, lora=(p, q), group=dist.group.WORLD, **ours)  # noqa: E731
    both(call, lambda *t: whole_loss(*t, **theirs), [HIDDEN, WEIGHT, BIAS, INNER, OUTER], [False, True, True, False, True], torch.float32, 1e-4)
    paths = dtkernels.paths().get("linear_logsumexp", {})
    assert paths.get("interpreter", 0) == (1 if len(mine(WEIGHT)) else 0), paths


def group_logprobs() -> None:
    """Log-probabilities and entropy; a target that no rank has gives -inf."""

    def truth(h, w, b):
        logs = ((3 * torch.tanh(F.linear(h, w, b) / 3)) / 0.7).log_softmax(-1)
        return logs.gather(-1, TARGET.clamp(min=0)[:, None])[:, 0], -(logs.exp() * logs).sum(-1)

    call = lambda h, w, b: tuple(ops.linear_logprobs(h, w, TARGET.clamp(min=0), b, softcap=3.0, temperature=0.7, group=dist.group.WORLD))  # noqa: E731
    both(call, truth, [HIDDEN, WEIGHT, BIAS], [False, True, True])
    found = ops.linear_logprobs(HIDDEN[:2], mine(WEIGHT), torch.tensor([V, 3]), group=dist.group.WORLD).logprobs
    assert found.isneginf().tolist() == [True, False], found


def group_shift_and_ranges() -> None:
    """The cut along a sequence; a target that no rank has gives inf, or an error under DTKERNELS_CHECK."""
    import os

    h, t = normal(2, 6, K), torch.arange(12).view(2, 6) * 3
    found = ops.linear_cross_entropy(h, mine(WEIGHT), t, shift=True, group=dist.group.WORLD)
    close(found, F.cross_entropy((h @ WEIGHT.T)[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1)))
    wrong = torch.tensor([3, V, 1])
    call = lambda: ops.linear_cross_entropy(HIDDEN[:3], mine(WEIGHT), wrong, reduction="none", group=dist.group.WORLD)  # noqa: E731
    assert call().isinf().tolist() == [False, True, False]
    os.environ["DTKERNELS_CHECK"] = "1"
    refused(call, IndexError, f"target is {V} at [1]; allowed: 0 to {V - 1}")
    del os.environ["DTKERNELS_CHECK"]


def refused(call, error: type[Exception], message: str) -> None:
    try:
        call()
    except error as found:
        assert message in str(found) and "\n" not in str(found), found
    else:
        raise AssertionError(f"nothing was refused: {message}")


def group_refusals() -> None:
    """One line for what is not a shard."""
    loss, world = ops.linear_cross_entropy, dist.group.WORLD
    refused(lambda: loss(HIDDEN, mine(WEIGHT), TARGET, group=3), TypeError, "group is int; allowed: a torch.distributed.ProcessGroup")
    refused(lambda: loss(HIDDEN, mine(WEIGHT), TARGET, BIAS, group=world), ValueError, "bias is (V,)")
    refused(lambda: loss(HIDDEN, mine(WEIGHT), TARGET, lora=(INNER, OUTER), group=world), ValueError, "lora is (..., R) and (V, R)")
    others = dist.new_group([0])
    if dist.get_rank():
        refused(lambda: loss(HIDDEN, mine(WEIGHT), TARGET, group=others), (TypeError, ValueError), "with this process in it")
    weight, _ = dtensors(WEIGHT)
    refused(lambda: loss(HIDDEN, weight, TARGET, group=world), TypeError, "weight is a DTensor beside group")
    refused(lambda: loss(HIDDEN, weight, TARGET, BIAS), TypeError, "bias is a plain tensor beside a weight in shards")


def dtensors(x: torch.Tensor, place=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(x, mesh, [place or Shard(0)]).detach().requires_grad_(), mesh


def dtensor_losses() -> None:
    """A weight that is a DTensor needs no group. Hidden states are plain, replicated, or cut along rows; V does not divide evenly."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for kind in (None, Replicate(), Shard(0)):
        exact = [t.clone().requires_grad_() for t in (HIDDEN, WEIGHT, BIAS)]
        weight, bias = dtensors(WEIGHT)[0], dtensors(BIAS, Replicate() if kind is None else None)[0]
        hidden = HIDDEN.clone().requires_grad_() if kind is None else dtensors(HIDDEN, kind)[0]
        found = ops.linear_cross_entropy(hidden, weight, TARGET, bias, label_smoothing=0.1)
        assert isinstance(found, DTensor) == (kind is not None)
        wanted = whole_loss(*exact, smoothing=0.1)
        close(found if kind is None else found.to_local(), wanted)
        wanted.backward()
        found.backward()
        for got, right in zip((hidden, weight, bias), exact):
            grad = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
            close(grad, right.grad)


CASES = {f.__name__: f for f in (group_losses, group_kernels, group_logprobs, group_shift_and_ranges)}
#: those without kernels, run by the processes of sharded_model_cases.py
REFERENCE_CASES = {f.__name__: f for f in (group_losses, group_logprobs, group_shift_and_ranges, group_refusals, dtensor_losses)}


if __name__ == "__main__":
    from several import run_cases

    run_cases(CASES, *sys.argv[1:])
