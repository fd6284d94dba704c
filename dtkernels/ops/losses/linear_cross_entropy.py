import torch

from ..op_decorator import op
from ..reductions import check_range, check_reduction
from .last_layer import check_targets, last_layer


@op(H="hidden (N, H)", W="weight (V, H)", b="bias (V)", t="target (N)", cap="softcap", smoothing="label_smoothing", penalty="z_loss")
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
) -> torch.Tensor:
    """Cross entropy of the logits hidden weight^T + bias, without the matrix of logits in memory (as Hsu et al., Liger Kernel, 2024, and Wijmans et al., 2024).

    Shapes: hidden (..., H); weight (V, H); target (...), integers from 0 to V - 1, or ignore_index for rows to ignore; bias (V,).

    - softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
    - label_smoothing spreads that share of the target probability over all classes.
    - z_loss: adds z_loss * logsumexp(logits)^2 to each row (Chowdhery et al., PaLM, 2022).
    - reduction: "none" returns (...), "sum" the sum, "mean" the mean over the rows that are not ignored (nan without any, as in torch).
    - shift: row i is held against target i + 1 along the last dimension of target; the last row of each sequence is ignored.

    The result is float32. Logits and their gradient are formed in pieces, in the promoted dtype of hidden and weight; the gradient of the
    weight is added up in float32. Differentiable in hidden, weight and bias, each only where it requires a gradient. Where no kernel runs,
    the reference holds all logits.

    A target out of range gives inf, or raises IndexError under DTKERNELS_CHECK=1. Raises ValueError where shapes disagree or an option is
    out of range, and TypeError where an argument is not a tensor or target holds no integers.

    >>> linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([3, -100]))
    tensor(1.3863)
    """
    name = "linear_cross_entropy"
    given = last_layer(name, hidden, weight, target, bias, softcap)
    check_reduction(name, reduction)
    check_range(name, "label_smoothing", label_smoothing, 0, 1)
    if shift:
        if target.dim() < 1:
            raise ValueError(f"{name}: shift is for sequences; got a target of shape {tuple(target.shape)}")
        target = torch.cat((target[..., 1:], torch.full_like(target[..., :1], ignore_index)), -1)
    check_targets(name, target, weight.shape[0], ignore_index)
    given |= {"smoothed": True, "smoothing": float(label_smoothing)} if label_smoothing else {}
    given |= {"squared": True, "penalty": float(z_loss)} if z_loss else {}
    rows = linear_cross_entropy.operator()(H=hidden.reshape(-1, hidden.shape[-1]), W=weight, t=target.reshape(-1), ignored=ignore_index, **given)
    if reduction == "none":
        return rows.reshape(target.shape)
    return rows.sum() if reduction == "sum" else rows.sum() / (target != ignore_index).sum()
