"""What several processes do together: shared by the tests on CPUs (gloo) and on GPUs (nccl). Each case runs in every process."""

from __future__ import annotations

import copy
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import dtkernels

WORLD = 2


class Net(nn.Module):
    """Linear, DyT, sigmoid of a product, softmax."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.weight, self.bias, self.alpha = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.zeros(width)),
            nn.Parameter(torch.tensor([0.5])),
        )
        self.gate = nn.Parameter(torch.randn(width, width) * width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = dtkernels.ops.dyt(self.inner(x), self.alpha, self.weight, self.bias)
        return dtkernels.ops.softmax(x * dtkernels.ops.mmsigmoid(x, self.gate))


def whole(device: str) -> tuple[Net, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The net, a batch, its result and the gradients that one process alone finds; the same in every process."""
    torch.manual_seed(3)
    net, x = Net().to(device), torch.randn(16, 64).to(device)
    result = net(x)
    loss(result).backward()
    grads = {n: p.grad.clone() for n, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    return net, x, result.detach(), grads


def loss(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.linspace(0, 1, 64, device=y.device)).sum(-1).mean()


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(WORLD)[dist.get_rank()]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


def ddp(device: str) -> None:
    """DistributedDataParallel averages the gradients that ops derive."""
    net, x, _, grads = whole(device)
    wrapped = nn.parallel.DistributedDataParallel(net, device_ids=None if device == "cpu" else [torch.device(device).index])
    loss(wrapped(mine(x))).backward()
    for n, p in net.named_parameters():
        close(p.grad, grads[n])


def fsdp2(device: str) -> None:
    """fully_shard hands ops plain tensors and shards their gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, x, _, grads = whole(device)
    sharded = copy.deepcopy(net)
    fully_shard(sharded, mesh=init_device_mesh(torch.device(device).type, (WORLD,)))
    loss(sharded(mine(x))).backward()
    for n, p in sharded.named_parameters():
        close(p.grad.full_tensor(), grads[n])


def _mesh(device: str):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(torch.device(device).type, (WORLD,))


def dtensor_rows(device: str) -> None:
    """A batch cut over devices stays cut; gradients of whole parameters are sums over the devices."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = _mesh(device)
    torch.manual_seed(5)
    x, a, w, b = (torch.randn(*s).to(device) for s in ((4, 6, 32), (1,), (32,), (32,)))
    inputs = [t.clone().requires_grad_() for t in (x, a, w, b)]
    cut = [distribute_tensor(t, mesh, [Shard(0) if t.dim() == 3 else Replicate()]).requires_grad_() for t in (x, a, w, b)]
    wanted, got = dtkernels.ops.dyt(*inputs), dtkernels.ops.dyt(*cut)
    assert got.placements == (Shard(0),), got.placements
    close(got.full_tensor(), wanted)
    wanted.square().sum().backward()
    got.square().sum().backward()
    for g, t in zip(cut, inputs):
        close(g.grad.full_tensor(), t.grad)


def dtensor_columns(device: str) -> None:
    """Tensor parallelism: element-wise ops stay cut along columns, and a reduction over columns gathers them first."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = _mesh(device)
    torch.manual_seed(6)
    x, w = torch.randn(8, 32).to(device), torch.randn(32).to(device)
    cut = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    weight = distribute_tensor(w, mesh, [Shard(0)])
    y = dtkernels.ops.dyt(cut, 0.5, weight, weight)
    assert y.placements == (Shard(1),), y.placements
    close(y.full_tensor(), dtkernels.ops.dyt(x, 0.5, w, w))
    z = dtkernels.ops.softmax(y)
    assert z.placements == (Replicate(),), z.placements
    z.square().sum().backward()
    leaf = x.clone().requires_grad_()
    dtkernels.ops.softmax(dtkernels.ops.dyt(leaf, 0.5, w, w)).square().sum().backward()
    close(cut.grad.full_tensor(), leaf.grad)


def dtensor_heads(device: str) -> None:
    """Attention stays cut along heads, grouped ones too, forward and backward."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh(device)
    torch.manual_seed(7)
    given = [torch.randn(*s).to(device) for s in ((2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 16))]
    leaves = [t.clone().requires_grad_() for t in given]
    cut = [distribute_tensor(t, mesh, [Shard(1)]).requires_grad_() for t in given]
    wanted, got = dtkernels.ops.attention(*leaves, causal=True), dtkernels.ops.attention(*cut, causal=True)
    assert got.placements == (Shard(1),), got.placements
    close(got.full_tensor(), wanted)
    wanted.square().sum().backward()
    got.square().sum().backward()
    for g, t in zip(cut, leaves):
        close(g.grad.full_tensor(), t.grad)


def dtensor_refused(device: str) -> None:
    """A plain tensor beside DTensors is refused in one line."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    x, w = torch.randn(4, 8).to(device), torch.ones(8).to(device)
    cut = distribute_tensor(x, _mesh(device), [Replicate()])
    try:
        dtkernels.ops.dyt(cut, 0.5, w, w)
    except TypeError as error:
        assert "plain tensor beside DTensors" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("a plain tensor beside DTensors was taken")


def streams_of_each_device(device: str) -> None:
    """One process calls on both devices in turn, whichever is current."""
    if device == "cpu":
        return
    for index in (0, 1, 0):
        x = torch.randn(64, 512, device=f"cuda:{index}", requires_grad=True)
        for _ in range(3):
            y = dtkernels.ops.softmax(x)
            (g,) = torch.autograd.grad(y.square().sum(), x)
        exact = x.detach().double().requires_grad_()
        close(y, exact.softmax(-1).float())
        close(g, torch.autograd.grad(exact.softmax(-1).square().sum(), exact)[0].float())


CASES = {f.__name__: f for f in (ddp, fsdp2, dtensor_rows, dtensor_columns, dtensor_heads, dtensor_refused, streams_of_each_device)}


if __name__ == "__main__":
    from several import run_cases

    device = "cpu" if sys.argv[1] == "cpu" else f"cuda:{sys.argv[2]}"
    if device != "cpu":
        torch.cuda.set_device(int(sys.argv[2]))
    run_cases({name: partial(case, device) for name, case in CASES.items()}, *sys.argv[1:])
