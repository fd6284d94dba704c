"""Replace normalization layers by dynamic tanh (DyT)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .. import ops


class DyT(nn.Module):
    """tanh(alpha * x) * weight + bias in one kernel (Zhu et al., *Transformers without Normalization*, 2025).

    x: (..., channels). alpha is a scalar parameter that starts at ``init_alpha`` (the paper uses 0.5, and other values for language
    models). weight starts at 1 and bias at 0, each of shape (channels,). Returns the shape of x in the promoted dtype.

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
    """Tell whether a module is a LayerNorm over the last dimension, torch's RMSNorm, or a like-named module with one weight vector."""
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm")) and not list(module.children())
    weight = getattr(module, "weight", None)
    return (isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or named) and isinstance(weight, torch.Tensor) and weight.dim() == 1


def convert_norms_to_dyt(model: nn.Module, init_alpha: float = 0.5, which: Callable[[str, nn.Module], bool] | None = None) -> nn.Module:
    """Replace each normalization layer inside ``model`` by a new DyT; change ``model`` in place and return it.

    ``which(name, module)`` selects the layers; the default is ``is_norm``. The new layers start as in the paper. The old layers' weights
    are discarded, so the model must be trained. A layer used in several places is replaced by one DyT. Raises TypeError where ``model``
    itself is a normalization layer. Raises ValueError where it contains none, or a selected layer has no one-dimensional weight.

    >>> convert_norms_to_dyt(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))[1]
    DyT(8, init_alpha=0.5)
    """
    if is_norm(model):
        raise TypeError(f"convert_norms_to_dyt changes what is inside a model; got a {type(model).__name__} itself")
    wanted = which if which is not None else lambda _, module: is_norm(module)
    new: dict[nn.Module, DyT] = {}
    for name, parent in list(model.named_modules()):
        for key, child in [(k, c) for k, c in parent._modules.items() if c is not None]:  # named_children omits repeated modules
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
