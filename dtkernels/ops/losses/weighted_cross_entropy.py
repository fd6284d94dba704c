import torch

from ..op_decorator import only_tensors, op
from ..option_checks import check_floating, check_range
from ..reductions import check_loss, counted
from .last_layer import check_targets


@op(A="logits (..., V)", w="weight (V)", t="target (...)", cap="softcap", smoothing="label_smoothing", ignored="ignore_index")
def weighted_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of logits as torch.nn.functional.cross_entropy, with class weights, a softcap and z-loss; cross_entropy is the op without them.

    Shapes: logits (..., V); target (...), integers from 0 to V - 1, or ignore_index for rows to ignore; weight (V,).

    - weight: class y counts weight[y] times; the mean is divided by the sum of the targets' weights.
    - softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
    - label_smoothing spreads that share of the target probability over all classes.
    - z_loss: adds z_loss * logsumexp(logits)^2 to each row (Chowdhery et al., PaLM, 2022). Its mean is over the rows, whatever the weights.
    - reduction: "none" returns (...), "sum" the sum, "mean" the mean over the rows that are not ignored (nan without any).

    The result is float32. Differentiable in logits and weight. A target out of range gives inf, or raises IndexError under
    DTKERNELS_CHECK=1. Raises ValueError where shapes disagree or an option is out of range, and TypeError where an argument is not a tensor
    or target holds no integers.

    >>> weighted_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]), torch.tensor([1.0, 3.0]), reduction="none")
    tensor([0.6931, 2.0794])
    """
    name = "weighted_cross_entropy"
    only_tensors(name, logits=logits, target=target, **({} if weight is None else {"weight": weight}))
    check_loss(name, reduction, label_smoothing, ignore_index, z_loss)
    if logits.shape[:-1] != target.shape or logits.dim() < 1:
        raise ValueError(f"{name}: target has a class for each row of logits; got shapes {tuple(logits.shape)}, {tuple(target.shape)}")
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        raise TypeError(f"{name}: target is {target.dtype}; allowed: integers")
    given: dict = {}
    if weight is not None:
        if weight.shape != logits.shape[-1:]:
            raise ValueError(f"{name}: weight is (V,); got shapes {tuple(logits.shape)}, {tuple(weight.shape)}")
        check_floating(name, weight=weight)
        given |= {"weighted": True, "w": weight}
    if softcap is not None:
        check_range(name, "softcap", softcap, 0, float("inf"), above=True)
        given |= {"capped": True, "cap": float(softcap)}
    check_targets(name, target, logits.shape[-1], ignore_index)
    given |= {"smoothed": True, "smoothing": float(label_smoothing)} if label_smoothing else {}
    rows, total = weighted_cross_entropy.operator()(A=logits, t=target, ignored=ignore_index, **given)
    counts = counted(target, ignore_index)
    squares = torch.where(counts, float(z_loss) * total * total, 0) if z_loss else rows.new_zeros(())
    if reduction == "none":
        return rows + squares
    if reduction == "sum":
        return rows.sum() + squares.sum()
    each = counts if weight is None else torch.where(counts, weight[target.long().clamp(0, weight.shape[0] - 1)], 0)
    return rows.sum() / each.sum() + squares.sum() / counts.sum()
