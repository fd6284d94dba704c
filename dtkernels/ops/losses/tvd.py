import torch

from ..op_decorator import op
from ..reductions import divergence_arguments, reduced


@op(S="student (..., V)", T="teacher (..., V)", t="target (...)", scale="1 / temperature", ignored="ignore_index")
def tvd(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    temperature: float = 1.0,
    reduction: str = "mean",
    target: torch.Tensor | None = None,
    ignore_index: int = -100,
    inputs: str = "logits",
) -> torch.Tensor:
    """Total variation distance of the softmax of logits over temperature: sum(abs(p - q)) / 2 (Wen et al., f-distillation, 2023).

    target: classes (...), integers; a row whose class is ignore_index gives 0, and the mean is over the others. inputs: "logits", or "probs" for
    probabilities, which are taken as they are.

    Shapes: student, teacher (..., V); the result is float32: of shape (...) with reduction "none", else the sum or the mean over the rows.
    Differentiable in both. A logit of -inf has probability 0. Raises ValueError where shapes disagree or an option is out of range, TypeError where
    an argument is not a tensor.

    >>> tvd(torch.zeros(2, 3), torch.zeros(2, 3))
    tensor(0.)
    """
    more = divergence_arguments("tvd", student, teacher, temperature, reduction, target, ignore_index, inputs, "probs")
    return reduced(tvd.operator()(**more), reduction, target, ignore_index)
