import torch

from ..op_decorator import op
from ..option_checks import check_range
from ..reductions import reduced
from .last_layer import layer_divergence_arguments


@op(H="hidden (N, H)", W="weight (V, H)", G="teacher_hidden (N, J)", V="teacher_weight (V, J)", r="target (N)", scale="1 / temperature", ignored="ignore_index")
def linear_jsd(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "mean",
    target: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence of the softmax of (hidden weight^T) / temperature and of the teacher's: jsd of two last layers.

    Shapes: hidden (..., H); weight (V, H); teacher_hidden (..., J); teacher_weight (V, J). The result is float32: of shape (...) with
    reduction "none", else the sum or the mean over the rows. The matrices of logits are formed in pieces, forward and backward.
    target: classes (...), integers; a row whose class is ignore_index gives 0, and the mean is over the others.
    Differentiable in all four tensors. Raises ValueError where shapes disagree or an option is out of range, TypeError where an argument is not a tensor.

    >>> linear_jsd(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 5), torch.zeros(4, 5))
    tensor(0.)
    """
    layers = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    more = layer_divergence_arguments("linear_jsd", layers, temperature, reduction, target, ignore_index, "r")
    check_range("linear_jsd", "beta", beta, 0, 1, above=True, below=True)
    rows = linear_jsd.operator()(beta=float(beta), **more)
    return reduced(rows.reshape(hidden.shape[:-1]), reduction, target, ignore_index)
