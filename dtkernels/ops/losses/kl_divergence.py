import torch

from ..op_decorator import only_tensors, op
from ..reductions import check_range, check_reduction, check_shapes, reduced


@op(S="student (..., V)", T="teacher (..., V)", scale="1 / temperature")
def kl_divergence(
    student: torch.Tensor, teacher: torch.Tensor, *, reverse: bool = False, temperature: float = 1.0, reduction: str = "mean"
) -> torch.Tensor:
    """KL(teacher || student) of the softmax of logits over temperature: sum(p * (log p - log q)), with p the teacher's (Hinton et al., 2015).

    reverse: KL(student || teacher) (Gu et al., MiniLLM, 2023). Nothing is multiplied by temperature^2.

    Shapes: student, teacher (..., V); the result is float32: of shape (...) with reduction "none", else the sum or the mean over the rows.
    Differentiable in both. Logits of -inf give nan. Raises ValueError where shapes disagree or an option is out of range, TypeError where
    an argument is not a tensor.

    >>> kl_divergence(torch.zeros(2, 3), torch.zeros(2, 3))
    tensor(0.)
    """
    only_tensors("kl_divergence", student=student, teacher=teacher)
    check_shapes("kl_divergence", "(..., V)", student=student, teacher=teacher)
    check_reduction("kl_divergence", reduction)
    check_range("kl_divergence", "temperature", temperature, 0, float("inf"), above=True)
    return reduced(kl_divergence.operator()(student, teacher, reverse=bool(reverse), scale=1 / temperature), reduction)
