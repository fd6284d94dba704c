from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..op_decorator import as_rows, op
from ..option_checks import check_range
from .last_layer import check_targets, last_layer
from .vocabulary_shards import VocabularyShard, all_classes, vocabulary_shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TokenLogprobs(NamedTuple):
    """Of each row the log-probability of its class, and the entropy of its softmax."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


@op(H="hidden (N, H)", W="weight (V, H)", b="bias (V)", t="target (N)", cap="softcap", scale="1 / temperature")
def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
) -> TokenLogprobs:
    """Return the log-probability of each row's class under softmax((hidden weight^T + bias) / temperature), and the entropy of the row.

    Shapes: hidden (..., H); weight (V, H); target (...), integers from 0 to V - 1; bias (V,); both results (...), float32. softcap: logits
    become softcap * tanh(logits / softcap) before the temperature. The matrix of logits is formed in pieces, forward and backward.
    Differentiable in hidden, weight and bias, through both results. group, or a weight that is a DTensor in shards along the vocabulary, as
    in `linear_cross_entropy`.

    A target out of range gives -inf, or raises IndexError under DTKERNELS_CHECK=1. Raises ValueError where shapes disagree or an option is
    out of range, and TypeError where an argument is not a tensor or target holds no integers.

    >>> linear_logprobs(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([3]))
    TokenLogprobs(logprobs=tensor([-1.3863]), entropy=tensor([1.3863]))
    """
    name = "linear_logprobs"
    shard = vocabulary_shard(name, hidden, weight, target, bias, None, group)
    if shard is not None:
        hidden, weight, target, bias = shard.hidden, shard.weight, shard.target, shard.bias
    given = last_layer(name, hidden, weight, target, bias, softcap)
    check_range(name, "temperature", temperature, 0, float("inf"), above=True)
    check_targets(name, target, all_classes(shard, weight), None)
    given |= {"H": as_rows(hidden), "W": weight, "scale": 1 / temperature}
    if shard is None:
        picked, total, mean = linear_logprobs.operator()(t=target.reshape(-1), **given)
        return TokenLogprobs((picked - total).reshape(target.shape), (total - mean).reshape(target.shape))
    picked, total, mean = _merged(shard, target.reshape(-1), given)
    return TokenLogprobs(shard.result((picked - total).reshape(target.shape)), shard.result((total - mean).reshape(target.shape)))


def _merged(shard: VocabularyShard, target: torch.Tensor, given: dict) -> tuple[torch.Tensor, ...]:
    """Return the logit of each row's class, the log-sum-exp and the mean logit under the softmax, of the classes of all ranks."""
    if shard.weight.shape[0]:
        own = shard.own_target(target)
        picked, total, mean = linear_logprobs.operator()(t=own, **given)
        picked = picked.masked_fill((own < 0) | (own >= shard.weight.shape[0]), 0)
    else:
        picked = mean = shard.nothing().reshape(-1)
        total = picked - float("inf")
    pickeds, totals, means = shard.gathered(picked, total, mean)
    picked = pickeds.sum(0).masked_fill(~shard.is_class(target), -float("inf"))
    return picked, totals.logsumexp(0), (totals.softmax(0) * means).sum(0)
