import torch

from ..op_decorator import only_tensors, op
from ..option_checks import check_range
from ..reductions import check_reduction, check_shapes, reduced


@op(A="logprobs (B, S)", O="old (B, S)", C="reference (B, S)", M="mask (B, S)", v="advantages (B)", low="epsilon", high="epsilon_high")
def grpo(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    reference: torch.Tensor | None = None,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """The mean over tokens of -min(r * a, clip(r, 1 - epsilon, 1 + epsilon_high) * a) + beta * (exp(d) - d - 1) (Shao et al., 2024).

    r = exp(logprobs - old), a the advantage of the sequence, d = reference - logprobs; without a reference the last term is left out.
    epsilon_high: epsilon if not given; another number is that of Yu et al., DAPO, 2025. Shapes: logprobs, old, mask, reference (B, S), the mask true
    where a token counts; advantages (B,). The result is float32: (B,), one number a sequence, with reduction "none", else the sum or
    the mean. Differentiable in logprobs, old, reference and advantages: pass what is held fixed without a gradient. Raises ValueError where
    shapes disagree or an option is out of range, TypeError where an argument is not a tensor.
    """
    tensors = {"logprobs": logprobs, "old": old, "mask": mask, **({} if reference is None else {"reference": reference})}
    only_tensors("grpo", **tensors, advantages=advantages)
    check_shapes("grpo", "(B, S)", **tensors)
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"grpo: advantages is (B,); got shapes {tuple(logprobs.shape)}, {tuple(advantages.shape)}")
    check_reduction("grpo", reduction)
    check_range("grpo", "epsilon", epsilon, 0, 1)
    check_range("grpo", "beta", beta, 0, float("inf"))
    more = {} if reference is None else {"referred": True, "C": reference, "beta": float(beta)}
    high = epsilon if epsilon_high is None else epsilon_high
    check_range("grpo", "epsilon_high", high, 0, float("inf"))
    return reduced(grpo.operator()(A=logprobs, O=old, M=mask, v=advantages, low=float(epsilon), high=float(high), **more), reduction)
