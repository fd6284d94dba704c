import torch

from ..op_decorator import only_tensors, op
from ..option_checks import as_flag, check_integer


@op(S="scores (B, G, I / G, L, L)", W="weight (G, O / G, I / G, R, T)", z="bias (G, O / G)")
def multi_token_attention(
    scores: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    padding: int | None = None,
    dilation: int = 1,
    groups: int = 1,
    sparse: bool = False,
) -> torch.Tensor:
    """Convolve the causal softmax of scores over queries, keys and heads, and mask it again (Golovneva et al., Multi-Token Attention, 2025).

    Shapes: scores (B, I, L, L); weight (O, I / groups, R, R) with R odd; bias (O,); the result (B, O, L, L), 0 above the diagonal, in the
    promoted dtype. padding: zeros on each side; it keeps the size, so it is dilation * (R - 1) / 2, the default. sparse: sparsemax in place of
    softmax. The probabilities are stored once. Differentiable in scores, weight and bias. Raises ValueError where shapes disagree or an
    option is out of range, TypeError where an argument is not a tensor.

    >>> multi_token_attention(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 1, 1))
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """
    name = "multi_token_attention"
    only_tensors(name, scores=scores, weight=weight, **({} if bias is None else {"bias": bias}))
    check_integer(name, "groups", groups, 1)
    check_integer(name, "dilation", dilation, 1)
    if padding is not None:
        check_integer(name, "padding", padding, 0)
    fits = scores.dim() == weight.dim() == 4 and scores.shape[2] == scores.shape[3] and weight.shape[2] == weight.shape[3] and weight.shape[2] % 2
    if not fits or weight.shape[0] % groups or weight.shape[1] * groups != scores.shape[1] or bias is not None and bias.shape != weight.shape[:1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (scores, weight, *(() if bias is None else (bias,))))
        raise ValueError(f"{name}: scores is (B, I, L, L), weight (O, I / groups, R, R) with R odd, bias (O,), groups {groups}; got shapes {shapes}")
    size = weight.shape[2]
    wanted = dilation * (size - 1) // 2
    if padding not in (None, wanted):
        raise ValueError(f"{name}: padding keeps the size, dilation * (R - 1) / 2; got dilation {dilation}, padding {padding}")
    batch, heads, length, _ = scores.shape
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    more = {} if bias is None else {"biased": True, "z": bias.reshape(groups, -1)}
    parts = scores.reshape(batch, groups, heads // groups, length, length)
    found = multi_token_attention.operator()(S=parts, W=grouped, padding=wanted, dilation=dilation, sparse=as_flag(name, "sparse", sparse), **more)
    return found.reshape(batch, weight.shape[0], length, length)
