import torch

from ..op_decorator import op
from ..option_checks import check_range
from ..reductions import check_pairs, check_reduction, reduced


@op(A="chosen (B, S)", B="rejected (B, R)", M="chosen_mask (B, S)", N="rejected_mask (B, R)", smoothing="label_smoothing")
def cpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_mask: torch.Tensor,
    rejected_mask: torch.Tensor,
    *,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return -log sigmoid(beta * (log p(chosen) - log p(rejected))) - alpha * log p(chosen) / tokens, log-probabilities summed (Xu et al., 2024).

    alpha weighs the negative log-probability of the chosen sequence, a mean over its tokens.

    Shapes: log-probabilities of tokens (B, S) for the chosen sequences and (B, R) for the rejected ones, with masks of their shapes, true
    where a token counts. The result is float32: (B,) with reduction "none", else the sum or the mean. Differentiable in the
    log-probabilities. Raises ValueError where shapes disagree or an option is out of range, TypeError where an argument is not a tensor.
    """
    check_pairs("cpo", chosen, rejected, chosen_mask, rejected_mask)
    check_reduction("cpo", reduction)
    check_range("cpo", "beta", beta, 0, float("inf"))
    check_range("cpo", "alpha", alpha, 0, float("inf"))
    check_range("cpo", "label_smoothing", label_smoothing, 0, 0.5)
    return reduced(cpo.operator()(A=chosen, B=rejected, M=chosen_mask, N=rejected_mask, beta=float(beta), alpha=float(alpha), smoothing=float(label_smoothing)), reduction)
