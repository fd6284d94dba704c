import torch

from ..op_decorator import as_rows, only_tensors, op


@op(A="x (B, S, C)", w="weight (C)", s="scale (B, C)", z="shift (B, C)")
def modulated_rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None, eps: float = 1e-6, *, offset: int = 0
) -> torch.Tensor:
    """Return rmsnorm(x) * (weight + offset) * (1 + scale) + shift: an RMS norm modulated by a condition (Peebles and Xie, DiT, 2023), in one kernel.

    Shapes: x (B, ..., C); weight (C,); scale and shift (C,), (B, C), or the shape of x; scale and shift have one shape. Computed in float32;
    returns the shape of x in the promoted dtype. Differentiable in all of them and eps. Raises ValueError where shapes disagree, TypeError
    where an argument is not a tensor.

    >>> modulated_rmsnorm(torch.tensor([[3.0, -3.0]]), torch.ones(2), torch.ones(2), torch.ones(2))
    tensor([[ 3.0000, -1.0000]])
    """
    name = "modulated_rmsnorm"
    only_tensors(name, x=x, weight=weight, scale=scale, **({} if shift is None else {"shift": shift}))
    fits = x.dim() > 0 and weight.shape == x.shape[-1:] and (shift is None or shift.shape == scale.shape)
    if not fits or scale.shape not in (x.shape[-1:], (x.shape[0], x.shape[-1]), x.shape):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, scale, *(() if shift is None else (shift,))))
        raise ValueError(f"{name}: x is (B, ..., C), weight (C,), scale and shift (C,), (B, C) or the shape of x; got shapes {shapes}")
    if scale.shape == x.shape:
        parts = as_rows(x)[:, None]
    elif scale.dim() == 2:
        parts = x.flatten(1, -2) if x.dim() > 2 else x[:, None]
    else:
        parts = as_rows(x)[None]
    more = {} if shift is None else {"shifted": True, "z": as_rows(shift)}
    found = modulated_rmsnorm.operator()(A=parts, w=weight, s=as_rows(scale), eps=eps, offset=offset, **more)
    return found.reshape(x.shape)
