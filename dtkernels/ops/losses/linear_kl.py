import torch

from ..op_decorator import op
from ..option_checks import as_flag
from ..reductions import reduced
from .last_layer import layer_divergence_arguments


@op(H="hidden (N, H)", W="weight (V, H)", G="teacher_hidden (N, J)", V="teacher_weight (V, J)", t="target (N)", scale="1 / temperature", ignored="ignore_index")
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
    """Return KL(teacher || student) of the softmax of (hidden weight^T) / temperature and of the teacher's: kl_divergence of two last layers.

    Shapes: hidden (..., H); weight (V, H); teacher_hidden (..., J); teacher_weight (V, J). The result is float32: of shape (...) with
    reduction "none", else the sum or the mean over the rows. The matrices of logits are formed in pieces, forward and backward.
    target: classes (...), integers; a row whose class is ignore_index gives 0, and the mean is over the others.
    Differentiable in all four tensors. Raises ValueError where shapes disagree or an option is out of range, TypeError where an argument is not a tensor.

    >>> linear_kl(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 5), torch.zeros(4, 5))
    tensor(0.)
    """
    layers = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    more = layer_divergence_arguments("linear_kl", layers, temperature, reduction, target, ignore_index, "t")
    rows = linear_kl.operator()(reverse=as_flag("linear_kl", "reverse", reverse), **more)
    return reduced(rows.reshape(hidden.shape[:-1]), reduction, target, ignore_index)
