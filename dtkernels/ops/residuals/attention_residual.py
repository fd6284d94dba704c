import torch

from ..op_decorator import only_tensors, op


@op(V="blocks (N, ..., C)", q="query (C)", w="weight (C)")
def attention_residual(blocks: torch.Tensor, query: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return the sum over n of softmax(query . rmsnorm(blocks[n]) * weight)[n] * blocks[n]: attention over depth (Kimi Team, Attention Residuals, 2026).

    Shapes: blocks (N, ..., C), the outputs of N earlier blocks; query, weight (C,). Computed in float32; returns (..., C) in the promoted
    dtype. Differentiable in all three and eps. Raises ValueError where shapes disagree, TypeError where an argument is not a tensor.

    >>> attention_residual(torch.tensor([[[1.0, 3.0]], [[3.0, 1.0]]]), torch.zeros(2), torch.ones(2))
    tensor([[2., 2.]])
    """
    only_tensors("attention_residual", blocks=blocks, query=query, weight=weight)
    if blocks.dim() < 2 or query.shape != blocks.shape[-1:] or weight.shape != blocks.shape[-1:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (blocks, query, weight))
        raise ValueError(f"attention_residual: blocks is (N, ..., C), query and weight (C,); got shapes {shapes}")
    return attention_residual.operator()(V=blocks.flatten(1, -2) if blocks.dim() > 2 else blocks[:, None], q=query, w=weight, eps=eps).reshape(blocks.shape[1:])
