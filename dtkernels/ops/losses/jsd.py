import torch

from ..op_decorator import op
from ..option_checks import check_range
from ..reductions import divergence_arguments, reduced


@op(S="student (..., V)", T="teacher (..., V)", t="target (...)", scale="1 / temperature", ignored="ignore_index")
def jsd(
    student: torch.Tensor,
    teacher: torch.Tensor,
    beta: float = 0.5,
    *,
    temperature: float = 1.0,
    reduction: str = "mean",
    target: torch.Tensor | None = None,
    ignore_index: int = -100,
    inputs: str = "logits",
) -> torch.Tensor:
    """Return beta * KL(p || m) + (1 - beta) * KL(q || m) with m = beta * p + (1 - beta) * q, p the teacher's softmax and q the student's (Agarwal et al., GKD, 2023).

    beta: above 0 and below 1; at the ends the divergence is 0, so use kl_divergence there.

    target: classes (...), integers; a row whose class is ignore_index gives 0, and the mean is over the others. inputs: "logits", or "log_probs" for
    log-probabilities, which are taken as they are: their gradient is not that of a softmax.

    Shapes: student, teacher (..., V); the result is float32: of shape (...) with reduction "none", else the sum or the mean over the rows.
    Differentiable in both. A logit of -inf has probability 0. Raises ValueError where shapes disagree or an option is out of range, TypeError where
    an argument is not a tensor.

    >>> jsd(torch.zeros(2, 3), torch.zeros(2, 3))
    tensor(0.)
    """
    more = divergence_arguments("jsd", student, teacher, temperature, reduction, target, ignore_index, inputs, "log_probs")
    check_range("jsd", "beta", beta, 0, 1, above=True, below=True)
    return reduced(jsd.operator()(beta=float(beta), **more), reduction, target, ignore_index)
