from __future__ import annotations

import torch

from ..op_decorator import only_tensors, op
from ..option_checks import as_flag, check_number, check_range

_ACTIVATIONS: dict[str, dict[str, bool | float]] = {"silu": {}, "gelu_tanh": {"gelu": True}, "gelu": {"exact": True}}


@op(Z="packed (M, 2, N)", P="packed (M, N, 2)", w="scale (M,)")
def packed_glu(
    packed: torch.Tensor,
    scale: torch.Tensor,
    *,
    paired: bool = False,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """Return scale * act(gate) * (up + offset) for each row, where gate and up are the halves of a row of packed: a gated unit of one product.

    Shapes: packed (M, 2 N); scale (M,). The result is (M, N), in the promoted dtype. paired: gate and up lie side by side, packed[:, 0::2] and
    packed[:, 1::2]. activation: "silu", which is gate * sigmoid(alpha * gate); "gelu", by the error function; "gelu_tanh". limit: gate is at
    most limit, and up between -limit and limit. Computed in float32. Differentiable in packed and scale. Raises ValueError for other shapes and
    activations. The units are those of Shazeer, GLU Variants Improve Transformer, 2020; with alpha, limit and offset that of gpt-oss, 2025.

    >>> packed_glu(torch.tensor([[1.0, 3.0]]), torch.tensor([2.0]))
    tensor([[4.3863]])
    """
    only_tensors("packed_glu", packed=packed, scale=scale)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"packed_glu: activation is {activation!r}; allowed: {', '.join(_ACTIVATIONS)}")
    if packed.dim() != 2 or packed.shape[1] % 2 or scale.shape != packed.shape[:1]:
        raise ValueError(f"packed_glu: shapes are packed (M, 2 N), scale (M,); found packed {tuple(packed.shape)}, scale {tuple(scale.shape)}")
    check_number("packed_glu", "alpha", alpha)
    check_number("packed_glu", "offset", offset)
    if limit is not None:
        check_range("packed_glu", "limit", limit, 0, float("inf"))
    if activation != "silu" and alpha != 1:
        raise ValueError(f"packed_glu: alpha is {alpha}; allowed with {activation}: 1")
    half = packed.shape[1] // 2
    given = {"P": packed.unflatten(1, (half, 2)), "paired": True} if as_flag("packed_glu", "paired", paired) else {"Z": packed.unflatten(1, (2, half))}
    options = _ACTIVATIONS[activation] or {"alpha": float(alpha)}
    bounds = {} if limit is None else {"limited": True, "limit": float(limit)}
    return packed_glu.operator()(w=scale, offset=float(offset), **given, **options, **bounds)
