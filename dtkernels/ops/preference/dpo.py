import torch

from ..op_decorator import only_tensors, op
from ..option_checks import check_range
from ..reductions import check_reduction, check_shapes, reduced


@op(A="chosen (B, S)", B="rejected (B, R)", C="reference_chosen (B, S)", D="reference_rejected (B, R)", M="chosen_mask (B, S)", N="rejected_mask (B, R)", smoothing="label_smoothing")
def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    chosen_mask: torch.Tensor,
    rejected_mask: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return -log sigmoid(beta * ((log p - log r)(chosen) - (log p - log r)(rejected))), log-probabilities summed over tokens (Rafailov et al., 2023).

    p is the policy, r the reference. label_smoothing: the share of pairs that are the other way round (conservative DPO; Mitchell, 2023).

    Shapes: log-probabilities of tokens (B, S) for the chosen sequences and (B, R) for the rejected ones, with masks of their shapes, true
    where a token counts. The result is float32: (B,) with reduction "none", else the sum or the mean. Differentiable in the
    log-probabilities, those of the reference model too. Raises ValueError where shapes disagree or an option is out of range, TypeError where an argument is not a tensor.
    """
    only_tensors("dpo", chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected, chosen_mask=chosen_mask, rejected_mask=rejected_mask)
    check_shapes("dpo", "(B, S)", chosen=chosen, reference_chosen=reference_chosen, chosen_mask=chosen_mask)
    check_shapes("dpo", "(B, R)", rejected=rejected, reference_rejected=reference_rejected, rejected_mask=rejected_mask)
    check_reduction("dpo", reduction)
    check_range("dpo", "beta", beta, 0, float("inf"))
    check_range("dpo", "label_smoothing", label_smoothing, 0, 0.5)
    return reduced(dpo.operator()(A=chosen, B=rejected, C=reference_chosen, D=reference_rejected, M=chosen_mask, N=rejected_mask, beta=float(beta), smoothing=float(label_smoothing)), reduction)
