"""Dynamic tanh in the place of normalization layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .. import ops


class DyT(nn.Module):
    """tanh(alpha * x) * weight + bias (Zhu et al., *Transformers without Normalization*, 2025), in one kernel.

    x: (..., channels). alpha is one number, ``init_alpha`` at first (0.5 in the paper, other values for language models);
    weight starts at 1 and bias at 0, each (channels,). Returns the shape of x in the promoted dtype.

    >>> DyT(3)(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, channels: int, init_alpha: float = 0.5, device: torch.device | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.channels, self.init_alpha = channels, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), init_alpha, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.channels}, init_alpha={self.init_alpha}"


def is_norm(module: nn.Module) -> bool:
    """LayerNorm over the last dimension, torch's RMSNorm, and modules of one vector that call themselves either."""
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm")) and not list(module.children())
    weight = getattr(module, "weight", None)
    return (isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or named) and isinstance(weight, torch.Tensor) and weight.dim() == 1


def convert_norms_to_dyt(model: nn.Module, init_alpha: float = 0.5, which: Callable[[str, nn.Module], bool] | None = None) -> nn.Module:
    """Put a new DyT in the place of each normalization layer inside ``model``, which is changed and returned.

    ``which(name, module)`` tells the layers to replace, all that ``is_norm`` finds unless given. The new layers start as in
    the paper; the weights of the old ones are not carried over, so the model has to be trained. A layer that stands in
    several places is replaced by one. Raises TypeError where ``model`` itself is a normalization layer, ValueError where
    there is none, or one that ``which`` asks for has no one-dimensional weight.

    >>> convert_norms_to_dyt(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))[1]
    DyT(8, init_alpha=0.5)
    """
    if is_norm(model):
        raise TypeError(f"convert_norms_to_dyt changes what is inside a model; got a {type(model).__name__} itself")
    wanted = which if which is not None else lambda _, module: is_norm(module)
    new: dict[nn.Module, DyT] = {}
    for name, parent in list(model.named_modules()):
        for key, child in [(k, c) for k, c in parent._modules.items() if c is not None]:  # named_children leaves repeats out
            place = f"{name}.{key}" if name else key
            if isinstance(child, DyT) or child not in new and not wanted(place, child):
                continue
            if child not in new:
                weight = getattr(child, "weight", None)
                if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
                    raise ValueError(f"convert_norms_to_dyt: {place} is a {type(child).__name__} without a one-dimensional weight")
                new[child] = DyT(weight.shape[0], init_alpha, weight.device, weight.dtype).train(child.training)
            setattr(parent, key, new[child])
    if not new:
        raise ValueError(f"convert_norms_to_dyt found no normalization layer in {type(model).__name__}")
    return model


__all__ = ["DyT", "convert_norms_to_dyt", "is_norm"]
