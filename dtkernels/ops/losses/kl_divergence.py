import torch

from ..op_decorator import op
from ..option_checks import as_flag
from ..reductions import divergence_arguments, reduced


@op(S="student (..., V)", T="teacher (..., V)", t="target (...)", scale="1 / temperature", ignored="ignore_index")
def kl_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    reduction: str = "mean",
    target: torch.Tensor | None = None,
    ignore_index: int = -100,
    inputs: str = "logits",
    log_target: bool = True,
) -> torch.Tensor:
    """Return KL(teacher || student) of the softmax of logits over temperature: sum(p * (log p - log q)), with p the teacher's (Hinton et al., 2015).

    reverse: KL(student || teacher) (Gu et al., MiniLLM, 2023). Nothing is multiplied by temperature^2.

    target: classes (...), integers; a row whose class is ignore_index gives 0, and the mean is over the others. inputs: "logits", or "log_probs" for
    log-probabilities, which are taken as they are: their gradient is not that of a softmax. log_target: with log_probs, False if the teacher's are
    probabilities, as torch.nn.functional.kl_div takes them; a class of probability 0 adds nothing.

    Shapes: student, teacher (..., V); the result is float32: of shape (...) with reduction "none", else the sum or the mean over the rows.
    Differentiable in both. A logit of -inf has probability 0; a class that only the second distribution of the divergence gives 0 makes it inf. Raises
    ValueError where shapes disagree or an option is out of range, TypeError where an argument is not a tensor.

    >>> kl_divergence(torch.zeros(2, 3), torch.zeros(2, 3))
    tensor(0.)
    """
    more = divergence_arguments("kl_divergence", student, teacher, temperature, reduction, target, ignore_index, inputs, "log_probs")
    if not log_target:
        if not more.pop("normalized", False) or temperature != 1:
            raise ValueError(f'kl_divergence: log_target is False with inputs={inputs!r} and temperature {temperature}; allowed: inputs="log_probs", temperature 1')
        more["probable"] = True
    return reduced(kl_divergence.operator()(reverse=as_flag("kl_divergence", "reverse", reverse), **more), reduction, target, ignore_index)
