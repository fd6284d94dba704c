"""Write operations in other torch operations, where torch has no decomposition that ends in the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..unsupported import UnsupportedOperation, refuse_generator

#: by name without overload; the name of an in-place form ends in an underscore
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}


def decomposes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update(dict.fromkeys(names, function))
        return function

    return entered


@decomposes("masked_scatter")
def masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Each place of the mask takes the element of the source that it counts: those of earlier blocks of each dimension, added up."""
    x, mask = torch.broadcast_tensors(x, mask)
    before = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim in range(x.dim()):
        inner = tuple(range(dim + 1, x.dim()))
        count = mask.sum(inner, keepdim=True) if inner else mask.to(torch.int64)
        before = before + count.cumsum(dim) - count
    return torch.where(mask, source.flatten()[before], x)


@decomposes("masked_scatter_")
def masked_scatter_in_place(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return x.copy_(masked_scatter(x, mask, source))


@decomposes("fill_diagonal_")
def fill_diagonal(x: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    if x.dim() != 2 or wrap:
        raise UnsupportedOperation("fill_diagonal_ of more than two dimensions, or wrapped", allowed="a matrix")
    x.diagonal().fill_(fill_value)
    return x


@decomposes("_trilinear")
def trilinear(i1: torch.Tensor, i2: torch.Tensor, i3: torch.Tensor, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1) -> torch.Tensor:
    """What ``bilinear`` is made of: the sum over dimensions of a product of three."""
    for dim in range(i1.dim() + len(expand1)):
        i1, i2, i3 = (t.unsqueeze(dim) if dim in added else t for t, added in zip((i1, i2, i3), (expand1, expand2, expand3)))
    return (i1 * i2 * i3).sum(sumdim)


@decomposes("normal")
def normal(mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None, **kwargs: Any) -> torch.Tensor:
    refuse_generator(generator)
    like = next((t for t in (mean, std) if isinstance(t, torch.Tensor)), None)
    if like is None:
        return torch.randn(size, **kwargs) * std + mean
    return torch.randn_like((mean + std).to(like.dtype)) * std + mean


@decomposes("normal_")
def normal_in_place(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    refuse_generator(generator)
    return x.copy_(torch.randn_like(x) * std + mean)


@decomposes("uniform_")
def uniform_in_place(x: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    refuse_generator(generator)
    return x.copy_(torch.rand_like(x) * (high - low) + low)


def whole(uniform: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Return integers from ``low`` to ``high - 1`` from numbers in [0, 1) of 24 bits."""
    if high - low > 2**24:
        raise UnsupportedOperation("randint of more than 2^24 values")
    return (uniform * (high - low)).floor().clamp(max=high - low - 1).to(dtype) + low


@decomposes("randint")
def randint(*bounds_and_size: Any, dtype: torch.dtype | None = None, generator: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> torch.Tensor:
    refuse_generator(generator)
    *bounds, size = bounds_and_size
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return whole(torch.rand(size, device=device), low, high, dtype or torch.int64)


@decomposes("randint_like")
def randint_like(x: torch.Tensor, *bounds: int, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return whole(torch.rand(x.shape, device=x.device), low, high, dtype or x.dtype)


@decomposes("fmax")
def fmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y)))


@decomposes("fmin")
def fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))


@decomposes("signbit")
def signbit(x: torch.Tensor) -> torch.Tensor:
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def gaussian_nll_loss(input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> torch.Tensor:
    """Return the loss without torch's test of the variances' signs, which reads data."""
    var = var if isinstance(var, torch.Tensor) else var * torch.ones_like(input)
    if var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    kept = var + (var.clamp(min=eps) - var).detach()  # torch clamps without a gradient
    loss = 0.5 * (torch.log(kept) + (input - target) ** 2 / kept)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def cov(input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> torch.Tensor:
    """Return the covariances without torch's test of the divisor, which is a tensor there."""
    if fweights is not None or aweights is not None:
        raise UnsupportedOperation("torch.cov with weights", allowed="torch.cov(x, correction=1)")
    x = input if input.dim() > 1 else input.unsqueeze(0)
    x = x - x.mean(1, keepdim=True)
    return (x @ x.mT / max(x.shape[1] - correction, 0)).squeeze()


def corrcoef(input: torch.Tensor) -> torch.Tensor:
    c = cov(input)
    if c.dim() == 0:
        return c / c
    deviation = c.diagonal().sqrt()
    return (c / deviation.unsqueeze(1) / deviation).clamp(-1, 1)


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Reduce the rows that each row of indices names: torch's operation has lost where the rows of indices end."""
    if input.dim() != 2 or offsets is not None:
        raise UnsupportedOperation("embedding_bag with offsets", why="the lengths of bags depend on data", allowed="indices of two dimensions, a row for each bag")
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedOperation("embedding_bag with max_norm or scale_grad_by_freq", allowed="mode, per_sample_weights, padding_idx")
    rows, kept = F.embedding(input, weight), None
    if per_sample_weights is not None:
        if mode != "sum":
            raise UnsupportedOperation(f"embedding_bag with per_sample_weights and mode {mode!r}", allowed="mode 'sum', as in torch")
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is not None:
        kept = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
        rows = torch.where(kept, rows, -math.inf if mode == "max" else 0.0)
    if mode == "max":
        largest = rows.max(1).values
        return largest if kept is None else torch.where(kept.any(1), largest, 0.0)
    count = max(input.shape[1], 1) if kept is None else kept.sum(1).clamp(min=1)
    return rows.sum(1) / count if mode == "mean" else rows.sum(1)


#: Python functions of torch that decide by data, with the same without that decision, and those whose operations lose what DT needs
FUNCTIONS: dict[Any, Callable[..., Any]] = {F.gaussian_nll_loss: gaussian_nll_loss, F.embedding_bag: embedding_bag, torch.cov: cov, torch.corrcoef: corrcoef}
FUNCTIONS |= {torch.Tensor.cov: cov, torch.Tensor.corrcoef: corrcoef}
