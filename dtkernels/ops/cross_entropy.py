import torch

from ..runtime.path_counters import checking
from .op_decorator import compiling, only_tensors, op
from .reductions import check_loss, counted


@op(A="logits (..., V)", t="target (...)", smoothing="label_smoothing", ignored="ignore_index")
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> torch.Tensor:
    """Cross entropy per row: log(sum(exp(logits))) - logits[target], as torch.nn.functional.cross_entropy, with the classes last.

    Shapes: logits (..., V); target (...), integers from 0 to V - 1, or ignore_index for rows to ignore. label_smoothing spreads that share
    of the target probability over all classes. reduction: "none" returns (...), "sum" the sum, "mean" the mean over the rows that are
    not ignored (nan without any). The result is float32; differentiable in logits.

    A target out of range gives inf, or raises IndexError under DTKERNELS_CHECK=1. Raises ValueError where shapes disagree or an option is
    out of range, and TypeError where an argument is not a tensor.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100]))
    tensor(1.3863)
    """
    only_tensors("cross_entropy", logits=logits, target=target)
    check_loss("cross_entropy", reduction, label_smoothing, ignore_index)
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"cross_entropy: target has a class for each row of logits; got shapes {tuple(logits.shape)}, {tuple(target.shape)}"
        )
    if not compiling() and checking():  # the kernel gives inf for targets out of range
        from ..runtime.reference.index_checks import check_elements

        check_elements("cross_entropy", "target", target, logits.shape[-1], ignore_index)
    share = {"smoothed": True, "smoothing": label_smoothing} if label_smoothing else {}
    rows = cross_entropy.operator()(logits, target, ignored=ignore_index, **share)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / counted(target, ignore_index).sum()
