"""Merge the results of the ranks of a process group, each for its shard of a vocabulary.

A rank has some rows of the last layer's weight. It computes the log-sum-exp of its logits and the logit of the target, if it has it;
both are numbers for each row of hidden states. One all-gather of them gives every rank the same loss. Backward needs no
communication but the sum of the gradients of hidden states, since each rank has only the part that its logits cause.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.path_counters import checking
from ..op_decorator import compiling


class _GradientsSummed(torch.autograd.Function):
    """Return tensors that all ranks have; their gradients are the sums of the ranks' parts. One node, so that all ranks sum them in one order."""

    @staticmethod
    def forward(ctx, group: Any, *shared: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in shared)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        summed: list[torch.Tensor | None] = [None] * (1 + len(grads))
        for i, grad in enumerate(grads, 1):
            if ctx.needs_input_grad[i]:
                whole = grad.clone(memory_format=torch.contiguous_format)
                torch.distributed.all_reduce(whole, group=ctx.group)
                summed[i] = whole
        return tuple(summed)


class _Gathered(torch.autograd.Function):
    """Return the tensors of all ranks, stacked. What is computed of them is the same on all ranks, so that each has its gradient already."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.rank = torch.distributed.get_rank(group)
        return _gather(x, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[ctx.rank], None


def _gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    world = torch.distributed.get_world_size(group)
    found = x.new_empty(world * x.shape[0], *x.shape[1:])
    all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor  # its name before torch 2.13
    all_gather(found, x.contiguous(), group=group)
    return found.unflatten(0, (world, x.shape[0]))


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of a call. ``first`` is its first class of ``classes``, each a number or a tensor of one element."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    lora: tuple[torch.Tensor, torch.Tensor] | None
    group: Any
    first: int | torch.Tensor
    classes: int | torch.Tensor
    mesh: Any = None  #: where the hidden states were a DTensor, the result is one

    def own_target(self, target: torch.Tensor) -> torch.Tensor:
        """Return the targets as this rank's classes; those of other ranks are out of range."""
        return target.long() - self.first

    def is_class(self, target: torch.Tensor) -> torch.Tensor:
        """Return whether each target is a class of any rank."""
        return (target >= 0) & (target < self.classes)

    def nothing(self) -> torch.Tensor:
        """Return 0 for each row, with gradients of 0: the contribution of a rank without classes."""
        dtype = torch.promote_types(torch.promote_types(self.hidden.dtype, self.weight.dtype), torch.float32)  # as the results of other ranks
        rows = self.hidden.sum(-1).to(dtype)
        if self.lora is not None:
            rows = rows + self.lora[0].sum(-1).to(dtype)
        for empty in (self.weight, self.bias, None if self.lora is None else self.lora[1]):
            rows = rows if empty is None else rows + empty.sum().to(dtype)
        return rows.masked_fill(torch.ones_like(rows, dtype=torch.bool), 0)

    def gathered(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each of some tensors, one number a row, of all ranks: (ranks, ...)."""
        return _Gathered.apply(torch.stack(parts), self.group).unbind(1)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Return a result that all ranks have as the caller expects it."""
        if self.mesh is None:
            return x
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)


def vocabulary_shard(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    lora: tuple[torch.Tensor, torch.Tensor] | None,
    group: Any,
) -> VocabularyShard | None:
    """Return this rank's part of a call whose weight is sharded along the vocabulary; None if it is not. Raises, one line, for bad arguments.

    That is so with ``group``, beside the rank's own rows of the weight, and for a weight that is a DTensor in shards along dimension 0 of a
    mesh of one dimension.
    """
    tensors = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    if group is None and not _sharded_rows(weight):
        return None
    if isinstance(lora, (tuple, list)) and len(lora) == 2:
        tensors |= {"lora[0]": lora[0], "lora[1]": lora[1]}
    elif lora is not None:
        raise TypeError(f"{op}: lora is {type(lora).__name__}; allowed: a pair of tensors, (..., R) and (V, R)")
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"{op}: {name} is {type(value).__name__}; allowed: a tensor")
    return _of_group(op, tensors, group) if group is not None else _of_mesh(op, tensors)


