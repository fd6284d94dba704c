import torch

from ..op_decorator import only_tensors, op
from ..option_checks import check_range
from ..reductions import check_reduction, check_shapes, reduced


@op(A="logprobs (B, S)", C="reference (B, S)", M="mask (B, S)", g="desirable (B)", point="kl", gain="desirable_weight", loss="undesirable_weight")
def kto(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    desirable: torch.Tensor,
    *,
    kl: float | torch.Tensor = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return weight * (1 - sigmoid(beta * (reward - kl))), or (kl - reward) where a sequence is undesirable (Ethayarajh et al., 2024).

    The reward of a sequence is the sum of logprobs - reference over its tokens; kl the reference point, a number or a one-element tensor, which
    the paper does not differentiate. Shapes: logprobs, reference, mask (B, S), the mask true where a token counts; desirable (B,), true or false.
    The result is float32: (B,) with reduction "none", else the sum or the mean. Differentiable in logprobs and reference. Raises ValueError
    where shapes disagree or the reduction is not known, TypeError where an argument is not a tensor.
    """
    only_tensors("kto", logprobs=logprobs, reference=reference, mask=mask, desirable=desirable)
    check_shapes("kto", "(B, S)", logprobs=logprobs, reference=reference, mask=mask)
    if desirable.shape != logprobs.shape[:1]:
        raise ValueError(f"kto: desirable is (B,); got shapes {tuple(logprobs.shape)}, {tuple(desirable.shape)}")
    check_reduction("kto", reduction)
    for name, value in (("beta", beta), ("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        check_range("kto", name, value, 0, float("inf"))
    numbers = {"beta": float(beta), "point": kl, "gain": float(desirable_weight), "loss": float(undesirable_weight)}
    return reduced(kto.operator()(A=logprobs, C=reference, M=mask, g=desirable, **numbers), reduction)
