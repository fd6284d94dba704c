from typing import NamedTuple

import torch

from ..op_decorator import as_rows, op
from ..option_checks import check_integer, check_range
from .last_layer import last_layer


class LogsumexpAndLogit(NamedTuple):
    """Of each row the logarithm of the sum of exponentials of its logits, and the logit that is asked for."""

    logsumexp: torch.Tensor
    logit: torch.Tensor


@op(H="hidden (N, H)", W="weight (V, H)", b="bias (V)", t="target (N)", P="lora[0] (N, R)", Q="lora[1] (V, R)", cap="softcap", smoothing="label_smoothing", share="label_smoothing / classes")
def linear_logsumexp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    classes: int | torch.Tensor | None = None,
    lora: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> LogsumexpAndLogit:
    """Return the log-sum-exp of each row of the logits hidden weight^T + bias, and the logit of its class: what one shard of a vocabulary adds to a cross entropy.

    Shapes: hidden (..., H); weight (V, H); target (...), integers; bias (V,); both results (...), float32. The matrix of logits is formed
    in pieces. A target outside 0 to V - 1, such as a class of another shard, gives a logit of 0. With label_smoothing s the second result
    is (1 - s) logit + s / classes * (sum of the row's logits); classes is V if not given. softcap and lora as in `linear_cross_entropy`.

    With the shards of a vocabulary, the log-sum-exp of the first results less the sum of the second ones is the cross entropy (Megatron-LM,
    Shoeybi et al., 2019), which `linear_cross_entropy(group=...)` computes. Differentiable in hidden, weight, bias and lora, through both results.
    Raises ValueError where shapes disagree or an option is out of range, and TypeError where an argument is not a tensor or target holds no integers.

    >>> linear_logsumexp(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([3]))
    LogsumexpAndLogit(logsumexp=tensor([1.3863]), logit=tensor([0.]))
    """
    name = "linear_logsumexp"
    given = last_layer(name, hidden, weight, target, bias, softcap, lora)
    check_range(name, "label_smoothing", label_smoothing, 0, 1)
    if label_smoothing:
        if classes is not None and not isinstance(classes, torch.Tensor):
            check_integer(name, "classes", classes, 1)
        share = label_smoothing / (weight.shape[0] if classes is None else classes)
        given |= {"smoothed": True, "smoothing": float(label_smoothing), "share": share}
    found = linear_logsumexp.operator()(H=as_rows(hidden), W=weight, t=target.reshape(-1), **given)
    return LogsumexpAndLogit(*(rows.reshape(target.shape) for rows in found))
