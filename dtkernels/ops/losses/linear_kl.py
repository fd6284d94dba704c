import torch

from ..op_decorator import only_tensors, op
from ..reductions import check_range, check_reduction, ignoring, reduced
from .last_layer import two_layers


@op(H="hidden (N, H)", W="weight (V, H)", G="teacher_hidden (N, J)", V="teacher_weight (V, J)", t="target (N)", scale="1 / temperature")
def linear_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    reduction: str = "mean",
    target: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """KL(teacher || student) of the softmax of (hidden weight^T) / temperature and of the teacher's: kl_divergence of two last layers.

    Shapes: hidden (..., H); weight (V, H); teacher_hidden (..., J); teacher_weight (V, J). The result is float32: of shape (...) with
    reduction "none", else the sum or the mean over the rows. The matrices of logits are formed in pieces, forward and backward.
    target: classes (...), integers; a row whose class is ignore_index gives 0, and the mean is over the others.
    Differentiable in all four tensors. Raises ValueError where shapes disagree or an option is out of range, TypeError where an argument is not a tensor.

    >>> linear_kl(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 5), torch.zeros(4, 5))
    tensor(0.)
    """
    only_tensors("linear_kl", hidden=hidden, weight=weight, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight)
    two_layers("linear_kl", hidden, weight, teacher_hidden, teacher_weight)
    check_reduction("linear_kl", reduction)
    check_range("linear_kl", "temperature", temperature, 0, float("inf"), above=True)
    student, teacher = (t.reshape(-1, t.shape[-1]) for t in (hidden, teacher_hidden))
    more = ignoring("linear_kl", hidden.shape[:-1], target, ignore_index)
    if target is not None:
        more["t"] = target.reshape(-1)
    rows = linear_kl.operator()(H=student, W=weight, G=teacher, V=teacher_weight, reverse=bool(reverse), scale=1 / temperature, **more)
    return reduced(rows.reshape(hidden.shape[:-1]), reduction, target, ignore_index)