def _dtensor() -> Any:
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def _sharded_rows(weight: torch.Tensor) -> bool:
    kind = _dtensor()
    return bool(kind) and isinstance(weight, kind) and weight.dim() == 2 and weight.device_mesh.ndim == 1 and weight.placements[0].is_shard(0)


def _of_group(op: str, tensors: dict, group: Any) -> VocabularyShard:
    """Describe a shard in plain tensors. The ranks exchange how many classes each has."""
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"{op}: group is {type(group).__name__}; allowed: a torch.distributed.ProcessGroup with this process in it")
    if torch.distributed.get_rank(group) < 0:
        raise ValueError(f"{op}: this process is not in group; allowed: a group with this process in it")
    for name, value in tensors.items():
        if _dtensor() and isinstance(value, _dtensor()):
            raise TypeError(f"{op}: {name} is a DTensor beside group; allowed: plain tensors, or a DTensor as weight without group")
    weight = tensors["weight"]
    sizes = _gather(torch.tensor([weight.shape[0] if weight.dim() else 0], device=weight.device), group)
    first, classes = sizes[: torch.distributed.get_rank(group)].sum(), sizes.sum()
    return _shard(_gradients_summed(tensors, [n for n in ("hidden", "lora[0]") if n in tensors], group), group, first, classes)


def _of_mesh(op: str, tensors: dict) -> VocabularyShard:
    """Describe a shard in a DTensor. Hidden states and targets may be plain tensors that all ranks have."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    weight, kind = tensors["weight"], _dtensor()
    mesh, group = weight.device_mesh, weight.device_mesh.get_group()
    world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    length = -(-weight.shape[0] // world)  # as torch.chunk cuts
    first = min(rank * length, weight.shape[0])
    local: dict = {}
    for name, value in tensors.items():
        by_class = name in ("weight", "bias", "lora[1]")
        if value is None:
            local[name] = None
        elif isinstance(value, kind):
            if value.device_mesh != mesh:
                raise ValueError(f"{op}: {name} is on another device mesh than weight; allowed: one mesh")
            place: Any = Shard(0) if by_class else Replicate()
            grads = [place if by_class or not value.is_floating_point() else Partial()]
            local[name] = value.redistribute(mesh, [place]).to_local(grad_placements=grads)
        elif by_class:
            raise TypeError(f"{op}: {name} is a plain tensor beside a weight in shards; allowed: a DTensor of its mesh")
        else:
            local[name] = value
    if local["weight"].shape[0] != max(0, min(length, weight.shape[0] - first)):
        raise ValueError(f"{op}: weight has {local['weight'].shape[0]} classes on rank {rank}; allowed: shards as torch.chunk makes them")
    local = _gradients_summed(local, [n for n in ("hidden", "lora[0]") if n in tensors and not isinstance(tensors[n], kind)], group)
    return _shard(local, group, first, weight.shape[0], mesh if isinstance(tensors["hidden"], kind) else None)


def _gradients_summed(tensors: dict, names: list[str], group: Any) -> dict:
    return {**tensors, **dict(zip(names, _GradientsSummed.apply(group, *(tensors[n] for n in names)), strict=True))} if names else tensors


def _shard(tensors: dict, group: Any, first: int | torch.Tensor, classes: int | torch.Tensor, mesh: Any = None) -> VocabularyShard:
    lora = (tensors["lora[0]"], tensors["lora[1]"]) if "lora[0]" in tensors else None
    return VocabularyShard(tensors["hidden"], tensors["weight"], tensors["target"], tensors["bias"], lora, group, first, classes, mesh)


def all_classes(shard: VocabularyShard | None, weight: torch.Tensor) -> int:
    """Return the number of classes of all ranks, as far as targets are checked; of a sharded vocabulary the host waits for it."""
    if shard is None or compiling() or not checking():
        return weight.shape[0]
    return int(shard.classes)
