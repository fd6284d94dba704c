from typing import NamedTuple

import torch

from ..op_decorator import op
from ..reductions import check_range
from .last_layer import check_targets, last_layer


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
) -> TokenLogprobs:
    """Log-probability of each row's class under softmax((hidden weight^T + bias) / temperature), and the entropy of the row.

    Shapes: hidden (..., H); weight (V, H); target (...), integers from 0 to V - 1; bias (V,); both results (...), float32. softcap: logits
    become softcap * tanh(logits / softcap) before the temperature. The matrix of logits is formed in pieces, forward and backward.
    Differentiable in hidden, weight and bias, through both results.

    A target out of range gives -inf, or raises IndexError under DTKERNELS_CHECK=1. Raises ValueError where shapes disagree or an option is
    out of range, and TypeError where an argument is not a tensor or target holds no integers.

    >>> linear_logprobs(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([3]))
    TokenLogprobs(logprobs=tensor([-1.3863]), entropy=tensor([1.3863]))
    """
    given = last_layer("linear_logprobs", hidden, weight, target, bias, softcap)
    check_range("linear_logprobs", "temperature", temperature, 0, float("inf"), above=True)
    check_targets("linear_logprobs", target, weight.shape[0], None)
    rows = hidden.reshape(-1, hidden.shape[-1])
    picked, total, mean = linear_logprobs.operator()(H=rows, W=weight, t=target.reshape(-1), scale=1 / temperature, **given)
    return TokenLogprobs((picked - total).reshape(target.shape), (total - mean).reshape(target.shape))
