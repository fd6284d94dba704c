import math

import torch

from ..op_decorator import only_tensors, op
from ..option_checks import as_flag


@op(A="x (N, R, C)", w="weight (R, C)", z="bias (R, C)", G="gate (N, R, C)")
def normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    centered: bool = False,
    offset: int = 0,
    gate: torch.Tensor | None = None,
    gate_first: bool = False,
    logistic: bool = False,
) -> torch.Tensor:
    """Return (v - mean) / sqrt(mean((v - mean)^2) + eps) * (weight + offset) + bias, times silu(gate): a norm of which every part is optional.

    v is x. mean is 0, or with centered the mean of a row: an RMS norm (Zhang and Sennrich, 2019) or a layer norm (Ba, Kiros and Hinton,
    2016). offset: 1 for models that store the weight minus 1 (Nemotron). With gate_first v is x * silu(gate), and the result has no gate:
    the two orders of Mamba 2 (Dao and Gu, 2024). logistic: times sigmoid(gate) instead, as in Kimi Linear. Shapes: x (..., C); weight and bias (C,), or (R, C) for x (..., R, C), a weight for each
    head or group; gate that of x. Computed in float32; returns the shape of x in the promoted dtype. Differentiable in all of them and eps.
    Raises ValueError where shapes disagree, TypeError where an argument is not a tensor.

    >>> normalize(torch.tensor([[1.0, 3.0]]), centered=True)
    tensor([[-1.0000,  1.0000]])
    """
    given = {"weight": weight, "bias": bias, "gate": gate}
    only_tensors("normalize", x=x, **{name: t for name, t in given.items() if t is not None})
    parts = next((t.shape for t in (weight, bias) if t is not None), x.shape[-1:])
    fits = 0 < len(parts) < 3 and x.dim() >= len(parts) and x.shape[x.dim() - len(parts) :] == parts
    if not fits or any(t is not None and t.shape != parts for t in (weight, bias)) or gate is not None and gate.shape != x.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, *given.values()) if t is not None)
        raise ValueError(f"normalize: x is (..., C) or (..., R, C), weight and bias (C,) or (R, C), gate has the shape of x; got shapes {shapes}")
    if (gate_first or logistic) and (gate is None or gate_first and logistic):
        raise ValueError("normalize: gate_first and logistic need a gate and exclude each other; allowed: one of them, with a gate")
    groups, width = parts[0] if len(parts) == 2 else 1, parts[-1]
    rows = math.prod(x.shape[: x.dim() - len(parts)])
    more: dict[str, object] = {}
    if weight is not None:
        more |= {"w": weight.reshape(groups, width), "weighted": True, "offset": offset}
    if bias is not None:
        more |= {"z": bias.reshape(groups, width), "biased": True}
    if gate is not None:
        more |= {"G": gate.reshape(rows, groups, width), "gated_first" if gate_first else "gated": True, "logistic": as_flag("normalize", "logistic", logistic)}
    found = normalize.operator()(A=x.reshape(rows, groups, width), eps=eps, centered=as_flag("normalize", "centered", centered), **more)
    return found.reshape(x.shape)
