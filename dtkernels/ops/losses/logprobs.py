import torch

from ..op_decorator import only_tensors, op
from ..option_checks import check_range
from .last_layer import check_targets
from .linear_logprobs import TokenLogprobs


@op(A="logits (..., V)", t="target (...)", scale="1 / temperature")
def logprobs(logits: torch.Tensor, target: torch.Tensor, *, temperature: float = 1.0) -> TokenLogprobs:
    """Return the log-probability of each row's class under softmax(logits / temperature), and the entropy of the row, in one pass over the logits.

    Shapes: logits (..., V); target (...), integers from 0 to V - 1; both results (...), float32. Differentiable in logits, through both
    results. Cross entropy is -logprobs. A logit of -inf has probability 0 and adds nothing to the entropy. A target out of range gives -inf, or
    raises IndexError under DTKERNELS_CHECK=1. Raises ValueError where shapes disagree or the temperature is not above 0, TypeError where an argument is not a tensor
    or target holds no integers.

    >>> logprobs(torch.zeros(1, 4), torch.tensor([3]))
    TokenLogprobs(logprobs=tensor([-1.3863]), entropy=tensor([1.3863]))
    """
    only_tensors("logprobs", logits=logits, target=target)
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logprobs: target has a class for each row of logits; got shapes {tuple(logits.shape)}, {tuple(target.shape)}")
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        raise TypeError(f"logprobs: target is {target.dtype}; allowed: integers")
    check_range("logprobs", "temperature", temperature, 0, float("inf"), above=True)
    check_targets("logprobs", target, logits.shape[-1], None)
    picked, total, mean = logprobs.operator()(A=logits, t=target, scale=1 / temperature)
    return TokenLogprobs(picked - total, total - mean)
