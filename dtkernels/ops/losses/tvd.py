import torch

from ..op_decorator import only_tensors, op
from ..reductions import check_range, check_reduction, check_shapes, ignoring, normalized, reduced


@op(S="student (..., V)", T="teacher (..., V)", t="target (...)", scale="1 / temperature")
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
    only_tensors("tvd", student=student, teacher=teacher)
    check_shapes("tvd", "(..., V)", student=student, teacher=teacher)
    check_reduction("tvd", reduction)
    check_range("tvd", "temperature", temperature, 0, float("inf"), above=True)
    more = {**ignoring("tvd", student.shape[:-1], target, ignore_index), **normalized("tvd", inputs, "probs")}
    if target is not None:
        more["t"] = target
    rows = tvd.operator()(S=student, T=teacher, scale=1 / temperature, **more)
    return reduced(rows, reduction, target, ignore_index)
