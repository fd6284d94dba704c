import torch

from ..op_decorator import op
from ..option_checks import check_range
from ..reductions import check_pairs, check_reduction, reduced


@op(A="chosen (B, S)", B="rejected (B, R)", M="chosen_mask (B, S)", N="rejected_mask (B, R)")
def orpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_mask: torch.Tensor,
    rejected_mask: torch.Tensor,
    *,
    beta: float = 0.1,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return -log p(chosen) - beta * log sigmoid(log odds(chosen) - log odds(rejected)), log-probabilities averaged over tokens (Hong et al., 2024).

    The odds of p are p / (1 - p). Each pair has the negative log-probability of its own chosen sequence.

    Shapes: log-probabilities of tokens (B, S) for the chosen sequences and (B, R) for the rejected ones, with masks of their shapes, true
    where a token counts. The result is float32: (B,) with reduction "none", else the sum or the mean. Differentiable in the
    log-probabilities. Raises ValueError where shapes disagree or an option is out of range, TypeError where an argument is not a tensor.
    """
    check_pairs("orpo", chosen, rejected, chosen_mask, rejected_mask)
    check_reduction("orpo", reduction)
    check_range("orpo", "beta", beta, 0, float("inf"))
    return reduced(orpo.operator()(A=chosen, B=rejected, M=chosen_mask, N=rejected_mask, beta=float(beta)), reduction)
