from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..op_decorator import as_rows, op
from ..reductions import check_loss, counted, reduced
from .last_layer import check_targets, last_layer
from .linear_logsumexp import linear_logsumexp
from .summed_rows import sum_of_rows
from .vocabulary_shards import VocabularyShard, all_classes, vocabulary_shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@op(H="hidden (N, H)", W="weight (V, H)", b="bias (V)", t="target (N)", P="lora[0] (N, R)", Q="lora[1] (V, R)", cap="softcap", smoothing="label_smoothing", penalty="z_loss", ignored="ignore_index")
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    shift: bool = False,
    lora: tuple[torch.Tensor, torch.Tensor] | None = None,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Cross entropy of the logits hidden weight^T + bias, without the matrix of logits in memory (as Hsu et al., Liger Kernel, 2024, and Wijmans et al., 2024).

    Shapes: hidden (..., H); weight (V, H); target (...), integers from 0 to V - 1, or ignore_index for rows to ignore; bias (V,).

    - softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
    - label_smoothing spreads that share of the target probability over all classes.
    - z_loss: adds z_loss * logsumexp(logits)^2 to each row (Chowdhery et al., PaLM, 2022).
    - reduction: "none" returns (...), "sum" the sum, "mean" the mean over the rows that are not ignored (nan without any, as in torch).
    - shift: row i is held against target i + 1 along the last dimension of target; the last row of each sequence is ignored.
    - lora: a pair (..., R) and (V, R), such as scale * hidden A^T and B, whose product is added to the logits before the softcap. With a weight
      that requires no gradient, its gradient is not computed (Hu et al., LoRA, 2021).
    - group: each rank of the process group has its own rows of the weight (and of bias and lora[1]), in the order of ranks, and their gradient.
      hidden, target and the result are the same on all ranks; the gradient of hidden is summed over them, in its dtype. A weight that is a
      DTensor in shards along dimension 0 of a one-dimensional mesh needs no group. If hidden is a DTensor, so is the result.

    The result is float32. Logits and their gradient are formed in pieces, in the promoted dtype of hidden and weight; the gradient of weight is
    accumulated in float32. The sum and the mean of bfloat16 rows keep the logits' gradient instead, in the memory of the logits, where that is
    no more than 1 GiB, or no more than hidden, weight and their gradients take; DTKERNELS_MEMORY_LIMIT (MiB) sets another limit.
    Differentiable in hidden, weight and bias. Where no kernel runs, the reference holds all logits.

    A target out of range gives inf, or raises IndexError under DTKERNELS_CHECK=1. Raises ValueError where shapes disagree or an option is
    out of range, and TypeError where an argument is not a tensor or target holds no integers.

    >>> linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([3, -100]))
    tensor(1.3863)
    """
    name = "linear_cross_entropy"
    shard = vocabulary_shard(name, hidden, weight, target, bias, lora, group)
    if shard is not None:
        hidden, weight, target, bias, lora = shard.hidden, shard.weight, shard.target, shard.bias, shard.lora
    given = last_layer(name, hidden, weight, target, bias, softcap, lora)
    check_loss(name, reduction, label_smoothing, ignore_index, z_loss)
    target = _shifted(target, ignore_index) if shift else target
    check_targets(name, target, all_classes(shard, weight), ignore_index)
    if shard is not None:
        rows = _sharded_rows(shard, target, ignore_index, label_smoothing, softcap, z_loss)
    else:
        given |= {"smoothed": True, "smoothing": float(label_smoothing)} if label_smoothing else {}
        given |= {"squared": True, "penalty": float(z_loss)} if z_loss else {}
        given |= {"H": as_rows(hidden), "W": weight, "t": target.reshape(-1), "ignored": ignore_index}
        total = None if reduction == "none" or lora else sum_of_rows(name, given)
        rows = linear_cross_entropy.operator()(**given) if total is None else total
    result = rows.reshape(target.shape) if reduction == "none" else reduced(rows, reduction, target, ignore_index)
    return result if shard is None else shard.result(result)


def _shifted(target: torch.Tensor, ignored: int) -> torch.Tensor:
    if target.dim() < 1:
        raise ValueError(f"linear_cross_entropy: shift is for sequences; got a target of shape {tuple(target.shape)}")
    return torch.cat((target[..., 1:], torch.full_like(target[..., :1], ignored)), -1)


def _sharded_rows(shard: VocabularyShard, target: torch.Tensor, ignored: int, smoothing: float, softcap: float | None, penalty: float) -> torch.Tensor:
    """Return the loss of each row: the log-sum-exp over all ranks minus the target's logit, which one rank holds."""
    if shard.weight.shape[0]:
        own = shard.own_target(target)
        options = {"softcap": softcap, "label_smoothing": smoothing, "classes": shard.classes, "lora": shard.lora}
        total, logit = linear_logsumexp(shard.hidden, shard.weight, own, shard.bias, **options)
    else:
        total, logit = shard.nothing() - float("inf"), shard.nothing()
    totals, logits = shard.gathered(total, logit)
    total, logit = totals.logsumexp(0), logits.sum(0).masked_fill(~shard.is_class(target), -float("inf"))
    loss = total - logit + penalty * total * total if penalty else total - logit
    return loss.masked_fill(~counted(target, ignored), 0)
